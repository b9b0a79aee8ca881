"""The attention template: softmax(scale * Q K^T) V in tiles of queries; hooks say where keys are.

    for each of this program's tiles, from the last row of tiles:
        at     = met(..)                     which keys the tile meets: the record for both hooks
        state  = nothing
        for s in 0 .. segments(at, args) - 1:
            here  = narrowed(at, s, ..)      which of this segment's; by default the same
            where = ready(at, here, s, args) keys that lie together, once they may be read
            state = state with those of them that the tile meets         nothing waits in here
        store the mean, rounded, and the log of the sum

Keys are counted by *position*, 0 up to all of a batch packed one behind the other; query t sees
positions lo(t) .. hi(t) - 1, where neither falls as t grows. That says all of causality, sequences
of any lengths, and tiles that hold queries of several sequences. A position that several segments
hold is counted by each. Where a query sees one range of each segment, but not of all keys, as of
shards that are zigzag, `narrowed` says which.

Queries are [tokens, q_heads, d]; keys and values [rows, kv_heads, d], where q_heads is a multiple
of kv_heads; a tile holds `tile.tokens` tokens of `tile.pack` heads that share their keys: row r is
token r // pack, head r % pack. Heads need not be powers of two long: `tile.d` is the next one.

The state is that of weft.tiles.softmax. Segments are taken in the order in which `segments` counts
them; of each the keys that all queries of the tile see come first, then the others, from the lowest
position up. So the order of sums is the caller's, and sums are the same bits each time.

Source  docs/decisions/009-hooks.md; Dao, FlashAttention-2 (2023)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.language import triton_api as api
from weft.tiles import softmax, swizzle


def padded_head(d: int) -> int:
    """The power of two that a head of d elements is taken for: 16 at least, what a dot takes."""
    return max(16, 1 << max(d - 1, 0).bit_length())


class Tile(NamedTuple):
    """How one program attends; a kernel takes it `as_constexpr`.

    Shapes  m: rows, at least tokens * pack; n: keys at a time; d: the head, padded
    `is_d_even` promises that heads are `d` long, which spares a mask.
    """

    m: Any
    n: Any
    d: Any
    tokens: Any
    pack: Any
    is_d_even: Any

    @classmethod
    def of(cls, m: int, n: int, *, d: int, pack: int = 1, tokens: int | None = None) -> Tile:
        padded = padded_head(d)
        return cls(m, n, padded, tokens or m // pack, pack, padded == d)

    def as_constexpr(self) -> Tile:
        return Tile(*map(tl.constexpr, self))


class Shape(NamedTuple):
    """Tokens of the queries, heads and their length. `scale` is what products are multiplied by,
    times log2(e)."""

    tokens: Any
    q_heads: Any
    kv_heads: Any
    d: Any
    scale: Any

    @classmethod
    def of(
        cls, tokens: int, q_heads: int, kv_heads: int, d: int, scale: float | None = None
    ) -> Shape:
        """`scale` is 1 / sqrt(d) by default."""
        scale = d**-0.5 if scale is None else scale
        return cls(tokens, q_heads, kv_heads, d, scale * softmax.LOG2_E.value)


class Met(NamedTuple):
    """A tile: row i_m and block i_n of heads. Its queries see positions lo .. hi - 1 and no other;
    all of them see all_lo .. all_hi - 1, if there are any. Made by `met`."""

    i_m: Any
    i_n: Any
    lo: Any
    hi: Any
    all_lo: Any
    all_hi: Any


class Bounds(NamedTuple):
    """Positions lo .. hi - 1."""

    lo: Any
    hi: Any


class Segment(NamedTuple):
    """Rows first .. end - 1 of k and of v; the first is at `position`."""

    k: Any
    v: Any
    first: Any
    end: Any
    position: Any


class Whole(NamedTuple):
    """One sequence: queries from position `first` on, `end` positions in all."""

    first: Any
    end: Any


class Listed(NamedTuple):
    """Said for each query: lo, hi: int32[tokens], as Bounds"""

    lo: Any
    hi: Any


class Sequences(NamedTuple):
    """Several: as Whole, and `count` of them. cu_seqlens: int32[count + 1]; steps: count + 1 in
    binary has so many digits, at most"""

    first: Any
    end: Any
    cu_seqlens: Any
    count: Any
    steps: Any


# ---------------------------------------------------------------------------------------------
# The template


@triton.jit
def the_same(at, bounds, segment, shape, tile, args):
    """Bounds of a segment are those of all keys."""
    return at, bounds


@triton.jit
def attention(q, out, lse, shape, tile, first, step, seen, causal: tl.constexpr,
              segments: tl.constexpr, ready: tl.constexpr, args,
              narrowed: tl.constexpr = the_same):  # fmt: skip
    """Attend tiles first, first + step, ..; call it from a kernel.

    out: as q, lse: fp32 [tokens, q_heads]; seen: Whole, Sequences or Listed; args: all hooks'

    Sync    what the hooks do; progress needs nothing of this launch's other programs
    """
    num_m = tl.cdiv(shape.tokens, tile.tokens)
    num_n = shape.q_heads // tile.pack
    for i in tl.range(first, num_m * num_n, step, flatten=False):
        at = met(last_first(i, num_m, num_n), shape, tile, seen, causal)
        queries = load_rows(q, at, shape, tile)
        bounds = visible(tokens_of(at, shape, tile), seen, causal)
        state = softmax.begin(tile.m, tile.d)
        for segment in tl.range(0, segments(at, args), flatten=False):
            here, limits = narrowed(at, bounds, segment, shape, tile, args)
            where = ready(at, here, segment, args)
            state = attend(queries, limits, where, here, shape, tile, state)
        mean, log = softmax.finish(state)
        store_rows(out, mean, at, shape, tile)
        place, there = numbers_of(at, shape, tile)
        tl.store(lse + place, log, mask=there)


@triton.jit
def attend(queries, bounds, where, at, shape, tile, state):
    """`state` with the keys of a Segment that the tile `at` meets."""
    shift = where.first - where.position
    begin = tl.maximum(where.position, at.lo)
    stop = tl.minimum(where.end - shift, at.hi)
    left = tl.maximum(stop - begin, 0)
    # Before, among and behind the keys that all queries see.
    lead = tl.cdiv(tl.minimum(tl.maximum(at.all_lo - begin, 0), left), tile.n)
    inside = begin + lead * tile.n
    whole = tl.maximum(tl.minimum(stop, at.all_hi) - inside, 0) // tile.n
    behind = inside + whole * tile.n
    rest = lead + tl.cdiv(tl.maximum(stop - behind, 0), tile.n)
    for i in range(whole):
        position = inside + i * tile.n
        state = _step(queries, bounds, where, at, position, shift, stop, shape, tile, state, False)
    for i in range(rest):
        position = tl.where(i < lead, begin, behind - lead * tile.n) + i * tile.n
        state = _step(queries, bounds, where, at, position, shift, stop, shape, tile, state, True)
    return state


@triton.jit
def _step(queries, bounds, where, at, position, shift, stop, shape, tile, state,
          is_masked: tl.constexpr):  # fmt: skip
    """`state` with `tile.n` keys from `position` on, none at or after `stop`."""
    j = position + tl.arange(0, tile.n)
    mask = j < stop
    k = load_keys(where.k, at, j + shift, mask, shape, tile, is_masked)
    x = tl.dot(queries, k.T, input_precision="ieee") * shape.scale
    if is_masked:
        seen = (j >= bounds.lo[:, None]) & (j < tl.minimum(bounds.hi, stop)[:, None])
        x = tl.where(seen, x, -float("inf"))
    v = load_keys(where.v, at, j + shift, mask, shape, tile, is_masked)
    return softmax.absorb(state, x, v)


@triton.jit
def load_keys(source, at, row, mask, shape, tile, is_masked: tl.constexpr = True):
    """Rows of k or of v, of the head that the tile's share; zeros where not `mask`, and behind the
    head's end."""
    head = at.i_n * tile.pack // (shape.q_heads // shape.kv_heads)
    c = tl.arange(0, tile.d)
    place = ((row.to(tl.int64) * shape.kv_heads + head) * shape.d)[:, None] + c[None, :]
    if tile.is_d_even:
        if is_masked:
            value = tl.load(source + place, mask=mask[:, None], other=0.0)
        else:
            value = tl.load(source + place)
    else:
        inside = (c < shape.d)[None, :]
        if is_masked:
            inside = inside & mask[:, None]
        value = tl.load(source + place, mask=inside, other=0.0)
    return value


