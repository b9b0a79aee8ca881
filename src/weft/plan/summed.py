"""Products that are summed over ranks: their problem, inputs, calls and cards.

Every rank has all m rows of A and of the product, but a part of k; what becomes of the product's
rows, which are split as torch.chunk splits them, is the operator's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from weft.base.errors import DtypeError, ShapeError
from weft.base.target import Target
from weft.compiler import Shard, Tensor, frontend, layouts, schedules
from weft.compiler.schedules import Config
from weft.ir.task import Program
from weft.plan import described, launches
from weft.plan.call_cache import check_out
from weft.plan.described import Kernels
from weft.plan.problems import Rows, nodes_of
from weft.plan.runner import new_runner

# Of the symmetric heap, for a product that another operator sums.
MOST_SHARED_BYTES = 32 << 20
AWKWARD_SHAPES = (
    (2, {"m": 2, "n": 64, "k": 64}),
    (1, {"m": 40, "n": 48, "k": 32}),
    (4, {"m": 1, "n": 32, "k": 32}),
    (4, {"m": 9, "n": 16, "k": 16}),
    (4, {"m": 0, "n": 16, "k": 16}),
)


@dataclass(frozen=True)
class Product(Rows):
    """[m, k] @ [k, n] on every rank, of which a traced program says what ranks exchange.

    `b_is_nk`: B lies in memory as [n, k], as weights usually do.
    """

    k: int = 0
    b_is_nk: bool = False

    transports: ClassVar[tuple[str, ...]]
    # The traced function; the sizes that all ranks' calls have alike.
    program: ClassVar[Callable[..., Any]]
    sizes: ClassVar[tuple[str, ...]] = ("m", "n", "k")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 0:
            raise ShapeError(f"{self.op}: k={self.k} is negative")

    def result_rows(self, rank: int) -> tuple[int, int]:
        """Which of the product's rows, or their sums, a rank's result is."""
        raise NotImplementedError

    def types(self) -> dict[str, Tensor]:
        """Of the program's parameters, with m open."""
        raise NotImplementedError

    @property
    def is_empty(self) -> bool:
        return 0 in (self.m, self.n, self.k)

    def can_use_tma(self, target: Target) -> bool:
        return launches.can_use_tma(self, self.itemsize, target)

    def can_use_sm90(self, target: Target) -> bool:
        """Does the template for Hopper take this problem there?"""
        is_asked = launches.is_for_hopper(self.itemsize, self.nodes, target)
        return is_asked and self.can_use_tma(target)

    def traced(self) -> Program:
        """The tensor program, with m open."""
        return _traced(self.op, type(self).program, tuple(self.types().items()))


@lru_cache(maxsize=256)
def _traced(name: str, function: Callable[..., Any], types: tuple) -> Program:
    return replace(frontend.trace(function, "tp", dict(types)), name=name)


class Problem(Product):
    """Products [m, k] @ [k, n], one of each rank, to be summed over ranks; sums in fp32."""

    # The unfused way, (world, transport, product, a, b, out); product(a, b) is the library's.
    sum_unfused: ClassVar[Callable[..., None]]

    @property
    def flops(self) -> int:
        """Of one rank's product."""
        return 2 * self.m * self.n * self.k

    @property
    def memory_bytes(self) -> int:
        """What one rank's product must read and write at least."""
        return ((self.m + self.n) * self.k + self.m * self.n) * self.itemsize

    def types(self) -> dict[str, Tensor]:
        k = self.k * self.num_ranks
        a = Tensor(self.dtype, ("m", k), Shard(1))
        return {"a": a, "b": Tensor(self.dtype, (k, self.n), Shard(0))}


