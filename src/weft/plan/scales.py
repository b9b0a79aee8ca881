"""Products of fp8 operands: what has a scale, checks of scales, and what kernels get of them."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any, ClassVar

import torch

from weft.base.dtypes import DTYPES, FLOATS, parse_dtype
from weft.base.errors import DtypeError, ShapeError
from weft.base.target import Target
from weft.compiler import dtensors
from weft.compiler.schedules import BLOCK_K, BLOCKS, E4M3
from weft.ir.device import scales_of
from weft.plan.launches import Start
from weft.plan.problems import OfProduct
from weft.tiles.hooks.scales import Apart, push_scales

# Scales of fp8: one for each row of A and column of B, or one for 1 x 128 of A and 128 x 128 of B.
ROWS = "rows"
FP8 = ("float8_e4m3fn", "float8_e5m2")
SUPPORTED = (*FLOATS, *FP8)
# torch._scaled_mm with scales of rows: from which compute capability on, and what divides n and k.
SCALED_ROWS_ARCH, SCALED_STEP = 90, 16
# What one program stores in one slot; programs for a slot; scales that it moves at a time.
PIECE_BYTES, MOST_PIECES, BLOCK = 32 << 10, 16, 1024


class Scaled(OfProduct):
    """What follows of a product's problem from its dtypes: those of fp8 operands have scales, of
    `scaling`, and results of another dtype."""

    of_sm90: ClassVar[tuple[str, str]] = "", "16-bit operands, or fp8 with b as [n, k], to 16 bits,"
    out_dtype: str
    scaling: str

    def set_dtypes(self) -> None:
        """By torch's names, with what is usual where nothing is said; of a frozen dataclass.

        Raises  DtypeError: a dtype that no product takes or gives, or another one's scaling
        """
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

    @property
    def options(self) -> dict[str, str]:
        """What the traced function takes beside its tensors."""
        return {"dtype": self.out_dtype, "scaling": self.scaling}

    @property
    def result_dtype(self) -> str:
        return self.out_dtype

    @property
    def out_itemsize(self) -> int:
        return DTYPES[self.out_dtype].itemsize

    @property
    def flops(self) -> int:
        """Of one rank's product."""
        return 2 * self.m * self.n * self.k

    @property
    def memory_bytes(self) -> int:
        """What one rank's product must read and write at least."""
        operands = (self.m + self.n) * self.k * self.itemsize
        return operands + self.m * self.n * self.out_itemsize

    def can_use_sm90(self, target: Target) -> bool:
        return self.out_itemsize == 2 and super().can_use_sm90(target)

    def library_takes(self, target: Target) -> bool:
        """Does torch's product take these operands there?"""
        if not self.scaling:
            return True
        is_there = target.backend == "emu" or (
            target.backend == "cuda" and int(target.arch) >= SCALED_ROWS_ARCH
        )
        is_typed = (self.scaling, self.dtype, self.out_dtype) == (ROWS, E4M3, "bfloat16")
        is_even = self.n % SCALED_STEP == 0 and self.k % SCALED_STEP == 0
        return is_there and is_typed and is_even and self.b_is_nk


# ---------------------------------------------------------------------------------------------
# Of a call's tensors


def named(a: Any, b: Any, scale_a: Any, scale_b: Any) -> dict[str, Any]:
    """Tensors as the plan names its buffers."""
    if scale_a is None:
        return {"a": a, "b": b}
    return {"a": a, "b": b, scales_of("a"): scale_a, scales_of("b"): scale_b}


def scale_shapes(rows: int, k: int, n: int) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
    """By kind the shapes of A's and of B's."""
    blocks = ceil(k / BLOCK_K)
    return {ROWS: ((rows, 1), (1, n)), BLOCKS: ((rows, blocks), (blocks, ceil(n / BLOCK_K)))}


