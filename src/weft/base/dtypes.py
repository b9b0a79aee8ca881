"""Dtypes by name: torch's names, short forms, widths, Triton's words. No torch needed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from weft.base.errors import DtypeError


@dataclass(frozen=True)
class Dtype:
    """`name` is torch's; `triton` is Triton's word for it in a signature and in TTIR."""

    name: str
    triton: str
    itemsize: int
    is_float: bool
    epsilon: float = 0.0


DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("float64", "fp64", 8, True, 2.0**-52),
        Dtype("float32", "fp32", 4, True, 2.0**-23),
        Dtype("float16", "fp16", 2, True, 2.0**-10),
        Dtype("bfloat16", "bf16", 2, True, 2.0**-7),
        Dtype("float8_e4m3fn", "fp8e4nv", 1, True, 2.0**-3),
        Dtype("float8_e5m2", "fp8e5", 1, True, 2.0**-2),
        Dtype("int64", "i64", 8, False),
        Dtype("int32", "i32", 4, False),
        Dtype("int16", "i16", 2, False),
        Dtype("int8", "i8", 1, False),
        Dtype("uint64", "u64", 8, False),
        Dtype("uint32", "u32", 4, False),
        Dtype("uint16", "u16", 2, False),
        Dtype("uint8", "u8", 1, False),
        Dtype("bool", "i1", 1, False),
    )
}

# What most operators take: products and sums of them are in fp32, and nothing has a scale.
FLOATS = ("float16", "bfloat16", "float32")

SHORT_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}


@cache
def parse_dtype(text: str) -> Dtype:
    """The dtype named `text`: torch's name, with or without "torch.", or fp16, bf16, fp32.

    Raises  DtypeError: a name outside the table
    """
    name = text.strip().removeprefix("torch.")
    name = SHORT_NAMES.get(name, name)
    if name not in DTYPES:
        known = ", ".join([*SHORT_NAMES, *DTYPES])
        raise DtypeError(f"unknown dtype {text!r}; weft knows {known}")
    return DTYPES[name]


def tolerance(name: str, k: int) -> float:
    """Relative error, ||out - ref|| / ||ref||, allowed for sums of k products rounded to `name`.

    Half an ulp of rounding on output, and fp32 accumulation growing as sqrt(k); doubled for slack.
    """
    dtype = parse_dtype(name)
    accumulated = 2.0**-23 * max(k, 1) ** 0.5
    return 2.0 * (dtype.epsilon / 2 + accumulated)
