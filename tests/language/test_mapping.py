"""Mappings as pure functions: everything is covered once, whatever divides by what."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base import parts
from weft.language import mapping as maps
from weft.language.mapping import StaticMapping, as_python

rows_of_rank, rows_of_channel, channel_of_row = (
    as_python(one) for one in (maps.rows_of_rank, maps.rows_of_channel, maps.channel_of_row)
)

SHAPES = {
    "rows": st.integers(1, 200),
    "num_ranks": st.integers(1, 8),
    "chunks": st.integers(1, 5),
}


@settings(max_examples=300)
@given(**SHAPES)
def test_ranks_and_channels_split_the_rows(rows, num_ranks, chunks):
    mapping = StaticMapping.of(rows, num_ranks, chunks=chunks)
    for pieces in (
        [rows_of_rank(r, mapping) for r in range(num_ranks)],
        [rows_of_channel(c, mapping) for c in range(num_ranks * chunks)],
    ):
        covered = [row for first, end in pieces for row in range(first, end)]
        assert covered == list(range(rows))
    for c in range(num_ranks * chunks):
        assert all(channel_of_row(row, mapping) == c for row in range(*rows_of_channel(c, mapping)))


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
