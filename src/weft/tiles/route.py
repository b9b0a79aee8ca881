"""Routing on the device: which expert takes a token, and where the token stands among the expert's.

Tokens of all ranks, in their order, are sorted by expert, by counting: `slot`s are numbers in that
order. As experts are chosen for a block of tokens, it is counted how many go to each; then

    slot of (token, k)  =  tokens of all experts before this one
                         + tokens of this expert in all blocks before this token's
                         + tokens of this expert before this one in its block

which depends on nothing but the tokens: no slot is given out by arrival. Blocks are cut within
each rank's tokens, so an expert's slots are in the order of source ranks, and a tile of them needs
the tokens of a range of ranks.

    choose     some logits -> experts, weights, counts
    count      counts of all blocks -> of each source and expert; of what comes before a block
    place      a block of all tokens -> its slots
    cut        counts -> tiles of slots, each of one expert; in which turn they are multiplied

A block is what a program takes: as many as there are programs, so that there are few counts to add
up. Each is called by a whole program. Data alone: the kernel says who waits for what. Scans are of
whole vectors alone: of a tile, along an axis with fewer elements than warps, Triton 3.6 fails to
compile them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Below the key of every number.
LOWEST = tl.constexpr(-(1 << 31))
TAKEN = tl.constexpr(-(1 << 63))
# Counts that are added up at a time; tiles that are cut at a time; blocks looked at for errors.
COUNTS = tl.constexpr(8192)
TILES = tl.constexpr(256)
BLOCKS = tl.constexpr(16)


def most_tiles(slots: int, experts: int, tile_m: int) -> int:
    """Tiles of up to `tile_m` slots, however these are split: an expert has one ragged tile."""
    return max(1, min(slots, (slots + experts * (tile_m - 1)) // tile_m))


class Tokens(NamedTuple):
    """m tokens, `rows` to a rank, in `blocks` blocks of `length`; `experts` of them; the table of
    tiles has room for `tiles`. `apart`: how many experts a rank's first one is behind that of the
    rank before; 0 where tables are of all."""

    m: Any
    rows: Any
    blocks: Any
    length: Any
    experts: Any
    tiles: Any
    apart: Any = 0


class RouteBlocking(NamedTuple):
    """Extents; a kernel takes it `as_constexpr`. `experts` and `sources` are powers of two that
    hold all of them, `width` is one that holds top_k; `block` tokens, of which a block has some
    times as many, and `tile_m` slots together. What else a router has: compiler.experts.Scoring.
    """

    block: Any
    experts: Any
    sources: Any
    top_k: Any
    width: Any
    tile_m: Any
    score: Any = None
    renormalise: Any = None
    groups: Any = None
    top_groups: Any = None
    group_best: Any = None
    scale: Any = None

    def as_constexpr(self) -> RouteBlocking:
        return RouteBlocking(*map(tl.constexpr, self))


class Chosen(NamedTuple):
    """[block, width] experts and weights of tokens; [experts] how many of them each expert has."""

    ids: Any
    weights: Any
    counts: Any


class Counts(NamedTuple):
    """[sources, experts] tokens of each source; [experts] those in blocks before some block."""

    by_source: Any
    before: Any


class Records(NamedTuple):
    """Tiles: slots first .. end of an expert, which tokens of ranks lo .. hi have."""

    expert: Any
    first: Any
    end: Any
    lo: Any
    hi: Any


@triton.jit
def keys_of(value):
    """Integers in the order of fp32 numbers; NaN counts as -inf, and -0 as 0."""
    value = tl.where(value == value, value, float("-inf"))
    value = tl.where(value == 0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _values_of(keys):
    """The numbers of such keys."""
    bits = tl.where(keys < 0, keys ^ 0x7FFFFFFF, keys)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def choose(logits, bias, row, own, tokens, cut):
    """The `Chosen` of rows `row` of `own`: the largest first, of equal ones the lowest first."""
    expert = tl.arange(0, cut.experts)
    there = (row < own)[:, None] & (expert < tokens.experts)[None, :]
    pointers = logits + row.to(tl.int64)[:, None] * tokens.experts + expert[None, :]
    value = tl.load(pointers, mask=there, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))
    # Chosen by logits where scores are in their order: of softmax many are 0.
    by_score: tl.constexpr = bias is not None or cut.groups > 1
    score, rating = value, value
    if by_score or cut.score == "sigmoid":
        score = scores_of(value, there, cut)
    if by_score:
        rating = score
    if bias is not None:
        rating += tl.load(bias + expert, mask=expert < tokens.experts, other=0.0)[None, :]
    may = there
    if cut.groups > 1:
        may = there & in_top_groups(rating, there, tokens.experts // cut.groups, cut)
    # One number of both, so that one maximum finds which and how much; taken ones go below all.
    key = tl.where(may, keys_of(rating), LOWEST).to(tl.int64)
    rest = (key << 32) | (cut.experts - 1 - expert)[None, :].to(tl.int64)
    k = tl.arange(0, cut.width)
    ids = tl.zeros((cut.block, cut.width), tl.int32)
    weights = tl.zeros((cut.block, cut.width), tl.float32)
    top = tl.zeros((cut.block,), tl.float32)
    for turn in range(cut.top_k):
        best = tl.max(rest, axis=1)
        chosen = cut.experts - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        if by_score or cut.score == "sigmoid":
            weight = tl.sum(tl.where(rest == best[:, None], score, 0.0), axis=1)
        else:
            amount = _values_of((best >> 32).to(tl.int32))
            top = tl.where(turn == 0, tl.where(amount == float("-inf"), 0.0, amount), top)
            weight = tl.exp(amount - top)
        is_turn = k[None, :] == turn
        ids = tl.where(is_turn, chosen[:, None], ids)
        weights = tl.where(is_turn, weight[:, None], weights)
        rest = tl.where(rest == best[:, None], TAKEN, rest)
    if cut.renormalise:
        weights = weights / tl.where(row < own, tl.sum(weights, axis=1), 1.0)[:, None]
    elif not by_score and cut.score == "softmax":
        total = tl.sum(tl.where(there, tl.exp(value - top[:, None]), 0.0), axis=1)
        weights = weights / tl.where(row < own, total, 1.0)[:, None]
    if cut.scale != 1.0:
        weights *= cut.scale
    return Chosen(ids, weights, tl.sum((may & (rest == TAKEN)).to(tl.int32), axis=0))


@triton.jit
def scores_of(value, there, cut):
    """Of logits, none of which is NaN; 0 where there are none."""
    if cut.score == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-value))
    else:
        top = tl.max(value, axis=1)
        score = tl.exp(value - tl.where(top == float("-inf"), 0.0, top)[:, None])
        total = tl.sum(score, axis=1)
        score = score / tl.where(tl.sum(there.to(tl.int32), axis=1) > 0, total, 1.0)[:, None]
    return tl.where(there, score, 0.0)


@triton.jit
def in_top_groups(rating, there, size, cut):
    """[block, experts] is an expert in one of its token's best groups of `size` neighbours?"""
    group = tl.arange(0, cut.experts) // size
    # Of groups, as of experts: the largest first, of equal ones the lowest.
    best = tl.zeros((cut.block,), tl.int64)
    is_in = there & (group < 0)[None, :]
    others = tl.zeros((cut.block, cut.experts), tl.int64) + TAKEN
    for g in range(cut.groups):
        inside = there & (group == g)[None, :]
        found = _sum_of_best(rating, inside, cut)
        key = (keys_of(found).to(tl.int64) << 32) | (cut.experts - 1 - g)
        others = tl.where((tl.arange(0, cut.experts) == g)[None, :], key[:, None], others)
    for _ in range(cut.top_groups):
        best = tl.max(others, axis=1)
        taken = cut.experts - 1 - (best & 0x7FFFFFFF).to(tl.int32)
        is_in = is_in | (group[None, :] == taken[:, None])
        others = tl.where(others == best[:, None], TAKEN, others)
    return is_in


