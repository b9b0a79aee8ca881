"""Experts whose inner columns are spread: as an ordinary mixture, forward and backward."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from ordinary import HIDDEN, Listed, MoE
from parallel import check, close, drawn, seeded
from torch import nn
from transformers import DeepseekV3Config, Qwen2MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

import weft
from weft.layers import ParallelMoE


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "make", "shape", "split"),
    [(2, MoE, (2, 3, HIDDEN), True), (2, MoE, (2, 3, HIDDEN), False),
     (3, partial(MoE, norm=False), (7, HIDDEN), True), (2, MoE, (1, HIDDEN), True),
     (3, MoE, (0, HIDDEN), True)],
)  # fmt: skip
def test_as_the_ordinary_module(ranks, num_ranks, make, shape, split):
    check(ranks, num_ranks, make, ParallelMoE.from_module, shape, split)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "num_ranks", "make", "shape", "split"),
    [("gather", 2, MoE, (2, 3, HIDDEN), True), ("gather", 4, MoE, (2, 3, HIDDEN), False),
     ("gather", 2, partial(MoE, norm=False), (7, HIDDEN), True),
     ("gather", 4, MoE, (1, HIDDEN), True), ("gather", 2, MoE, (0, HIDDEN), True),
     ("dispatch", 2, MoE, (7, HIDDEN), True), ("dispatch", 4, MoE, (2, 3, HIDDEN), False),
     ("dispatch", 2, MoE, (0, HIDDEN), True), ("dispatch by choice", 2, MoE, (7, HIDDEN), True)],
)  # fmt: skip
def test_of_whole_experts_as_the_ordinary_module(ranks, strategy, num_ranks, make, shape, split):
    style = partial(ParallelMoE.from_module, strategy=strategy)
    check(ranks, num_ranks, make, style, shape, split)


def deepseek_v3(groups: int = 4, taken: int = 2) -> nn.Module:
    """transformers' own: sigmoids, a bias for the choice, groups of experts, one that all share."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": 6, "num_experts_per_tok": 3}
    config = DeepseekV3Config(
        **sizes, n_routed_experts=8, n_shared_experts=2, n_group=groups, topk_group=taken,
        routed_scaling_factor=2.5, norm_topk_prob=True,
    )  # fmt: skip
    config._experts_implementation = "eager"
    made = DeepseekV3MoE(config)
    made.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 8)[torch.randperm(8)])
    return made


def qwen2_moe() -> nn.Module:
    """transformers' own: an expert that all share, behind a gate."""
    sizes = {"hidden_size": HIDDEN, "moe_intermediate_size": 6, "num_experts_per_tok": 2}
    config = Qwen2MoeConfig(**sizes, num_experts=4, shared_expert_intermediate_size=12)
    config._experts_implementation = "eager"
    return Qwen2MoeSparseMoeBlock(config)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "make", "shape", "split"),
    [(2, deepseek_v3, (2, 5, HIDDEN), True), (3, deepseek_v3, (7, HIDDEN), False),
     (2, partial(deepseek_v3, 1, 1), (9, HIDDEN), False), (2, qwen2_moe, (2, 5, HIDDEN), True)],
)  # fmt: skip
def test_as_transformers_routes_and_shares(ranks, num_ranks, make, shape, split):
    check(ranks, num_ranks, make, ParallelMoE.from_module, shape, split)


def test_experts_may_be_a_list_of_modules(ranks):
    def main():
        with weft.init() as world:
            ordinary, x = seeded(partial(MoE, Listed)), drawn(5, HIDDEN)
            layer = ParallelMoE.from_module(copy.deepcopy(ordinary), world)
            close(layer(x), ordinary(x))
            (layer(x).sum(), ordinary(x).sum())[0].backward()
            assert layer.gate["weight"].grad.abs().sum() > 0

    ranks(main, 2)


def test_mistakes_say_values_place_and_remedy(ranks):
    def main():
        with weft.init() as world:
            with pytest.raises(weft.ShapeError, match="ParallelMoE: inner=6 over 4 ranks"):
                ParallelMoE.from_module(MoE(), world)
            with pytest.raises(weft.ShapeError, match="ParallelMoE: experts=6 over 4 ranks"):
                ParallelMoE.from_module(MoE(experts=6), world, strategy="gather")
            with pytest.raises(
                weft.UsageError, match="strategy='all'; it must be one of 'columns'"
            ):
                ParallelMoE.from_module(MoE(), world, strategy="all")
            with pytest.raises(weft.UsageError, match="Linear has none of gate, router"):
                ParallelMoE.from_module(nn.Linear(2, 2), world)
            other = MoE()
            other.gate.bias = nn.Parameter(torch.zeros(4))
            with pytest.raises(weft.UnsupportedError, match="MoE has bias, which"):
                ParallelMoE.from_module(other, world)

    ranks(main, 4)
