"""What the post-compile check reports: kinds of findings, and the verdict on one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from weft.base.counts import counted
from weft.base.report import Finding, Side
from weft.verify.places import NOWHERE, Loc, place_of

LOST_WAIT = "lost wait"
PURE_WAIT = "pure wait"
UNORDERED_WAIT = "unordered wait"
HOISTED_LOAD = "hoisted load"
EARLY_WAIT = "early wait"
NO_BARRIER = "release without barrier"
UNFINISHED_STORE = "release before store is written"
DELETED_ATOMIC = "deleted atomic"
WEAK_ORDER = "weakened order"

SAFE_WAIT = (
    "wait with wl.wait, or `while tl.atomic_add(p, 0, sem='acquire', scope='sys') < v: pass` and "
    "tl.debug_barrier() after it, outside the K loop of a persistent loop with flatten=False"
)


@dataclass(frozen=True)
class StageFinding(Finding):
    """A finding with the stage at which it went wrong: "ttir", "ttgir" or "ptx"."""

    stage: str = ""

    def __str__(self) -> str:
        return f"[{self.stage}] {super().__str__()}"


@dataclass
class CompiledReport:
    """The verdict on one kernel for one target.

    `waits` counts waits per stage; `notes` say what was seen and is no defect by itself.
    """

    kernel: str
    target: str
    findings: list[StageFinding] = field(default_factory=list)
    waits: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def ok(self) -> bool:
        return not self.findings

    def of(self, kind: str) -> list[StageFinding]:
        return [finding for finding in self.findings if finding.kind == kind]

    def add(
        self,
        kind: str,
        stage: str,
        message: str,
        at: tuple[Loc, str],
        other: tuple[Loc, str] = (NOWHERE, ""),
        *,
        remedy: str,
        tensor: str | None = None,
    ) -> None:
        """File a finding, unless one of its kind has its places already.

        `at` and `other` are the places of its sides, with what each does there.
        """
        loc, note = at
        first = Side.at(place_of(self._full(loc)), kernel=self.kernel, note=note, tensor=tensor)
        second = None
        if other[0]:
            second = Side.at(place_of(self._full(other[0])), kernel=self.kernel, note=other[1])
        finding = StageFinding(kind, message, first, second, remedy, stage=stage)
        if all(known.key() != finding.key() for known in self.findings):
            self.findings.append(finding)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _full(self, loc: Loc) -> Loc:
        """`loc` with the folders of its files, as far as they are known."""
        return tuple((self.files.get(file, file), line, column) for file, line, column in loc)

    def to_json(self) -> dict[str, object]:
        return {
            "kernel": self.kernel,
            "target": self.target,
            "waits": dict(self.waits),
            "findings": [
                {**one.to_json(), "stage": one.stage, "message": one.message, "remedy": one.remedy}
                for one in self.findings
            ],
            "notes": list(self.notes),
            "ok": self.ok,
        }

    def __str__(self) -> str:
        stages = ", ".join(f"{stage} {count}" for stage, count in self.waits.items())
        head = f"{self.kernel} for {self.target} (waits: {stages or 'none'}): "
        notes = [f"  note: {note}" for note in self.notes]
        if self.ok:
            return "\n".join([head + "as written", *notes])
        head = "\n".join([head + counted(len(self.findings), "finding"), *notes])
        return "\n\n".join([head, *map(str, self.findings)])