# ---------------------------------------------------------------------------------------------
# Tiles: where their queries lie, and what these see


@triton.jit
def tokens_of(at, shape, tile):
    """The token of each of the tile's rows, the last one's for rows that have none."""
    i = tl.minimum(tl.arange(0, tile.m) // tile.pack, tile.tokens - 1)
    return tl.minimum(at.i_m * tile.tokens + i, shape.tokens - 1)


@triton.jit
def is_row(at, shape, tile):
    """Which of the tile's rows have a query."""
    i = tl.arange(0, tile.m) // tile.pack
    return (i < tile.tokens) & (at.i_m * tile.tokens + i < shape.tokens)


@triton.jit
def heads_of(at, tile):
    """The head of each of the tile's rows."""
    return at.i_n * tile.pack + tl.arange(0, tile.m) % tile.pack


@triton.jit
def places(at, shape, tile):
    """Where the tile's rows lie in [tokens, q_heads, d], and which of these there are."""
    number, there = numbers_of(at, shape, tile)
    place = (number * shape.d)[:, None] + tl.arange(0, tile.d)[None, :]
    return place, elements_of(there, shape, tile)


@triton.jit
def elements_of(there, shape, tile):
    """[rows, tile.d] which elements of rows there are."""
    mask = there[:, None]
    if not tile.is_d_even:
        mask = mask & (tl.arange(0, tile.d) < shape.d)[None, :]
    return mask


@triton.jit
def numbers_of(at, shape, tile):
    """Where the tile's rows lie in [tokens, q_heads], and which of them there are."""
    token = tokens_of(at, shape, tile).to(tl.int64)
    return token * shape.q_heads + heads_of(at, tile), is_row(at, shape, tile)


@triton.jit
def load_rows(source, at, shape, tile):
    """The tile's rows [tile.m, tile.d] of what lies as queries do; zeros where there are none."""
    place, inside = places(at, shape, tile)
    return tl.load(source + place, mask=inside, other=0.0)


@triton.jit
def store_rows(target, value, at, shape, tile):
    """The opposite of `load_rows`; rounded."""
    place, inside = places(at, shape, tile)
    tl.store(target + place, value.to(target.dtype.element_ty), mask=inside)


@triton.jit
def met(at, shape, tile, seen, causal: tl.constexpr):
    """The `Met` of a tile: bounds never fall, so its first and its last query say all."""
    first = at.i_m * tile.tokens
    last = tl.minimum(first + tile.tokens, shape.tokens) - 1
    begin = visible(first, seen, causal)
    end = visible(last, seen, causal)
    return Met(at.i_m, at.i_n, begin.lo, end.hi, end.lo, begin.hi)


@triton.jit
def last_first(i, num_m, num_n):
    """From the last row of tiles, which by causality meet most keys; heads together."""
    return swizzle.At(num_m - 1 - i // num_n, i % num_n)


_is_whole = api.is_one_of(Whole)
_is_listed = api.is_one_of(Listed)


@triton.jit
def seen_by(cu_seqlens, count, steps, first, end):
    """What queries see: Whole where cu_seqlens is None, else Sequences."""
    first, end = tl.cast(first, tl.int32), tl.cast(end, tl.int32)
    if cu_seqlens is None:
        seen = Whole(first, end)
    else:
        seen = Sequences(first, end, cu_seqlens, tl.cast(count, tl.int32), tl.cast(steps, tl.int32))
    return seen


@triton.jit
def visible(token, seen, causal: tl.constexpr):
    """The Bounds of a query, or of a tensor of them: its sequence's keys, none where it is in none;
    `causal`, those up to its own. Those that are Listed say all by themselves."""
    if _is_listed(seen):
        lo, hi = tl.load(seen.lo + token), tl.load(seen.hi + token)
    else:
        position = token + seen.first
        if _is_whole(seen):
            lo, hi = token * 0, token * 0 + seen.end
        else:
            behind = count_up_to(seen.cu_seqlens, position, seen.count + 1, seen.steps)
            lo = tl.load(seen.cu_seqlens + tl.maximum(behind - 1, 0))
            hi = tl.load(seen.cu_seqlens + tl.minimum(behind, seen.count))
            lo, hi = _clamped(lo, seen), _clamped(tl.where(behind == 0, lo, hi), seen)
        if causal:
            hi = tl.minimum(hi, position + 1)
    return Bounds(lo, hi)


@triton.jit
def _clamped(position, seen):
    return tl.minimum(tl.maximum(position, 0), seen.end)


@triton.jit
def count_up_to(values, position, count, steps):
    """How many of `count` values, which never fall, are `position` or less. By halves; count in
    binary has `steps` digits, at most."""
    low = position * 0
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        value = tl.load(values + middle, mask=low < high, other=0)
        is_below = (low < high) & (value <= position)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    return low
