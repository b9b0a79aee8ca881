"""The attention template: softmax(scale * Q K^T) V in tiles of queries, with hooks.

    for i in this program's share of the tiles:
        at     = order(i, ...)               which tile is next
        at     = met(at, visible)            and which keys it meets: the record for later hooks
        bounds = visible(token, ...)         which keys each of its queries sees
        state  = nothing
        for s in 0 .. segments(at, ...) - 1:
            where = ready(at, s, ...)        keys that lie together, once they may be read
            state = state with those of them that the tile meets         nothing waits in here
        emit(at, state, ...)                 what becomes of it
        announce(at, ...)                    who is told of it
    done()                                   this program has read its last operand

Keys are counted by *position*, 0 up to all of a batch packed one behind the other; query t sees
positions lo(t) .. hi(t) - 1, where neither falls as t grows. That says all of causality, sequences
of any lengths, and tiles that hold queries of several sequences. A position that several segments
hold is counted by each.

A hook is a `@triton.jit` function, given as a constexpr together with one tuple of arguments. Those
that have a default are left out by None:

    order(i, num_m, num_n, args) -> at                  a record that begins with i_m, i_n
    visible(token, args) -> Bounds                      of one query, or of a tensor of them
    segments(at, ready_args) -> count
    ready(at, segment, tile, args) -> Segment           may wait
    emit(at, state, tile, args)                         data alone, see `emit_store`
    announce(at, part, args)                            part is 0
    done(args)                                          once per program

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

from weft.tiles import softmax, swizzle


def padded_head(d: int) -> int:
    """The power of two that a head of d elements is taken for: 16 at least, what a dot takes."""
    return max(16, 1 << max(d - 1, 0).bit_length())


class Tile(NamedTuple):
    """How one program attends; a kernel takes it `as_constexpr`.

    Shapes  m: rows, at least tokens * pack; n: keys at a time; d: the head, padded; k: so much of
            it is multiplied at a time: where that is all, queries stay where they are
    `is_d_even` promises that heads are `d` long, which spares a mask.
    """

    m: Any
    n: Any
    d: Any
    k: Any
    tokens: Any
    pack: Any
    is_d_even: Any

    @classmethod
    def of(
        cls, m: int, n: int, *, d: int, k: int = 0, pack: int = 1, tokens: int | None = None
    ) -> Tile:
        """`k`: all of the head by default."""
        padded = padded_head(d)
        return cls(m, n, padded, min(k or padded, padded), tokens or m // pack, pack, padded == d)

    def as_constexpr(self) -> Tile:
        return Tile(*map(tl.constexpr, self))


class Shape(NamedTuple):
    """Queries in all, heads and their length, and how far tokens lie apart, in elements. `scale` is
    what products are multiplied by, times log2(e)."""

    tokens: Any
    q_heads: Any
    kv_heads: Any
    d: Any
    q_stride: Any
    kv_stride: Any
    scale: Any

    @classmethod
    def of(
        cls, tokens: int, q_heads: int, kv_heads: int, d: int, scale: float | None = None
    ) -> Shape:
        """Of what is contiguous; `scale` is 1 / sqrt(d) by default."""
        scale = d**-0.5 if scale is None else scale
        apart = (q_heads * d, kv_heads * d)
        return cls(tokens, q_heads, kv_heads, d, *apart, scale * softmax.LOG2_E.value)


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


class State(NamedTuple):
    """What a tile's queries have seen: see weft.tiles.softmax. Shapes  [m], [m], [m, d]"""

    high: Any
    total: Any
    out: Any


class Lengths(NamedTuple):
    """Arguments of `visible_in_sequences`: queries from position `first` on, `count` sequences, of
    `end` positions in all. cu_seqlens: int32[count + 1]; steps: count + 1 in binary has so many
    digits, at most"""

    cu_seqlens: Any
    count: Any
    steps: Any
    first: Any
    end: Any


class One(NamedTuple):
    """Arguments of `visible_before` and `visible_all`: queries from position `first` on, `end`
    positions in all."""

    first: Any
    end: Any


