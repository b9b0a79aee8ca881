"""PTX on vectors, of inline assembly: registers of two or four parts, halves added in pairs.

A vector is its parts, each a register of its own: `.v4 .b32 %a` is %a.x, %a.y, %a.z and %a.w.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

PARTS = "xyzw"
# Two numbers in one register of 32 bits.
PAIRS = {"bf16x2": np.dtype(ml_dtypes.bfloat16), "f16x2": np.dtype(np.float16)}
ON_PAIRS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "min": np.minimum, "max": np.maximum,
}  # fmt: skip
# Of one f32, computed in fp64 and rounded once: approximations of hardware are not imitated.
ON_NUMBERS: dict[str, tuple[int, Callable[..., Any]]] = {
    **{name: (2, function) for name, function in ON_PAIRS.items()},
    "min": (2, np.fmin), "max": (2, np.fmax), "div": (2, np.divide),
    "fma": (3, lambda a, b, c: a * b + c), "neg": (1, np.negative), "abs": (1, np.abs),
    "ex2": (1, np.exp2), "lg2": (1, np.log2), "rcp": (1, np.reciprocal), "sqrt": (1, np.sqrt),
    "rsqrt": (1, lambda a: 1 / np.sqrt(a)), "tanh": (1, np.tanh), "sin": (1, np.sin),
    "cos": (1, np.cos),
}  # fmt: skip
ROUNDINGS = {"rn", "approx", "ftz", "full"}

Read = Callable[[Any], int]
Write = Callable[[Any, int], None]


def parts_of(operand: str) -> list[str]:
    """The registers in `{a, b}`."""
    return [part.strip() for part in operand.strip("{} ").split(",")]


def count_of(words: Sequence[str]) -> int:
    """How many parts an opcode's vector has: 1 without `.v2` or `.v4`."""
    return next((int(word[1]) for word in words if re.fullmatch("v[24]", word)), 1)


def parts_of_register(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}.{part}" for part in PARTS[:count]]


def split(read: Read, writes: list[Write], bits: int) -> Callable[[Any], None]:
    """`mov.b64 {a, b}, c`: the low bits into the first."""
    size = bits // len(writes)

    def step(lane: Any) -> None:
        value = read(lane)
        for number, write in enumerate(writes):
            write(lane, value >> number * size & (1 << size) - 1)

    return step


def joined(reads: list[Read], write: Write, bits: int) -> Callable[[Any], None]:
    """`mov.b64 c, {a, b}`."""
    size = bits // len(reads)

    def step(lane: Any) -> None:
        values = [(read(lane) & (1 << size) - 1) << i * size for i, read in enumerate(reads)]
        write(lane, sum(values))

    return step


def on_numbers(
    change: Callable[..., Any], dtype: np.dtype, wide: type, reads: list[Read], write: Write
) -> Callable[[Any], None]:
    """`add.bf16x2 c, a, b`, `fma.rn.f32 d, a, b, c`: each number of a register, computed in `wide`
    and rounded once."""

    def step(lane: Any) -> None:
        bits = [np.array([read(lane) & 0xFFFFFFFF], np.uint32) for read in reads]
        with np.errstate(all="ignore"):
            result = change(*(one.view(dtype).astype(wide) for one in bits))
            write(lane, int(result.astype(dtype).view(np.uint32)[0]))

    return step
