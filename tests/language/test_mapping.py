"""Mappings as pure functions: everything is covered once, whatever divides by what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base import parts
from weft.language import mapping as maps
from weft.language.mapping import StaticMapping, as_python

f_shape, f_channel, f_count = map(as_python, (maps.f_shape, maps.f_channel, maps.f_count))
rows_of_rank, rows_of_channel = map(as_python, (maps.rows_of_rank, maps.rows_of_channel))

SHAPES = {
    "rows": st.integers(1, 200),
    "num_ranks": st.integers(1, 8),
    "chunks": st.integers(1, 5),
    "push_rows": st.integers(1, 40),
    "tile_rows": st.integers(1, 70),
}


@settings(max_examples=300)
@given(**SHAPES)
def test_ranks_and_channels_split_the_rows(rows, num_ranks, chunks, push_rows, tile_rows):
    mapping = StaticMapping.of(rows, num_ranks, chunks=chunks, push_rows=push_rows)
    for pieces in (
        [rows_of_rank(r, mapping) for r in range(num_ranks)],
        [rows_of_channel(c, mapping) for c in range(num_ranks * chunks)],
    ):
        covered = [row for first, end in pieces for row in range(first, end)]
        assert covered == list(range(rows))


@settings(max_examples=300)
@given(**SHAPES)
def test_tiles_cover_the_rows_and_know_their_channels(
    rows, num_ranks, chunks, push_rows, tile_rows
):
    made = StaticMapping.of(rows, num_ranks, chunks=chunks, push_rows=push_rows)
    used = StaticMapping.of(
        rows, num_ranks, chunks=chunks, push_rows=push_rows, tile_rows=tile_rows
    )
    counts = dict.fromkeys(range(num_ranks * chunks), 0)
    for mapping in (made, used):
        covered = []
        for i in range(mapping.num_tiles):
            first, end = f_shape(i, mapping)
            covered += range(first, end)
            begin, num = f_channel(i, mapping)
            touched = {
                c
                for c in range(num_ranks * chunks)
                for f, e in [rows_of_channel(c, mapping)]
                if max(f, first) < min(e, end)
            }
            named = set(range(begin, begin + num))
            assert touched <= named
            # What is named beyond that is empty, and full from the start.
            assert all(f_count(c, mapping) == 0 for c in named - touched)
            if mapping is made:
                shares = [rows_of_rank(r, mapping) for r in range(num_ranks)]
                assert any(lo <= first and end <= hi for lo, hi in shares)
                for c in touched:
                    counts[c] += 1
        assert covered == list(range(rows))
    for c, count in counts.items():
        assert f_count(c, made) == f_count(c, used) == count


def test_a_tile_across_two_ranks_waits_for_both():
    used = StaticMapping.of(10, 2, chunks=1, push_rows=2, tile_rows=4)
    assert f_shape(1, used) == (4, 8)
    assert f_channel(1, used) == (0, 2)
    assert [f_count(c, used) for c in range(2)] == [3, 3]


def test_a_python_function_is_no_kernel():
    with pytest.raises(AttributeError):
        as_python(lambda i: i)


@settings(max_examples=300)
@given(size=st.integers(0, 200), num_ranks=st.integers(1, 12))
def test_host_and_device_give_a_rank_the_part_that_torch_chunk_does(size, num_ranks):
    part_of, each = as_python(maps.part_of), parts.full_part(size, num_ranks)
    chunks = [one.tolist() for one in torch.arange(size).chunk(num_ranks)]
    for rank in range(num_ranks):
        first, end = parts.part_of(size, rank, num_ranks)
        assert part_of(size, rank, each) == (first, end)
        assert [*range(first, end)] == (chunks[rank] if rank < len(chunks) else [])
        assert end - first <= each
