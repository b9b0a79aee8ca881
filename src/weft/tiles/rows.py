"""The template for whole rows: they are summed over ranks and worked on, with hooks around.

    for i in this program's share of the tiles of rows:
        at    = order(i, ...)             which tile is next: an Owned
        value = ready(at, ...)            where this rank's share of the rows lies; loaded, or added
                                          up from a token's choices, in fp32
        value = combine(at, ...)          of own rows: with the other ranks' shares
        emit(at, ...)                     another rank's rows -> their owner; own ones -> all ranks
        announce(at, ...)                 who is told of it
        result(at, value, ...)            of own rows: what becomes of them here
    for i in the same share, tiles of other ranks' rows alone:
        value = collect(at, ...)          when their owner has sent them
        result(at, value, ...)

Hooks are as those of weft.tiles.gemm, with the tile's extents beside its cells. What comes before
`emit` is done once for all ranks, where the rows are summed; `result` is done by every rank, on the
same bits: `combine` ends with `rounded`, to what is sent. So of several results that follow from
each other one travels. Where sums are scattered nothing is collected, and `result` is the owner's
alone. It is behind `announce`: a release of rows waits for all stores before it.

A tile is tile.m whole rows, in columns up to the power of two `tile.n`; of any number.

Source  docs/decisions/009-hooks.md
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import slots
from weft.tiles import activations, composition, fragments
from weft.tiles.hooks import partition, table

# A row is in registers at once: of so many threads at most.
MOST_COLUMNS = 1 << 15


class Tile(NamedTuple):
    """Rows of a tile, and the power of two that their columns fit in; `as_constexpr` in kernels."""

    m: Any
    n: Any

    def as_constexpr(self) -> Tile:
        return Tile(*map(tl.constexpr, self))


@triton.jit
def rows(hooks: tl.constexpr, arrays, slot, mapping, tile, world):
    """The kernel. mapping: partition.Parts with num_n = 1

    Sync    what the hooks do; programs wait for those of their number on other ranks, so all of
            them must be resident
    """
    _rows(
        composition.Launch(
            wl.rank(world).to(tl.int32), slots.slot_epoch(slot), tl.program_id(0),
            tl.num_programs(0), None, None, arrays, None, None, mapping, slot, world, 0,
        ), tile, hooks,
    )  # fmt: skip


@triton.jit
def _rows(given, tile, composed: tl.constexpr):
    hooks: tl.constexpr = composed.within(given)
    launch = composition.leaves(given)
    parts = given.mapping
    hooks.begin(launch)
    num_m = parts.tiles_m * given.world.num_ranks
    order_args = hooks.arrange(num_m, tile.m, launch)
    for i in tl.range(given.program, num_m, given.num_programs, flatten=False):
        at = hooks.order(i, num_m, 1, order_args)
        value = share(at, tile, parts, launch, hooks)
        row = at.i_m * tile.m
        value = hooks.combine(at, fragments.Cells(row, 0, 0, True), value, tile, launch)
        hooks.emit(at, fragments.Cells(row, 0, 0, True), value, tile, launch)
        if hooks.announce is not None:
            hooks.announce(at, 0, launch)
        if at.owner == given.rank:
            hooks.result(at, value, tile, launch)
    if hooks.collect is not None:
        for i in tl.range(given.program, num_m, given.num_programs, flatten=False):
            at = hooks.order(i, num_m, 1, order_args)
            if at.owner != given.rank:
                hooks.result(at, hooks.collect(at, tile, launch), tile, launch)
    hooks.end(launch)


# ---------------------------------------------------------------------------------------------
# What is done to a tile's rows


@triton.jit
def _cells(at, tile, parts):
    """Offsets of a tile's elements from its first row's begin, and which there are."""
    i, j = tl.arange(0, tile.m), tl.arange(0, tile.n)
    mask = (i < at.end - at.row)[:, None] & (j < parts.n)[None, :]
    return i.to(tl.int64)[:, None] * parts.n + j[None, :], mask


@triton.jit
def share(at, tile, parts, launch, hooks: tl.constexpr):
    """This rank's share of a tile's rows, where the hook `ready` says, in fp32."""
    rows_of = hooks.ready(at, 0, tile, launch)
    if table.is_chosen(rows_of):
        value = table.add_choices(rows_of, parts.n, at.end - at.row, tile.m, tile.n)
    else:
        offset, mask = _cells(at, tile, parts)
        offset += rows_of.first.to(tl.int64) * parts.n
        value = tl.load(rows_of.source + offset, mask=mask, other=0.0).to(tl.float32)
    return value


@triton.jit
def load(source, parts, at, tile):
    """A tile's rows of `source`, which has all rows of all ranks, in fp32."""
    offset, mask = _cells(at, tile, parts)
    there = source + partition.place_of(at.owner, at, parts) + offset
    return tl.load(there, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store(target, parts, at, value, tile):
    """A tile's rows -> their place among all rows, rounded."""
    offset, mask = _cells(at, tile, parts)
    there = target + partition.place_of(at.owner, at, parts) + offset
    tl.store(there, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def store_own(target, parts, at, value, tile):
    """An own tile's rows -> their place among this rank's, rounded."""
    offset, mask = _cells(at, tile, parts)
    there = target + at.row.to(tl.int64) * parts.n + offset
    tl.store(there, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def add(source, parts, at, value, tile):
    return value + load(source, parts, at, tile)


@triton.jit
def mul(source, parts, at, value, tile):
    return value * load(source, parts, at, tile)


@triton.jit
def _row(source, value, n):
    """One row of n columns, for all rows of a tile, in fp32."""
    j = tl.arange(0, value.shape[1])
    return tl.load(source + j, mask=j < n, other=0.0).to(tl.float32)[None, :]


@triton.jit
def add_row(source, parts, value):
    return value + _row(source, value, parts.n)


@triton.jit
def mul_row(source, parts, value):
    return value * _row(source, value, parts.n)


@triton.jit
def add_loaded(value, loaded):
    return value + loaded


@triton.jit
def mul_loaded(value, loaded):
    return value * loaded


@triton.jit
def silu(value):
    return activations.silu(value)


@triton.jit
def gelu(value):
    return activations.gelu(value)


@triton.jit
def gelu_tanh(value):
    return activations.gelu_tanh(value)


@triton.jit
def rounded(value, like):
    """As `value` is once it has been stored where `like` points, in fp32."""
    return value.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def rms_norm(value, weight, eps, n):
    """value / sqrt(mean of value^2 over a row + eps) * weight, in fp32. value: [tile.m, tile.n],
    0 outside of the n columns that there are"""
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / n + eps)
    return value * scale[:, None] * _row(weight, value, n)
