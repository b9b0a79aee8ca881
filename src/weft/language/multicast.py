"""Declarations: multicast, one access for all ranks' copies; compiled, never needed."""

from __future__ import annotations

import triton.language as tl

from weft.language.operands import Values
from weft.language.registry import Effects, declare


@declare(Effects(reads=("ptr",)), kinds={"ptr": "multicast"})
def multimem_ld_reduce(ptr: tl.tensor) -> tl.tensor:
    """The sum, made in the switch, of what all ranks hold at a multicast address.

        result  =  sum over ranks p of  ptr@p

    No operator of weft needs it, and weft makes no multicast objects; `weft doctor --json` says
    whether the hardware could.

    Shapes  ptr: a (tile of) pointer(s) into a multicast mapping, not from `at`
    Dtypes  float32, int32
    Sync    relaxed, system-wide; the order of the sum is the switch's own
    Raises  UnsupportedError: compiled for less than sm_90
    Cost    one load by each thread, answered by the switch
    Source  PTX ISA multimem.ld_reduce
    """


@declare(Effects(writes=("ptr",)), kinds={"ptr": "multicast"})
def multimem_st(ptr: tl.tensor, value: Values) -> None:
    """Store to all ranks at once through a multicast address.

        ptr@p  <-  value        for every rank p

    Shapes  ptr: a (tile of) pointer(s) into a multicast mapping; value broadcasts to it
    Dtypes  float32, int32
    Sync    relaxed, system-wide
    Raises  UnsupportedError: compiled for less than sm_90
    Cost    one store by each thread
    Source  PTX ISA multimem.st
    """


@declare(Effects(reads=("ptr",), writes=("ptr",)), kinds={"ptr": "multicast"})
def multimem_red(ptr: tl.tensor, value: Values) -> None:
    """Add to what every rank holds at a multicast address.

        ptr@p  <-  ptr@p + value        for every rank p

    Shapes  ptr: a (tile of) pointer(s) into a multicast mapping; value broadcasts to it
    Dtypes  float32, int32
    Sync    relaxed, system-wide
    Raises  UnsupportedError: compiled for less than sm_90
    Cost    one reduction by each thread
    Source  PTX ISA multimem.red
    """
