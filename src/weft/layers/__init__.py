"""Layers: torch modules whose parameters are spread over the ranks, by weft's operators.

    mlp = weft.layers.ParallelMLP.from_module(model.mlp, world)
    model = weft.parallelize(model, world)

Each takes its shards from an ordinary module (`from_module`), plain or of DTensors, and computes
what that module does, forward and backward. `Activations` says how rows lie between layers.
"""

from __future__ import annotations

from weft.layers.activations import Activations, split_from
from weft.layers.attention import ParallelAttention, rotary
from weft.layers.cache import Cache, PagedCache, alone
from weft.layers.embedding import ParallelEmbedding
from weft.layers.linear import ColumnParallelLinear, RowParallelLinear
from weft.layers.lm_head import ParallelLMHead
from weft.layers.mlp import ParallelMLP
from weft.layers.moe import ParallelMoE
from weft.layers.norm import ParallelNorm
from weft.layers.pipeline import Pipeline
from weft.layers.ring import ring_attention
from weft.layers.stages import bubble
from weft.layers.ulysses import UlyssesAttention, ulysses_attention
from weft.layers.zigzag import zigzag_join, zigzag_positions, zigzag_split

__all__ = [
    "Activations",
    "Cache",
    "ColumnParallelLinear",
    "PagedCache",
    "ParallelAttention",
    "ParallelEmbedding",
    "ParallelLMHead",
    "ParallelMLP",
    "ParallelMoE",
    "ParallelNorm",
    "Pipeline",
    "RowParallelLinear",
    "UlyssesAttention",
    "alone",
    "bubble",
    "ring_attention",
    "rotary",
    "split_from",
    "ulysses_attention",
    "zigzag_join",
    "zigzag_positions",
    "zigzag_split",
]
