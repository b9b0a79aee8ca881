"""Operators by name, and a user's tensor program as one: by its card run, verify and bench take it.

    weft run model.py:mlp --ranks 4 --shape m=200
    weft bench model.py:mlp --shape m=2048

What a call's `transport` is for operators is the lowering here: kernels that overlap, or one
persistent kernel. The reference is what the program means, of whole tensors in fp32; measured
beside them is the same program by library calls.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from weft.base import parts
from weft.base.card import Op, trials
from weft.base.dtypes import DTYPES
from weft.base.errors import ConfigError, UnsupportedError, UsageError, WeftError
from weft.base.target import TARGETS, Target
from weft.tools.files import find_program
from weft.tools.words import is_in_file

if TYPE_CHECKING:
    import torch

    from weft.compiler import Compiled
    from weft.ir.task import Task
    from weft.tune.case import Case
    from weft.tune.variants import Variant

# Of sizes that are not given: no tile divides it, and the emulator is through with it in seconds.
DEFAULT_SIZE = 97
OVERLAPPED, PERSISTENT, UNFUSED = "overlapped", "persistent", "unfused"
LOWERINGS = (OVERLAPPED, PERSISTENT, UNFUSED)


@dataclass(frozen=True)
class Problem:
    """One call: the program, as FILE.py:NAME, its sizes, and the ranks.

    Shapes  k: elements of the longest sum
    """

    program: str
    num_ranks: int
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    nodes: tuple[int, ...] = ()
    k: int = 1


@dataclass(frozen=True)
class Config:
    """How a program is lowered."""

    transport: str = OVERLAPPED

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: no such lowering, or this program has no task of it"""
        if self.transport not in LOWERINGS:
            told = f"lowering {self.transport!r}; it is one of {', '.join(LOWERINGS)}"
            raise ConfigError(f"{problem.program}: {told}")
        if self.transport == PERSISTENT and (error := _no_tasks(problem)):
            raise ConfigError(f"{problem.program}: {error}")


def find_op(name: str) -> Op:
    """The operator's card, or that of the tensor program FILE.py:NAME.

    Raises  UsageError: no such operator; the message names those there are, nearest first
    """
    from weft.ops import cards

    if is_in_file(name):
        return card_of(name)
    known = cards()
    if name in known:
        return known[name]
    if name.endswith(".py"):
        raise UsageError(
            f"{name} is a file: name a program of it, {name}:PROGRAM; weft emulate runs a script"
        )
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else "."
    raise UsageError(f"no operator is called {name!r}{hint} The operators are {', '.join(known)}")


@functools.cache
def card_of(words: str) -> Op:
    """The card of the program FILE.py:NAME; the file is imported once.

    Raises  UsageError: no such file or program; one whose inputs or results cannot be made up
    """
    program = compiled_of(words).stages.program
    for task in inputs_of(program):
        _check_input(words, task)
    for name in program.results:
        if type(_type(program.task(name)).placement).__name__ == "Partial":
            told = f"its result {name} is a summand on each rank; return all_reduce({name})"
            raise UsageError(f"{words}: {told}, so that there is something to compare")
    named = dict.fromkeys(_named_sizes(program), DEFAULT_SIZE)
    smallest = dict.fromkeys(named, 8)
    return Op(
        name=words, summary=f"the tensor program {program.name}", problem=Problem, config=Config,
        make_problem=functools.partial(_make_problem, words), make_inputs=make_inputs,
        reference=reference, run=run, candidates=candidates, kernels=kernels,
        default_shape=named, dtypes=(_type(program.task(program.results[0])).dtype,),
        baselines={UNFUSED: unfused}, takes_nodes=True, composed=(UNFUSED,),
        smallest=dict.fromkeys(named, 2), trials=trials(smallest),
    )  # fmt: skip


