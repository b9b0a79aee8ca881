"""Routing on the device: which expert takes a token, and where the token stands among the expert's.

Tokens of all ranks, in their order, are sorted by expert, by counting: `slot`s are numbers in that
order. As experts are chosen for a block of tokens, it is counted how many go to each; then

    slot of (token, k)  =  tokens of all experts before this one
                         + tokens of this expert in all blocks before this token's
                         + tokens of this expert before this one in its block

which depends on nothing but the tokens: no slot is given out by arrival. Blocks are cut within
each rank's tokens, so an expert's slots are in the order of source ranks, and a tile of them needs
the tokens of a range of ranks.

    choose     a block of logits -> experts, weights, counts
    count      counts of all blocks -> of each source and expert; of what comes before a block
    place      a block of all tokens -> its slots
    cut        counts -> tiles of slots, each of one expert; in which turn they are multiplied

Each is called by a whole program. Data alone: the kernel says who waits for what.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Below the key of every number.
LOWEST = tl.constexpr(-(1 << 31))
# Blocks whose counts are added up at a time; tiles that are cut at a time.
BLOCKS = tl.constexpr(16)
TILES = tl.constexpr(32)


class Tokens(NamedTuple):
    """m tokens, `rows` to a rank, in `blocks` blocks; `experts` of them; the table of tiles has
    room for `tiles`."""

    m: Any
    rows: Any
    blocks: Any
    experts: Any
    tiles: Any


class Cut(NamedTuple):
    """Extents; a kernel takes it `as_constexpr`. `experts` and `sources` are powers of two that
    hold all of them, `width` is one that holds top_k; `block` tokens and `tile_m` slots together.
    """

    block: Any
    experts: Any
    sources: Any
    top_k: Any
    width: Any
    tile_m: Any
    renormalise: Any

    def as_constexpr(self) -> Cut:
        return Cut(*map(tl.constexpr, self))


class Chosen(NamedTuple):
    """[block, width] experts and weights of tokens; [experts] how many tokens each expert has."""

    ids: Any
    weights: Any
    counts: Any


class Counts(NamedTuple):
    """[sources, experts] tokens of each source; [experts] those in blocks before some block."""

    by_source: Any
    before: Any


class Records(NamedTuple):
    """Tiles: slots first .. end of an expert, which tokens of ranks lo .. hi have; `is_tile` says
    which there are. Of others all are 0."""

    expert: Any
    first: Any
    end: Any
    lo: Any
    hi: Any
    is_tile: Any


@triton.jit
def keys_of(value):
    """Integers in the order of fp32 numbers; NaN counts as -inf, and -0 as 0."""
    value = tl.where(value == value, value, float("-inf"))
    value = tl.where(value == 0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def choose(logits, row, own, tokens, cut):
    """The `Chosen` of rows `row` of `own`: the largest first, of equal ones the lowest first.

    Weights are the softmax over all experts; over those chosen where cut.renormalise.
    """
    expert = tl.arange(0, cut.experts)
    there = (row < own)[:, None] & (expert < tokens.experts)[None, :]
    pointers = logits + row.to(tl.int64)[:, None] * tokens.experts + expert[None, :]
    value = tl.load(pointers, mask=there, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    top = tl.max(value, axis=1)
    share = tl.exp(value - tl.where(top == float("-inf"), 0.0, top)[:, None])
    key = tl.where(there, keys_of(value), LOWEST)
    k = tl.arange(0, cut.width)
    ids = tl.zeros((cut.block, cut.width), tl.int32)
    weights = tl.zeros((cut.block, cut.width), tl.float32)
    taken = tl.zeros((cut.block, cut.experts), tl.int32)
    for turn in range(cut.top_k):
        best = key == tl.max(key, axis=1)[:, None]
        chosen = tl.min(tl.where(best, expert[None, :], cut.experts), axis=1)
        hit = expert[None, :] == chosen[:, None]
        weight = tl.sum(tl.where(hit, share, 0.0), axis=1)
        ids = tl.where(k[None, :] == turn, chosen[:, None], ids)
        weights = tl.where(k[None, :] == turn, weight[:, None], weights)
        taken += hit.to(tl.int32)
        key = tl.where(hit, LOWEST, key)
    total = tl.sum(tl.where(there, share, 0.0), axis=1)
    if cut.renormalise:
        total = tl.sum(weights, axis=1)
    weights = weights / tl.where(row < own, total, 1.0)[:, None]
    return Chosen(ids, weights, tl.sum(tl.where(there, taken, 0), axis=0))


@triton.jit
def count(counted, block, tokens, cut, num_ranks: tl.constexpr):
    """The `Counts` over all blocks, and before `block`. counted: int32[blocks of all, experts]"""
    expert = tl.arange(0, cut.experts)
    source = tl.arange(0, cut.sources)
    by_source = tl.zeros((cut.sources, cut.experts), tl.int32)
    before = tl.zeros((cut.experts,), tl.int32)
    for s in range(num_ranks):
        for at in range(0, tokens.blocks, BLOCKS):
            inside = at + tl.arange(0, BLOCKS)
            index = s * tokens.blocks + inside
            mask = (inside < tokens.blocks)[:, None] & (expert < tokens.experts)[None, :]
            pointers = counted + index[:, None] * tokens.experts + expert[None, :]
            some = tl.load(pointers, mask=mask, other=0)
            before += tl.sum(tl.where((index < block)[:, None], some, 0), axis=0)
            by_source += tl.where(source[:, None] == s, tl.sum(some, axis=0)[None, :], 0)
    return Counts(by_source, before)


@triton.jit
def store_counts(counts, by_source, tokens, cut, num_ranks: tl.constexpr):
    """counts[source, expert]  <-  by_source, without what is there for powers of two."""
    source, expert = tl.arange(0, cut.sources), tl.arange(0, cut.experts)
    mask = (source < num_ranks)[:, None] & (expert < tokens.experts)[None, :]
    tl.store(counts + source[:, None] * tokens.experts + expert[None, :], by_source, mask=mask)


@triton.jit
def place(ids, weights, block, begin, token_of, weight_of, slot_of, room, tokens, cut):
    """Store the slots of a block of all tokens, whose expert's next slot is begin[expert].

    ids, weights: [m, top_k], of all ranks. A choice below 0 is none: its slot is -1. Slots from
    `room` on are taken, but nothing is stored in them. Gives how many each expert has taken.
    """
    expert = tl.arange(0, cut.experts)
    source = block // tokens.blocks
    row = (block - source * tokens.blocks) * cut.block + tl.arange(0, cut.block)
    token = source * tokens.rows + row
    here = (row < tokens.rows) & (token < tokens.m)
    taken = tl.zeros((cut.block, cut.experts), tl.int32)
    for k in range(cut.top_k):
        chosen = tl.load(ids + token * cut.top_k + k, mask=here, other=-1)
        taken += (chosen[:, None] == expert[None, :]).to(tl.int32)
    slots = tl.cumsum(taken, axis=0) - taken + begin[None, :]
    for k in range(cut.top_k):
        chosen = tl.load(ids + token * cut.top_k + k, mask=here, other=-1)
        slot = tl.sum(tl.where(chosen[:, None] == expert[None, :], slots, 0), axis=1)
        weight = tl.load(weights + token * cut.top_k + k, mask=here, other=0.0)
        there = (chosen >= 0) & (slot < room)
        tl.store(token_of + slot, token, mask=there)
        tl.store(weight_of + slot, weight, mask=there)
        tl.store(slot_of + token * cut.top_k + k, tl.where(chosen < 0, -1, slot), mask=here)
    return tl.sum(taken, axis=0)


@triton.jit
def first_of(counts):
    """[experts] what comes before each of what there is so much of."""
    return tl.cumsum(counts, axis=0) - counts


@triton.jit
def _picked(values, is_chosen):
    """values[expert] of each tile, where is_chosen: [tiles, experts]."""
    return tl.sum(tl.where(is_chosen, values[None, :], 0), axis=1)


@triton.jit
def _records(i, by_source, cut, num_ranks: tl.constexpr):
    """The `Records` of tiles i, of a table that is sorted by slot."""
    expert = tl.arange(0, cut.experts)
    source = tl.arange(0, cut.sources)
    slots = tl.sum(by_source, axis=0)
    tiles = (slots + cut.tile_m - 1) // cut.tile_m
    is_tile = i < tl.sum(tiles, axis=0)
    first_tile = first_of(tiles)
    chosen = (first_tile[None, :] <= i[:, None]) & (i[:, None] < (first_tile + tiles)[None, :])
    inside = (i - _picked(first_tile, chosen)) * cut.tile_m
    begin = _picked(first_of(slots), chosen)
    last = tl.minimum(inside + cut.tile_m, _picked(slots, chosen)) - 1
    upto = tl.cumsum(by_source, axis=0)
    lo = tl.zeros_like(i)
    hi = tl.zeros_like(i)
    for s in range(num_ranks):
        done = _picked(tl.sum(tl.where(source[:, None] == s, upto, 0), axis=0), chosen)
        lo += (is_tile & (done <= inside)).to(tl.int32)
        hi += (is_tile & (done <= last)).to(tl.int32)
    return Records(
        _picked(expert, chosen), tl.where(is_tile, begin + inside, 0),
        tl.where(is_tile, begin + last + 1, 0), lo, hi, is_tile,
    )  # fmt: skip


@triton.jit
def latest(lo, hi, rank, num_ranks: tl.constexpr):
    """The hops over which the last of lo .. hi reaches `rank`, where all send to rank + 1 first."""
    behind = tl.maximum(lo, rank + 1)
    return tl.where(hi > rank, rank - behind + num_ranks, rank - lo)


@triton.jit
def cut_tiles(by_source, tiles, turns, num_tiles, rank, tokens, cut, num_ranks: tl.constexpr):
    """Fill the tables: int32[5, tokens.tiles] expert, first, end, lo, hi; and turns, the order in
    which this rank multiplies them: own tokens' first, then those that are complete next."""
    hops = tl.arange(0, cut.sources)
    by_hop = tl.zeros((cut.sources,), tl.int32)
    for at in range(0, tokens.tiles, TILES):
        i = at + tl.arange(0, TILES)
        one = _records(i, by_source, cut, num_ranks)
        here = i < tokens.tiles
        tl.store(tiles + i, one.expert, mask=here)
        tl.store(tiles + tokens.tiles + i, one.first, mask=here)
        tl.store(tiles + 2 * tokens.tiles + i, one.end, mask=here)
        tl.store(tiles + 3 * tokens.tiles + i, one.lo, mask=here)
        tl.store(tiles + 4 * tokens.tiles + i, one.hi, mask=here)
        hop = latest(one.lo, one.hi, rank, num_ranks)
        by_hop += tl.sum((one.is_tile[:, None] & (hop[:, None] == hops[None, :])).to(tl.int32), 0)
    tl.store(num_tiles, tl.sum(by_hop, axis=0))
    turn = first_of(by_hop)
    for at in range(0, tokens.tiles, TILES):
        i = at + tl.arange(0, TILES)
        one = _records(i, by_source, cut, num_ranks)
        hop = latest(one.lo, one.hi, rank, num_ranks)
        is_hop = (one.is_tile[:, None] & (hop[:, None] == hops[None, :])).to(tl.int32)
        places = tl.cumsum(is_hop, axis=0) - is_hop + turn[None, :]
        mine = tl.where(one.is_tile, tl.sum(places * is_hop, axis=1), i)
        tl.store(turns + mine, i, mask=i < tokens.tiles)
        turn += tl.sum(is_hop, axis=0)
