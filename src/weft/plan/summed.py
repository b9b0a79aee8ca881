"""Products that are summed over ranks: their problem, inputs, calls and cards.

Every rank has all m rows of A and of the product, but a part of k; what becomes of the product's
rows, which are split as torch.chunk splits them, is the operator's matter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from weft.base.errors import DtypeError, OutOfMemoryError, ShapeError
from weft.base.fields import copied
from weft.base.target import Target
from weft.compiler import Shard, Tensor, frontend, schedules
from weft.compiler.buckets import of_bucket
from weft.compiler.facts import class_of
from weft.compiler.schedules import Config
from weft.ir.task import Program
from weft.plan import described, exchanges, launches, nccl, scales
from weft.plan.call_cache import check_apart, check_out, find_call, out_dtype_of
from weft.plan.memory import like
from weft.plan.problems import OfProduct, Rows, nodes_of, product_of
from weft.plan.runner import new_runner
from weft.plan.scales import Scaled, in_fp32

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
class Product(OfProduct, Rows):
    """[m, k] @ [k, n] on every rank, of which a traced program says what ranks exchange.

    `b_is_nk`: B lies in memory as [n, k], as weights usually do.
    """

    k: int = 0
    b_is_nk: bool = False

    is_summed: ClassVar[bool] = True
    # The traced function.
    program: ClassVar[Callable[..., Any]]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 0:
            raise ShapeError(f"{self.op}: k={self.k} is negative")

    # How operands are scaled, a field of those that take fp8; declared here it would be theirs too.
    scaling = ""

    def result_rows(self, rank: int) -> tuple[int, int]:
        """Which of the product's rows, or their sums, a rank's result is."""
        raise NotImplementedError

    def result_of(self, rank: int) -> tuple[int, int]:
        first, end = self.result_rows(rank)
        return end - first, self.n

    def library_takes(self, target: Target) -> bool:
        """Does torch's product take these operands there?"""
        return True

    def can_use_library(self, target: Target) -> bool:
        return target.backend == "cuda" and self.is_even

    def traced(self) -> Program:
        """The tensor program, with m open."""
        return traced(self, type(self).program)


def traced(problem: OfProduct, function: Callable[..., Any]) -> Program:
    """The program of one problem's sizes but for m, which is open."""
    of_all = tuple(problem.types().items()), tuple(problem.options.items())
    return _traced(problem.op, function, *of_all)


@lru_cache(maxsize=256)
def _traced(name: str, function: Callable[..., Any], types: tuple, options: tuple) -> Program:
    return replace(frontend.trace(function, "tp", dict(types), **dict(options)), name=name)


@dataclass(frozen=True)
class Problem(Scaled, Product):
    """Products [m, k] @ [k, n], one of each rank, to be summed over ranks; sums in fp32.

    `scaling`, of fp8 alone, says what has a scale, as in weft.plan.gathered; shares and results are
    then of `out_dtype`, bfloat16 unless told otherwise, and else of the operands' dtype.
    """

    out_dtype: str = ""
    scaling: str = ""

    dtypes: ClassVar[tuple[str, ...]] = scales.SUPPORTED
    # The operator that sums the library's product: the unfused way.
    unfused: ClassVar[type[exchanges.Problem]]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.set_dtypes()
        if not self.scaling and self.out_dtype != self.dtype:
            raise DtypeError(
                f"{self.op}: out_dtype {self.out_dtype} of {self.dtype} operands; sums of others "
                "than fp8 are rounded to theirs: convert the result"
            )

    @property
    def options(self) -> dict[str, str]:
        return {"dtype": self.out_dtype if self.scaling else "", "scaling": self.scaling}

    @property
    def unsaid(self) -> tuple[str, ...]:
        """Fields that keys of measured choices have of fp8 alone."""
        return () if self.scaling else ("out_dtype", "scaling")

    @property
    def row_bytes(self) -> int:
        """Of the product, as it travels."""
        return self.n * self.out_itemsize

    def can_use_tma(self, target: Target) -> bool:
        return launches.can_use_tma(self, self.itemsize, target, self.out_itemsize)

    def can_use_library(self, target: Target) -> bool:
        return self.library_takes(target) and super().can_use_library(target)

    def types(self) -> dict[str, Tensor]:
        k = self.k * self.num_ranks
        a = Tensor(self.dtype, ("m", k), Shard(1))
        return {"a": a, "b": Tensor(self.dtype, (k, self.n), Shard(0))}