def _check_input(words: str, task: Task) -> None:
    kind = _type(task)
    if not kind.dtype.startswith(("float", "bfloat")):
        raise UsageError(
            f"{words}: its input {task.name} is of {kind.dtype}, whose values nobody can make up: "
            "run it from a script of your own, with weft emulate or weft verify"
        )


def _type(task: Task) -> Any:
    assert task.type is not None
    return task.type


def inputs_of(program: Any) -> list[Task]:
    return [task for task in program.tasks if task.kind == "input"]


def _named_sizes(program: Any) -> list[str]:
    sizes = [size for task in inputs_of(program) for size in _type(task).sizes]
    return list(dict.fromkeys(size for size in sizes if isinstance(size, str)))


@functools.cache
def compiled_of(words: str) -> Compiled:
    """A file's program, the same one at every call: it keeps its plans."""
    return find_program(words)


def _make_problem(
    words: str, num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    from weft.compiler.passes.tile import number

    found = Problem(words, num_ranks, tuple(shape.items()), dtype, nodes)
    program = compiled_of(words).stages.program
    sums = [
        number(_type(program.task(task.operands[0])).sizes[-1], dict(shape))
        for task in program.tasks if "matmul" in task.kind
    ]  # fmt: skip
    return Problem(words, num_ranks, found.sizes, dtype, nodes, max(sums, default=1))


# ---------------------------------------------------------------------------------------------
# Values


def whole_inputs(problem: Problem, seed: int) -> dict[str, torch.Tensor]:
    """All of each input, on every rank the same; weights so small that products stay finite."""
    import torch

    from weft.compiler.passes.tile import number

    program, sizes = compiled_of(problem.program).stages.program, dict(problem.sizes)
    weights = {task.operands[1] for task in program.tasks if "matmul" in task.kind}
    generator, found = torch.Generator().manual_seed(seed), {}
    for task in inputs_of(program):
        shape = [number(size, sizes) for size in _type(task).sizes]
        drawn = torch.randn(shape, generator=generator)
        if task.name in weights:
            drawn *= max(shape[-2], 1) ** -0.5
        found[task.name] = drawn.to(getattr(torch, _type(task).dtype))
    return found


def part_of(problem: Problem, task: Task, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank has of a value; of a sum, the rows of it that it would have of a shard."""
    import torch

    from weft.compiler.passes.tile import bounds_of
    from weft.ir.task import Partial

    kind = _type(task)
    if kind.placement == Partial():
        rows = slice(*parts.part_of(whole.shape[0], rank, problem.num_ranks))
        mine = torch.zeros_like(whole)
        mine[rows] = whole[rows]
        return mine
    bounds = bounds_of(kind, rank, dict(problem.sizes), problem.num_ranks)
    return whole[tuple(slice(*pair) for pair in bounds)].contiguous()


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's tensors: the same for one seed on every machine."""
    program = compiled_of(problem.program).stages.program
    whole = whole_inputs(problem, seed)
    return {name: part_of(problem, program.task(name), whole[name], rank) for name in whole}


def reference(problem: Problem, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[Any]:
    """All ranks' results of all ranks' inputs, as the program means it, in fp32."""
    import torch

    from weft.compiler import libraries
    from weft.ir.task import Partial, Shard

    program, whole = compiled_of(problem.program).stages.program, {}
    for task in inputs_of(program):
        parts, placement = [one[task.name] for one in inputs], _type(task).placement
        if isinstance(placement, Shard):
            whole[task.name] = torch.cat(parts, placement.dim)
        else:
            whole[task.name] = sum(parts) if placement == Partial() else parts[0]
    results = libraries.reference(program, whole)
    return [
        _one_or_all(
            part_of(problem, program.task(name), result, rank)
            for name, result in zip(program.results, results, strict=True)
        )
        for rank in range(problem.num_ranks)
    ]


def _one_or_all(values: Iterator[Any]) -> Any:
    found = tuple(values)
    return found[0] if len(found) == 1 else found


# ---------------------------------------------------------------------------------------------
# Calls


def run(
    world: Any, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> Any:
    """One call on this rank; without a configuration what overlaps."""

    compiled = compiled_of(problem.program).options(lowering=(config or Config()).transport)
    return compiled(*inputs.values(), world=world, **dict(problem.sizes))


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """What overlaps; then one persistent kernel, where there is a task for everything."""
    yield Config(OVERLAPPED)
    if len(problem.nodes) <= 1 and target.backend in ("cuda", "emu") and not _no_tasks(problem):
        yield Config(PERSISTENT)


def _no_tasks(problem: Problem) -> str:
    """Why a program is not one persistent kernel; empty where it is."""
    from weft.megakernel.extents import chosen
    from weft.megakernel.graph import build

    compiled, sizes = compiled_of(problem.program), dict(problem.sizes)
    try:
        tiled = chosen(
            compiled.tiled, sizes, problem.num_ranks, TARGETS["emu"].num_sms,
            tuple(compiled.settings.tiles),
        )  # fmt: skip
        build(tiled, sizes, problem.num_ranks)
    except WeftError as error:
        return error.message
    return ""


def unfused(case: Case) -> Variant:
    """The same program by library calls, one after the other."""
    from weft.tune.variants import Variant

    def call(inputs: Any) -> Any:
        return lambda: run(case.world, case.problem, inputs, Config(UNFUSED))

    return Variant(UNFUSED, [call(inputs) for inputs in case.sets], about=str(Config(UNFUSED)))


def kernels(problem: Problem, config: Config | None, target: Target) -> Iterator[tuple[Any, Any]]:
    """The generated kernels of the call, as records."""
    from weft.base.hardware import find_hardware
    from weft.compiler.facts import Facts
    from weft.tools.explanation import Subject

    if (config or Config()).transport == OVERLAPPED:
        nodes = tuple(problem.nodes) if len(problem.nodes) > 1 else ()
        facts = Facts(dict(problem.sizes), problem.num_ranks, target, nodes)
        compiled = compiled_of(problem.program)
        subject = Subject(compiled.stages.tasks["trace"], facts, find_hardware("h200x4"), compiled)
        yield from generated(subject, target, [])


def generated(subject: Any, target: Target, notes: list[str]) -> Iterator[tuple[Any, Any]]:
    """The kernels of a program's plan; `notes` get those that have no record."""
    from weft.compiler.lower import kernels, signature, source
    from weft.ir.device import Buffer, Launch
    from weft.plan import launches
    from weft.tiles import gemm_sm90

    plan, facts = subject.plan, subject.facts
    buffers = {one.name: one for one in plan.of(Buffer)}
    for launch in plan.of(Launch):
        try:
            if launch.template not in ("gemm", "grouped"):
                raise UnsupportedError(f"it is of the template {launch.template}, with no record")
            twins = source.load(kernel := kernels.lower_launch(plan, launch))
        except UnsupportedError as error:
            note = f"{launch.kernel} is not compiled ahead: {error.message}"
            notes += [note] if note not in notes else []
            continue
        dtype = DTYPES[buffers[launch.writes[0]].dtype]
        tile_m, tile_n, tile_k = launch.tile
        plain = (tile_m, gemm_sm90.wide_columns(tile_n), tile_k)
        given = signature.Specialised(dtype.name, plain, facts.num_ranks, num_stages=2)
        yield twins.plain, signature.record(kernel, "plain", given)
        is_hopper = launches.is_for_hopper(dtype.itemsize, facts.nodes or (1,), target)
        if twins.sm90 is not None and is_hopper and gemm_sm90.has_tile(launch.tile):
            stages = gemm_sm90.most_stages(*launch.tile, target)
            given = signature.Specialised(
                dtype.name, launch.tile, facts.num_ranks, num_stages=stages,
                num_warps=gemm_sm90.NUM_WARPS,
            )  # fmt: skip
            yield twins.sm90, signature.record(kernel, "sm90", given)
