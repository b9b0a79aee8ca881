"""`ready` where rows of A are a rank's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton

from weft.tiles import gemm


class Operand(NamedTuple):
    """Arguments of `read_owned`."""

    a: Any
    parts: Any


@triton.jit
def read_owned(at, segment, tile, args):
    """A is there from the start. args: Operand"""
    first = at.owner * args.parts.rows
    return gemm.Rows(source=args.a, first=first + at.row, end=first + at.end)