def scaling_of(op: str, a: torch.Tensor, b: torch.Tensor, scales: tuple[Any, Any]) -> str:
    """How operands are scaled: "", ROWS or BLOCKS; one scale for all is ROWS.

    Raises  ShapeError, DtypeError: scales that do not fit their operands, or are missing
    """
    given = dict(zip(("scale_a", "scale_b"), scales, strict=True))
    missing = [name for name, scale in given.items() if scale is None]
    for name, scale in given.items():
        dtensors.refuse(op, name, scale)
    if str(a.dtype).removeprefix("torch.") not in FP8:
        if len(missing) < 2:
            raise DtypeError(f"{op}: a is {a.dtype}, and scales are of fp8; leave them out")
        return ""
    if missing:
        raise DtypeError(f"{op}: a is {a.dtype} and {' and '.join(missing)} is missing; pass both")
    known, fitting = scale_shapes(*a.shape, b.shape[1]), []
    for i, (name, scale) in enumerate(given.items()):
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


def multiply(tensors: Mapping[str, Any], out: Any, dtype: torch.dtype) -> torch.Tensor:
    """torch's product of `named` operands that `Scaled.library_takes`; of fp8 in this dtype."""
    a, b = tensors["a"], tensors["b"]
    if len(tensors) == 2:
        return torch.mm(a, b, out=out)
    scale_a, scale_b = tensors[scales_of("a")], tensors[scales_of("b")]
    if not scale_a.numel() == scale_b.numel() == 1:
        # Of both one for all, or of neither.
        scale_a = scale_a.reshape(-1, 1).expand(a.shape[0], 1).contiguous()
        scale_b = scale_b.reshape(1, -1).expand(1, b.shape[1]).contiguous()
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=dtype, use_fast_accum=False, out=out)


# ---------------------------------------------------------------------------------------------
# Of a card


def random_operands(problem: Any, rows: int, rank: int, seed: int) -> dict[str, torch.Tensor]:
    """`rows` of A and all of B, with scales where they have some: normal random numbers on the CPU,
    the same for one seed on every machine."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    n, k, dtype = problem.n, problem.k, problem.torch_dtype
    is_nk = problem.b_is_nk or bool(problem.scaling)
    a = torch.randn(rows, k, generator=generator).to(dtype)
    b = torch.randn((n, k) if is_nk else (k, n), generator=generator).to(dtype)
    b = b.t() if is_nk else b
    found = {"a": a, "b": b if problem.b_is_nk else b.contiguous()}
    if problem.scaling:
        shapes = scale_shapes(rows, k, n)[problem.scaling]
        for name, shape in zip(("scale_a", "scale_b"), shapes, strict=True):
            found[name] = torch.rand(*shape, generator=generator) + 0.5
    return found


def room_for(
    problem: Any, shape: tuple[int, int], inputs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """`out`, where a call would give a result of another dtype without it."""
    if problem.out_dtype == problem.dtype:
        return {}
    dtype = getattr(torch, problem.out_dtype)
    return {"out": torch.empty(shape, dtype=dtype, device=inputs["a"].device)}


def in_fp32(problem: Any, inputs: Mapping[str, Any], name: str) -> torch.Tensor:
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
# What kernels get


def steps_of(scale: Any) -> tuple[int, int]:
    """How far scales lie apart; one for all is everywhere."""
    return (scale.stride(0), scale.stride(1)) if scale.numel() > 1 else (0, 0)


def apart_of(scale_a: Any, scale_b: Any, scaling: str) -> Apart:
    """How those of a product lie."""
    a_row, a_k = steps_of(scale_a)
    b_k, b_column = steps_of(scale_b)
    if scaling == BLOCKS:
        return Apart(a_row, a_k, b_column, b_k, BLOCK_K)
    return Apart(a_row, 0, b_column, 0, 1)


def pushed(scale_a: Any, gathered: Any, split: Any, takes: bool, slot: Any, world: Any) -> Start:
    """The launch that stores own scales on every rank."""
    blocks = gathered.shape[1]
    pieces = max(1, min(MOST_PIECES, ceil(split.rank_rows * blocks * 4 / PIECE_BYTES)))
    given = (scale_a, gathered, *steps_of(scale_a), blocks, slot.arg, split, takes, world.arg)
    return Start(push_scales, (world.num_ranks * pieces, 1, 1), (*given, BLOCK), {"num_warps": 4})
