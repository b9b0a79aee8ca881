"""Orders of tiles: pure integer functions that say which tile the i-th one is.

Each is a bijection of 0 .. num_m * num_n - 1 onto At(i_m, i_n) and a `@triton.jit` function whose
`.fn` is the same function on Python integers: kernels run the one, tests the other.

An order walks column by column inside groups of `group_m` rows of tiles, so that programs that
run together share tiles of both operands in L2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton


class At(NamedTuple):
    """A tile; records of orders may have more fields behind these two."""

    i_m: Any
    i_n: Any


@triton.jit
def grouped(i, num_m, num_n, args):
    """From the first row of tiles to the last. args: (group_m,)"""
    group_m = args[0]
    group = i // (group_m * num_n)
    inside = i - group * group_m * num_n
    height = min(num_m - group * group_m, group_m)
    return At(group * group_m + inside % height, inside // height)


@triton.jit
def rotated(i, num_m, num_n, args):
    """From row of tiles `first`, around to the one before it. args: (group_m, first, head)

    With `first_to_gather` this is the gather form: own tiles first, then those of the next rank,
    and so on, in the order in which they arrive. No group reaches over the first `head` rows of
    tiles, 1 to num_m: own rows in the gather form, which need not wait for others.
    """
    group_m = args[0]
    head = args[2]
    # Arithmetic, not branches: the same text serves integers and traced scalars.
    is_behind = min(i // (head * num_n), 1)
    begin = is_behind * head
    rows = head + is_behind * (num_m - 2 * head)
    group = (i - begin * num_n) // (group_m * num_n)
    inside = i - (begin + group * group_m) * num_n
    height = min(rows - group * group_m, group_m)
    i_m = (begin + group * group_m + inside % height + args[1]) % num_m
    return At(i_m, inside // height)


@triton.jit
def first_to_gather(first_row, end_row, tile_m, num_m):
    """The row of tiles to begin with where rows first_row .. end_row - 1 are there already.

    The first that begins among them; where none does, the one that holds them.
    """
    begins = (first_row + tile_m - 1) // tile_m
    holds = first_row // tile_m
    is_inside = min(max(end_row - begins * tile_m, 0), 1)
    return (begins * is_inside + holds * (1 - is_inside)) % num_m
