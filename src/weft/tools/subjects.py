"""What `weft verify` looks at: one call of an operator in one way, or a script.

Both can be run under a seed, or under a chooser; both can be written down and found again.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.base.card import Op
from weft.base.errors import UsageError
from weft.base.report import Finding, Side
from weft.base.target import TARGETS
from weft.base.topology import Topology
from weft.tools.check import CALLS, Work, one_slot, rel_err
from weft.tools.emulate import run_script_once
from weft.tools.programs import find_op
from weft.tools.words import find_script, shape_text

if TYPE_CHECKING:
    from weft.emulator.choices import Chooser
    from weft.verify.exploration.search import Ran

NUM_SMS = 132


@dataclass
class OpSubject:
    """`calls` is a name of check.CALLS: how often and how the operator is called."""

    work: Work
    config: Any
    calls: str = "once"
    num_sms: int = NUM_SMS
    deterministic = True
    _known: dict[bytes, Finding | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.work.op.name} {shape_text(self.work.shape)} {self.work.dtype}"

    @property
    def variant(self) -> str:
        transport = getattr(self.config, "transport", "default")
        return transport if self.calls == "once" else f"{transport}, {self.calls}"

    @property
    def num_ranks(self) -> int:
        return self.work.num_ranks

    @property
    def file(self) -> None:
        """An operator is part of weft."""

    def run(self, chooser: Chooser | None = None, *, seed: int = 0, observers: Any = ()) -> Ran:
        import weft
        from weft.verify.exploration.search import Ran, outcome_bytes

        with weft.emulated(
            self.work.num_ranks, self.work.nodes or 1, seed, self.num_sms, collect=True,
            chooser=chooser, observers=observers,
        ) as session:  # fmt: skip
            outputs = session.run(partial(CALLS[self.calls], self.work, self.config))
        session.report.op = self.work.op.name
        if not session.report.ok:
            return Ran(session.report)
        outcome = outcome_bytes(outputs)
        if outcome not in self._known:
            self._known[outcome] = self._judge(outputs)
        wrong = self._known[outcome]
        if wrong is not None:
            session.report.add(wrong)
        return Ran(session.report, outcome)

    def _judge(self, outputs: Sequence[Any]) -> Finding | None:
        """The operator's own answer, against its reference."""
        references = [self.work.reference(seed) for seed in range(len(outputs[0]))]
        for rank, calls in enumerate(outputs):
            for number, (output, reference) in enumerate(zip(calls, references, strict=True)):
                error = rel_err(output, reference[rank])
                if error > self.work.tolerance():
                    return Finding(
                        "wrong answer",
                        f"call {number + 1} of {self.work.op.name} is off by {error:.2g} of its"
                        f" norm on rank {rank}; {self.work.tolerance():.2g} is allowed",
                        Side(rank=rank, note="returns a wrong answer"),
                        remedy="every check passes: look at indices, and at what is left out",
                    )
        return None

    def to_json(self) -> dict[str, Any]:
        work = self.work
        return {
            "op": work.op.name, "ranks": work.num_ranks, "nodes": list(work.nodes),
            "shape": dict(work.shape), "dtype": work.dtype, "calls": self.calls,
            "num_sms": self.num_sms, "config": None if self.config is None else asdict(self.config),
        }  # fmt: skip


@dataclass
class ScriptSubject:
    """A script on all ranks of `topology`; what it says is the same every time, and not shown.

    `slots` is how many each of its workspaces has, 1 or None: as many as usual.
    """

    path: str
    args: Sequence[str]
    topology: Topology
    num_sms: int = NUM_SMS
    slots: int | None = None
    deterministic = False

    @property
    def variant(self) -> str:
        return "script" if self.slots is None else "script, one slot"

    @property
    def name(self) -> str:
        return self.path

    @property
    def num_ranks(self) -> int:
        return self.topology.num_ranks

    @property
    def file(self) -> str:
        return self.path

    def run(self, chooser: Chooser | None = None, *, seed: int = 0, observers: Any = ()) -> Ran:
        from weft.verify.exploration.search import Ran

        with nullcontext() if self.slots is None else one_slot():
            return Ran(
                run_script_once(
                    self.path, list(self.args), self.topology, seed, io.StringIO(), self.num_sms,
                    chooser=chooser, observers=observers,
                )
            )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "script": self.path, "args": list(self.args), "nodes": list(self.topology.sizes),
            "num_sms": self.num_sms, "slots": self.slots,
        }  # fmt: skip


AnySubject = OpSubject | ScriptSubject


def subjects_of_op(
    work: Work, calls: Sequence[str] = ("once",), num_sms: int = NUM_SMS
) -> list[OpSubject]:
    """Every configuration of the operator, called in each of these ways."""
    configs = list(work.op.candidates(work.problem(), TARGETS["emu"])) or [None]
    return [OpSubject(work, config, how, num_sms) for how in calls for config in configs]


def smallest(op: Op, ranks: int) -> dict[str, int]:
    """The smallest shape with two tiles for each of `ranks` ranks; `m` is over all of them."""
    sizes = {name: op.smallest.get(name, size) for name, size in op.default_shape.items()}
    return {name: size * ranks if name == "m" else size for name, size in sizes.items()}


def subject_of(values: Mapping[str, Any]) -> AnySubject:
    """The subject that `to_json` wrote down.

    Raises  UsageError: it is not there any more, or takes other words now
    """
    if "script" in values:
        path = str(find_script(values["script"]))
        topology = Topology.of(None, values["nodes"])
        return ScriptSubject(path, values["args"], topology, values["num_sms"], values["slots"])
    op = find_op(values["op"])
    work = Work(op, values["ranks"], values["shape"], values["dtype"], tuple(values["nodes"]))
    config = values["config"]
    try:
        made = None if config is None else op.config(**config)
    except TypeError as error:
        raise UsageError(f"{op.name} takes another configuration now: {error}") from None
    return OpSubject(work, made, values["calls"], values["num_sms"])
