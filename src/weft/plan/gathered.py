"""Products of rows that all ranks have: their problem, inputs, calls and cards.

m is global and its rows are split as torch.chunk splits them; n and k are per rank. What is fused
is a traced program's plan; `Call` runs it, or the libraries instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from weft.base.dtypes import DTYPES, FLOATS, parse_dtype
from weft.base.errors import DtypeError, ShapeError
from weft.base.parts import full_part, part_of
from weft.compiler import Shard, Tensor, dtensors, frontend, gather_schedules
from weft.compiler.gather_schedules import BLOCK_K, BLOCKS, LIBRARY, Config
from weft.ir.device import scales_of
from weft.ir.task import Program
from weft.plan import call_cache, nccl
from weft.plan.problems import check_sizes, nodes_of
from weft.plan.runner import new_runner
from weft.plan.summed import AWKWARD_SHAPES as AWKWARD_SHAPES

# Scales of fp8: one for each row of A and column of B, or one for 1 x 128 of A and 128 x 128 of B.
ROWS = "rows"
FP8 = ("float8_e4m3fn", "float8_e5m2")
SUPPORTED = (*FLOATS, *FP8)


@dataclass(frozen=True)
class Problem:
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

    @property
    def is_empty(self) -> bool:
        return 0 in (self.m, self.n, self.k)

    @property
    def rows(self) -> int:
        """Rows of a full shard."""
        return full_part(self.m, self.num_ranks)

    def shard(self, rank: int) -> tuple[int, int]:
        """The rows first .. end - 1 that `rank` holds."""
        return part_of(self.m, rank, self.num_ranks)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

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
    def gathered_bytes(self) -> int:
        """What one rank receives when all shards are full."""
        return (self.m - min(self.rows, self.m)) * self.k * self.itemsize

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
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != 2:
            shape = tuple(tensor.shape)
            raise ShapeError(f"{op}: {name} has shape {shape}; it must have two dimensions")
        if tensor.device != world.device:
            raise ShapeError(
                f"{op}: {name} is on {tensor.device} but the world on {world.device}; move it "
                "there with .to(world.device)"
            )
    (rows, k), (k_b, n) = a.shape, b.shape
    if k != k_b:
        raise ShapeError(f"{op}: a has k={k} but b has k={k_b}; pass b as [k, n], not [n, k]")
    if a.dtype != b.dtype:
        raise DtypeError(f"{op}: a is {a.dtype} but b is {b.dtype}; convert one of them")
    is_nk = not b.is_contiguous()
    for name, one, also in (
        ("a", a, ""), ("b", b.t() if is_nk else b, ", or a transposed contiguous [n, k]")
    ):  # fmt: skip
        if not one.is_contiguous():
            given = {"a": a, "b": b}[name]
            raise ShapeError(
                f"{op}: {name} of shape {tuple(given.shape)} has strides {given.stride()}; it must "
                f"be contiguous{also}: pass {name}.contiguous()"
            )
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
            told = f"{name} is {scale.dtype} on {scale.device}; it must be float32 on {a.device}"
            raise DtypeError(f"{op}: {told}")
        shape = tuple(scale.shape)
        kinds = [kind for kind, fits in known.items()
                 if fits[i] == shape or (kind == ROWS and scale.numel() == 1)]  # fmt: skip
        if not kinds:
            told = " or ".join(f"{fits[i]} ({kind})" for kind, fits in known.items())
            told = f"{name} has shape {shape}; it must be {told}, or one number"
            raise ShapeError(f"{op}: {told}")
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


def traced(function: Callable[..., Any] | None, problem: Problem) -> Program:
    """The program of one problem's sizes but for m, which is open."""
    return _traced(function, replace(problem, m=0, nodes=(), b_is_nk=False))


@lru_cache(maxsize=256)
def _traced(function: Any, problem: Problem) -> Program:
    one, columns = problem, problem.n * problem.num_ranks
    types = {"a": Tensor(one.dtype, ("m", one.k), Shard(0)),
             "b": Tensor(one.dtype, (one.k, columns), Shard(1))}  # fmt: skip
    made = frontend.trace(function, "tp", types, dtype=one.out_dtype, scaling=one.scaling)
    return replace(made, name=one.op)


class Call:
    """What calls with one problem and one configuration share on one rank: found once, kept.

    `tensors` describe them, for `world.operator_call`.
    """

    tensors = ""

    def __init__(
        self, world: Any, problem: Problem, config: Config, tensors: Sequence[Any],
        program: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        config.check(problem, world.target)
        self.world, self.problem, self.is_empty = world, problem, problem.is_empty
        self.program = program
        self.out_dtype = getattr(torch, problem.out_dtype)
        # What all ranks must call alike.
        sizes = f"m={problem.m},n={problem.n},k={problem.k}"
        self.name = f"{config.op} {sizes} {problem.dtype} {config}"
        is_fused = config.transport != LIBRARY and not self.is_empty
        self.runner: Any = self._new_runner(config, *tensors) if is_fused else None

    def _new_runner(self, config: Config, *tensors: Any) -> Any:
        """What runs it where one kernel does all."""
        problem = self.problem
        program = traced(self.program, problem)
        stages = gather_schedules.planned(program, config, problem, self.world.target)
        return new_runner(self.world, stages, _named(*tensors), {"m": problem.m})

    def _multiply(self, gathered: Any, b: Any, out: Any) -> None:
        """The library's product."""
        torch.mm(gathered, b, out=out)

    def __call__(self, a: Any, b: Any, out: Any = None, scale_a: Any = None, scale_b: Any = None):
        """Queue the call; its result. Collective."""
        if out is None:
            out = torch.empty(self.problem.result, dtype=self.out_dtype, device=a.device)
        else:
            increment_version((out,))
        # Also said where there is nothing to do: a rank without rows that passes no m takes m for 0
        self.world.operator_call(self.name, self.tensors)
        if self.runner is not None:
            self.runner.queue(_named(a, b, scale_a, scale_b), (out,))
        elif self.is_empty:
            out.zero_()
        else:
            whole = torch.empty((self.problem.m, self.problem.k), dtype=a.dtype, device=a.device)
            nccl.all_gather(self.world, a, whole)
            self._multiply(whole, b, out)
        return out


def _named(a: Any, b: Any, scale_a: Any, scale_b: Any) -> dict[str, Any]:
    """Tensors as the plan names its buffers."""
    if scale_a is None:
        return {"a": a, "b": b}
    return {"a": a, "b": b, scales_of("a"): scale_a, scales_of("b"): scale_b}


# ---------------------------------------------------------------------------------------------
# The card


def make_problem(
    num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = (),
    kind: type[Problem] = Problem,
) -> Problem:  # fmt: skip
    return kind(shape["m"], shape["n"], shape["k"], num_ranks, dtype, nodes=nodes)


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
