"""Ulysses attention: as attention of all tokens in one process, forward and backward."""

from __future__ import annotations

import pytest
import torch
from parallel import close, drawn, seeded
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import weft
from weft.layers import UlyssesAttention, rotary, ulysses_attention
from weft.layers.attention import rotated
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


class Ordinary(nn.Module):
    """As checkpoints have it."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, bias: bool, norms: bool) -> None:
        super().__init__()
        self.head_dim, self.scaling = D, 0.3
        self.q_proj = nn.Linear(hidden, heads * D, bias=bias)
        self.k_proj = nn.Linear(hidden, kv_heads * D, bias=bias)
        self.v_proj = nn.Linear(hidden, kv_heads * D, bias=bias)
        self.o_proj = nn.Linear(heads * D, hidden, bias=bias)
        if norms:
            self.q_norm, self.k_norm = nn.RMSNorm(D), nn.RMSNorm(D)

    def forward(self, x, turns, causal):
        q, k, v = (one(x).unflatten(-1, (-1, D)) for one in (self.q_proj, self.k_proj, self.v_proj))
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = (one[:, None] for one in turns)
        q, k = (rotated(one.transpose(1, 2), cos, sin).transpose(1, 2) for one in (q, k))
        return self.o_proj(alone(q, k, v, causal, self.scaling).flatten(-2))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "batch", "tokens", "heads", "kv_heads", "causal", "bias"),
    [(2, 3, 5, 4, 4, True, False), (2, 1, 4, 4, 1, False, True), (3, 2, 3, 6, 3, True, True),
     (4, 1, 2, 8, 2, True, False), (1, 2, 7, 2, 1, True, True)],
)  # fmt: skip
def test_with_projections(ranks, num_ranks, batch, tokens, heads, kv_heads, causal, bias):
    """Forward, gradients of all that every rank has, names, and without gradients: twice, since a
    weight by ranks is kept then, and behind a step of descent."""
    hidden, whole = 20, num_ranks * tokens
    ordinary = seeded(lambda: Ordinary(hidden, heads, kv_heads, bias, norms=num_ranks == 3))
    x, gradient = drawn(batch, whole, hidden, seed=1), drawn(batch, whole, hidden, seed=2)
    turns = rotary(torch.arange(whole)[None], D)
    wanted = ordinary(x.requires_grad_(), turns, causal)
    (wanted * gradient).sum().backward()
    named = {name: one.grad for name, one in ordinary.named_parameters()}

    def main():
        with weft.init() as world:

            def own(one):
                return one.narrow(1, world.rank * tokens, tokens).contiguous()

            layer = UlyssesAttention.from_module(ordinary, world, causal=causal)
            assert layer.state_dict().keys() == ordinary.state_dict().keys()
            mine = own(x.detach()).requires_grad_()
            got = layer(mine, turns)
            close(got, own(wanted.detach()), "forward")
            (got * own(gradient)).sum().backward()
            close(mine.grad, own(x.grad), "x")
            for kind in ("weight", "bias") if bias else ("weight",):
                parts = [named[f"{one}_proj.{kind}"] for one in "qkv"]
                close(getattr(layer.qkv, kind).grad, torch.cat(parts), kind)
                close(getattr(layer.out, kind).grad, named[f"o_proj.{kind}"], f"out {kind}")
            with torch.no_grad():
                for _ in range(2):
                    close(layer(mine, turns), own(wanted.detach()), "without gradients")
                layer.qkv.weight.zero_()
                layer.out.weight.mul_(2)
                if not bias:
                    assert not layer(mine, turns).any()

    ranks(main, num_ranks)


def test_projections_are_recorded(ranks):
    ordinary = seeded(lambda: Ordinary(20, 4, 2, bias=False, norms=False))
    x, turns = drawn(1, 10, 20), rotary(torch.arange(10)[None], D)

    def main():
        with weft.init() as world, torch.no_grad():
            layer = UlyssesAttention.from_module(ordinary, world)
            mine = x[:, 5 * world.rank :][:, :5].contiguous()
            eager = layer(mine, turns)
            with world.record() as recording:
                recorded = layer(mine, turns)
            recording.replay()
            assert torch.equal(eager, recorded)
            close(recorded, ordinary(x, turns, True)[:, 5 * world.rank :][:, :5], "replayed")

    ranks(main, 2)


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
            with pytest.raises(weft.ShapeError, match="UlyssesAttention on 2 ranks: 5 heads do"):
                UlyssesAttention(8, 5, 5, D, world)

    ranks(main, 2)
