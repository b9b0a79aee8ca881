"""The online softmax: parts in any cut give the whole; of nothing zeros; of NaN, NaN."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from weft.tiles import softmax


@triton.jit
def mean_of_parts(scores, values, out, lse, n, part: tl.constexpr):
    """Rows of 4 scores, values [n, 4]; every second part is finished first, and merged."""
    row = tl.arange(0, 4)
    state = softmax.begin(4, 4)
    for first in range(0, n, part):
        j = first + tl.arange(0, part)
        there = (j < n)[None, :]
        score = tl.load(scores + row[:, None] * n + j[None, :], mask=there, other=float("-inf"))
        value = tl.load(values + j[:, None] * 4 + row[None, :], mask=(j < n)[:, None], other=0.0)
        score *= softmax.LOG2_E
        if (first // part) % 2 == 0:
            state = softmax.absorb(state, score, value)
        else:
            other, log = softmax.finish(softmax.absorb(softmax.begin(4, 4), score, value))
            state = softmax.merge(state, other, log)
    mean, log = softmax.finish(state)
    tl.store(out + row[:, None] * 4 + row[None, :], mean)
    tl.store(lse + row, log)


def run(ranks, scores, values, part):
    def main():
        out, lse = torch.empty(4, 4), torch.empty(4)
        mean_of_parts[(1,)](scores, values, out, lse, scores.shape[1], part)
        return out, lse

    return ranks(main, 1)[0]


@pytest.mark.parametrize("part", [16, 32, 128])
def test_parts_give_the_whole(ranks, part):
    scores, values = 30 * torch.randn(4, 77), torch.randn(77, 4)
    scores[1, :39], scores[2, 21:], scores[3] = -torch.inf, -torch.inf, -torch.inf
    out, lse = run(ranks, scores, values, part)
    torch.testing.assert_close(out[:3], scores[:3].softmax(1) @ values, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse[:3], scores[:3].logsumexp(1), rtol=1e-6, atol=0)
    assert not out[3].any() and lse[3] == -torch.inf


def test_one_part_alone_is_merged_as_it_is(ranks):
    """Bit by bit: so a rank that has all keys gives what it would give alone."""
    scores, values = torch.randn(4, 16), torch.randn(16, 4)
    nothing = torch.full((4, 16), -torch.inf)
    alone = run(ranks, scores, values, 16)
    behind = run(ranks, torch.cat([nothing, scores], 1), torch.cat([values, values]), 16)
    assert torch.equal(alone[0], behind[0])
    torch.testing.assert_close(alone[1], behind[1], rtol=1e-6, atol=0)


def test_what_is_no_number_stays_none(ranks):
    scores, values = torch.randn(4, 22), torch.randn(22, 4)
    scores[0, 20], scores[1, 0], values[3, 2] = torch.nan, torch.nan, torch.nan
    out, lse = run(ranks, scores, values, 16)
    assert out[:2].isnan().all() and lse[:2].isnan().all()
    assert out[2:, 2].isnan().all() and not out[2:, [0, 1, 3]].isnan().any()
