"""Angles by which positions turn the halves of a head, in fp32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cos_sin(angle):
    """(cos, sin), wrong by about 1e-7 for each unit of the angle, as an angle in fp32 is too.

    By polynomials within an eighth of a turn, then the quarter that it lies in: the libraries'
    functions need local memory for angles that no position has.

    Source  Cephes, sinf.c
    """
    turns = angle * 0.15915494309189535
    quarter = tl.floor(turns * 4 + 0.5)
    rest = (turns - quarter * 0.25) * 6.283185307179586
    square = rest * rest
    sin = rest + rest * square * (
        -1.6666654611e-1 + square * (8.3321608736e-3 - square * 1.9515295891e-4)
    )
    cos = (
        1
        - square * 0.5
        + square
        * square
        * (4.166664568298827e-2 + square * (-1.388731625493765e-3 + square * 2.443315711809948e-5))
    )
    quadrant = quarter.to(tl.int32) & 3
    is_odd = (quadrant & 1) == 1
    cos, sin = tl.where(is_odd, sin, cos), tl.where(is_odd, cos, sin)
    is_back = (quadrant == 1) | (quadrant == 2)
    return tl.where(is_back, -cos, cos), tl.where(quadrant >= 2, -sin, sin)