def problem_of(kind: Callable[..., Any], world: Any, a: Any, b: Any, out: Any = None) -> Any:
    """The problem that this rank's tensors are a part of, as `kind` makes it.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    op = kind.op
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != 2:
            shape = tuple(tensor.shape)
            raise ShapeError(f"{op}: {name} has shape {shape}; it must have two dimensions")
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b:
        raise ShapeError(f"{op}: a has k={k} but b has k={k_b}; pass b as [k, n], not [n, k]")
    if a.dtype != b.dtype:
        raise DtypeError(f"{op}: a is {a.dtype} but b is {b.dtype}; convert one of them")
    layouts.check_tensor(op, "a", a, world)
    is_nk = not b.is_contiguous()
    is_t = is_nk and b.t().is_contiguous()
    layouts.check_tensor(op, "b.t()" if is_t else "b", b.t() if is_t else b, world)
    problem = kind(m, n, world.num_ranks, str(a.dtype), nodes_of(world), k, is_nk)
    if out is not None:
        first, end = problem.result_rows(world.rank)
        check_out(op, out, (end - first, n), a.dtype, world)
    return problem


def make_inputs(problem: Any, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's normal random tensors on the CPU: the same for one seed on every machine."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    n, k = problem.n, problem.k
    a = torch.randn(problem.m, k, generator=generator).to(problem.torch_dtype)
    b = torch.randn((n, k) if problem.b_is_nk else (k, n), generator=generator)
    b = b.to(problem.torch_dtype)
    return {"a": a, "b": b.t() if problem.b_is_nk else b}


def total(inputs: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """The sum of all ranks' products, in fp32."""
    sums = inputs[0]["a"].float() @ inputs[0]["b"].float()
    for one in inputs[1:]:
        sums += one["a"].float() @ one["b"].float()
    return sums


class Call:
    """What calls with one problem and one configuration share on one rank: found once, kept.

    `runner` runs it where one kernel does all, as `recorded` where the user records the call.
    `tensors` describe them, for `world.operator_call`.
    """

    tensors = ""

    def __init__(
        self, world: Any, problem: Any, config: Config, tensors: Mapping[str, Any],
        recorded: Config | None = None,
    ) -> None:  # fmt: skip
        config.check(problem, world.target)
        self.world, self.problem, self.config = world, problem, config
        first, end = problem.result_rows(world.rank)
        self.out_shape = (end - first, problem.n)
        sizes = ",".join(f"{name}={getattr(problem, name)}" for name in problem.sizes)
        self.name = f"{problem.op} {sizes} {problem.dtype} {config}"
        self.runner = None
        if config.is_fused and not problem.is_empty:
            stages = schedules.planned(problem.traced(), config, problem, world.target)
            if recorded is not None:
                instead = schedules.planned(problem.traced(), recorded, problem, world.target)
                stages = replace(stages, recorded=instead)
            self.runner = new_runner(world, stages, tensors, {"m": problem.m})

    def __call__(self, out: torch.Tensor | None, **tensors: Any) -> torch.Tensor:
        """Queue the call; its result. Collective."""
        if out is None:
            first = next(iter(tensors.values()))
            out = torch.empty(self.out_shape, dtype=first.dtype, device=first.device)
        else:
            increment_version((out,))
        self.world.operator_call(self.name, self.tensors)
        if self.runner is not None:
            self.runner.queue(tensors, (out,))
        elif self.problem.is_empty:
            out.zero_()
        else:
            transport = self.config.transport
            self.problem.sum_unfused(self.world, transport, self._product, **tensors, out=out)
        return out

    def _product(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The library's product: where peers read it in place, if that is not much, in memory that
        products of all sizes share. Collective."""
        if self.problem.m * self.problem.row_bytes > MOST_SHARED_BYTES:
            return torch.mm(a, b)
        request = {"product": ((self.problem.m, self.problem.n), a.dtype)}
        slot = self.world.workspace(f"{self.problem.op}.product", request, num_slots=1)
        return torch.mm(a, b, out=slot.product)


# ---------------------------------------------------------------------------------------------
# The card


def kernels(
    run: Callable[..., Any], problem: Any, config: Config | None, target: Target
) -> Kernels:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or next(schedules.fused(problem, target))
    config.check(problem, target)
    if config.is_fused:
        kernels_of = described.kernels_of(run, make_inputs, schedules.fused)
        yield from kernels_of(problem, config, target)


def fake(problem: Any, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """A rank's result: its shape and dtype, without its values."""
    first, end = problem.result_rows(rank)
    return torch.empty((end - first, problem.n), dtype=problem.torch_dtype, device="meta")


def make_problem(
    kind: Any, num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Any:
    return kind(shape["m"], shape["n"], num_ranks, dtype, nodes, shape["k"])


def card(kind: type[Problem], run: Callable[..., Any]) -> dict[str, Any]:
    """What the cards of such operators have alike."""
    return {
        "config": Config,
        "make_problem": partial(make_problem, kind),
        "make_inputs": make_inputs,
        "run": run,
        "kernels": partial(kernels, run),
        "fake": fake,
        "program": kind.traced,
        "takes_nodes": True,
        "default_shape": {"m": 256, "n": 256, "k": 256},
        "smallest": {"m": 32, "n": 16, "k": 16},
    }
