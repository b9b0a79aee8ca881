"""Attention to one block of keys after another: between blocks the state lies in memory.

    lay_out         which tokens of packed sequences each rank has, as a table
    list_visible    of a rank's queries, which keys of some rank's each sees
    attend_block    the state with those keys:  mean, lse  =  merge(mean, lse; of the block)
    merge_block     the same, of a block that a library's kernel has attended

A block is what one rank has of the keys; it comes to the others in turns (weft.layers.ring). How
tokens lie over the ranks is a table of weft.plan.sequence_shards: of a sequence a rank has two
parts at most, in order, so what a query sees of a block are rows lo .. hi - 1 of it.

Tiles, loads and the loop over keys are those of weft.tiles.attention, the merge is softmax.merge.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.tiles import attention, softmax


@triton.jit
def lay_out(cu_seqlens, ends, table, m, columns, num_ranks: tl.constexpr, zigzag: tl.constexpr,
            block: tl.constexpr):  # fmt: skip
    """ends and table of weft.plan.sequence_shards.shards_of, which says what they are; a rank to a
    program. cu_seqlens: None is one sequence of all tokens"""
    rank, m, columns = tl.program_id(0), tl.cast(m, tl.int32), tl.cast(columns, tl.int32)
    for first in range(0, columns, block):
        i = first + tl.arange(0, block)
        begin = _end_of(cu_seqlens, i, m, columns)
        behind = _end_of(cu_seqlens, i + 1, m, columns)
        row = _rows_up_to(begin, rank, m, num_ranks, zigzag)
        front, back, count = begin, begin, begin * 0
        if zigzag:
            for other in range(num_ranks):
                some = _rows_up_to(behind, other, m, num_ranks, zigzag)
                some -= _rows_up_to(begin, other, m, num_ranks, zigzag)
                half = (some + 1) // 2
                # All first parts, and the second ones of ranks behind, come before the own second.
                back += half + tl.where(other > rank, some - half, 0)
                front += tl.where(other < rank, half, 0)
                count = tl.where(other == rank, half, count)
        else:
            front = tl.maximum(begin, tl.minimum(rank * tl.cdiv(m, num_ranks), m))
            count = _rows_up_to(behind, rank, m, num_ranks, zigzag) - row
            back = front
        own, there = table + rank * 4 * columns + i, i < columns - 1
        tl.store(own, row, mask=i < columns)
        tl.store(own + columns, tl.where(there, front, 0), mask=i < columns)
        tl.store(own + 2 * columns, tl.where(there, count, 0), mask=i < columns)
        tl.store(own + 3 * columns, tl.where(there, back, 0), mask=i < columns)
        if rank == 0:
            tl.store(ends + i, begin, mask=i < columns)


@triton.jit
def _end_of(cu_seqlens, i, m, columns):
    """Where what is before sequence i of the table ends: at 0 of the tokens of none in front."""
    if cu_seqlens is None:
        end = tl.where(i < 2, 0, m)
    else:
        inside = (i > 0) & (i < columns - 1)
        found = tl.load(cu_seqlens + i - 1, mask=inside, other=0)
        end = tl.where(i < columns - 1, tl.minimum(tl.maximum(found, 0), m), m)
    return end


@triton.jit
def _rows_up_to(end, rank, m, num_ranks: tl.constexpr, zigzag: tl.constexpr):
    """How many of the tokens before `end` a rank has."""
    if zigzag:
        rows = (end + num_ranks - 1 - rank) // num_ranks
    else:
        each = tl.cdiv(m, num_ranks)
        first = tl.minimum(rank * each, m)
        rows = tl.minimum(tl.maximum(end - first, 0), tl.minimum(each, m - first))
    return rows


@triton.jit
def list_visible(table, lo, hi, rank, hop, rows, tokens, columns, steps, num_ranks: tl.constexpr,
                 causal: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """What each of own queries sees of the block of rank - hop, - hop - 1, ..: as many as the grid
    has in its second extent, a row of lo and of hi, int32 [hops, tokens], for each.

    table: int32 [num_ranks, 4, columns] of weft.plan.sequence_shards, of columns - 1 sequences,
    where the first and the last are tokens of none; columns has `steps` binary digits. Bounds are
    rows of the block, plus `rows` times its rank
    """
    hop += tl.program_id(1)
    columns = tl.cast(columns, tl.int32)
    from_rank = (rank - hop + 2 * num_ranks) % num_ranks
    own = table + rank * 4 * columns
    source = table + from_rank * 4 * columns
    row = tl.program_id(0) * block + tl.arange(0, block)
    i = attention.count_up_to(own, row, columns, steps) - 1
    i = tl.minimum(tl.maximum(i, 0), columns - 2)
    begin, end = tl.load(source + i), tl.load(source + i + 1)
    if causal:
        within, count = row - tl.load(own + i), tl.load(own + 2 * columns + i)
        first = tl.load(own + columns + i) + within
        behind = tl.load(own + 3 * columns + i) + within - count
        position = tl.where(within < count, first, behind)
        count = tl.load(source + 2 * columns + i)
        seen = _up_to(position - tl.load(source + columns + i), count)
        seen += _up_to(position - tl.load(source + 3 * columns + i), end - begin - count)
        end = begin + seen
    is_of_none = (i == 0) | (i == columns - 2)
    begin += from_rank * rows
    end += from_rank * rows
    to = tl.program_id(1) * tokens + row
    tl.store(lo + to, begin, mask=row < tokens)
    tl.store(hi + to, tl.where(is_of_none, begin, end), mask=row < tokens)


@triton.jit
def _up_to(place, count):
    """How many of `count` keys one behind the other are at `place`, counted from theirs, or before
    it."""
    return tl.minimum(tl.maximum(place + 1, 0), count)


@triton.jit
def attend_block(q, k, v, mean, lse, out, lo, hi, keys, shape, tile, is_first: tl.constexpr,
                 is_last: tl.constexpr):  # fmt: skip
    """A tile to a program. mean: fp32, as q, and lse: fp32 [tokens, q_heads], the state, which
    `is_first` need not be there; `is_last` the mean goes to `out`. k, v: `keys` rows"""
    num_n = shape.q_heads // tile.pack
    num_m = tl.num_programs(0) // num_n
    at = attention.last_first(tl.program_id(0), num_m, num_n)
    seen = attention.Listed(lo, hi)
    at = attention.met(at, shape, tile, seen, False)
    bounds = attention.visible(attention.tokens_of(at, shape, tile), seen, False)
    queries = attention.load_rows(q, at, shape, tile)
    state = softmax.begin(tile.m, tile.d)
    # The state of a tile that sees nothing stays as it is.
    is_left: tl.constexpr = not (is_first or is_last)
    if not is_first:
        place, inside, number, there = _places(at, shape, tile, is_left)
        log = tl.load(lse + number, mask=there, other=-float("inf"))
        state = softmax.merge(state, tl.load(mean + place, mask=inside, other=0.0), log)
    block = attention.Segment(k, v, tl.cast(0, tl.int32), tl.cast(keys, tl.int32), 0)
    state = attention.attend(queries, bounds, block, at, shape, tile, state)
    found, log = softmax.finish(state)
    place, inside, number, there = _places(at, shape, tile, is_left)
    target = out if is_last else mean
    tl.store(target + place, found.to(target.dtype.element_ty), mask=inside)
    tl.store(lse + number, log, mask=there)


@triton.jit
def _places(at, shape, tile, is_left: tl.constexpr):
    """Where a tile's rows lie, and which there are; `is_left`: none of a tile that sees nothing."""
    place, inside = attention.places(at, shape, tile)
    number, there = attention.numbers_of(at, shape, tile)
    if is_left:
        inside, there = inside & (at.lo < at.hi), there & (at.lo < at.hi)
    return place, inside, number, there


