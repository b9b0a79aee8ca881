"""The GEMM template: C[m, n] = A[m, k] @ B[k, n] in tiles, with hooks for what is around it.

    for i in this program's share of the tiles:
        at    = order(i, ...)            which tile is next: the record that every hook is given
        rows  = ready(at, ...)           where the tile's rows of A lie, once they may be read
        value = sum over k of A[rows, k] @ B[k, at.i_n]
        value = value * scales(at, ...)  of fp8 rows and columns; or of blocks, on the way
        value = combine(at, ...)         with what else belongs to the tile
        emit(at, ...)                    what becomes of the result
        announce(at, ...)                who is told of it
    done()                               this program has read its last operand

A hook is a `@triton.jit` function, given as a constexpr together with one tuple of arguments. Those
that have a default are left out by None, and cost nothing then:

    order(i, num_m, num_n, args) -> at                   a record that begins with i_m, i_n
    ready(at, segment, tile, args) -> Rows, Indexed, ..  segment is 0: a GEMM has one
    combine(at, cells, value, args) -> value             fp32 sums in and out; may wait and read
    emit(at, cells, fragment, args)                      data alone, see `emit_store`
    announce(at, part, args)                             part is 0: a tile is stored in one
    done(args)                                           once per program
    scales(at, tile, args) -> Scales                     where the tile's scales lie

Where sums run over rows of both operands, C[m, n] = sum over rows of A[row, m] B[row, n], and these
come in parts (gradients of weights), a tile asks for one part after the other:

    segments(at, args) -> count                    `ready` is asked for segments 0 .. count - 1
    ready(at, segment, tile, args) -> Contracted   rows of both operands, once they may be read

and adds them up in this order. B is then what `ready` says, `shape.k` is not looked at, and the
operands' rows are `stride_a` and `stride_b` apart. Where it is columns of A and rows of B that come
in parts, all alike, `ready` gives a Slice, and `shape.k` is what a part has of them.

Hooks have one source for this template and the one for Hopper: the fragment, here a whole tile,
and `cells` (fragments.Cells) come from the template, index tensors from tiles/fragments.py.

`ready` runs once per tile or segment, outside the loop over k: a wait inside would cost the
pipelining there. The outer loop is never flattened into the inner one (`flatten=False`), or the
next tile's wait would run before this tile's result is stored. What `emit` stored is complete once
`announce` has called `notify` or what else releases. `one_tile` is the body without the loop.

An operand is a TMA descriptor made by the host (`tile.tma`) or a pointer to rows `stride` apart
whose columns are contiguous; extents need not divide by the tile's. B may lie as [k, n] or, with
`tile.b_is_nk`, as [n, k]. Sums are in fp32. Tensor cores add fp8 products up with 14 bits on
Hopper: there they are added to sums of full width every tile.k.

Scales are of a tensor, of rows of A and columns of B (strides of 0 for what is alike), applied
behind the sums; or, `per_block`, of BLOCK_K columns of a row of A and of BLOCK_K x BLOCK_K of B,
applied every tile.k: it must divide BLOCK_K, and tile.n too. `scales_of` is such a hook.

Source  docs/decisions/009-hooks.md
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import triton_api as api
from weft.tiles import fragments, tile_trace

# What has one scale each where scales are of blocks: so many columns of a row of A, of B so many
# rows and columns.
BLOCK_K = tl.constexpr(128)


class Tile(NamedTuple):
    """How one program multiplies; a kernel takes it `as_constexpr`.

    `is_k_even` promises that all of k divides by `k`, which spares the pointer path a mask.
    """

    m: Any
    n: Any
    k: Any
    b_is_nk: Any
    tma: Any
    is_k_even: Any

    @classmethod
    def of(
        cls, m: int, n: int, k: int, *, size_k: int, b_is_nk: bool = False, tma: bool = False
    ) -> Tile:
        return cls(m, n, k, b_is_nk, tma, size_k % k == 0)

    def as_constexpr(self) -> Tile:
        return Tile(*map(tl.constexpr, self))


class Shape(NamedTuple):
    """Extents of the product, and how far rows of the operands lie apart, in elements."""

    m: Any
    n: Any
    k: Any
    stride_a: Any
    stride_b: Any
    stride_c: Any


class Rows(NamedTuple):
    """Where a tile's rows of A lie: in `source`, from row `first`, none at or after `end`."""

    source: Any
    first: Any
    end: Any


class Indexed(NamedTuple):
    """Rows that lie anywhere: row i of `source` is row index[i], from i = `first` on, none at or
    after `end`. B is number `slice` of several that lie one behind the other. Without TMA."""

    source: Any
    index: Any
    first: Any
    end: Any
    slice: Any


