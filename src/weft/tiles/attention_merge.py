"""Decode attention over keys that all ranks have parts of: send a tile's part to all, merge all.

Hooks of the decode template (attention_decode.py) and their kernel. A part is the mean of the
values and lse, the log of the sum of weights. Plan and signals are those of weft.ops.flash_decode.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import slots
from weft.tiles import attention, attention_decode, softmax


class Sent(NamedTuple):
    """Arguments of both hooks. `boxes`: the parts that each source sends, of `capacity` tiles;
    `number`: of the call, the flag of LL packets or the value that `ready` is set to."""

    boxes: Any
    ready: Any
    number: Any
    rank: Any
    capacity: Any
    shape: Any
    world: Any


@triton.jit
def _number(args, at, tile):
    """Which tile it is."""
    return at.i_m * (args.shape.q_heads // tile.pack) + at.i_n


@triton.jit
def _box(args, source, at, tile):
    """Pointers to a tile's means and to its lse's in the box of `source`, and which there are."""
    index = tl.cast(source, tl.int64) * args.capacity + _number(args, at, tile)
    row, column = tl.arange(0, tile.m), tl.arange(0, tile.d)
    first = args.boxes + index * (tile.m * (tile.d + 1))
    there = attention.is_row(at, args.shape, tile)
    mask = there[:, None] & (column < args.shape.d)[None, :]
    means = first + row[:, None] * tile.d + column[None, :]
    return means, mask, first + tile.m * tile.d + row, there


@triton.jit
def _words(args, at, tile):
    """The tile's signal words in `ready`, one for each rank."""
    return args.ready + _number(args, at, tile) * args.world.num_ranks


@triton.jit
def _send_packets(at, out, lse, tile, args):
    """args: Sent"""
    means, mask, logs, there = _box(args, args.rank, at, tile)
    for hop in range(1, args.world.num_ranks + 1):
        to = (args.rank + hop) % args.world.num_ranks
        # weft: equivalent-mutant peer+1 of at: every rank gets the same, in another order
        wl.put_packets(args.world, means, out, args.number, to=to, mask=mask)
        # weft: equivalent-mutant peer+1 of at: as above
        wl.put_packets(args.world, logs, lse, args.number, to=to, mask=there)


@triton.jit
def _push(at, out, lse, tile, args):
    """args: Sent"""
    means, mask, logs, there = _box(args, args.rank, at, tile)
    for hop in range(1, args.world.num_ranks + 1):
        to = (args.rank + hop) % args.world.num_ranks
        # weft: equivalent-mutant peer+1 of at: every rank gets the same, in another order
        wl.put(args.world, means, out, to=to, mask=mask)
        # weft: equivalent-mutant peer+1 of at: as above
        wl.put(args.world, logs, lse, to=to, mask=there)
    ready = _words(args, at, tile) + args.rank
    wl.notify_all(args.world, ready, args.number, op=wl.SignalOp.SET)


@triton.jit
def _merge(at, tile, by_packets: tl.constexpr, args):
    """Merge all ranks' parts of a tile, in the order of ranks. args: Sent"""
    if not by_packets:
        # One wait for all: the next round's loads could move above a wait inside the loop.
        ranks: tl.constexpr = args.world.num_ranks
        wl.wait(_words(args, at, tile), args.number, ranks, world=args.world)  # pairs with _push
    state = softmax.begin(tile.m, tile.d)
    for source in range(args.world.num_ranks):
        means, mask, logs, there = _box(args, source, at, tile)
        if by_packets:
            out = wl.wait_packets(means, args.number, world=args.world, mask=mask, dtype=tl.float32)
            lse = wl.wait_packets(logs, args.number, world=args.world, mask=there, dtype=tl.float32)
        else:
            out = tl.load(means, mask=mask, other=0.0)
            lse = tl.load(logs, mask=there, other=0.0)
        state = softmax.merge(state, out, lse)
    return softmax.finish(state)


@triton.jit
def flash_decode_kernel(q, cache, lengths, out, boxes, ready, partials, slot, shape, splits,
                        capacity, tile, world, by_packets: tl.constexpr):  # fmt: skip
    """boxes: of LL packets int64[2, num_ranks, capacity, rows * (d + 1)]; pushed, fp32 without the
    2"""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    rank = wl.rank(world).to(tl.int32)
    shape = attention_decode.without_constants(shape)
    capacity = tl.cast(capacity, tl.int32)
    e = slots.slot_epoch(slot)
    if by_packets:
        size = world.num_ranks * tl.cast(capacity, tl.int64) * (tile.m * (tile.d + 1))
        boxes, number = boxes + (e % 2) * size, e.to(tl.int32)
        ready = boxes  # unused by packets; a record cannot hold None
    else:
        slots.slot_wait_free(world, slot, e)
        number = e
    send: tl.constexpr = _send_packets if by_packets else _push
    # The record is written out twice: in a variable, the world's constants would become values.
    attention_decode.decode(
        q, cache, lengths, shape, splits, tile, partials, program, num_programs,
        send, Sent(boxes, ready, number, rank, capacity, shape, world),
    )  # fmt: skip
    for t in tl.range(program, attention_decode.tiles_of(shape, tile), num_programs, flatten=False):
        at = attention_decode.tile_at(t, shape, tile)
        mean, log = _merge(
            at, tile, by_packets, Sent(boxes, ready, number, rank, capacity, shape, world)
        )
        attention_decode.emit_store(at, mean, log, tile, attention_decode.Stored(out, shape))
    if by_packets:
        # weft: equivalent-mutant swap of atomic: this rank's own next call comes after the last one
        slots.slot_advance(slot, e, num_programs)
    else:
        slots.slot_finish(world, slot, e, num_programs)
