"""Products of rows that all ranks have: their problem, inputs, calls and cards.

m is global and its rows are split as torch.chunk splits them; n and k are per rank. What is fused
is a traced program's plan; `Call` runs it, or the libraries instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import ceil
from typing import Any, ClassVar

import torch

from weft.base.dtypes import DTYPES, FLOATS, parse_dtype
from weft.base.errors import DtypeError, ShapeError
from weft.base.providers import provider
from weft.base.target import Target
from weft.compiler import Shard, Tensor, dtensors, frontend, gather_schedules, schedules
from weft.compiler.gather_schedules import BLOCK_K, BLOCKS, LIBRARY, RELAY, UNFUSED, Config
from weft.ir.task import Program
from weft.plan import call_cache, nccl
from weft.plan.problems import Split, check_sizes, nodes_of, product_of
from weft.plan.summed import AWKWARD_SHAPES as AWKWARD_SHAPES
from weft.plan.summed import ProductCall
from weft.tiles import blocking

# Scales of fp8: one for each row of A and column of B, or one for 1 x 128 of A and 128 x 128 of B.
ROWS = "rows"
FP8 = ("float8_e4m3fn", "float8_e5m2")
SUPPORTED = (*FLOATS, *FP8)


@dataclass(frozen=True)
class Problem(Split):
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
    sizes: ClassVar[tuple[str, ...]] = ("m", "n", "k")
    transports: ClassVar[tuple[str, ...]] = (*gather_schedules.TRANSPORTS, RELAY, UNFUSED, LIBRARY)
    templates: ClassVar[tuple[str, ...]] = schedules.TEMPLATES
    is_summed: ClassVar[bool] = False
    # What its templates and the library take, for messages.
    of_sm90: ClassVar[tuple[str, str]] = "", "16-bit operands, or fp8 with b as [n, k], to 16 bits,"
    of_library: ClassVar[str] = ", of one node, and a result of the operands' dtype"

    def __post_init__(self) -> None:
        scaled = parse_dtype(self.dtype).name in FP8
        usual = "bfloat16" if scaled else self.dtype
        for name, known in (("dtype", SUPPORTED), ("out_dtype", FLOATS)):
            dtype = parse_dtype(getattr(self, name) or usual).name
            if dtype not in known:
                raise DtypeError(f"{self.op}: {name} {dtype}; it takes {', '.join(known)}")
            object.__setattr__(self, name, dtype)
        if scaled and not self.scaling:
            object.__setattr__(self, "scaling", ROWS)
        if self.scaling not in ((ROWS, BLOCKS) if scaled else ("",)):
            raise DtypeError(f"{self.op}: scaling={self.scaling!r} of {self.dtype} operands")
        check_sizes(self.op, self.num_ranks, m=self.m, n=self.n, k=self.k)

    @property
    def result(self) -> tuple[int, int]:
        """Rows and columns of what a rank ends with."""
        return self.m, self.n

    def types(self) -> dict[str, Tensor]:
        """Of the program's parameters, the gathered one first, with m open."""
        return {"a": Tensor(self.dtype, ("m", self.k), Shard(0)),
                "b": Tensor(self.dtype, (self.k, self.n * self.num_ranks), Shard(1))}  # fmt: skip

    @property
    def options(self) -> dict[str, str]:
        """What the traced function takes beside its tensors."""
        return {"dtype": self.out_dtype, "scaling": self.scaling}

    @property
    def is_empty(self) -> bool:
        return 0 in (self.m, self.n, self.k)

    def can_use_tma(self, target: Target) -> bool:
        """Do the rows of A, B and C begin where TMA can read them, whichever way B lies? That may
        differ by rank, and a choice may not."""
        rows = [self.k * self.itemsize, self.n * self.itemsize]
        return blocking.can_use_tma(target, [*rows, self.n * self.out_itemsize])

    def can_use_sm90(self, target: Target) -> bool:
        """Does the template for Hopper take this problem there?"""
        # Communication CTAs store directly from Gluon: what reaches other nodes is relayed.
        is_near = len(self.nodes) <= 1 or gather_schedules.can_relay(self)
        is_hopper = target.arch == 90 and is_near
        is_16_bit = self.itemsize == 2 or (self.itemsize == 1 and self.b_is_nk)
        return is_hopper and is_16_bit and self.out_itemsize == 2 and self.can_use_tma(target)

    @property
    def can_use_unfused(self) -> bool:
        """Can torch multiply what weft's collective has gathered?"""
        return self.out_dtype == self.dtype and not self.scaling and self.num_ranks > 1

    def can_use_library(self, target: Target) -> bool:
        """Can NCCL and cuBLAS do the same there?"""
        is_even = self.is_even and len(self.nodes) <= 1
        return target.backend == "cuda" and is_even and self.can_use_unfused

    @property
    def out_itemsize(self) -> int:
        return DTYPES[self.out_dtype].itemsize

    @property
    def shard_bytes(self) -> int:
        return self.rows * self.k * self.itemsize

    @property
    def flops(self) -> int:
        """Of one rank."""
        return 2 * self.m * self.n * self.k

    @property
    def memory_bytes(self) -> int:
        """What one rank's product must read and write at least."""
        operands = (self.m + self.n) * self.k * self.itemsize
        return operands + self.m * self.n * self.out_itemsize


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
        nodes_of(world), scaling_of(a, b, (scale_a, scale_b)),
    )  # fmt: skip
    call_cache.check_shard(op, "a", rows, problem, world, sized_by)
    if out is not None:
        call_cache.check_out(op, out, problem.result, out.dtype, world)
    return problem