@triton.jit
def merge_block(mean, lse, found, log, head_step, token_step, tokens, heads, d,
                tile_m: tl.constexpr, tile_d: tl.constexpr):  # fmt: skip
    """The state with a block that was attended elsewhere. mean, lse: fp32 [tokens, heads, d] and
    [tokens, heads]; found: as mean, of any dtype; log: its lse, whose elements lie by the steps"""
    row = tl.program_id(0).to(tl.int64) * tile_m + tl.arange(0, tile_m)
    there, c = row < tl.cast(tokens, tl.int64) * heads, tl.arange(0, tile_d)
    place, inside = (row * d)[:, None] + c[None, :], there[:, None] & (c < d)[None, :]
    state = softmax.begin(tile_m, tile_d)
    held = tl.load(lse + row, mask=there, other=-float("inf"))
    state = softmax.merge(state, tl.load(mean + place, mask=inside, other=0.0), held)
    number = row % heads * head_step + row // heads * token_step
    come = tl.load(log + number, mask=there, other=-float("inf"))
    value = tl.load(found + place, mask=inside, other=0.0).to(tl.float32)
    merged, total = softmax.finish(softmax.merge(state, value, come))
    tl.store(mean + place, merged, mask=inside)
    tl.store(lse + row, total, mask=there)
