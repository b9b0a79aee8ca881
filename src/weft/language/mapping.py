"""Mappings: which rows a tile covers, which rows a rank has, which channel announces them.

    f_shape(i, mapping)    -> (first row, end row)          of the logical tensor; may be empty
    f_channel(i, mapping)  -> (first channel, how many)     that announce them
    f_count(c, mapping)    -> how many tiles announce themselves on channel c: then it is full

A mapping is affine: rows split over ranks as torch.chunk splits them, each rank's part
into chunks, one channel per chunk. Whoever produces cuts each rank's part into tiles (PART);
whoever consumes cuts all rows (WHOLE), so one of its tiles may lie across chunks, and ranks.
Nothing need divide.

Each function is `@triton.jit`; `as_python(function)` is the same function on Python integers.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.base.parts import full_part
from weft.language import triton_api as api

WHOLE = tl.constexpr(0)
PART = tl.constexpr(1)


class StaticMapping(NamedTuple):
    """`rows` in all, `rank_rows` per rank, `chunk_rows` per chunk of which each rank has `chunks`.

    `tile_rows` is the extent of the tiles that are numbered, `push_rows` that of the tiles that
    announce themselves; for the producer (PART) they are the same.
    """

    kind: Any
    rows: Any
    rank_rows: Any
    chunk_rows: Any
    chunks: Any
    tile_rows: Any
    push_rows: Any

    @classmethod
    def of(
        cls, rows: int, num_ranks: int, *, chunks: int, push_rows: int, tile_rows: int | None = None
    ) -> StaticMapping:
        """With tile_rows the consumer's view, without it the producer's."""
        rank_rows = max(1, full_part(rows, num_ranks))
        kind = PART if tile_rows is None else WHOLE
        return cls(
            kind.value,
            rows,
            rank_rows,
            max(1, -(-rank_rows // chunks)),
            chunks,
            push_rows if tile_rows is None else tile_rows,
            push_rows,
        )

    def as_constexpr(self) -> StaticMapping:
        """As a kernel takes it: resolved at compile time."""
        return StaticMapping(*map(tl.constexpr, self))

    @property
    def num_tiles(self) -> int:
        """How many tiles f_shape numbers."""
        if self.kind == WHOLE.value:
            return -(-self.rows // self.tile_rows)
        num_ranks = -(-self.rows // self.rank_rows)
        return num_ranks * -(-self.rank_rows // self.tile_rows)

    @property
    def tiles_per_rank(self) -> int:
        """Of the producer's view: rank r makes tiles r * tiles_per_rank and on."""
        return -(-self.rank_rows // self.tile_rows)


@triton.jit
def part_of(size, r, each):
    """The indices (first, end) of `size` that rank r has; empty for the last ranks of a small size.

    As `weft.base.parts.part_of` on the host, where `each` is the full part; any other that is 1 or
    more cuts the size in parts of so many.
    """
    first = min(r * each, size)
    return first, min(first + each, size)


@triton.jit
def rows_of_rank(r, mapping):
    """(first row, end row) of rank r's part."""
    return part_of(mapping.rows, r, mapping.rank_rows)


@triton.jit
def channel_of_row(row, mapping):
    r = row // mapping.rank_rows
    return r * mapping.chunks + (row - r * mapping.rank_rows) // mapping.chunk_rows


@triton.jit
def rows_of_channel(c, mapping):
    """(first row, end row) that channel c announces."""
    r = c // mapping.chunks
    begin, end = rows_of_rank(r, mapping)
    first = min(begin + (c - r * mapping.chunks) * mapping.chunk_rows, end)
    return first, min(first + mapping.chunk_rows, end)


@triton.jit
def f_shape(i, mapping):
    """(first row, end row) of tile i."""
    if mapping.kind == WHOLE:
        first = i * mapping.tile_rows
        return first, min(first + mapping.tile_rows, mapping.rows)
    else:
        per_rank = (mapping.rank_rows + mapping.tile_rows - 1) // mapping.tile_rows
        r = i // per_rank
        begin, end = rows_of_rank(r, mapping)
        first = min(begin + (i - r * per_rank) * mapping.tile_rows, end)
        return first, min(first + mapping.tile_rows, end)


@triton.jit
def f_channel(i, mapping):
    """(first channel, how many) of tile i's rows; none where it has no rows."""
    first, end = f_shape(i, mapping)
    some = min(max(end - first, 0), 1)
    begin = channel_of_row(first, mapping)
    return begin, (channel_of_row(first + max(end - first, 1) - 1, mapping) - begin + 1) * some


@triton.jit
def f_count(c, mapping):
    """How many producer's tiles lie in channel c, wholly or in part."""
    first, end = rows_of_channel(c, mapping)
    begin = c // mapping.chunks * mapping.rank_rows
    some = min(max(end - first, 0), 1)
    last = begin + max(end - begin, 1) - 1
    tiles = (last - begin) // mapping.push_rows - (first - begin) // mapping.push_rows + 1
    return tiles * some


def as_python(function: Any) -> Any:
    """A `@triton.jit` function of integers for Python's, the functions that it calls too."""
    plain = function.fn
    names = {
        name: _plain(value)
        for name, value in plain.__globals__.items()
        if name in plain.__code__.co_names
    }
    return types.FunctionType(plain.__code__, {**names, "__builtins__": __builtins__})


def _plain(value: Any) -> Any:
    if isinstance(value, types.ModuleType):
        return _Module(value)
    return as_python(value) if isinstance(value, api.JITFunction) else value


class _Module:
    """A module whose functions are for Python integers."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        value = vars(self)[name] = _plain(getattr(self._module, name))
        return value
