"""Cards of tensor programs: run, verify, bench and compile take them as they take operators.

    op = card("model.py:mlp", lambda problem: mlp, run)          a user's program
    PROGRAM = Operator(NAME, function, x=("m k", Shard(0)), ...)       an operator that is a program

A Problem holds the sizes by the names of the program's types; inputs, reference and kernels follow
from the program. What a call's `transport` is for other operators is the lowering here: kernels
that overlap, one persistent kernel, or library calls one after the other.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from weft.base import fields, parts
from weft.base.card import TRIAL_NODES, UNFUSED, Op, Trial
from weft.base.dtypes import FLOATS
from weft.base.errors import ConfigError, ShapeError
from weft.base.providers import provider
from weft.base.target import Target
from weft.compiler import libraries
from weft.compiler.buckets import TILE_ROWS
from weft.compiler.compiled import Compiled
from weft.compiler.facts import class_of
from weft.compiler.frontend import trace
from weft.compiler.passes.tile import bounds_of, number
from weft.ir.task import Program, Task
from weft.ir.tensor import Partial, Placement, Shard, Type, is_split, pieces_of
from weft.plan import described
from weft.plan.choices import PROGRAMS

OVERLAPPED, PERSISTENT = "overlapped", "persistent"
LOWERINGS = (OVERLAPPED, PERSISTENT, UNFUSED)
# Programs of an operator that are kept, one for each set of sizes but the rows'.
MOST_PROGRAMS = 256

# By name, the program of a problem. Programs of one name are told apart by ticks: an operator's
# program in one dtype has the operator's name too.
_COMPILED: dict[str, Callable[[Problem], Compiled]] = {}


@dataclass(frozen=True)
class Problem:
    """One call: the program's name, its sizes, and the ranks.

    Shapes  k: elements of the longest sum; b_is_nk: all weights lie as [n, k], as those of
            torch.nn.Linear, not as [k, n]
    """

    program: str
    num_ranks: int
    sizes: tuple[tuple[str, int], ...]
    dtype: str
    nodes: tuple[int, ...] = ()
    k: int = 1
    b_is_nk: bool = False

    op: ClassVar[str] = PROGRAMS

    @property
    def compiled(self) -> Compiled:
        return _COMPILED[self.program](self)

    @property
    def traced(self) -> Program:
        return self.compiled.stages.program

    @property
    def open_sizes(self) -> dict[str, int]:
        """Those that calls of one program may differ in."""
        names = named_sizes(self.traced)
        return {name: size for name, size in self.sizes if name in names}


@dataclass(frozen=True)
class Config:
    """How a program is lowered."""

    transport: str = OVERLAPPED

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: no such lowering, or this program has no task of it"""
        fields.check_one_of(problem.program, self, "transport", LOWERINGS)
        if self.transport == PERSISTENT and (error := _why_not_persistent(problem)):
            raise ConfigError(f"{problem.program}: {error}")


def _why_not_persistent(problem: Problem) -> str:
    return provider("persistent").why_not(problem.compiled, problem.open_sizes, problem.num_ranks)


def card(
    name: str, compiled_of: Callable[[Problem], Compiled], run: Callable[..., Any] | None = None,
    **given: Any,
) -> Op:  # fmt: skip
    """The card of a program; `given` are fields that do not follow from it."""
    key, call = name, run or run_program
    while _COMPILED.setdefault(key, compiled_of) is not compiled_of:
        key += "'"
    usual: dict[str, Any] = {
        "problem": Problem, "config": Config, "make_inputs": make_inputs, "reference": reference,
        "make_problem": functools.partial(make_problem, key), "candidates": candidates,
        "fake": fake, "unfused": (Config(UNFUSED),),
        "takes_nodes": True, "composed": (UNFUSED,),
        "program": lambda problem: problem.compiled.stages.tasks["trace"],
    }  # fmt: skip
    chosen = usual | given
    chosen["kernels"] = described.KernelsOf(call, make_inputs, chosen["candidates"], neighbours)
    return Op(name=name, run=call, **chosen)


def inputs_of(program: Program) -> list[Task]:
    return [task for task in program.tasks if task.kind == "input"]


def type_of(task: Task) -> Type:
    assert task.type is not None
    return task.type


def named_sizes(program: Program) -> list[str]:
    sizes = [size for task in inputs_of(program) for size in type_of(task).sizes]
    return list(dict.fromkeys(size for size in sizes if isinstance(size, str)))