class Kept(NamedTuple):
    """Arguments of `ready_always`."""

    k: Any
    v: Any
    rows: Any


class Stored(NamedTuple):
    """Arguments of `emit_store`."""

    out: Any
    lse: Any
    shape: Any


# ---------------------------------------------------------------------------------------------
# The template


@triton.jit
def attention(
    q,
    shape,
    tile,
    num_m,
    first,
    step,
    order: tl.constexpr,
    order_args,
    visible: tl.constexpr,
    visible_args,
    segments: tl.constexpr,
    ready: tl.constexpr,
    ready_args,
    emit: tl.constexpr,
    emit_args,
    announce: tl.constexpr = None,
    announce_args=None,
    done: tl.constexpr = None,
    done_args=None,
):
    """Attend tiles first, first + step, ... of the order; call it from a kernel.

    `num_m` counts rows of tiles: cdiv(shape.tokens, tile.tokens).

    Sync    what the hooks do; progress needs nothing of this launch's other programs
    """
    num_n = shape.q_heads // tile.pack
    for i in tl.range(first, num_m * num_n, step, flatten=False):
        at = order(i, num_m, num_n, order_args)
        one_tile(
            met(at, shape, tile, visible, visible_args), q, shape, tile, visible, visible_args,
            segments, ready, ready_args, emit, emit_args, announce, announce_args,
        )  # fmt: skip
    if done is not None:
        done(done_args)


@triton.jit
def one_tile(
    at,
    q,
    shape,
    tile,
    visible: tl.constexpr,
    visible_args,
    segments: tl.constexpr,
    ready: tl.constexpr,
    ready_args,
    emit: tl.constexpr,
    emit_args,
    announce: tl.constexpr = None,
    announce_args=None,
):
    """The tile of the `Met` at, from its first wait to its announcement."""
    queries = q
    if tile.k == tile.d:
        queries = load_rows(q, at, 0, tile.d, shape, tile)
    bounds = visible(tokens_of(at, shape, tile), visible_args)
    high, total, out = softmax.begin(tile.m, tile.d)
    state = State(high, total, out)
    for segment in tl.range(0, segments(at, ready_args), flatten=False):
        where = ready(at, segment, tile, ready_args)
        state = attend(queries, bounds, where, at, shape, tile, state)
    emit(at, state, tile, emit_args)
    if announce is not None:
        announce(at, 0, announce_args)


@triton.jit
def attend(queries, bounds, where, at, shape, tile, state):
    """`state` with the keys of a Segment that the tile `at` meets.

    queries: loaded; or, where tile.k is less than a head, the pointer to all of them
    """
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
    if tile.k == tile.d:
        k = load_keys(where.k, at, j + shift, mask, 0, tile.d, shape, tile, is_masked)
        x = tl.dot(queries, k.T, input_precision="ieee")
    else:
        x = tl.zeros((tile.m, tile.n), tl.float32)
        for column in range(0, tile.d, tile.k):
            some = load_rows(queries, at, column, tile.k, shape, tile)
            k = load_keys(where.k, at, j + shift, mask, column, tile.k, shape, tile, is_masked)
            x = tl.dot(some, k.T, x, input_precision="ieee")
    x = x * shape.scale
    if is_masked:
        seen = (j >= bounds.lo[:, None]) & (j < tl.minimum(bounds.hi, stop)[:, None])
        x = tl.where(seen, x, -float("inf"))
    v = load_keys(where.v, at, j + shift, mask, 0, tile.d, shape, tile, is_masked)
    high, total, out = softmax.absorb(state.high, state.total, state.out, x, v)
    return State(high, total, out)


