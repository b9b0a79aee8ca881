"""all_reduce_rms_norm for few rows, in one launch: packets carry rows of x, and of the total.

Not an operator: a part of all_reduce_rms_norm.py, which see.

Plan
    one_shot    every row of x -> every other rank; each sums all rows, in the order of ranks
    two_shot    row r of x -> rank r % num_ranks, which sums it likewise and sends the sum to all
    then        total and its norm -> the results, row by row

Signals
    words[2, ..]   packets, flagged with the call's epoch, in two halves that calls use in turns.
                   Every row is summed from all ranks' shares: who has ended a call knows that all
                   ranks have begun it, and so have ended the one before. No credit
    epoch, ticket  the slot's
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import slots
from weft.tiles import rows


class Rows(NamedTuple):
    """Extents of x, and of boxes: `capacity` rows in each."""

    m: Any
    n: Any
    capacity: Any


class Boxes(NamedTuple):
    """Where packets of a call go, and what they carry beside data."""

    words: Any
    flag: Any
    rank: Any
    n: Any
    capacity: Any
    world: Any


@triton.jit
def _packets(index, row, args, tile, per: tl.constexpr):
    """The packets of a row in box `index`, and which there are; each of `per` elements."""
    c = tl.arange(0, tile.n // per)
    first = (tl.cast(index, tl.int64) * args.capacity + row) * (tile.n // per)
    return args.words + first + c, c * per < args.n


@triton.jit
def _send(value, index, row, to, args, tile, dtype: tl.constexpr):
    """A row -> box `index` of rank `to`. args: Boxes"""
    there, mask = _packets(index, row, args, tile, 32 // dtype.primitive_bitwidth)
    wl.put_packets(args.world, there, value.to(dtype), args.flag, to=to, mask=mask)


@triton.jit
def _send_to_others(value, index, row, args, tile, dtype: tl.constexpr):
    for hop in range(1, args.world.num_ranks):
        _send(value, index, row, (args.rank + hop) % args.world.num_ranks, args, tile, dtype)


@triton.jit
def _receive(index, row, args, tile, dtype: tl.constexpr):
    """A row in box `index`, when it has come, in fp32. args: Boxes"""
    there, mask = _packets(index, row, args, tile, 32 // dtype.primitive_bitwidth)
    value = wl.wait_packets(there, args.flag, world=args.world, mask=mask, dtype=dtype)
    return value.to(tl.float32)


@triton.jit
def _load(source, row, n, tile):
    j = tl.arange(0, tile.n)
    return tl.load(source + tl.cast(row, tl.int64) * n + j, mask=j < n, other=0.0).to(tl.float32)


@triton.jit
def _sum(x, residual, row, args, tile):
    """The total of a row: all ranks' shares in the order of ranks, then the residual; rounded."""
    dtype: tl.constexpr = x.dtype.element_ty
    # Loaded first, so that nothing but packets is waited for.
    own, more = _load(x, row, args.n, tile), _load(residual, row, args.n, tile)
    total = tl.zeros((tile.n,), tl.float32)
    for peer in range(args.world.num_ranks):
        if peer == args.rank:
            total += own
        else:
            total += _receive(peer, row, args, tile, dtype)
    return rows.rounded(total + more, x)


@triton.jit
def _store(normed, total, weight, value, row, n, eps, tile):
    """What becomes of a row of the total on every rank."""
    j = tl.arange(0, tile.n)
    there = tl.cast(row, tl.int64) * n + j
    tl.store(total + there, value.to(total.dtype.element_ty), mask=j < n)
    norm = rows.rms_norm(value[None, :], weight, eps, n).reshape(tile.n)
    tl.store(normed + there, norm.to(normed.dtype.element_ty), mask=j < n)


@triton.jit
def all_reduce_rms_norm_packets(x, residual, weight, normed, total, eps, words, slot, shape, tile,
                                world, two_shot: tl.constexpr):  # fmt: skip
    """words: int64[2, num_ranks + 1, capacity, packets of a row]: a box for each source of shares,
    then one for totals"""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    dtype: tl.constexpr = x.dtype.element_ty
    per: tl.constexpr = 32 // dtype.primitive_bitwidth
    m, n, capacity = shape.m, shape.n, tl.cast(shape.capacity, tl.int64)
    half = (world.num_ranks + 1) * capacity * (tile.n // per)
    flag, mine = e.to(tl.int32), words + (e % 2) * half
    for row in range(program, m, num_programs):
        share = _load(x, row, n, tile)
        if two_shot:
            owner = row % world.num_ranks
            if owner != rank:
                _send(share, rank, row, owner, Boxes(mine, flag, rank, n, capacity, world), tile,
                      dtype)  # fmt: skip
        else:
            _send_to_others(share, rank, row, Boxes(mine, flag, rank, n, capacity, world), tile,
                            dtype)  # fmt: skip
    for row in range(program, m, num_programs):
        if (not two_shot) or row % world.num_ranks == rank:
            value = _sum(x, residual, row, Boxes(mine, flag, rank, n, capacity, world), tile)
            if two_shot:
                _send_to_others(value, world.num_ranks, row,
                                Boxes(mine, flag, rank, n, capacity, world), tile,
                                dtype)  # fmt: skip
            _store(normed, total, weight, value, row, n, eps, tile)
    if two_shot:
        for row in range(program, m, num_programs):
            if row % world.num_ranks != rank:
                value = _receive(world.num_ranks, row,
                                 Boxes(mine, flag, rank, n, capacity, world), tile,
                                 dtype)  # fmt: skip
                _store(normed, total, weight, value, row, n, eps, tile)
    # weft: equivalent-mutant swap of atomic: behind the last one comes this rank's own next call
    slots.slot_advance(slot, e, num_programs)
