"""The template for few whole rows: every rank sums all of them, and packets bring the shares.

    for i in this program's share of the tiles of rows:
        at    = order(i, ...)             which tile is next: an Owned, of one part for all rows
        value = ready(at, ...)            where this rank's share of it lies; loaded, in fp32
        emit(at, ...)                     -> every other rank: `send`
    for i in the same share:
        value = combine(at, ...)          with the other ranks' shares: `add_shares`
        result(at, value, ...)            what becomes of the rows, here as on every rank

All is sent before anything is waited for. Nothing is announced: a packet says itself that it has
come, by the call's epoch, which is its flag. What `combine` reads beside packets it loads first.

For more rows the template is weft.tiles.rows, with hooks from here: `push` a share to who owns the
rows, which then has `add_shares`, and `send`s the sums, which the others `take`.

Packets lie in boxes, words[row, source, half, packet], which hold packets alone, ever; rows are
those of an owner's part, where there are owners. A box has one writer, however many rows calls
have. Calls use the halves in turns. Every row is summed from all ranks' shares: who has ended a
call knows that all ranks have begun it, and so have ended the one before. So there is no credit.

A tile is tile.m whole rows, in columns up to the power of two `tile.n`, of 16 or 32 bits each.

Source  `one_shot` and `two_shot` of weft.ops.all_reduce_rms_norm; NCCL's LL protocol
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import fragments, rows
from weft.tiles.hooks import partition


class Boxes(NamedTuple):
    """Where packets lie, and which call's they are."""

    words: Any
    e: Any
    rank: Any
    parts: Any
    world: Any


@triton.jit
def every_row(
    parts,
    tile,
    first,
    step,
    order: tl.constexpr,
    order_args,
    ready: tl.constexpr,
    ready_args,
    emit: tl.constexpr,
    emit_args,
    combine: tl.constexpr,
    combine_args,
    result: tl.constexpr,
    result_args,
):
    """Work on tiles first, first + step, ... of the order; call it from a kernel. parts:
    partition.Parts of one part that has all rows, with num_n = 1

    Sync    what the hooks do; programs wait for those of their number on other ranks, so all of
            them must be resident
    """
    for i in tl.range(first, parts.tiles_m, step, flatten=False):
        at = order(i, parts.tiles_m, 1, order_args)
        value = rows.share(at, tile, parts, ready, ready_args)
        emit(at, fragments.Cells(at.row, 0, 0, True), value, tile, emit_args)
    for i in tl.range(first, parts.tiles_m, step, flatten=False):
        at = order(i, parts.tiles_m, 1, order_args)
        value = rows.share(at, tile, parts, ready, ready_args)
        value = combine(at, fragments.Cells(at.row, 0, 0, True), value, tile, combine_args)
        result(at, value, tile, result_args)


@triton.jit
def in_rows(i, num_m, num_n, parts):
    """The order from the first row to the last. A tile is of the one part that there is."""
    return partition.Owned(i, 0, 0, i * parts.tile_m, parts.m)


@triton.jit
def _packets(source, at, tile, args, per: tl.constexpr):
    """The packets of a tile from `source`, and which there are; each of `per` elements."""
    width: tl.constexpr = tile.n // per
    row = at.row + tl.arange(0, tile.m)
    c = tl.arange(0, width)
    box = (row.to(tl.int64) * args.world.num_ranks + source) * 2 + args.e % 2
    mask = (row < at.end)[:, None] & (c * per < args.parts.n)[None, :]
    return args.words + box[:, None] * width + c[None, :], mask


@triton.jit
def send(at, value, tile, dtype: tl.constexpr, args):
    """What this rank has of a tile, which is of dtype -> every other rank. args: Boxes"""
    there, mask = _packets(args.rank, at, tile, args, 32 // dtype.primitive_bitwidth)
    flag = args.e.to(tl.int32)
    for hop in range(1, args.world.num_ranks):
        to = (args.rank + hop) % args.world.num_ranks
        wl.put_packets(args.world, there, value.to(dtype), flag, to=to, mask=mask)


@triton.jit
def push(at, value, tile, dtype: tl.constexpr, args):
    """This rank's share of a tile -> who owns its rows. args: Boxes"""
    there, mask = _packets(args.rank, at, tile, args, 32 // dtype.primitive_bitwidth)
    flag = args.e.to(tl.int32)
    wl.put_packets(args.world, there, value.to(dtype), flag, to=at.owner, mask=mask)


@triton.jit
def take(source, at, tile, dtype: tl.constexpr, args):
    """What `source` has sent of a tile, in fp32. args: Boxes

    Sync    waits for its packets
    """
    there, mask = _packets(source, at, tile, args, 32 // dtype.primitive_bitwidth)
    flag = args.e.to(tl.int32)
    return wl.wait_packets(there, flag, world=args.world, mask=mask, dtype=dtype).to(tl.float32)


@triton.jit
def add_shares(at, value, tile, dtype: tl.constexpr, args):
    """All ranks' shares of a tile in the order of ranks, in fp32; value is this one's. args: Boxes

    Sync    waits for the packets of each other rank
    """
    total = tl.zeros((tile.m, tile.n), tl.float32)
    for source in range(args.world.num_ranks):
        if source == args.rank:
            total += value
        else:
            total += take(source, at, tile, dtype, args)
    return total