def problem_of(
    kind: Callable[..., Any], world: Any, a: Any, b: Any, out: Any = None, scale_a: Any = None,
    scale_b: Any = None,
) -> Any:  # fmt: skip
    """The problem that this rank's tensors are a part of, as `kind` makes it.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    op = kind.op
    m, n, k, is_nk = product_of(op, a, b, world)
    scaling = scales.scaling_of(op, a, b, (scale_a, scale_b))
    out_dtype = out_dtype_of(op, out) if scaling else ""
    problem = kind(
        m, n, world.num_ranks, str(a.dtype), nodes_of(world), k, is_nk, out_dtype, scaling
    )
    if out is not None:
        dtype = getattr(torch, problem.out_dtype)
        check_out(op, out, problem.result_of(world.rank), dtype, world)
    return problem


def make_inputs(problem: Any, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's normal random tensors on the CPU: the same for one seed on every machine."""
    return scales.random_operands(problem, problem.m, rank, seed)


def total(problem: Any, inputs: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """The sum of all ranks' products, in fp32."""
    products = (in_fp32(problem, one, "a") @ in_fp32(problem, one, "b") for one in inputs)
    sums = next(products)
    for one in products:
        sums += one
    return sums


_as_text = lru_cache(maxsize=1024)(str)


class ProductCall:
    """What calls with one problem and one configuration share on one rank: found once, kept.

    `runner` runs the plan that `planned` gives of a problem's class, a configuration and a target,
    where one kernel does all. `tensors` describe the call's, for `world.operator_call`.
    """

    tensors = ""

    def __init__(
        self, world: Any, problem: Any, config: Any, tensors: Mapping[str, Any],
        planned: Callable[[Any, Any, Target], Any],
    ) -> None:  # fmt: skip
        self.world, self.problem, self.config = world, problem, config
        out_dtype = problem.result_dtype
        self._out = problem.result_of(world.rank), getattr(torch, out_dtype)
        self._operator_call = world.operator_call
        # What all ranks must call alike.
        sizes = ",".join([f"{name}={getattr(problem, name)}" for name in problem.sizes])
        dtypes = problem.dtype
        if problem.is_summed and out_dtype != dtypes:  # what travels is rounded to it
            dtypes += f" to {out_dtype}"
        self.name = f"{problem.op} {sizes} {dtypes} {_as_text(config)}"
        self.runner, self._is_empty = None, problem.is_empty
        if config.is_fused and not self._is_empty:
            stages = planned(copied(problem, m=class_of(problem.m)), config, world.target)
            self.runner = new_runner(world, stages, tensors, {"m": problem.m})

    @cached_property
    def _like(self) -> torch.Tensor:
        return like(*self._out, self.world.device)

    def __call__(self, out: torch.Tensor | None, **tensors: Any) -> torch.Tensor:
        """Queue the call; its result. Collective."""
        if out is None:
            out = torch.empty_like(self._like)
        else:
            begin = out.data_ptr()
            end = begin + out.nbytes
            for one in tensors.values():  # here: a function is a tenth of a microsecond
                if isinstance(one, torch.Tensor):
                    first = one.data_ptr()
                    if first < end and begin < first + one.nbytes:
                        check_apart(self.problem.op, out, tensors)
            increment_version((out,))
        self._operator_call(self.name, self.tensors)
        if self.runner is not None:
            self.runner.queue(tensors, (out,))
        elif self._is_empty:
            out.zero_()
        else:
            self._run_unfused(out, **tensors)
        return out

    def _run_unfused(self, out: torch.Tensor, **tensors: Any) -> None:
        raise NotImplementedError

    def _prepare(
        self, recorded: Any, tensors: Mapping[str, Any], make: Callable[[Any], ProductCall]
    ) -> None:
        """Have what is there to be had before the user records a call that is done otherwise, which
        `make` gives of a problem: unfused where this is not. Memory cannot be had then.

        Once for a bucket of m, of its largest, where smaller ones need no more.
        """
        if recorded.is_fused or not self.config.is_fused:
            return
        world, calls, problem = self.world, self.world.calls, self.problem
        of_all = ("prepared", problem.op, problem.dtype, problem.n, problem.k)
        needs = ()
        if recorded.transport != schedules.LIBRARY:
            needs = exchanges.needs_of(world, self.exchanged(problem, tensors))
        # Tensors may lie otherwise on other ranks, for which these sizes are then not new.
        if calls.is_covered((*of_all, needs), {"m": problem.m}):
            return
        with suppress(OutOfMemoryError):  # a recording will say it
            if calls.is_first(of_all, self.runner):
                # The first of a product by calling it: the library loads its kernels.
                make(problem)(None, **tensors)
            elif needs:
                largest = of_bucket(problem)
                if exchanges.needs_of(world, self.exchanged(largest, tensors)) == needs:
                    problem = largest
                make(problem).move(**tensors)
        calls.cover((*of_all, needs), {"m": problem.m})

    def exchanged(self, problem: Any, tensors: Mapping[str, Any]) -> Any:
        """The problem of what ranks exchange in an unfused call of `problem`."""
        raise NotImplementedError

    def move(self, **tensors: Any) -> None:
        """An unfused call without its product: rows like those that ranks have are moved.
        Collective."""
        raise NotImplementedError


# A product has some seventy plans for all m; a model a few products.
@lru_cache(maxsize=1024)
def _planned(recorded: Config | None, problem: Problem, config: Config, target: Target) -> Any:
    """The stages of a problem of the class that m is of, with those of recorded calls where engines
    do the others."""
    program = problem.traced()
    stages = schedules.planned(program, config, problem, target)
    if config.transport == schedules.CE_PUSH and recorded and recorded.is_fused:
        instead = schedules.planned(program, recorded, problem, target)
        stages = replace(stages, recorded=instead)
    return stages


class Call(ProductCall):
    """Of a product that is summed over ranks, done as `recorded` says where the user records it."""

    def __init__(
        self, world: Any, problem: Any, config: Config, tensors: Mapping[str, Any],
        recorded: Config | None = None,
    ) -> None:  # fmt: skip
        super().__init__(world, problem, config, tensors, partial(_planned, recorded))
        # Where peers read the library's product in place, if that is not much: memory that products
        # of all sizes share.
        self._products: Any = None
        if self.runner is None and problem.m * problem.row_bytes <= MOST_SHARED_BYTES:
            request = {"product": ((problem.m, problem.n), self._out[1])}
            self._products = world.asked(f"{problem.op}.product", request, num_slots=1)
        # What sums the last call's product, by where it and the result lie on the heap.
        self._exchange: tuple[Any, Any] = None, None
        if recorded:
            make = lambda problem: Call(world, problem, recorded, tensors)  # noqa: E731
            self._prepare(recorded, tensors, make)

    def _run_unfused(
        self, out: torch.Tensor, product: torch.Tensor | None = None, **tensors: Any
    ) -> None:
        world, kind = self.world, self.problem.unfused
        if self.config.transport == schedules.LIBRARY:
            is_whole = out.shape[0] == self.problem.m
            product = scales.multiply(tensors, out if is_whole else None, out.dtype)
            nccl.BY_NAME[kind.op](world, product, out)
            return
        if product is None:
            into = self._products and self._products.take(world.is_recording()).product
            if len(tensors) == 2:
                product = torch.mm(tensors["a"], tensors["b"], out=into)
            else:
                product = scales.multiply(tensors, into, out.dtype)
        place = world.offset(product), world.offset(out)
        lay, exchange = self._exchange
        if place != lay:
            make = partial(exchanges.make_call, kind)
            exchange = find_call(world, kind.op, (product, out), (None,), make)
            self._exchange = place, exchange
        exchange(product, out)

    def exchanged(self, problem: Problem, tensors: Mapping[str, Any]) -> exchanges.Problem:
        is_shared = problem.m * problem.row_bytes <= MOST_SHARED_BYTES
        return problem.unfused(
            problem.m, problem.n, problem.num_ranks, problem.result_dtype, problem.nodes,
            in_place=is_shared and len(problem.nodes) <= 1,
        )  # fmt: skip

    def move(self, a: torch.Tensor, **_: Any) -> None:
        product = self._products and self._products.reserve().product
        if product is None:
            shape = self.problem.m, self.problem.n
            product = a.new_empty(shape, dtype=self._out[1])
        self._run_unfused(torch.empty_like(self._like), product.zero_())


# ---------------------------------------------------------------------------------------------
# The card


def calling(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A card's `run`, of an operator that takes `out`."""

    def run(world: Any, problem: Problem, inputs: Mapping[str, Any], config: Any = None) -> Any:
        given = scales.room_for(problem, problem.result_of(world.rank), inputs)
        return function(**inputs, **given, world=world, config=config)

    run.__module__ = function.__module__
    return run


def fake(problem: Any, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """A rank's result: its shape and dtype, without its values."""
    dtype = getattr(torch, problem.result_dtype)
    return torch.empty(problem.result_of(rank), dtype=dtype, device="meta")


def card(kind: type[Problem], run: Callable[..., Any]) -> dict[str, Any]:
    """What the cards of such operators have alike."""
    return {
        "config": Config,
        "make_inputs": make_inputs,
        "run": run,
        "kernels": described.KernelsOf(run, make_inputs, schedules.fused),
        "fake": fake,
        "dtypes": kind.dtypes,
        "program": kind.traced,
        "takes_nodes": True,
        "default_shape": {"m": 256, "n": 256, "k": 256},
        "smallest": {"m": 32, "n": 16, "k": 16},
    }
