"""Zigzag shards: split and joined they are what they were, forward and backward."""

from __future__ import annotations

import pytest
import torch
from parallel import drawn

import weft
from weft.layers import zigzag_join, zigzag_positions, zigzag_split


@pytest.mark.parametrize(
    ("num_ranks", "m", "starts"),
    [(1, 5, None), (2, 8, None), (3, 20, [0, 7, 7, 18]), (4, 3, [0, 3]), (2, 0, None),
     (4, 21, [2, 12, 19])],
)  # fmt: skip
def test_split_and_joined(ranks, num_ranks, m, starts):
    whole, weights = drawn(m, 3), drawn(m, 3, seed=2)
    lengths = None if starts is None else torch.tensor(starts, dtype=torch.int32)

    def main():
        with weft.init() as world:
            x = whole.clone().requires_grad_()
            own = zigzag_split(x, world=world, cu_seqlens=lengths)
            assert len(own) == (m + num_ranks - 1 - world.rank) // num_ranks
            joined = zigzag_join(own, world=world, cu_seqlens=lengths, m=m)
            assert torch.equal(joined, whole)
            (joined * weights).sum().backward()
            assert torch.equal(x.grad, weights)
            within = zigzag_positions(m, world=world, cu_seqlens=lengths)
            begins = torch.tensor([0, *(starts or [0]), m])
            place = torch.arange(m)
            of = torch.searchsorted(begins[:-1].contiguous(), place, right=True) - 1
            expected = zigzag_split(place - begins[of], world=world, cu_seqlens=lengths)
            assert torch.equal(within, expected)

    ranks(main, num_ranks)


def test_recorded_and_replayed_with_other_lengths(ranks):
    def main():
        with weft.init() as world:
            x, lengths = drawn(12, 2), torch.tensor([0, 5, 12], dtype=torch.int32)
            call = lambda: zigzag_join(  # noqa: E731
                zigzag_split(x, world=world, cu_seqlens=lengths), world=world, cu_seqlens=lengths
            )
            call()
            with world.record() as recording:
                joined = call()
            for end in (5, 12, 0, 7):
                x.copy_(drawn(12, 2, seed=end))
                lengths[1] = end
                joined.zero_()
                recording.replay()
                assert torch.equal(joined, x)

    ranks(main, 3)


def test_what_does_not_fit(ranks):
    def main():
        with weft.init() as world, pytest.raises(weft.ShapeError, match="of m=9 it has"):
            zigzag_join(torch.ones(6, 2), world=world, m=9)

    ranks(main, 2)
