"""Mappings: which rows each rank has, and which channel announces a row.

A mapping is affine: rows split over ranks as torch.chunk splits them, each rank's part
into chunks, one channel per chunk. Nothing need divide.

Each function is `@triton.jit`; `as_python(function)` is the same function on Python integers.
"""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import triton

from weft.base.parts import full_part
from weft.language import triton_api as api


class StaticMapping(NamedTuple):
    """`rows` in all, `rank_rows` per rank, `chunk_rows` per chunk of which each rank has `chunks`;
    `tile_rows` is the extent of the tiles that read them."""

    rows: Any
    rank_rows: Any
    chunk_rows: Any
    chunks: Any
    tile_rows: Any

    @classmethod
    def of(cls, rows: int, num_ranks: int, *, chunks: int, tile_rows: int = 1) -> StaticMapping:
        rank_rows = max(1, full_part(rows, num_ranks))
        return cls(rows, rank_rows, max(1, -(-rank_rows // chunks)), chunks, tile_rows)


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
