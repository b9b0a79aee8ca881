"""Attention over keys that other ranks send: hooks of the attention template, and their kernel.

Segments of keys, in a fixed order: own ones first, read in place; then those of rank - 1, - 2, ...
and, not causal, those of the last rank down to rank + 1; of each, chunk by chunk. A tile waits for
a chunk just before it reads it, and only if its queries see a key of it. Plan and signals are those
of weft.ops.ag_attention.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import mapping, slots
from weft.tiles import attention, move


class Shards(NamedTuple):
    """m tokens, `rows` to a rank, in `chunks` of chunk_rows; `columns` elements in a token's keys;
    `pushers`: communication CTAs. `sequences`, whose number + 1 has `steps` binary digits."""

    m: Any
    rows: Any
    chunks: Any
    chunk_rows: Any
    columns: Any
    pushers: Any
    sequences: Any
    steps: Any


class Arrival(NamedTuple):
    """Arguments of all hooks; values first, tuples last (Triton 3.6). lo, hi: int32 [num_ranks, own
    tokens], what queries see of the keys of rank, rank - 1, ..; read by `narrowed` alone"""

    k: Any
    v: Any
    k_gathered: Any
    v_gathered: Any
    rows_ready: Any
    lo: Any
    hi: Any
    e: Any
    rank: Any
    shards: Any
    world: Any


@triton.jit
def _sources(at, args):
    """How many ranks before this one have keys that a tile meets, and the last rank that has any.
    args: Arrival"""
    first = min(at.lo // args.shards.rows, args.rank)
    return args.rank - first, max((at.hi - 1) // args.shards.rows, args.rank)


@triton.jit
def segments_of(at, args):
    """Own keys, and the chunks of each rank that has any. args: Arrival"""
    before, last = _sources(at, args)
    count = 1 + (before + last - args.rank) * args.shards.chunks
    return count * min(max(at.hi - at.lo, 0), 1)


@triton.jit
def chunk_of(at, segment, args):
    """(source, chunk, first token, end) of a segment but the first: ranks before this one, the
    nearest first, then those behind it, the last first; of each, chunk by chunk. args: Arrival"""
    shards = args.shards
    before, last = _sources(at, args)
    hop = (segment - 1) // shards.chunks
    chunk = (segment - 1) % shards.chunks
    # Arithmetic, not branches: the same text serves integers and traced scalars.
    is_behind = min(max(hop - before + 1, 0), 1)
    source = (args.rank - 1 - hop) * (1 - is_behind) + (last - hop + before) * is_behind
    first = source * shards.rows + chunk * shards.chunk_rows
    end = min(first + shards.chunk_rows, (source + 1) * shards.rows, shards.m)
    return source, chunk, first, end


@triton.jit
def narrowed(at, bounds, segment, shape, tile, args):
    """Of the segment's rank, by what is listed: (rank - hop) mod ranks is the order in which chunks
    come where a tile meets keys of all ranks. args: Arrival"""
    hop = (segment + args.shards.chunks - 1) // args.shards.chunks
    seen = attention.Listed(args.lo + hop * shape.tokens, args.hi + hop * shape.tokens)
    here = attention.met(at, shape, tile, seen, False)
    return here, attention.visible(attention.tokens_of(at, shape, tile), seen, False)


@triton.jit
def ready(at, here, segment, args):
    """Own keys in place; others once their chunk has arrived. args: Arrival"""
    shards = args.shards
    source, chunk, row, end = chunk_of(at, segment, args)
    position = row
    k = args.k_gathered
    v = args.v_gathered
    if segment == 0:
        k = args.k
        v = args.v
        position = args.rank * shards.rows
        row = 0
        end = tl.minimum(shards.m - position, shards.rows)
    elif tl.maximum(row, here.lo) < tl.minimum(end, here.hi):
        # Pairs with push, or with the copy engine's signal words.
        wl.wait(args.rows_ready + source * shards.chunks + chunk, args.e, world=args.world)
    return attention.Segment(k, v, row, end, position)


@triton.jit
def push(world, k, v, k_gathered, v_gathered, rows_ready, e, rank, own, pusher, shards,
         causal: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """Store chunks pusher, pusher + pushers, ... of own keys and values in the slots of the ranks
    behind; announce each."""
    peers = world.num_ranks - 1
    if causal:
        peers -= rank
    first = (rank * shards.rows).to(tl.int64) * shards.columns
    for unit in range(pusher, peers * shards.chunks, shards.pushers):
        to = (rank + 1 + unit // shards.chunks) % world.num_ranks
        chunk = unit % shards.chunks
        begin = tl.minimum(chunk * shards.chunk_rows, own)
        rows = tl.minimum(begin + shards.chunk_rows, own) - begin
        size = rows.to(tl.int64) * shards.columns
        offset = begin.to(tl.int64) * shards.columns
        move.send(world, k_gathered + first + offset, k + offset, size, to, block)
        move.send(world, v_gathered + first + offset, v + offset, size, to, block)
        word = rows_ready + rank * shards.chunks + chunk
        wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def ag_attention_attend(q, k, v, out, lse, cu_seqlens, lo, hi, k_gathered, v_gathered, rows_ready,
                        slot, shape, shards, tile, world, by_engine: tl.constexpr,
                        causal: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """The attention template with the hooks above; before it, the pushers store own keys.

    lo, hi: None, or what queries see, which then is neither causal nor said by cu_seqlens.
    """
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    first, own_end = mapping.part_of(shards.m, rank, shards.rows)
    # Zigzag ranks may have one less than their place in the slot.
    own = tl.minimum(own_end - first, shape.tokens)
    if not by_engine:
        if program < shards.pushers:
            slots.slot_wait_free(world, slot, e)
            push(world, k, v, k_gathered, v_gathered, rows_ready, e, rank, own, program, shards,
                 causal, block)  # fmt: skip
    seen = attention.seen_by(cu_seqlens, shards.sequences, shards.steps, first, shards.m)
    is_listed: tl.constexpr = lo is not None
    narrow: tl.constexpr = narrowed if is_listed else attention.the_same
    # A record cannot hold None.
    of_lo, of_hi = lo if is_listed else rows_ready, hi if is_listed else rows_ready
    # Pushers come last in every round.
    attention.attention(
        q, out, lse, shape, tile, num_programs - 1 - program, num_programs, seen, causal,
        segments_of, ready,
        Arrival(
            k, v, k_gathered, v_gathered, rows_ready, of_lo, of_hi, e, rank, shards, world
        ),
        narrow,
    )  # fmt: skip
    if by_engine:
        if program == 0:
            # All signals, also those that no tile needed: one that came late would undo the next
            # call's. And an own one: `take` has read the epoch, which ends with this call.
            if causal:
                count = rank * shards.chunks + 1
            else:
                count = world.num_ranks * shards.chunks
            wl.wait(rows_ready, e, count, world=world)
    slots.slot_finish(world, slot, e, num_programs)