# ---------------------------------------------------------------------------------------------
# Scales


def scale_shapes(rows: int, k: int, n: int) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """By kind the shapes of A's and of B's."""
    blocks = ceil(k / BLOCK_K)
    return {ROWS: ((rows, 1), (1, n)), BLOCKS: ((rows, blocks), (blocks, ceil(n / BLOCK_K)))}


def scaling_of(a: torch.Tensor, b: torch.Tensor, scales: tuple[Any, Any]) -> str:
    """How operands are scaled: "", ROWS or BLOCKS; one scale for all is ROWS.

    Raises  ShapeError, DtypeError: scales that do not fit their operands, or are missing
    """
    op, named = Problem.op, dict(zip(("scale_a", "scale_b"), scales, strict=True))
    missing = [name for name, scale in named.items() if scale is None]
    for name, scale in named.items():
        dtensors.refuse(op, name, scale)
    if str(a.dtype).removeprefix("torch.") not in FP8:
        if len(missing) < 2:
            raise DtypeError(f"{op}: a is {a.dtype}, and scales are of fp8; leave them out")
        return ""
    if missing:
        raise DtypeError(f"{op}: a is {a.dtype} and {' and '.join(missing)} is missing; pass both")
    known, fitting = scale_shapes(*a.shape, b.shape[1]), []
    for i, (name, scale) in enumerate(named.items()):
        if scale.dtype != torch.float32 or scale.device != a.device:
            message = f"{name} is {scale.dtype} on {scale.device}; it must be float32 on {a.device}"
            raise DtypeError(f"{op}: {message}")
        shape = tuple(scale.shape)
        kinds = [kind for kind, fits in known.items()
                 if fits[i] == shape or (kind == ROWS and scale.numel() == 1)]  # fmt: skip
        if not kinds:
            message = " or ".join(f"{fits[i]} ({kind})" for kind, fits in known.items())
            message = f"{name} has shape {shape}; it must be {message}, or one number"
            raise ShapeError(f"{op}: {message}")
        fitting.append(kinds)
    if both := [kind for kind in fitting[0] if kind in fitting[1]]:
        return both[0]
    of_a, of_b = (f"{tuple(one.shape)} is of {', '.join(kinds)}"
                  for one, kinds in zip(scales, fitting, strict=True))  # fmt: skip
    raise ShapeError(
        f"{op}: scale_a of shape {of_a}, scale_b of shape {of_b}; pass both of one kind"
    )


