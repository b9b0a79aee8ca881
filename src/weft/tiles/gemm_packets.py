"""A product for small m that is summed over ranks in one launch: LL packets carry its tiles.

Each program multiplies its share (gemm_small.py); the one that completes a tile sends it:

    two_shot=False   to every rank, and each sums what all ranks have sent, in the order of ranks
    two_shot=True    tile t to rank t % num_ranks, which sums it likewise and sends the sum to all

Every rank gets the same bits: of the same sums, or of one.

Signals
    words[2, ..]   packets, flagged with the call's epoch, in two halves that calls use in turns.
                   Who ends a call has had packets of it from all whose memory it writes in the
                   next, and they sent them after they had ended the call before: so no credit
    come           local: counts the programs that share a tile       (gemm_small)
    epoch, ticket  the slot's
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.base.parts import full_part
from weft.language import slots
from weft.tiles import gemm, gemm_small, rows
from weft.tiles.mailboxes import PACKET_BYTES


class Sent(NamedTuple):
    """Arguments of the hooks: `words` is the call's half, `num_m` rows of `tiles` tiles."""

    out: Any
    words: Any
    flag: Any
    rank: Any
    m: Any
    n: Any
    num_m: Any
    tiles: Any
    world: Any


@triton.jit
def _packets(tile, itemsize: tl.constexpr):
    """Offsets of a tile's packets, [tile.m, tile.n values]."""
    columns: tl.constexpr = tile.n * itemsize // 4
    return tl.arange(0, tile.m)[:, None] * columns + tl.arange(0, columns)[None, :]


