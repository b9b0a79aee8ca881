"""Attention of tokens that are split over the ranks: each attends with some heads to all of them.

    own tokens, all heads  ->  all tokens, own heads    one all-to-all of q, k and v
    softmax(q k^T * scale) v                            each rank by itself
    all tokens, own heads  ->  own tokens, all heads    one all-to-all

What a rank sends and gets is its tokens' q, k, v and results, however many ranks there are; by
gathered keys (weft.ops.ag_attention) it gets those of all other ranks.

Source  DeepSpeed Ulysses (Jacobs et al. 2023, 2309.14509)
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.base.errors import DtypeError, ShapeError
from weft.ops import all_to_all
from weft.runtime.world import World


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, *, world: World, causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q k^T * scale) v of all ranks' tokens, of which this rank gets those of its own.
    Collective; differentiable.

    A token's position is its place among those of all ranks, in their order. With fewer kv_heads
    than ranks, ranks whose heads share one are sent it each.

    Shapes  q: [.., own tokens, heads, d]; k, v: [.., own tokens, kv_heads, d], with equally many
            tokens on every rank; the result as q
    Dtypes  all alike, what torch's scaled_dot_product_attention takes; on NVIDIA's GPUs by cuDNN
            where it can, of the kernels that torch may use: torch.nn.attention.sdpa_kernel says so
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError: heads that ranks do not divide, kv_heads that heads or ranks do not go with;
            DtypeError
    """
    ranks = world.num_ranks
    _check(q, k, v, ranks)
    (*batch, tokens, heads, d), kv_heads = q.shape, k.shape[-2]
    each_q, each_kv = heads // ranks, max(1, kv_heads // ranks)
    parts = [one.reshape(-1, tokens, one.shape[-2], d) for one in (q, k, v)]
    if kv_heads < ranks:
        parts[1:] = [one.repeat_interleave(ranks // kv_heads, 2) for one in parts[1:]]
    parts = [one.unflatten(2, (ranks, -1)) for one in parts]
    # [ranks, batch * own tokens, heads of q, k and v there]
    sent = torch.cat([one.flatten(-2).permute(2, 0, 1, 3) for one in parts], -1)
    got = all_to_all(sent.flatten(0, 2).contiguous(), world=world)
    # [batch, heads, all tokens, d]
    whole = got.view(ranks, -1, tokens, got.shape[-1]).transpose(0, 1).flatten(1, 2)
    own = whole.unflatten(-1, (-1, d)).transpose(1, 2)
    own_q, own_k, own_v = own.split([each_q, each_kv, each_kv], 1)
    with _cudnn_first(q):
        made = functional.scaled_dot_product_attention(
            own_q, own_k, own_v, is_causal=causal, scale=scale, enable_gqa=True
        )
    back = made.transpose(1, 2).unflatten(1, (ranks, tokens)).transpose(0, 1)
    back = all_to_all(back.flatten(3).flatten(0, 2).contiguous(), world=world)
    mine = back.view(ranks, -1, tokens, each_q, d).permute(1, 2, 0, 3, 4)
    return mine.reshape(*batch, tokens, heads, d)


def _cudnn_first(q: Tensor) -> Any:
    """cuDNN's kernel is the first of those that the user lets torch choose from."""
    if not q.is_cuda or torch.version.hip is not None or torch.compiler.is_compiling():
        return nullcontext()
    return sdpa_kernel(kernels(), set_priority=True)


def kernels() -> list[SDPBackend]:
    """Of torch's attention, those that may be used now, in the order in which they are tried."""
    may = {
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    return [one for one, is_on in may.items() if is_on]


def _check(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> None:
    alike = q.dim() >= 3 and k.shape == v.shape
    if not alike or (*q.shape[:-2], q.shape[-1]) != (*k.shape[:-2], k.shape[-1]):
        wrong = "they must be [.., tokens, heads, d], alike but for the heads of k and v"
        raise ShapeError(f"{_said(q, k, v, ranks)}; {wrong}")
    if not (q.dtype == k.dtype == v.dtype):
        wrong = f"have {q.dtype}, {k.dtype}, {v.dtype}; they must be alike"
        raise DtypeError(f"{_said(q, k, v, ranks)} {wrong}")
    heads, kv_heads = q.shape[-2], k.shape[-2]
    if heads % ranks:
        wrong = f"{heads} heads do not divide by the ranks"
        raise ShapeError(f"{_said(q, k, v, ranks)}: {wrong}")
    if kv_heads == 0 or heads % kv_heads or (kv_heads % ranks and ranks % kv_heads):
        wrong = f"{kv_heads} kv_heads must divide {heads} heads, and the ranks, or be divided by"
        raise ShapeError(f"{_said(q, k, v, ranks)}: {wrong} them")


def _said(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> str:
    """A call in an error's words."""
    shapes = ", ".join(f"{name} {tuple(one.shape)}" for name, one in (("q", q), ("k", k), ("v", v)))
    return f"ulysses_attention: {shapes} on {ranks} ranks"