def make_problem(
    name: str, num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    found = Problem(name, num_ranks, tuple(shape.items()), dtype, nodes)
    program = found.traced
    sums = [
        number(type_of(program.task(task.operands[0])).sizes[-1], dict(shape))
        for task in program.tasks if "matmul" in task.kind
    ]  # fmt: skip
    return replace(found, k=max(sums, default=1))


def neighbours(problem: Problem) -> Iterator[Problem]:
    """The same with other numbers of rows; also such whose shards are whole tiles if its are."""
    (name, size), *rest = problem.sizes
    tiles = TILE_ROWS * problem.num_ranks
    for other in (size - 1, size + 1, size - tiles, size + tiles):
        if class_of(other) == class_of(size):  # else it has another plan
            yield replace(problem, sizes=((name, other), *rest))


# ---------------------------------------------------------------------------------------------
# Values


def weights_of(program: Program) -> set[str]:
    """The right operands of products."""
    return {task.operands[1] for task in program.tasks if "matmul" in task.kind}


def whole_inputs(problem: Problem, seed: int) -> dict[str, torch.Tensor]:
    """All of each input, on every rank the same; weights so small that products stay finite."""
    program, sizes = problem.traced, problem.open_sizes
    weights = weights_of(program)
    generator, found = torch.Generator().manual_seed(seed), {}
    for task in inputs_of(program):
        shape = [number(size, sizes) for size in type_of(task).sizes]
        drawn = torch.randn(shape, generator=generator)
        if task.name in weights:
            drawn *= max(shape[-2], 1) ** -0.5
        found[task.name] = drawn.to(getattr(torch, type_of(task).dtype))
    return found


def part_of(problem: Problem, task: Task, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank has of a value; of a sum, the rows of it that it would have of a shard."""
    kind = type_of(task)
    if kind.placement == Partial():
        rows = slice(*parts.part_of(whole.shape[0], rank, problem.num_ranks))
        mine = torch.zeros_like(whole)
        mine[rows] = whole[rows]
        return mine
    return rank_part(kind.placement, whole, rank, problem.num_ranks).contiguous()


def rank_part(
    placement: Placement | None, whole: torch.Tensor, rank: int, num_ranks: int
) -> torch.Tensor:
    """What a rank has of a tensor that is no sum: its part of each piece that is split."""
    for dim, extent in enumerate(whole.shape):
        if sizes := pieces_of(placement, dim, extent):
            mine = [one.narrow(dim, first, end - first) for one in whole.split(sizes, dim)
                    for first, end in [parts.part_of(one.shape[dim], rank, num_ranks)]]  # fmt: skip
            whole = torch.cat(mine, dim)
    return whole


def whole_of(placement: Placement | None, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """The tensor of which ranks have these parts."""
    if placement == Partial():
        return torch.stack(list(pieces)).sum(0)
    dim = next((dim for dim in range(pieces[0].dim()) if is_split(placement, dim)), None)
    if dim is None:
        return pieces[0]
    extent, num_ranks = sum(one.shape[dim] for one in pieces), len(pieces)
    sizes = pieces_of(placement, dim, extent)
    mine = [
        one.split([last - first for size in sizes
                   for first, last in [parts.part_of(size, rank, num_ranks)]], dim)
        for rank, one in enumerate(pieces)
    ]  # fmt: skip
    return torch.cat([part[i] for i in range(len(sizes)) for part in mine], dim)


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's tensors: the same for one seed on every machine."""
    whole = whole_inputs(problem, seed)
    mine = {
        name: part_of(problem, problem.traced.task(name), one, rank) for name, one in whole.items()
    }
    if problem.b_is_nk:
        for name in weights_of(problem.traced) & mine.keys():
            mine[name] = mine[name].mT.contiguous().mT
    return mine


def reference(problem: Problem, inputs: Sequence[Mapping[str, torch.Tensor]]) -> list[Any]:
    """All ranks' results of all ranks' inputs, as the program means it, in fp32."""
    program, whole = problem.traced, {}
    for task in inputs_of(program):
        pieces = [one[task.name] for one in inputs]
        whole[task.name] = whole_of(type_of(task).placement, pieces)
    results = libraries.reference(program, whole)
    return [
        _one_or_all(
            part_of(problem, program.task(name), result, rank)
            for name, result in zip(program.results, results, strict=True)
        )
        for rank in range(problem.num_ranks)
    ]


def fake(problem: Problem, inputs: Mapping[str, torch.Tensor], rank: int = 0) -> Any:
    """A rank's results without values."""
    return _one_or_all(_result(problem, name, rank) for name in problem.traced.results)


def _result(problem: Problem, name: str, rank: int) -> torch.Tensor:
    kind, sizes = type_of(problem.traced.task(name)), problem.open_sizes
    bounds = bounds_of(kind, rank, sizes, problem.num_ranks)
    shape = [last - first for first, last in bounds]
    return torch.empty(shape, dtype=getattr(torch, kind.dtype), device="meta")


def _one_or_all(values: Iterator[Any]) -> Any:
    found = tuple(values)
    return found[0] if len(found) == 1 else found


def run_program(
    world: Any, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> Any:
    """One call on this rank; without a configuration as it is called without options."""
    compiled = problem.compiled
    if config is not None:
        compiled = compiled.options(lowering=config.transport)
    return compiled(*inputs.values(), world=world, **problem.open_sizes)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """What overlaps; then one persistent kernel, where there is a task for everything."""
    yield Config(OVERLAPPED)
    is_possible = len(problem.nodes) <= 1 and target.backend in ("cuda", "emu")
    if is_possible and not _why_not_persistent(problem):
        yield Config(PERSISTENT)


# ---------------------------------------------------------------------------------------------
# Operators


class Operator:
    """A function over the compiler's values as an operator, with the types of its parameters.

        PROGRAM = Operator("ag_gemm", traced, x=("m k", Shard(0)), w=("k n", Shard(1)))
        PROGRAM(x, w, world=world)

    The first size is the rows of all ranks and stays open; the others count one rank's part, and
    each set of them, with a dtype and options of the function, is a program of its own.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], **types: tuple[str, Placement]
    ) -> None:
        self.function, self.name = function, name
        self.types = {name: (form.split(), where) for name, (form, where) in types.items()}
        self.rows = next(iter(self.types.values()))[0][0]
        self.program_of = functools.lru_cache(MOST_PROGRAMS)(self._program_of)

    def __call__(
        self, *tensors: torch.Tensor, world: Any, m: int | None = None,
        config: Config | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        dtype = str(tensors[0].dtype).removeprefix("torch.")
        sizes = tuple(self._sizes_of(tensors).items())
        compiled = self.program_of(dtype, sizes, world.num_ranks, tuple(options.items()))
        if config is not None:
            compiled = compiled.options(lowering=config.transport)
        return compiled(*tensors, world=world, **({} if m is None else {self.rows: m}))

    def _sizes_of(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """The sizes of this rank's tensors, but for the rows'."""
        found: dict[str, int] = {}
        for (name, (sizes, _)), one in zip(self.types.items(), tensors, strict=True):
            if one.dim() != len(sizes):
                form, shape = ", ".join(sizes), tuple(one.shape)
                raise ShapeError(f"{self.name}: {name} has shape {shape}; it must be [{form}]")
            for size, extent in zip(sizes, one.shape, strict=True):
                found.setdefault(size, extent)
        return {name: size for name, size in found.items() if name != self.rows}

    def _program_of(
        self, dtype: str, sizes: tuple[tuple[str, int], ...], num_ranks: int, options: tuple
    ) -> Compiled:
        known = dict(sizes)

        @functools.wraps(self.function)
        def traced(*values: Any, **named: Any) -> Any:
            return self.function(*values, **named, **dict(options))

        parameters = list(inspect.signature(self.function).parameters.values())
        own = inspect.Signature([one for one in parameters if one.name in self.types])
        traced.__name__ = self.name
        traced.__dict__["__signature__"] = own

        def size_of(name: str, dim: int, where: Placement) -> int | str:
            if name == self.rows or name.isdecimal():
                return int(name) if name.isdecimal() else name
            return known[name] * (num_ranks if where == Shard(dim) else 1)

        types = {
            name: Type(dtype, tuple(size_of(x, i, where) for i, x in enumerate(form)), where)
            for name, (form, where) in self.types.items()
        }
        return Compiled(trace(traced, "tp", types))

    def card(
        self, run: Callable[..., Any], smallest: Mapping[str, int],
        several: Mapping[str, int], **given: Any,
    ) -> Op:  # fmt: skip
        """Its card. `smallest` are sizes of two tiles for a rank, `several` of so many columns of
        tiles that few rows are several programs, too: of these are the trials, all calls of one
        class of sizes, and so of one plan."""

        def compiled_of(problem: Problem) -> Compiled:
            sizes = tuple((name, size) for name, size in problem.sizes if name != self.rows)
            return self.program_of(problem.dtype, sizes, problem.num_ranks, ())

        def overlapped(problem: Problem, target: Target) -> Iterator[Config]:
            yield Config(OVERLAPPED)

        return card(
            self.name, compiled_of, run, candidates=overlapped, dtypes=FLOATS, smallest=smallest,
            trials=tuple(Trial(nodes, several, calls=(0, 0, 0)) for nodes in TRIAL_NODES), **given,
        )  # fmt: skip
