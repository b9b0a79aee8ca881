"""One operator on many ranks, in all the ways it is called, each answer against the reference."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any

from weft.base.card import Op
from weft.base.counts import counted
from weft.base.dtypes import tolerance
from weft.base.errors import ShapeError
from weft.tools.words import shape_text

REPLAYS = 3


# How many slots a workspace has, and the least there can be.
SLOTS, ONE_SLOT = "WEFT_SLOTS", "1"


@contextmanager
def one_slot() -> Iterator[None]:
    """Every call uses the slot of the call before: only credits keep them apart."""
    before = os.environ.get(SLOTS)
    os.environ[SLOTS] = ONE_SLOT
    try:
        yield
    finally:
        os.environ.pop(SLOTS)
        if before is not None:
            os.environ[SLOTS] = before


@dataclass(frozen=True)
class Work:
    """What is asked of an operator: on how many ranks, how large, in which dtype.

    `nodes` are the sizes of scale-up domains; () is one.
    """

    op: Op
    num_ranks: int
    shape: Mapping[str, int]
    dtype: str
    nodes: Sequence[int] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by the operator's name: a process of another rank has a card of its own."""
        sizes = (self.num_ranks, dict(self.shape), self.dtype, tuple(self.nodes))
        return _work_of, (self.op.name, *sizes)

    def problem(self) -> Any:
        nodes = (tuple(self.nodes),) if self.op.takes_nodes else ()
        return self.op.make_problem(self.num_ranks, self.shape, self.dtype, *nodes)

    def another(self) -> Work:
        """The same work a quarter larger in its first size, so that no buffer fits by accident."""
        if not self.shape:  # a program that names no size
            return replace(self)
        name, size = next(iter(self.shape.items()))
        larger = size + max(1, size // 4)
        return replace(self, shape={**self.shape, name: larger})

    def inputs(self, rank: int, seed: int) -> Mapping[str, Any]:
        return self.op.make_inputs(self.problem(), rank, seed)

    def reference(self, seed: int) -> Sequence[Any]:
        inputs = [self.inputs(rank, seed) for rank in range(self.num_ranks)]
        return self.op.reference(self.problem(), inputs)

    def rank_bytes(self) -> int:
        """How much memory one rank's inputs and result take, without having it."""
        import torch
        from torch._subclasses import fake_tensor
        from torch.utils._pytree import tree_leaves

        problem = self.problem()
        try:
            with fake_tensor.FakeTensorMode():
                inputs = self.inputs(0, seed=0)
        except (
            fake_tensor.DynamicOutputShapeException,
            fake_tensor.DataDependentOutputException,
        ):  # a router's tables depend on values
            return getattr(problem, "memory_bytes", 0)
        outputs = None if self.op.fake is None else self.op.fake(problem, inputs)
        held = tree_leaves([list(inputs.values()), outputs])
        return sum(one.nbytes for one in held if isinstance(one, torch.Tensor))

    def check_memory(self) -> None:
        """Raises  ShapeError: sizes that this machine's memory does not hold, with the bytes"""
        needed, there = self.num_ranks * self.rank_bytes(), memory_bytes()
        if needed > there:
            ranks = counted(self.num_ranks, "rank")
            raise ShapeError(
                f"{self.op.name} of {shape_text(self.shape)}: inputs and results of {ranks} take "
                f"{needed} bytes ({needed / 2**30:.1f} GiB) at least, to be compared on this "
                f"machine, which has {there} ({there / 2**30:.1f} GiB); pass a smaller --shape"
            )

    def tolerance(self) -> float:
        # fp8 operands have results of another dtype.
        problem = self.problem()
        rounded = getattr(problem, "out_dtype", self.dtype)
        return tolerance(rounded, getattr(problem, "k", 1))


def _work_of(name: str, *sizes: Any) -> Work:
    from weft.tools.programs import find_op

    return Work(find_op(name), *sizes)


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@dataclass(frozen=True)
class Step:
    """One call of the operator: how it was called, on what, and how far off the worst rank was."""

    name: str
    work: Work
    rel_err: float

    @property
    def ok(self) -> bool:
        return self.rel_err <= self.work.tolerance()


def inputs_on(world: Any, work: Work, seed: int) -> Mapping[str, Any]:
    """This rank's inputs, on the world's device."""
    plain = work.inputs(world.rank, seed)
    return {name: one.to(world.device) if hasattr(one, "to") else one
            for name, one in plain.items()}  # fmt: skip


def _closed(world: Any, outputs: Sequence[Any]) -> list[Any]:
    """The outputs as they are now, once all work on this rank is done."""
    kept = [_keep(output) for output in outputs]
    world.synchronize()
    world.close()
    return kept


def call_every_way(work: Work, seed: int) -> list[tuple[str, Any]]:
    """On one rank: eager, recorded and replayed, another shape, eager again."""
    import weft
    from weft.tune.answers import poison

    world = weft.init()
    op, problem, mine = work.op, work.problem(), inputs_on(world, work, seed)
    outputs = [("eager", _keep(op.run(world, problem, mine, None)))]
    with world.record() as recording:
        replayed = op.run(world, problem, mine, None)
    for turn in range(REPLAYS):
        poison(replayed)
        recording.replay()
        outputs.append((f"replay {turn + 1}", _keep(replayed)))
    other = work.another()
    theirs = inputs_on(world, other, seed)
    outputs.append(("another shape", _keep(op.run(world, other.problem(), theirs, None))))
    outputs.append(("eager again", _keep(op.run(world, problem, mine, None))))
    _closed(world, ())
    return outputs


def call_once(work: Work, config: Any = None) -> list[Any]:
    """On one rank: one eager call."""
    import weft

    world = weft.init()
    return _closed(world, [work.op.run(world, work.problem(), inputs_on(world, work, 0), config)])


def call_back_to_back(work: Work, config: Any = None, *, barriers: bool = False) -> list[Any]:
    """On one rank: three calls with other numbers each, on one slot, with nothing in between.

    Only the operator's own signals keep the calls apart; or, with `barriers`, the world's.
    """
    import weft

    os.environ[SLOTS] = ONE_SLOT  # of this emulated rank
    world = weft.init()
    outputs = []
    for mine in [inputs_on(world, work, seed) for seed in range(REPLAYS)]:
        outputs.append(work.op.run(world, work.problem(), mine, config))
        if barriers:
            world.barrier()
    return _closed(world, outputs)


def call_recorded(work: Work, config: Any = None) -> list[Any]:
    """On one rank: a call, then one that is recorded and replayed three times without a pause."""
    import weft

    os.environ[SLOTS] = ONE_SLOT  # of this emulated rank
    world = weft.init()
    mine = inputs_on(world, work, 0)
    work.op.run(world, work.problem(), mine, config)  # workspaces cannot grow in a recording
    with world.record() as recording:
        output = work.op.run(world, work.problem(), mine, config)
    for _ in range(REPLAYS):
        recording.replay()
    return _closed(world, [output])


RECORDED = "recorded"
# How an operator is called to be verified: (work, configuration) on one rank -> its outputs, of
# which the n-th is that of the inputs of seed n.
CALLS: dict[str, Callable[[Work, Any], list[Any]]] = {
    "once": call_once,
    "again": call_back_to_back,
    "barriers": partial(call_back_to_back, barriers=True),
    RECORDED: call_recorded,
}


def check_emulated(work: Work, *, seed: int = 0) -> list[Step]:
    """Every way of calling the operator, on emulated ranks with all checks.

    Raises  FindingError: a race, a deadlock, or whatever else the emulator found
    """
    import weft

    with weft.emulated(ranks=work.num_ranks, nodes=work.nodes or 1, seed=seed) as session:
        outputs = session.run(partial(call_every_way, work, seed))
    return judge(work, outputs, seed)


def check_on_gpus(work: Work, *, seed: int = 0) -> list[Step]:
    """Every way of calling the operator, one process and one GPU for each rank."""
    return judge(work, run_on_gpus(work, seed), seed)


def judge(work: Work, outputs: Sequence[Sequence[tuple[str, Any]]], seed: int) -> list[Step]:
    """Each step's error over all ranks against the reference."""
    asked = {"another shape": work.another()}
    references = {id(work): work.reference(seed)}
    steps = []
    for index, (name, _) in enumerate(outputs[0]):
        which = asked.get(name, work)
        if id(which) not in references:
            references[id(which)] = which.reference(seed)
        mine = [rank_outputs[index][1] for rank_outputs in outputs]
        errors = [rel_err(*pair) for pair in zip(mine, references[id(which)], strict=True)]
        steps.append(Step(name, which, max(errors)))
    return steps


def rel_err(out: Any, ref: Any) -> float:
    """||out - ref|| / ||ref|| in fp64 on the CPU, the worst of a tuple; see weft.tune.answers."""
    import torch

    from weft.tune import answers

    return answers.rel_err(out, ref, torch.float64)


def run_on_gpus(work: Work, seed: int) -> list[list[tuple[str, Any]]]:
    """Every way of calling the operator, one process and one GPU for each rank.

    Raises  RanksStopped: a process failed; what it said is on stderr
    """
    import torch

    from weft.tune import processes

    with tempfile.TemporaryDirectory() as folder:
        processes.run_on_gpus(_gpu_rank, work.num_ranks, work, seed, folder, timeout_s=inf)
        return [torch.load(Path(folder) / f"{rank}.pt") for rank in range(work.num_ranks)]


def _gpu_rank(rank: int, work: Work, seed: int, folder: str) -> None:
    """One rank's process: the same calls as on the emulator."""
    import torch

    if len(work.nodes) > 1:
        os.environ["WEFT_NODES"] = "+".join(map(str, work.nodes))
    outputs = call_every_way(work, seed)
    kept = [(step, _map(lambda tensor: tensor.detach().cpu(), out)) for step, out in outputs]
    torch.save(kept, Path(folder) / f"{rank}.pt")


def _map(function: Callable[[Any], Any], value: Any) -> Any:
    return [function(v) for v in value] if isinstance(value, (tuple, list)) else function(value)


def _keep(value: Any) -> Any:
    return _map(lambda tensor: tensor.clone(), value)