@triton.jit
def _sum_of_best(rating, inside, cut):
    """[block] the sum of the `group_best` largest ratings inside, added from the largest on."""
    at = tl.arange(0, cut.experts)[None, :]
    rest = tl.where(inside, rating, float("-inf"))
    total = tl.zeros((cut.block,), tl.float32)
    for _ in range(cut.group_best):
        most = tl.max(rest, axis=1)
        total += most
        which = tl.min(tl.where(inside & (rest == most[:, None]), at, cut.experts), axis=1)
        rest = tl.where(at == which[:, None], float("-inf"), rest)
    return total


@triton.jit
def count(counted, first, block, tokens, cut, num_ranks: tl.constexpr):
    """The `Counts` of experts from `first` on, over all blocks, and before `block`. counted:
    int32[blocks of all, experts]"""
    some: tl.constexpr = max(1, min(64, COUNTS // cut.experts))
    expert = tl.arange(0, cut.experts)
    source = tl.arange(0, cut.sources)
    by_source = tl.zeros((cut.sources, cut.experts), tl.int32)
    before = tl.zeros((some, cut.experts), tl.int32)
    for s in range(num_ranks):
        of_source = tl.zeros((some, cut.experts), tl.int32)
        for at in range(0, tokens.blocks, some):
            inside = at + tl.arange(0, some)
            index = s * tokens.blocks + inside
            column = first + expert
            mask = (inside < tokens.blocks)[:, None] & (column < tokens.experts)[None, :]
            pointers = counted + index[:, None] * tokens.experts + column[None, :]
            counts = tl.load(pointers, mask=mask, other=0)
            before += tl.where((index < block)[:, None], counts, 0)
            of_source += counts
        by_source += tl.where(source[:, None] == s, tl.sum(of_source, axis=0)[None, :], 0)
    return Counts(by_source, tl.sum(before, axis=0))


@triton.jit
def store_counts(counts, by_source, experts, cut, num_ranks: tl.constexpr):
    """counts[source, expert]  <-  by_source, without what is there for powers of two."""
    source, expert = tl.arange(0, cut.sources), tl.arange(0, cut.experts)
    mask = (source < num_ranks)[:, None] & (expert < experts)[None, :]
    tl.store(counts + source[:, None] * experts + expert[None, :], by_source, mask=mask)


@triton.jit
def place(ids, weights, block, begin, token_of, weight_of, slot_of, room, own_first, own, tokens,
          cut):  # fmt: skip
    """Store the slots of a block of all tokens, whose expert's next slot is begin[expert].

    ids, weights: [m, top_k], of all ranks; a token's choices differ. A choice that is none of the
    `own` experts from own_first on has the slot -1. Slots from `room` on are taken, but nothing is
    stored in them. Gives each expert's next slot behind the block.
    """
    expert = tl.arange(0, cut.experts)
    i = tl.arange(0, cut.block * cut.width)
    k = i % cut.width
    source = block // tokens.blocks
    first = (block - source * tokens.blocks) * tokens.length
    for at in range(first, tl.minimum(first + tokens.length, tokens.rows), cut.block):
        row = at + i // cut.width
        token = source * tokens.rows + row
        here = (row < tokens.rows) & (token < tokens.m) & (k < cut.top_k)
        chosen = tl.load(ids + token * cut.top_k + k, mask=here, other=-1) - own_first
        chosen = tl.where(here & (chosen >= 0) & (chosen < own), chosen, -1)
        weight = tl.load(weights + token * cut.top_k + k, mask=here, other=0.0)
        is_earlier = (chosen[:, None] == chosen[None, :]) & (i[None, :] < i[:, None])
        slot = tl.gather(begin, tl.maximum(chosen, 0), 0)
        slot += tl.sum(is_earlier.to(tl.int32), axis=1)
        there = (chosen >= 0) & (slot < room)
        tl.store(token_of + slot, token, mask=there)
        tl.store(weight_of + slot, weight, mask=there)
        tl.store(slot_of + token * cut.top_k + k, tl.where(chosen < 0, -1, slot), mask=here)
        begin += tl.sum((chosen[:, None] == expert[None, :]).to(tl.int32), axis=0)
    return begin


@triton.jit
def first_of(counts):
    """[experts] what comes before each of what there is so much of."""
    return tl.cumsum(counts, axis=0) - counts


@triton.jit
def row_of(values, index, extent: tl.constexpr):
    """[columns] row `index` of values: [extent, columns]."""
    return tl.sum(tl.where(tl.arange(0, extent)[:, None] == index, values, 0), axis=0)


@triton.jit
def up_to(by_source, sources: tl.constexpr, num_ranks: tl.constexpr):
    """[sources, experts] what each source and those before it have of each expert."""
    source = tl.arange(0, sources)[:, None]
    total = tl.zeros_like(by_source)
    for s in range(num_ranks):
        total += tl.where(source >= s, row_of(by_source, s, sources)[None, :], 0)
    return total


@triton.jit
def _expert_of(i, upto, experts: tl.constexpr):
    """Of each i the first expert with i < upto[expert], or the last; upto: [experts], rising."""
    found = tl.zeros_like(i)
    step = tl.cast(experts // 2, tl.int32)
    while step > 0:
        found += tl.where(tl.gather(upto, found + step - 1, 0) <= i, step, 0)
        step //= 2
    return found


@triton.jit
def _records(i, by_source, upto, cut, num_ranks: tl.constexpr):
    """The `Records` of tiles i that there are, of a table that is sorted by slot. upto: up_to"""
    slots = tl.sum(by_source, axis=0)
    tiles = (slots + cut.tile_m - 1) // cut.tile_m
    expert = _expert_of(i, tl.cumsum(tiles, axis=0), cut.experts)
    inside = (i - tl.gather(first_of(tiles), expert, 0)) * cut.tile_m
    begin = tl.gather(first_of(slots), expert, 0)
    last = tl.minimum(inside + cut.tile_m, tl.gather(slots, expert, 0)) - 1
    lo = tl.zeros_like(i)
    hi = tl.zeros_like(i)
    for s in range(num_ranks):
        done = tl.gather(row_of(upto, s, cut.sources), expert, 0)
        lo += (done <= inside).to(tl.int32)
        hi += (done <= last).to(tl.int32)
    return Records(expert, begin + inside, begin + last + 1, lo, hi)


@triton.jit
def latest(lo, hi, rank, num_ranks: tl.constexpr):
    """The hops over which the last of lo .. hi reaches `rank`, where all send to rank + 1 first."""
    behind = tl.maximum(lo, rank + 1)
    return tl.where(hi > rank, rank - behind + num_ranks, rank - lo)


@triton.jit
def cut_tiles(by_source, tiles, turns, num_tiles, rank, tokens, cut, num_ranks: tl.constexpr):
    """Fill the tables: int32[5, tokens.tiles] expert, first, end, lo, hi; and turns, the order in
    which this rank multiplies them: own tokens' first, then those that are complete next."""
    slots = tl.sum(by_source, axis=0)
    number = tl.sum((slots + cut.tile_m - 1) // cut.tile_m, axis=0)
    tl.store(num_tiles, number)
    upto = up_to(by_source, cut.sources, num_ranks)
    hops = tl.arange(0, cut.sources)
    by_hop = tl.zeros((cut.sources,), tl.int32)
    for at in range(0, tokens.tiles, TILES):
        i = at + tl.arange(0, TILES)
        one = _records(i, by_source, upto, cut, num_ranks)
        here, is_tile = i < tokens.tiles, i < number
        tl.store(tiles + i, tl.where(is_tile, one.expert, 0), mask=here)
        tl.store(tiles + tokens.tiles + i, tl.where(is_tile, one.first, 0), mask=here)
        tl.store(tiles + 2 * tokens.tiles + i, tl.where(is_tile, one.end, 0), mask=here)
        tl.store(tiles + 3 * tokens.tiles + i, tl.where(is_tile, one.lo, 0), mask=here)
        tl.store(tiles + 4 * tokens.tiles + i, tl.where(is_tile, one.hi, 0), mask=here)
        hop = latest(one.lo, one.hi, rank, num_ranks)
        for h in range(num_ranks):
            of_hop = tl.sum((is_tile & (hop == h)).to(tl.int32), axis=0)
            by_hop += tl.where(hops == h, of_hop, 0)
    done = tl.zeros((cut.sources,), tl.int32)
    for at in range(0, tokens.tiles, TILES):
        i = at + tl.arange(0, TILES)
        is_tile = i < number
        one = _records(i, by_source, upto, cut, num_ranks)
        hop = latest(one.lo, one.hi, rank, num_ranks)
        turn = i
        for h in range(num_ranks):
            is_hop = (is_tile & (hop == h)).to(tl.int32)
            first = tl.sum(tl.where(hops < h, by_hop, tl.where(hops == h, done, 0)), axis=0)
            turn = tl.where(is_hop != 0, first + first_of(is_hop), turn)
            done += tl.where(hops == h, tl.sum(is_hop, axis=0), 0)
        tl.store(turns + turn, i, mask=i < tokens.tiles)
