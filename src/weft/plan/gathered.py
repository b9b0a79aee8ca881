"""Products of rows that all ranks have: their problem, inputs, calls and cards.

m is global and its rows are split as torch.chunk splits them; n and k are per rank. What is fused
is a traced program's plan; `Call` runs it, or the libraries instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import torch

from weft.base.providers import provider
from weft.base.target import Target
from weft.compiler import Shard, Tensor, gather_schedules
from weft.compiler.gather_schedules import LIBRARY, RELAY, UNFUSED, Config
from weft.ir.task import Program
from weft.plan import call_cache, nccl, scales, summed
from weft.plan.problems import check_sizes, nodes_of, product_of
from weft.plan.scales import Scaled
from weft.plan.summed import AWKWARD_SHAPES as AWKWARD_SHAPES
from weft.plan.summed import ProductCall
from weft.plan.summed import fake as fake
from weft.tiles import blocking


@dataclass(frozen=True)
class Problem(Scaled):
    """m rows over all ranks, n columns and k of each rank; dtypes by torch's names.

    `b_is_nk`: B lies in memory as [n, k], as weights usually do. Sums are in fp32. `nodes` counts
    the ranks of each scale-up domain; () is one domain. `scaling`, of fp8 alone, says what has a
    scale: "rows" (and columns of B) or "blocks"; results are then bfloat16 unless told otherwise.
    """

    m: int
    n: int
    k: int
    num_ranks: int
    dtype: str = "bfloat16"
    out_dtype: str = ""
    b_is_nk: bool = False
    nodes: tuple[int, ...] = ()
    scaling: str = ""

    op: ClassVar[str] = "ag_gemm"
    transports: ClassVar[tuple[str, ...]] = (*gather_schedules.TRANSPORTS, RELAY, UNFUSED, LIBRARY)
    is_summed: ClassVar[bool] = False
    of_library: ClassVar[str] = ", of one node, and a result of the operands' dtype"

    def __post_init__(self) -> None:
        self.set_dtypes()
        check_sizes(self.op, self.num_ranks, m=self.m, n=self.n, k=self.k)

    @property
    def result(self) -> tuple[int, int]:
        """Rows and columns of what every rank ends with."""
        return self.m, self.n

    def result_of(self, rank: int) -> tuple[int, int]:
        return self.result

    def types(self) -> dict[str, Tensor]:
        """Of the program's parameters, the gathered one first, with m open."""
        return {"a": Tensor(self.dtype, ("m", self.k), Shard(0)),
                "b": Tensor(self.dtype, (self.k, self.n * self.num_ranks), Shard(1))}  # fmt: skip

    @property
    def can_relay(self) -> bool:
        return gather_schedules.can_relay(self)

    def can_use_tma(self, target: Target) -> bool:
        """Do the rows of A, B and C begin where TMA can read them, whichever way B lies? That may
        differ by rank, and a choice may not."""
        rows = [self.k * self.itemsize, self.n * self.itemsize]
        return blocking.can_use_tma(target, [*rows, self.n * self.out_itemsize])

    def library_takes(self, target: Target) -> bool:
        """Can torch multiply what is gathered? Scales are not."""
        return not self.scaling

    @property
    def can_use_unfused(self) -> bool:
        """Can torch multiply what weft's collective has gathered?"""
        return self.out_dtype == self.dtype and not self.scaling and self.num_ranks > 1

    def can_use_library(self, target: Target) -> bool:
        """Can NCCL and cuBLAS do the same there?"""
        is_even = self.is_even and len(self.nodes) <= 1
        return target.backend == "cuda" and is_even and self.can_use_unfused

    @property
    def shard_bytes(self) -> int:
        return self.rows * self.k * self.itemsize


def problem_of(
    world: Any, a: Any, b: Any, m: int | None = None, out: Any = None, scale_a: Any = None,
    scale_b: Any = None,
) -> Problem:  # fmt: skip
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    op = Problem.op
    rows, n, k, is_nk = product_of(op, a, b, world)
    sized_by = out if m is None and out is not None and out.dim() else None
    if m is None:
        m = rows * world.num_ranks if sized_by is None else sized_by.shape[0]
    problem = Problem(
        m, n, k, world.num_ranks, str(a.dtype), call_cache.out_dtype_of(op, out), is_nk,
        nodes_of(world), scales.scaling_of(op, a, b, (scale_a, scale_b)),
    )  # fmt: skip
    call_cache.check_shard(op, "a", rows, problem, world, sized_by)
    if out is not None:
        call_cache.check_out(op, out, problem.result, out.dtype, world)
    return problem


# ---------------------------------------------------------------------------------------------
# Calls


def traced(function: Callable[..., Any], problem: Problem) -> Program:
    """The program of one problem's sizes but for m, which is open."""
    return summed.traced(problem, function)


# A product has some seventy plans for all m; a model a few products.
@lru_cache(maxsize=1024)
def _planned(function: Any, problem: Problem, config: Config, target: Target) -> Any:
    """The stages of a problem of the class that m is of."""
    return gather_schedules.planned(traced(function, problem), config, problem, target)


class Call(ProductCall):
    """Of a product of gathered rows, which the first of `tensors` are; done as `recorded` says
    where the user records it."""

    def __init__(
        self, world: Any, problem: Problem, config: Config, tensors: Mapping[str, Any],
        program: Callable[..., Any], recorded: Config | None = None,
    ) -> None:  # fmt: skip
        super().__init__(world, problem, config, tensors, partial(_planned, program))
        if recorded:
            make = lambda problem: type(self)(  # noqa: E731
                world, problem, recorded, tensors, program
            )
            self._prepare(recorded, tensors, make)

    @cached_property
    def _operands(self) -> tuple[str, ...]:
        """What is gathered, and what is multiplied by it."""
        return tuple(self.problem.types())

    def _run_unfused(self, out: torch.Tensor | None, **tensors: Any) -> None:
        """Without an `out` rows are gathered, and that is all."""
        own, right = map(tensors.__getitem__, self._operands)
        if self.config.transport == LIBRARY:
            shape = self.problem.m, self.problem.k
            whole = torch.empty(shape, dtype=own.dtype, device=own.device)
            nccl.all_gather(self.world, own, whole)
        else:
            gather = provider("collectives").all_gather
            whole = gather(own.contiguous(), world=self.world, m=self.problem.m)
        if out is not None:
            self._multiply(whole, right, out)

    def exchanged(self, problem: Problem, tensors: Mapping[str, Any]) -> Any:
        own = tensors[self._operands[0]]
        rows = own.shape[0] * problem.num_ranks
        kind = provider("collectives").card("all_gather").problem
        return kind(
            problem.m, problem.k, problem.num_ranks, problem.dtype, problem.nodes,
            in_place=problem.m == rows and call_cache.is_on_heap(self.world, own),
        )  # fmt: skip

    def move(self, **tensors: Any) -> None:
        own = tensors[self._operands[0]]
        first, end = self.problem.shard(self.world.rank)
        if own.shape[0] != end - first:
            tensors[self._operands[0]] = own.new_zeros(end - first, self.problem.k)
        self._run_unfused(None, **tensors)

    def _multiply(self, gathered: Any, b: Any, out: Any) -> None:
        """The library's product."""
        torch.mm(gathered, b, out=out)


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's normal random tensors on the CPU: the same for one seed on every machine."""
    first, end = problem.shard(rank)
    return scales.random_operands(problem, end - first, rank, seed)