@triton.jit
def _there(at, tile, args, itemsize: tl.constexpr):
    """Which of a tile's packets hold anything."""
    per: tl.constexpr = 4 // itemsize
    row = at.i_m * tile.m + tl.arange(0, tile.m)
    column = at.i_n * tile.n + tl.arange(0, tile.n // per) * per
    return (row < args.m)[:, None] & (column < args.n)[None, :]


@triton.jit
def _box(args, index, tile, itemsize: tl.constexpr):
    """The packets of box `index`, each of a tile."""
    size: tl.constexpr = tile.m * tile.n * itemsize // 4
    return args.words + index.to(tl.int64) * size + _packets(tile, itemsize)


@triton.jit
def _number(at, args):
    """The place of a tile in gemm_small's order."""
    return at.i_n * args.num_m + at.i_m


@triton.jit
def _to_all(at, value, index, args):
    """A tile -> box `index` of every rank, this one too."""
    itemsize: tl.constexpr = args.out.dtype.element_ty.primitive_bitwidth // 8
    data = value.to(args.out.dtype.element_ty)
    mask = _there(at, rows.Tile(value.shape[0], value.shape[1]), args, itemsize)
    box = _box(args, index, rows.Tile(value.shape[0], value.shape[1]), itemsize)
    for hop in range(1, args.world.num_ranks + 1):
        to = (args.rank + hop) % args.world.num_ranks
        # weft: equivalent-mutant peer+1 of at: every rank gets the same, in another order
        wl.put_packets(args.world, box, data, args.flag, to=to, mask=mask)


@triton.jit
def _send_to_all(at, cells, value, args):
    """args: Sent"""
    tile_index = args.rank * args.tiles + _number(at, args)
    _to_all(at, value, tile_index, args)


@triton.jit
def _send_to_owner(at, cells, value, args):
    """args: Sent"""
    itemsize: tl.constexpr = args.out.dtype.element_ty.primitive_bitwidth // 8
    t, ranks = _number(at, args), args.world.num_ranks
    index = args.rank * tl.cdiv(args.tiles, ranks) + t // ranks
    mask = _there(at, rows.Tile(value.shape[0], value.shape[1]), args, itemsize)
    box = _box(args, index, rows.Tile(value.shape[0], value.shape[1]), itemsize)
    data = value.to(args.out.dtype.element_ty)
    wl.put_packets(args.world, box, data, args.flag, to=t % ranks, mask=mask)


@triton.jit
def _receive(at, tile, index, args):
    """The tile in box `index`, when it has come, in fp32."""
    itemsize: tl.constexpr = args.out.dtype.element_ty.primitive_bitwidth // 8
    mask, box = _there(at, tile, args, itemsize), _box(args, index, tile, itemsize)
    value = wl.wait_packets(
        box, args.flag, world=args.world, mask=mask, dtype=args.out.dtype.element_ty
    )
    return value.to(tl.float32)


@triton.jit
def _sum(at, tile, index, pitch, args):
    """What all ranks have sent of a tile, in the order of ranks; boxes are `pitch` apart."""
    total = _receive(at, tile, index, args)
    for source in range(1, args.world.num_ranks):
        total += _receive(at, tile, index + source * pitch, args)
    return total


@triton.jit
def _store(at, value, tile, args):
    row = at.i_m * tile.m + tl.arange(0, tile.m)
    column = at.i_n * tile.n + tl.arange(0, tile.n)
    mask = (row < args.m)[:, None] & (column < args.n)[None, :]
    pointers = args.out + row.to(tl.int64)[:, None] * args.n + column[None, :]
    tl.store(pointers, value.to(args.out.dtype.element_ty), mask=mask)


@triton.jit
def _take_one_shot(program, num_programs, tile, args):
    """args: Sent"""
    for t in range(program, args.tiles, num_programs):
        at = gemm_small.tile_at(t, args.num_m)
        _store(at, _sum(at, tile, t, args.tiles, args), tile, args)


@triton.jit
def _take_two_shot(program, num_programs, tile, args):
    """args: Sent"""
    ranks = args.world.num_ranks
    most = tl.cdiv(args.tiles, ranks)
    for i in range(program, most, num_programs):
        if i * ranks + args.rank < args.tiles:
            t = i * ranks + args.rank
            at = gemm_small.tile_at(t, args.num_m)
            _to_all(at, _sum(at, tile, i, most, args), ranks * most + t, args)
    for t in range(program, args.tiles, num_programs):
        at = gemm_small.tile_at(t, args.num_m)
        _store(at, _receive(at, tile, ranks * most + t, args), tile, args)


@triton.jit
def gemm_packets(a, b, out, words, sums, come, slot, shape, half, tile, world,
                two_shot: tl.constexpr, end: tl.constexpr):  # fmt: skip
    """words: int64[2 * half]. end: what the last program does to the slot, advance or finish it;
    "" where another kernel of the call comes behind this one"""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    flag, mine = e.to(tl.int32), words + (e % 2) * half
    m, n = tl.cast(shape.m, tl.int32), tl.cast(shape.n, tl.int32)
    num_m = tl.cdiv(m, tile.m)
    tiles = num_m * tl.cdiv(n, tile.n)
    send: tl.constexpr = _send_to_owner if two_shot else _send_to_all
    # Written out each time: a variable would make numbers of the world's constants.
    gemm_small.gemm_small(
        b, shape, tile, gemm_small.Partials(sums, come), program, num_programs,
        gemm.ready_always, gemm.Always(a, m),
        send, Sent(out, mine, flag, rank, m, n, num_m, tiles, world),
    )  # fmt: skip
    take: tl.constexpr = _take_two_shot if two_shot else _take_one_shot
    take(program, num_programs, tile, Sent(out, mine, flag, rank, m, n, num_m, tiles, world))
    if end == "finish":
        slots.slot_finish(world, slot, e, num_programs)
    elif end == "advance":
        # weft: equivalent-mutant swap of atomic: behind the last comes this rank's own next call
        slots.slot_advance(slot, e, num_programs)


def num_boxes(tiles: int, num_ranks: int, two_shot: bool) -> int:
    """Tiles that one half of `words` holds."""
    return num_ranks * full_part(tiles, num_ranks) + tiles if two_shot else num_ranks * tiles


def packets_of(tile_m: int, tile_n: int, itemsize: int) -> int:
    """Packets of a tile."""
    return tile_m * tile_n * itemsize // PACKET_BYTES.value