class Sliced(NamedTuple):
    """As `Rows`, with a B as an Indexed has it. Without TMA."""

    source: Any
    first: Any
    end: Any
    slice: Any


class Shifted(NamedTuple):
    """As `Rows`, times columns of B of which the first lies in column `before`."""

    source: Any
    first: Any
    end: Any
    before: Any


class Slice(NamedTuple):
    """As `Rows`, of shape.k columns of A: in `source`, whose rows are `stride` apart, those from
    `column` on; with them go the rows of B from `above` on. By TMA of whole tile.k alone."""

    source: Any
    first: Any
    end: Any
    column: Any
    stride: Any
    above: Any


class Contracted(NamedTuple):
    """`rows` rows of both operands, from row `left_first` of `left` and `right_first` of `right`
    on, to be summed over. `tile.is_k_even` promises that tile.k divides them."""

    left: Any
    right: Any
    left_first: Any
    right_first: Any
    rows: Any


class Scales(NamedTuple):
    """Scales of a tile, fp32: `a` of its first row, `b` of its first column, both of the first
    block of k, and how far the next ones are. There are so many `rows` and `columns`."""

    a: Any
    b: Any
    rows: Any
    columns: Any
    a_row: Any
    a_k: Any
    b_column: Any
    b_k: Any


class Scaled(NamedTuple):
    """Arguments of `scales_of`: fp32 scales of A and B, and how far they lie apart. Columns have
    one each for `block_n` of them."""

    a: Any
    b: Any
    shape: Any
    a_row: Any
    a_k: Any
    b_column: Any
    b_k: Any
    block_n: Any


class Stored(NamedTuple):
    """Arguments of `emit_store`. c: a descriptor, or a pointer to rows shape.stride_c apart"""

    c: Any
    shape: Any


class Always(NamedTuple):
    """Arguments of `ready_always`."""

    a: Any
    m: Any


# By type: what a tile's rows are decides how they are loaded.
is_indexed = api.is_one_of(Indexed)
is_sliced = api.is_one_of(Indexed, Sliced)
is_shifted = api.is_one_of(Shifted)
is_slice = api.is_one_of(Slice)


@triton.jit
def gemm(
    b,
    shape,
    tile,
    num_m,
    first,
    step,
    order: tl.constexpr,
    order_args,
    ready: tl.constexpr,
    ready_args,
    emit: tl.constexpr,
    emit_args,
    combine: tl.constexpr = None,
    combine_args=None,
    announce: tl.constexpr = None,
    announce_args=None,
    done: tl.constexpr = None,
    done_args=None,
    scales: tl.constexpr = None,
    scales_args=None,
    per_block: tl.constexpr = False,
    segments: tl.constexpr = None,
    segments_args=None,
    world=None,
):
    """Multiply tiles first, first + step, ... of the order; call it from a kernel.

    `num_m` counts rows of tiles: cdiv(shape.m, tile.m), or more where tiles are cut within parts.
    `world` keeps the trace, where no hook is given one.

    Sync    what the hooks do; progress needs nothing of this launch's other programs
    """
    num_n = tl.cdiv(shape.n, tile.n)
    traced = tile_trace.kept(
        world, order_args, ready_args, emit_args, combine_args, announce_args, done_args,
        segments_args,
    )  # fmt: skip
    for i in tl.range(first, num_m * num_n, step, flatten=False):
        at = order(i, num_m, num_n, order_args)
        one_tile(
            at, b, shape, tile, ready, ready_args, emit, emit_args,
            combine, combine_args, announce, announce_args, scales, scales_args, per_block,
            segments, segments_args, traced, i,
        )  # fmt: skip
    if done is not None:
        done(done_args)


