"""`weft compile`: kernels of operators, programs and users for GPUs that need not be here."""

from __future__ import annotations

import json as json_text
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from weft.base.errors import UsageError
from weft.base.records import PLAN_FORMAT, plan_digest
from weft.base.target import Target
from weft.manycore.record import NAME as MANYCORE
from weft.manycore.record import is_manycore
from weft.tools import console, kernels, options
from weft.tools.binaries import Binary, binary_of, build
from weft.tools.kernels import Kernels, Specialised
from weft.tools.prepare import sizes_of
from weft.tools.programs import find_op
from weft.tools.words import op_dtype, parse_targets, parse_topology


def compile_kernels(
    context: typer.Context,
    subject: kernels.SubjectWord,
    target: options.TargetsOrC,
    ranks: options.Ranks = None,
    nodes: options.Nodes = "1",
    shape: options.Shape = "",
    dtype: options.Dtype = kernels.DEFAULT_DTYPE,
    output: Annotated[
        str,
        options.option(
            "FOLDER",
            "write here: of an operator or a program an artefact, which runs its calls without "
            "a compiler; of other kernels the binaries and a plan of their launches",
            "-o",
            "--output",
        ),
    ] = "",
    json: options.AsJson = False,
) -> int:
    """Compile kernels ahead of time and check the compiled code; no GPU is needed.

    An operator's; those that a script launches when it is run on emulated ranks; those of a tensor
    program. The check reads TTGIR and assembly: no wait is lost, no load that a wait guards is
    above it.

    With -o, of an operator or a program: those of all calls of the sizes, of which several may be
    named (--shape m=1..4096,n=7168,k=4096), and what each call queues.
    """
    if output:
        make_folder(output)
    if is_manycore(target):
        from weft.tools import many_cores

        return many_cores.compile_to(subject, ranks, nodes, shape, "", target, output, json)
    targets = parse_targets(target, [MANYCORE])
    if output and kernels.is_called(subject):
        return compile_calls(subject, targets, ranks, nodes, shape, dtype, output, json)
    found = kernels.find_kernels(context, subject, ranks, nodes, shape, dtype)
    binaries, complaints = [], []
    with console.bar("compiling", len(targets)) as bar:
        for one in targets:
            built, complained = compile_for(found, one)
            binaries += built
            complaints += complained
            bar.advance()
    if output:
        write(binaries, output, subject)
    for note in found.notes:
        console.notes().print(f"note: {note}", markup=False)
    return tell(subject, binaries, complaints, output, json)


def tell(
    subject: str, binaries: Sequence[Binary], complaints: Sequence[str], output: str, json: bool
) -> int:
    values = {
        "op": subject,
        "kernels": [binary.to_json() for binary in binaries],
        "ok": not complaints,
    }
    if complaints:
        values["findings"] = complaints
    console.print_json(values) if json else show(values, output)
    return console.FINE if values["ok"] else console.PROBLEM


def compile_calls(
    subject: str, targets: Sequence[Target], ranks: int | None, nodes: str, shape: str, dtype: str,
    output: str, json: bool,
) -> int:  # fmt: skip
    """An operator's or a program's calls, as an artefact in a folder.

    Raises  UsageError: several nodes, or sizes that are missing or unknown
    """
    from weft.plan import artefact
    from weft.verify.compiled import compiled

    card, topology = find_op(subject, has_values=False), parse_topology(ranks, nodes)
    if len(topology.sizes) > 1:
        raise UsageError(f"--nodes {nodes}: an artefact is for ranks of one node")
    known = card.default_shape
    sizes = {**{name: known[name] for name in ("m", "n", "k") if name in known},
             **sizes_of(shape, known)}  # fmt: skip
    built = artefact.build(
        card, sizes, num_ranks=topology.num_ranks, targets=targets,
        dtype=op_dtype(card, "" if dtype == kernels.DEFAULT_DTYPE else dtype).name,
    )  # fmt: skip
    built.write(output)
    complaints = [str(finding) for one in built.kernels
                  for finding in compiled(one.compiled, one.target).findings]  # fmt: skip
    binaries = [binary_of(one.compiled, one.id, one.target) for one in built.kernels]
    return tell(subject, binaries, complaints, output, json)


def compile_for(found: Kernels, target: Target) -> tuple[list[Binary], list[str]]:
    """Every kernel of the subject for one target, and what the post-compile check found."""
    from weft.verify.compiled import compiled

    binaries, complaints = [], []
    for fn, record in in_names_of_their_own(found.of(target)):
        binaries.append(build(fn, record, target))
        complaints += [str(finding) for finding in compiled(fn, target, record).findings]
    return binaries, complaints


def in_names_of_their_own(kernels: Sequence[Specialised]) -> Iterator[Specialised]:
    """The same kernels; the second of a name is NAME.2: a plan finds each by its name."""
    seen: Counter[str] = Counter()
    for fn, record in kernels:
        seen[record.name] += 1
        count = seen[record.name]
        yield fn, record if count == 1 else replace(record, name=f"{record.name}.{count}")


def make_folder(output: str) -> None:
    """Before the work and not behind it.

    Raises  UsageError: it cannot be made
    """
    try:
        Path(output).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"-o {output}: no folder can be made there: {error.strerror}") from error


def write(binaries: list[Binary], output: str, op: str) -> None:
    """The binaries with a plan beside them that says how each is launched."""
    folder = Path(output)
    kernels = [binary.write(folder) for binary in binaries]
    digest = plan_digest(kernels)
    plan = {"format": PLAN_FORMAT, "op": op, "kernels": kernels, "sha256": digest}
    text = json_text.dumps(plan, indent=2, default=str)
    (folder / "plan.json").write_text(text + "\n")


def show(values: dict, output: str) -> None:
    show_kernels(values["kernels"])
    out = console.results()
    for finding in values.get("findings", ()):
        out.print(finding, markup=False)
    verdict = "[bold green]ok[/]" if values["ok"] else "[bold red]the check found a problem[/]"
    out.print(f"{values['op']}: {verdict}" + (f", written to {output}" if output else ""))


def show_kernels(kernels: Sequence[Mapping[str, Any]]) -> None:
    """Binaries as their JSON has them, in a table."""
    rows = [
        (one["name"], one["target"], one["format"], f"{one['bytes']:,}",
         "-" if one["registers"] is None else str(one["registers"]), f"{one['shared_bytes']:,}")
        for one in kernels
    ]  # fmt: skip
    console.print_table(rows, "kernel", "target", "format", "bytes", "registers", "shared bytes")