@triton.jit
def load_keys(source, at, row, mask, column, width: tl.constexpr, shape, tile,
              is_masked: tl.constexpr):  # fmt: skip
    """Rows of k or of v, `width` columns of the tile's heads from `column` on; zeros where not
    `mask`, and behind the head's end."""
    head = at.i_n * tile.pack // (shape.q_heads // shape.kv_heads)
    c = column + tl.arange(0, width)
    place = row.to(tl.int64)[:, None] * shape.kv_stride + (head * shape.d + c)[None, :]
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
def load_rows(source, at, column, width: tl.constexpr, shape, tile):
    """The tile's rows [tile.m, width] of what lies as queries do, from a column on; zeros where
    there are none."""
    pointers, inside = places(source, at, column, width, shape.q_stride, shape, tile)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def places(source, at, column, width: tl.constexpr, stride, shape, tile):
    """Where the tile's rows lie in [tokens, q_heads, d], and which of these there are."""
    token = tokens_of(at, shape, tile).to(tl.int64)
    c = column + tl.arange(0, width)
    place = token[:, None] * stride + heads_of(at, tile)[:, None] * shape.d + c[None, :]
    return source + place, is_row(at, shape, tile)[:, None] & (c < shape.d)[None, :]


@triton.jit
def met(at, shape, tile, visible: tl.constexpr, visible_args):
    """The `Met` of a tile: bounds never fall, so its first and its last query say all."""
    first = at.i_m * tile.tokens
    last = tl.minimum(first + tile.tokens, shape.tokens) - 1
    begin = visible(first, visible_args)
    end = visible(last, visible_args)
    return Met(at.i_m, at.i_n, begin.lo, end.hi, end.lo, begin.hi)


@triton.jit
def last_first(i, num_m, num_n, args):
    """An order: from the last row of tiles, which by causality meet most keys; heads together."""
    return swizzle.At(num_m - 1 - i // num_n, i % num_n)


@triton.jit
def visible_all(token, args):
    """Every query sees every key. args: One"""
    return Bounds(token * 0, token * 0 + args.end)


@triton.jit
def visible_before(token, args):
    """A query sees the keys up to its own. args: One"""
    return Bounds(token * 0, tl.minimum(token + args.first + 1, args.end))


@triton.jit
def visible_in_sequences(token, args):
    """A query sees its own sequence; no key where it is in none. args: Lengths"""
    position = token + args.first
    # How many sequences begin at or before it, by halves.
    low = token * 0
    high = low + args.count + 1
    for _ in range(args.steps):
        middle = (low + high) // 2
        begin = tl.load(args.cu_seqlens + middle, mask=low < high, other=0)
        is_below = (low < high) & (begin <= position)
        low = tl.where(is_below, middle + 1, low)
        high = tl.where(is_below, high, middle)
    lo = tl.load(args.cu_seqlens + tl.maximum(low - 1, 0))
    hi = tl.load(args.cu_seqlens + tl.minimum(low, args.count))
    return Bounds(_clamped(lo, args), _clamped(tl.where(low == 0, lo, hi), args))


@triton.jit
def _clamped(position, args):
    return tl.minimum(tl.maximum(position, 0), args.end)


@triton.jit
def visible_before_in_sequences(token, args):
    """As `visible_in_sequences`, keys up to its own. args: Lengths"""
    bounds = visible_in_sequences(token, args)
    return Bounds(bounds.lo, tl.minimum(bounds.hi, token + args.first + 1))


@triton.jit
def one_segment(at, args):
    """All keys lie together."""
    return 1


@triton.jit
def ready_always(at, segment, tile, args):
    """All keys are there from the start. args: Kept"""
    return Segment(args.k, args.v, 0, args.rows, 0)


@triton.jit
def emit_store(at, state, tile, args):
    """Store the tile's output, rounded, and its log-sum-exp [tokens, q_heads]. args: Stored"""
    shape = args.shape
    out, lse = softmax.finish(state.high, state.total, state.out)
    stride = shape.q_heads * shape.d
    pointers, inside = places(args.out, at, 0, tile.d, stride, shape, tile)
    tl.store(pointers, out.to(args.out.dtype.element_ty), mask=inside)
    token = tokens_of(at, shape, tile).to(tl.int64)
    place = args.lse + token * shape.q_heads + heads_of(at, tile)
    tl.store(place, lse, mask=is_row(at, shape, tile))