@triton.jit
def one_tile(
    at,
    b,
    shape,
    tile,
    ready: tl.constexpr,
    ready_args,
    emit: tl.constexpr,
    emit_args,
    combine: tl.constexpr = None,
    combine_args=None,
    announce: tl.constexpr = None,
    announce_args=None,
    scales: tl.constexpr = None,
    scales_args=None,
    per_block: tl.constexpr = False,
    segments: tl.constexpr = None,
    segments_args=None,
    traced=None,
    unit=0,
):
    """The tile of the record `at`, from its wait to its announcement.

    `traced` is what `tile_trace.kept` says; this tile is the launch's `unit`.
    """
    if traced is not None:
        start = wl.timestamp()
    if segments is not None:
        value = tl.zeros((tile.m, tile.n), tl.float32)
        if traced is not None:
            waited = start - start
        for segment in tl.range(0, segments(at, segments_args), flatten=False):
            if traced is not None:
                waited -= wl.timestamp()
            pair = ready(at, segment, tile, ready_args)
            if traced is not None:
                waited += wl.timestamp()
            if is_slice(pair):
                value = add_slice(pair, b, at.i_n, shape, tile, value)
            else:
                value = contract(pair, at, shape, tile, value)
        if traced is not None:
            tile_trace.open_record(traced, unit, at, start, waited)
    else:
        rows = ready(at, 0, tile, ready_args)
        if traced is not None:
            tile_trace.open_record(traced, unit, at, start, wl.timestamp() - start)
        if scales is None:
            value = multiply(rows, b, at.i_n, shape, tile)
        else:
            value = multiply_scaled(
                rows, b, at.i_n, shape, tile, scales(at, tile, scales_args), per_block
            )
    if traced is not None:
        tile_trace.stamp(traced, unit, tile_trace.SUMMED)
    row, column = at.i_m * tile.m, at.i_n * tile.n
    if combine is not None:
        value = combine(at, fragments.Cells(row, column, 0, True), value, combine_args)
        if traced is not None:
            tile_trace.stamp(traced, unit, tile_trace.COMBINED)
    emit(at, fragments.Cells(row, column, 0, True), value, emit_args)
    if announce is not None:
        announce(at, 0, announce_args)
    if traced is not None:
        tile_trace.stamp(traced, unit, tile_trace.END)


@triton.jit
def multiply(rows, b, i_n, shape, tile):
    """One tile: fp32 sums over k of `rows` of A and column tile i_n of B."""
    value = tl.zeros((tile.m, tile.n), tl.float32)
    column = i_n * tile.n
    if is_sliced(rows):
        b = slice_of(rows, b, shape, tile)
    if is_shifted(rows):
        if tile.tma:
            column += rows.before
        elif tile.b_is_nk:
            b += rows.before.to(tl.int64) * shape.stride_b
        else:
            b += rows.before
    if is_indexed(rows):
        rows = located(rows, tile)
    for at_k in range(0, shape.k, tile.k):
        left = load_a(rows, at_k, shape, tile)
        right = load_b(b, column, at_k, shape, tile)
        value = add_product(left, right, value)
    return value


@triton.jit
def add_slice(rows, b, i_n, shape, tile, value):
    """`value` plus a slice's columns of A times its rows of B. rows: Slice"""
    a, before, above = rows.source, rows.column, rows.above
    if tile.tma:
        tl.static_assert(tile.is_k_even, "TMA knows no end of a slice but the tensor's")
    else:  # the end of the slice is where that of k is
        a += before
        if tile.b_is_nk:
            b += above
        else:
            b += above.to(tl.int64) * shape.stride_b
        before, above = 0, 0
    part = Rows(source=a, first=rows.first, end=rows.end)
    lies = Shape(shape.m, shape.n, shape.k, rows.stride, shape.stride_b, shape.stride_c)
    for at_k in range(0, shape.k, tile.k):
        left = load_a(part, before + at_k, lies, tile)
        right = load_b(b, i_n * tile.n, above + at_k, shape, tile)
        value = add_product(left, right, value)
    return value


@triton.jit
def add_product(left, right, value):
    """`value` plus left @ right, in fp32."""
    if left.dtype.is_fp8():
        value = tl.dot(left, right, value, max_num_imprecise_acc=left.shape[1])
    else:
        value = tl.dot(left, right, value, input_precision="ieee")
    return value


@triton.jit
def contract(pair, at, shape, tile, value):
    """`value` plus the sum over a pair's rows of both operands' products. pair: Contracted"""
    for at_k in range(0, pair.rows, tile.k):
        left = load_rows(
            pair.left, pair.left_first + at_k, pair.rows - at_k, at.i_m * tile.m, shape.m,
            shape.stride_a, tile, tile.m,
        )  # fmt: skip
        right = load_rows(
            pair.right, pair.right_first + at_k, pair.rows - at_k, at.i_n * tile.n, shape.n,
            shape.stride_b, tile, tile.n,
        )  # fmt: skip
        value = add_product(left.T, right, value)
    return value


@triton.jit
def load_rows(source, first, rows, column, columns, stride, tile, width: tl.constexpr):
    """[tile.k, width] from row `first` and `column` on; zeros outside, and behind `rows` rows: what
    lies there may not have come yet."""
    if tile.tma:
        tl.static_assert(tile.is_k_even, "TMA knows no end of a segment but the tensor's")
        value = source.load([first, column])
    else:
        i = tl.arange(0, tile.k)
        j = column + tl.arange(0, width)
        pointers = source + (first + i).to(tl.int64)[:, None] * stride + j[None, :]
        mask = (j < columns)[None, :]
        if not tile.is_k_even:
            mask = mask & (i < rows)[:, None]
        value = tl.load(pointers, mask=mask, other=0.0)
    return value


