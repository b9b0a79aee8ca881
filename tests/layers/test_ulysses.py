"""Ulysses attention: as attention of all tokens in one process, forward and backward."""

from __future__ import annotations

import pytest
import torch
from parallel import close, drawn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from weft.layers import ulysses_attention
from weft.layers.ulysses import kernels

D = 4


def alone(q, k, v, causal, scale):
    """Of all tokens, [.., tokens, heads, d]."""
    q, k, v = (one.transpose(-3, -2) for one in (q, k, v))
    made = functional.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=scale, enable_gqa=True
    )
    return made.transpose(-3, -2)


@pytest.mark.parametrize(
    ("num_ranks", "batch", "tokens", "heads", "kv_heads", "causal"),
    [(2, (), 5, 4, 4, True), (2, (3,), 4, 4, 1, False), (3, (2,), 3, 6, 3, True),
     (4, (), 2, 8, 2, True), (1, (), 7, 2, 1, True)],
)  # fmt: skip
def test_as_one_process(ranks, num_ranks, batch, tokens, heads, kv_heads, causal):
    whole = num_ranks * tokens
    given = [drawn(*batch, whole, n, D, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads))]
    weights = drawn(*batch, whole, heads, D, seed=9)
    leaves = [one.clone().requires_grad_() for one in given]
    wanted = alone(*leaves, causal, 0.3)
    (wanted * weights).sum().backward()

    def main():
        with weft.init() as world:

            def own(one):
                return one.narrow(-3, world.rank * tokens, tokens)

            mine = [own(one).clone().requires_grad_() for one in given]
            got = ulysses_attention(*mine, world=world, causal=causal, scale=0.3)
            close(got, own(wanted.detach()), "forward")
            (got * own(weights)).sum().backward()
            for name, one, leaf in zip("qkv", mine, leaves, strict=True):
                close(one.grad, own(leaf.grad), name)

    ranks(main, num_ranks)


def test_cudnn_is_tried_first_of_what_the_user_allows():
    every = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION,
             SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]  # fmt: skip
    assert kernels() == every
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
        assert kernels() == [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    assert kernels() == every


def test_what_does_not_fit(ranks):
    def main():
        with weft.init() as world:

            def q(heads, dtype=torch.float32):
                return torch.ones(3, heads, D, dtype=dtype)

            with pytest.raises(weft.ShapeError, match="5 heads do not divide by the ranks"):
                ulysses_attention(q(5), q(5), q(5), world=world)
            with pytest.raises(weft.ShapeError, match="3 kv_heads must divide 4 heads"):
                ulysses_attention(q(4), q(3), q(3), world=world)
            with pytest.raises(weft.ShapeError, match="alike but for the heads of k and v"):
                ulysses_attention(q(4), q(4), q(2), world=world)
            with pytest.raises(weft.ShapeError, match=r"they must be \[.., tokens, heads, d\]"):
                ulysses_attention(torch.ones(3, D), q(4), q(4), world=world)
            with pytest.raises(weft.DtypeError, match="have torch.float32, torch.float16"):
                ulysses_attention(q(4), q(4, torch.float16), q(4), world=world)

    ranks(main, 2)
