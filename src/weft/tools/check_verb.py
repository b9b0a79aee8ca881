"""`weft check SCRIPT.py`: does the compiled code keep what makes kernels correct between ranks?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import typer

from weft.base.counts import counted
from weft.base.errors import WeftError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.tools import console, kernels, options
from weft.tools.kernels import Kernels, Specialised, place_of
from weft.tools.words import parse_targets
from weft.verify.findings import CompiledReport

# Of each vendor what is most in use; all are compiled for in seconds.
DEFAULT_TARGETS = "cuda:90,cuda:100,hip:gfx942"


@dataclass(frozen=True)
class Checked:
    """One kernel for one target: what the check read in it, or why it does not compile."""

    place: str
    record: KernelRecord
    target: str
    report: CompiledReport | None
    error: WeftError | None = None

    @property
    def ok(self) -> bool:
        return self.report is not None and self.report.ok

    def to_json(self) -> dict[str, Any]:
        known: dict[str, Any] = {"kernel": self.record.name, "target": self.target, "ok": self.ok}
        if self.report is not None:
            known |= self.report.to_json()
        if self.error is not None:
            known["error"] = {"kind": type(self.error).__name__, "message": str(self.error)}
        return {**known, "place": self.place, "record": self.record.to_json()}


def check(
    context: typer.Context,
    subject: kernels.SubjectWord,
    target: options.Targets = DEFAULT_TARGETS,
    ranks: options.Ranks = None,
    nodes: options.Nodes = "1",
    shape: options.Shape = "",
    dtype: options.Dtype = kernels.DEFAULT_DTYPE,
    seed: options.Seed = 0,
    num_sms: options.NumSms = 132,
    json: options.AsJson = False,
) -> int:  # fmt: skip
    """Compile kernels for GPUs that need not be here, and check the compiled code.

    A script is run on emulated ranks; each kernel that it launches is compiled with the types,
    constants and options of its launches. Read are TTIR, TTGIR and assembly: no wait is lost, no
    load that a wait guards is above it, stores are complete before a signal.
    """
    targets = parse_targets(target)
    found = kernels.find_kernels(context, subject, ranks, nodes, shape, dtype, seed, num_sms)
    work = [(one, where) for where in targets for one in found.of(where)]
    checked = []
    with console.bar(f"{subject}: checking", len(work)) as bar:
        for one, where in work:
            checked.append(check_kernel(one, where))
            bar.advance()
    ran = found.report is None or found.report.ok
    ok = ran and all(one.ok for one in checked)
    if json:
        values = {"subject": subject, "kernels": [one.to_json() for one in checked], "ok": ok}
        if found.report is not None:
            values["run"] = found.report.to_json()
        console.print_json({**values, "notes": found.notes})
    else:
        show(subject, found, checked)
    return console.FINE if ok else console.PROBLEM


def check_kernel(one: Specialised, target: Target) -> Checked:
    """One kernel for one target; that it does not compile there is no reason to stop."""
    from weft.verify.compiled import compiled

    fn, record = one
    try:
        return Checked(place_of(fn), record, target.name, compiled(fn, target, record))
    except WeftError as error:
        return Checked(place_of(fn), record, target.name, None, error)


def show(subject: str, found: Kernels, checked: list[Checked]) -> None:
    out = console.results()
    if found.report is not None and not found.report.ok:
        out.print(str(found.report) + "\n", markup=False)
    for note in found.notes:
        console.notes().print(f"note: {note}", markup=False)
    numbers: dict[tuple[str, str], int] = {}
    for one in checked:
        numbers.setdefault((one.place, str(one.record)), len(numbers) + 1)
    for (place, record), number in numbers.items():
        out.print(f"{number}  {place}: {record}", markup=False)
    rows = [
        (
            f"{numbers[one.place, str(one.record)]}  {one.record.name}", one.target,
            waits_of(one.report.waits) if one.report else "-", verdict(one),
        )
        for one in checked
    ]  # fmt: skip
    console.print_table(rows, "kernel", "target", "waits", "")
    for one in checked:
        if one.error is not None:
            out.print(f"\n{type(one.error).__name__}: {one.error}", markup=False)
        elif one.report is not None and (one.report.notes or not one.ok):
            out.print(f"\n{one.report}", markup=False)
    count, bad = counted(len(checked), "compiled kernel"), sum(not one.ok for one in checked)
    ok = f"[bold green]{count}: as written[/]"
    out.print(ok if not bad else f"\n[bold red]{bad} of {count}: not as written[/]")


def verdict(one: Checked) -> str:
    if one.report is None:
        return "does not compile"
    if one.ok:
        return (
            "as written" if "ptx" in one.report.waits else "as written in TTGIR, not read further"
        )
    return ", ".join(dict.fromkeys(finding.kind for finding in one.report.findings))


def waits_of(waits: Mapping[str, int]) -> str:
    """Waits at each stage, in few words where they are the same in all."""
    if len(set(waits.values())) <= 1:
        return str(next(iter(waits.values()), 0))
    return ", ".join(f"{stage} {count}" for stage, count in waits.items())
