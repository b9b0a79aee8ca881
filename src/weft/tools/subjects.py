"""What `weft verify` looks at: one call of an operator in one way, or a script.

Both can be run under a seed, or under a chooser; both can be written down and found again.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.base.card import Op
from weft.base.errors import UsageError
from weft.base.report import Finding, Side
from weft.base.target import TARGETS
from weft.base.topology import Topology
from weft.tools.check import CALLS, RECORDED, Work, one_slot, rel_err
from weft.tools.emulate import run_script_once
from weft.tools.programs import find_op
from weft.tools.words import find_script, shape_text

if TYPE_CHECKING:
    from weft.emulator.choices import Chooser
    from weft.verify.exploration.search import Ran

NUM_SMS, HOPPER = 132, 90
# Of a machine of Hopper's, where programs are to have several tiles each.
FEW_SMS = 3


@dataclass
class OpSubject:
    """`calls` is a name of check.CALLS: how often and how the operator is called."""

    work: Work
    config: Any
    calls: str = "once"
    num_sms: int = NUM_SMS
    arch: int = 0
    deterministic = True
    _known: dict[bytes, Finding | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.work.op.name} {shape_text(self.work.shape)} {self.work.dtype}"

    @property
    def variant(self) -> str:
        transport = getattr(self.config, "transport", "default")
        if self.arch:
            by_tma = " by TMA" if getattr(self.config, "by_tma", False) else ""
            transport = f"{transport}{by_tma} on Hopper"
        return transport if self.calls == "once" else f"{transport}, {self.calls}"

    @property
    def num_ranks(self) -> int:
        return self.work.num_ranks

    @property
    def file(self) -> None:
        """An operator is part of weft."""

    def run(self, chooser: Chooser | None = None, *, seed: int = 0, **options: Any) -> Ran:
        """One run; `options` are those of weft.emulated."""
        import weft
        from weft.verify.exploration.search import Ran, outcome_bytes

        with weft.emulated(
            self.work.num_ranks, self.work.nodes or 1, seed, self.num_sms, collect=True,
            chooser=chooser, name=self.work.op.name, arch=self.arch, **options,
        ) as session:  # fmt: skip
            outputs = session.run(partial(CALLS[self.calls], self.work, self.config))
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
            "arch": self.arch,
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
    arch: int = 0
    deterministic = False

    @property
    def variant(self) -> str:
        on_hopper = " on Hopper" if self.arch else ""
        return f"script{on_hopper}" + ("" if self.slots is None else ", one slot")

    @property
    def name(self) -> str:
        return self.path

    @property
    def num_ranks(self) -> int:
        return self.topology.num_ranks

    @property
    def file(self) -> str:
        return self.path

    def run(self, chooser: Chooser | None = None, *, seed: int = 0, **options: Any) -> Ran:
        """One run; `options` are those of weft.emulated."""
        from weft.verify.exploration.search import Ran

        with nullcontext() if self.slots is None else one_slot():
            return Ran(
                run_script_once(
                    self.path, list(self.args), self.topology, seed, io.StringIO(), self.num_sms,
                    chooser=chooser, arch=self.arch, **options,
                )
            )  # fmt: skip

    def to_json(self) -> dict[str, Any]:
        return {
            "script": self.path, "args": list(self.args), "nodes": list(self.topology.sizes),
            "num_sms": self.num_sms, "slots": self.slots, "arch": self.arch,
        }  # fmt: skip


AnySubject = OpSubject | ScriptSubject


def subjects_of_op(
    work: Work, calls: Sequence[str] = ("once",), num_sms: int = NUM_SMS
) -> list[OpSubject]:
    """Every configuration of the operator, called in each of these ways."""
    target = replace(TARGETS["emu"], num_sms=num_sms)
    configs = list(work.op.candidates(work.problem(), target)) or [None]
    return _called(work, configs, calls, num_sms)


def _called(
    work: Work, configs: Sequence[Any], calls: Sequence[str], num_sms: int, arch: int = 0
) -> list[OpSubject]:
    """Each configuration in each way of calling, but for recordings that there cannot be."""
    return [
        OpSubject(work, one, how, num_sms, arch) for how in calls for one in configs
        if how != RECORDED or one is None or work.op.records_as(one, one)
    ]  # fmt: skip


def subjects_on_hopper(
    work: Work, calls: Sequence[str] = ("once",), num_sms: int = NUM_SMS
) -> list[OpSubject]:
    """The same of what the operator's kernels in Gluon do on a machine of Hopper's; may be none."""
    there, ways = on_hopper(work, num_sms)
    return _called(there, ways, calls, num_sms, HOPPER)


def few_tiles_on_hopper(work: Work) -> Work:
    """The same with two of that template's tiles for each rank, each of several steps of k."""
    from weft.tiles import gemm_sm90

    tile = {"m": 2 * gemm_sm90.TILE_M.value * work.num_ranks, "n": 128, "k": 3 * 64}
    return replace(work, shape={name: tile.get(name, n) for name, n in work.shape.items()})


def on_hopper(work: Work, num_sms: int) -> tuple[Work, list[Any]]:
    """Each way in which the template for Hopper does the work, its tables cut as it takes them."""
    from weft.compiler.schedules import SM_PUSH
    from weft.plan import program_cards, summed
    from weft.tiles import gemm_sm90

    if hasattr(work.problem(), "tile_m"):
        work = replace(work, shape={**work.shape, "tile_m": gemm_sm90.TILE_M.value})
    problem, target = work.problem(), replace(TARGETS["emu"], arch=HOPPER, num_sms=num_sms)
    configs = list(work.op.candidates(problem, target))
    if isinstance(problem, program_cards.Problem):  # the compiler takes it where there is a product
        is_its = work.dtype in ("float16", "bfloat16")
        has_product = any(task.kind == "matmul" for task in problem.traced.tasks)
        return work, configs[:1] if is_its and has_product else []
    config = next((one for one in configs if getattr(one, "template", "") == "sm90"), None)
    if config is None:
        return work, []
    ways = [replace(config, transport=one) for one in problem.transports]
    if isinstance(problem, summed.Problem):
        ways.append(replace(config, transport=SM_PUSH, by_tma=True))
    return work, [one for one in ways if one.is_fused and not list(one.unfit(problem, target))]


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
        arch = values.get("arch", 0)
        return ScriptSubject(
            path, values["args"], topology, values["num_sms"], values["slots"], arch
        )
    op = find_op(values["op"])
    work = Work(op, values["ranks"], values["shape"], values["dtype"], tuple(values["nodes"]))
    config = values["config"]
    try:
        made = None if config is None else op.config(**config)
    except TypeError as error:
        raise UsageError(f"{op.name} takes another configuration now: {error}") from None
    return OpSubject(work, made, values["calls"], values["num_sms"], values.get("arch", 0))
