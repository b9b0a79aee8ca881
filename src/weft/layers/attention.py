"""Attention whose heads are spread over the ranks: one product for queries, keys and values.

    q, k, v = x @ (q, k, v)_proj^T        own heads, of all rows
    q, k    = rotated(norm(q)), rotated(norm(k))
    y       = softmax(q k^T * scale) v @ o_proj^T       summed over ranks

Each rank attends by itself, with the keys of its heads: a cache holds those alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from weft.base.errors import ShapeError
from weft.layers.activations import Activations
from weft.layers.cache import attend
from weft.layers.linear import ColumnParallelLinear, RowParallelLinear
from weft.layers.norm import ParallelNorm
from weft.layers.shards import check_divides, name_parts, one_of, seat_of
from weft.runtime.world import World

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
OUT = ("o_proj", "out_proj")

# cos and sin of each position, [batch or 1, tokens, head_dim].
Rotary = tuple[Tensor, Tensor]


def rotary(positions: Tensor, head_dim: int, base: float = 1e4) -> Rotary:
    """cos and sin of positions [.., tokens], as Llama has them: the same for both halves."""
    halves = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32)
    angle = positions[..., None].float() * base ** (-halves / head_dim)
    angle = torch.cat((angle, angle), -1)
    return angle.cos(), angle.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves of each head of x [batch, heads, tokens, head_dim], turned against each other."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class ParallelAttention(nn.Module):
    """Self-attention with heads spread over the ranks, grouped (GQA) or not. Collective.

    Where there are fewer kv_heads than ranks, ranks whose heads share one have it each.

    q_norm, k_norm: modules that norm each head. `layer`: which of a cache's layers this is.

    Shapes  x, the result: [batch, tokens, hidden], or [tokens, hidden] of one sequence, as
            activations lie
    Raises  ShapeError: ranks that do not divide heads, or kv_heads, nor are divided by these;
            kv_heads that do not divide heads
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, world: World, *,
        bias: bool = False, out_bias: bool = False, q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None, scale: float | None = None, layer: int = 0,
        out: str = OUT[0], activations: Activations | None = None, **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        if heads % kv_heads:
            raise ShapeError(
                f"{type(self).__name__}: heads={heads} over kv_heads={kv_heads}; each of these "
                "serves as many heads: heads must be a multiple of kv_heads"
            )
        name, n, (_, of) = type(self).__name__, world.num_ranks, seat_of(kv_heads, world)
        self.heads = check_divides(name, "heads", heads, world) if of < n else heads // n
        self.kv_heads = 1 if of < n else check_divides(name, "kv_heads", kv_heads, world)
        self.head_dim, self.layer = head_dim, layer
        self.scale = head_dim**-0.5 if scale is None else scale
        activations = activations or Activations(world)
        own = [one * head_dim for one in (self.heads, self.kv_heads, self.kv_heads)]
        self.qkv = ColumnParallelLinear(
            hidden, sum(own) * n, world, bias=bias, activations=activations, **options
        )
        self.qkv.copies = (own[0], seat_of(kv_heads, world)) if of < n else None
        self.out = RowParallelLinear(
            heads * head_dim, hidden, world, bias=out_bias, activations=activations, **options
        )
        self.q_norm, self.k_norm = (
            None if one is None else ParallelNorm(one, world) for one in (q_norm, k_norm)
        )
        name_parts(self, "qkv", dict(zip(PROJECTIONS, own, strict=True)))
        name_parts(self, "out", {out: hidden})

    @classmethod
    def from_module(
        cls, module: nn.Module, world: World, activations: Activations | None = None, **given: Any
    ) -> ParallelAttention:
        """Of a module with q_proj, k_proj, v_proj, o_proj and head_dim, and q_norm, k_norm, scaling
        and layer_idx if it has them; `given` are arguments of the constructor."""
        name = cls.__name__
        parts = [one_of(name, module, one) for one in PROJECTIONS]
        out = next((one for one in OUT if hasattr(module, one)), OUT[0])
        head_dim = given.pop("head_dim", None) or one_of(name, module, "head_dim")
        activations = activations or Activations(world)
        rows, hidden = parts[0].weight.shape
        norms = {one: getattr(module, one, None) for one in ("q_norm", "k_norm")}
        given = {
            **norms, "scale": getattr(module, "scaling", None),
            "layer": getattr(module, "layer_idx", 0), **given,
        }  # fmt: skip
        made = cls(
            hidden, rows // head_dim, parts[1].weight.shape[0] // head_dim, head_dim, world,
            out=out, activations=activations, device="meta", **given,
        )  # fmt: skip
        seats = [seat_of(one.weight.shape[0] // head_dim, world) for one in parts]
        copies = made.qkv.copies
        made.qkv = ColumnParallelLinear.from_modules(parts, world, activations, seats)
        made.qkv.copies = copies
        made.out = RowParallelLinear.from_module(one_of(name, module, *OUT), world, activations)
        return made

    def forward(
        self, x: Tensor, rotary: Rotary | None = None, *, cache: Any = None,
        mask: Tensor | None = None, attend: Callable[..., Tensor] = attend,
    ) -> Tensor:  # fmt: skip
        """Attend causally, or as `mask` says: [batch, 1, tokens, keys], of booleans or added.

        cache: what keys are kept in and attended from: a `Cache`, a `PagedCache`, or what has
        transformers' `update(k, v, layer)`
        """
        y = self.qkv(x)
        heads = (y if y.dim() > 2 else y[None]).unflatten(-1, (-1, self.head_dim))
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], 2)
        q = (q if self.q_norm is None else self.q_norm(q)).transpose(1, 2)
        k = (k if self.k_norm is None else self.k_norm(k)).transpose(1, 2)
        v = v.transpose(1, 2)
        if rotary is not None:
            cos, sin = (one.unsqueeze(-3).to(q.dtype) for one in rotary)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        if hasattr(cache, "attend"):
            found = cache.attend(q, k, v, self.layer, self.scale)
        else:
            if cache is not None:
                k, v = cache.update(k, v, self.layer)
            found = attend(q, k, v, mask, self.scale)
        return self.out(found.transpose(1, 2).reshape(*y.shape[:-1], self.heads * self.head_dim))