def in_fp32(problem: Problem, inputs: Mapping[str, Any], name: str) -> torch.Tensor:
    """An operand as its scales have it."""
    operand = inputs[name].float()
    if not problem.scaling:
        return operand
    scale = inputs[f"scale_{name}"]
    for axis, extent in enumerate(operand.shape):
        if problem.scaling == BLOCKS and scale.shape[axis] != extent:
            scale = scale.repeat_interleave(BLOCK_K, axis).narrow(axis, 0, extent)
    return operand * scale


# ---------------------------------------------------------------------------------------------
# Calls


def traced(function: Callable[..., Any], problem: Problem) -> Program:
    """The program of one problem's sizes but for m, which is open."""
    return _traced(function, replace(problem, m=0, nodes=()))


@lru_cache(maxsize=256)
def _traced(function: Any, problem: Problem) -> Program:
    made = frontend.trace(function, "tp", problem.types(), **problem.options)
    return replace(made, name=problem.op)


class Call(ProductCall):
    """Of a product of gathered rows, which the first of `tensors` are; done as `recorded` says
    where the user records it."""

    def __init__(
        self, world: Any, problem: Problem, config: Config, tensors: Mapping[str, Any],
        program: Callable[..., Any], recorded: Config | None = None,
    ) -> None:  # fmt: skip
        config.check(problem, world.target)
        stages = None
        if config.is_fused and not problem.is_empty:
            made = traced(program, problem)
            stages = gather_schedules.planned(made, config, problem, world.target)
        out = problem.result, problem.out_dtype
        super().__init__(world, problem, config, tensors, stages, *out)
        self._left, self._right = problem.types()
        if recorded:
            make = partial(type(self), world, problem, recorded, tensors, program)
            self._prepare(recorded, tensors, make)

    def _run_unfused(self, out: torch.Tensor, **tensors: Any) -> None:
        own, right = tensors[self._left], tensors[self._right]
        self._multiply(self._gathered(own), right, out)

    def move(self, **tensors: Any) -> None:
        self._gathered(tensors[self._left])

    def _gathered(self, own: torch.Tensor) -> torch.Tensor:
        if self.config.transport == LIBRARY:
            shape = self.problem.m, self.problem.k
            whole = torch.empty(shape, dtype=own.dtype, device=own.device)
            nccl.all_gather(self.world, own, whole)
            return whole
        gather = provider("collectives").all_gather
        return gather(own.contiguous(), world=self.world, m=self.problem.m)

    def _multiply(self, gathered: Any, b: Any, out: Any) -> None:
        """The library's product."""
        torch.mm(gathered, b, out=out)


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's normal random tensors on the CPU: the same for one seed on every machine."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    first, end = problem.shard(rank)
    dtype = getattr(torch, problem.dtype)
    is_nk = problem.b_is_nk or bool(problem.scaling)
    a = torch.randn(end - first, problem.k, generator=generator).to(dtype)
    b = torch.randn(*((problem.n, problem.k) if is_nk else (problem.k, problem.n)),
                    generator=generator).to(dtype)  # fmt: skip
    b = b.t() if is_nk else b
    found = {"a": a, "b": b if problem.b_is_nk else b.contiguous()}
    if problem.scaling:
        shapes = scale_shapes(end - first, problem.k, problem.n)[problem.scaling]
        for name, shape in zip(("scale_a", "scale_b"), shapes, strict=True):
            found[name] = torch.rand(*shape, generator=generator) + 0.5
    return found


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """The result's shape and dtype, without its values."""
    return torch.empty(problem.result, dtype=getattr(torch, problem.out_dtype), device="meta")