@triton.jit
def multiply_scaled(rows, b, i_n, shape, tile, scaled, per_block: tl.constexpr):
    """As `multiply`, times scales. scaled: Scales"""
    value = tl.zeros((tile.m, tile.n), tl.float32)
    column = i_n * tile.n
    i = tl.arange(0, tile.m)
    if is_sliced(rows):
        b = slice_of(rows, b, shape, tile)
    if is_indexed(rows):
        rows = located(rows, tile)
    for at_k in range(0, shape.k, tile.k):
        left = load_a(rows, at_k, shape, tile)
        right = load_b(b, column, at_k, shape, tile)
        if per_block:
            tl.static_assert(BLOCK_K % tile.n == 0 and BLOCK_K % tile.k == 0, "more than a block")
            block = at_k // BLOCK_K
            there = scaled.a + i * scaled.a_row + block * scaled.a_k
            scale = tl.load(there, mask=i < scaled.rows, other=0.0)
            scale *= tl.load(scaled.b + block * scaled.b_k)
            product = add_product(left, right, tl.zeros((tile.m, tile.n), tl.float32))
            value += product * scale[:, None]
        else:
            value = add_product(left, right, value)
    if not per_block:
        j = tl.arange(0, tile.n)
        a_scale = tl.load(scaled.a + i * scaled.a_row, mask=i < scaled.rows, other=0.0)
        b_scale = tl.load(scaled.b + j * scaled.b_column, mask=j < scaled.columns, other=0.0)
        value = value * a_scale[:, None] * b_scale[None, :]
    return value


@triton.jit
def located(rows, tile):
    """An Indexed as `load_a` takes it: `index` is the tile's own part, loaded once."""
    i = rows.first + tl.arange(0, tile.m)
    index = tl.load(rows.index + i, mask=i < rows.end, other=0)
    return Indexed(rows.source, index, rows.first, rows.end, rows.slice)


@triton.jit
def slice_of(rows, b, shape, tile):
    """Where the B of an Indexed or a Sliced begins."""
    tl.static_assert(not tile.tma, "rows by index, and B of several, are loaded by pointers")
    if tile.b_is_nk:
        lines = shape.n
    else:
        lines = shape.k
    return b + rows.slice.to(tl.int64) * lines * shape.stride_b


@triton.jit
def load_a(rows, at_k, shape, tile):
    """Tile [tile.m, tile.k] of A from column at_k; zeros outside. Of an Indexed: located"""
    if tile.tma:
        value = rows.source.load([rows.first, at_k])
    else:
        i = rows.first + tl.arange(0, tile.m)
        j = at_k + tl.arange(0, tile.k)
        row = i
        if is_indexed(rows):
            row = rows.index
        pointers = rows.source + row.to(tl.int64)[:, None] * shape.stride_a + j[None, :]
        mask = (i < rows.end)[:, None]
        if not tile.is_k_even:
            mask = mask & (j < shape.k)[None, :]
        value = tl.load(pointers, mask=mask, other=0.0)
    return value


@triton.jit
def load_b(b, column, at_k, shape, tile):
    """Tile [tile.k, tile.n] of B from row at_k and `column`; zeros outside."""
    if tile.tma:
        if tile.b_is_nk:
            value = b.load([column, at_k]).T
        else:
            value = b.load([at_k, column])
    else:
        i = at_k + tl.arange(0, tile.k)
        j = column + tl.arange(0, tile.n)
        if tile.b_is_nk:
            pointers = b + i[:, None] + j.to(tl.int64)[None, :] * shape.stride_b
        else:
            pointers = b + i.to(tl.int64)[:, None] * shape.stride_b + j[None, :]
        mask = (j < shape.n)[None, :]
        if not tile.is_k_even:
            mask = mask & (i < shape.k)[:, None]
        value = tl.load(pointers, mask=mask, other=0.0)
    return value


@triton.jit
def ready_always(at, segment, tile, args):
    """A is there from the start. args: Always"""
    return Rows(source=args.a, first=at.i_m * tile.m, end=args.m)


@triton.jit
def scales_of(at, tile, args):
    """Scales that lie as A's rows and B's columns do. args: Scaled"""
    row = at.i_m * tile.m
    column = at.i_n * tile.n
    return Scales(
        args.a + row.to(tl.int64) * args.a_row,
        args.b + (column // args.block_n).to(tl.int64) * args.b_column,
        args.shape.m - row, args.shape.n - column,
        args.a_row, args.a_k, args.b_column, args.b_k,
    )  # fmt: skip


@triton.jit
def emit_store(at, cells, fragment, args):
    """Store the fragment in C, rounded to C's dtype. args: Stored"""
    fragments.store_block(args.c, cells.row, cells.column, fragment, args.shape.m, args.shape.n,
                          args.shape.stride_c)  # fmt: skip
