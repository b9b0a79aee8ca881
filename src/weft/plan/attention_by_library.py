"""Attention to one block of keys after another by the library's kernels, forward and backward.

Of one sequence, without lengths on the device, what a rank's queries see of a block is one of

    causal in order   own keys, causal; those of ranks before, all; of ranks behind, none
    causal zigzag     own keys, causal; of ranks before, all queries their first part; of ranks
                      behind, queries of the second part all keys
    else              all

which kernels of one causal or whole product do: cuDNN's where torch may use it, FlashAttention-2
else. Both give the log of the sum of weights, by which results merge; for gradients the latter
takes that of all blocks. On other devices plain torch does the same.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.base.errors import UnsupportedError
from weft.compiler import attending
from weft.plan.sequence_shards import Shards
from weft.tiles.attention import padded_head
from weft.tiles.attention_blocks import merge_block

ROWS_AT_ONCE = 32
# Of NVIDIA's GPUs, from which cuDNN's attention is the faster one.
CUDNN_FROM = (9, 0)


class Seen(NamedTuple):
    """Queries from `first` on see the block's first `keys`; or as many as they are, causal."""

    first: int
    keys: int
    causal: bool


def seen_of(shards: Shards, rank: int, source: int, causal: bool) -> Seen | None:
    """What a rank's queries see of a source's keys, of one sequence of all tokens."""
    keys = shards.rows(source)
    if not causal or source == rank:
        return Seen(0, keys, causal)
    if not shards.zigzag:
        return Seen(0, keys, False) if source < rank else None
    if source < rank:
        return Seen(0, (keys + 1) // 2, False)
    return Seen((shards.rows(rank) + 1) // 2, keys, False)


class LibraryAttention:
    """As weft.plan.attention_blocks.BlockAttention, which says what calls do."""

    def __init__(
        self, q: Tensor, kv_heads: int, shards: Shards, *, rank: int, causal: bool,
        scale: float | None, target: Any,
    ) -> None:  # fmt: skip
        self.q, self.shards, self.rank, self.causal = q, shards, rank, causal
        self.scale = q.shape[-1] ** -0.5 if scale is None else scale
        self.library = library_for(q)
        self.seen: Seen | None = None
        self._found: tuple[Tensor, Tensor] | None = None

    def see(self, source: int) -> None:
        seen = seen_of(self.shards, self.rank, source, self.causal)
        is_empty = seen is None or not seen.keys or seen.first >= self.q.shape[0]
        self.seen = None if is_empty else seen

    def attend(
        self, k: Tensor, v: Tensor, mean: Tensor | None, lse: Tensor, out: Tensor, *,
        is_first: bool, is_last: bool,
    ) -> None:  # fmt: skip
        if self.seen is not None:
            first, keys, causal = self.seen
            found, log = self.library.attend(self.q[first:], k[:keys], v[:keys], self.scale, causal)
            if is_first:
                (out if mean is None else mean).copy_(found)
                lse.copy_(log.t())
            else:
                merge(mean[first:], lse[first:], found, log)  # pyright: ignore
        if is_last and mean is not None:
            out.copy_(mean)

    def given(self, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor) -> tuple:
        return k, v, out, dout, lse

    def queries(self, given: tuple, dq: Tensor, *, adds: bool) -> None:
        """And what is found of keys meanwhile, which `keys` adds."""
        if self.seen is None:
            self._found = None
            return
        (first, keys, causal), (k, v, out, dout, lse) = self.seen, given
        found, *self._found = self.library.gradients(
            dout[first:], self.q[first:], k[:keys], v[:keys], out[first:], lse[first:], self.scale,
            causal,
        )  # fmt: skip
        _put(dq[first:], found, adds)

    def keys(self, given: tuple, dk: Tensor, dv: Tensor, *, adds: bool) -> None:
        if self._found is not None:
            for to, found in zip((dk, dv), self._found, strict=True):
                _put(to[: found.shape[0]], found, adds)
            self._found = None


def _put(to: Tensor, found: Tensor, adds: bool) -> None:
    if adds:
        to += found
    else:
        to.copy_(found)


def merge(mean: Tensor, lse: Tensor, found: Tensor, log: Tensor) -> None:
    """mean, lse  <-  those of both. fp32; found: as mean, log: [q_heads, tokens]"""
    tokens, heads, d = mean.shape
    merge_block[(ceil(tokens * heads / ROWS_AT_ONCE),)](
        mean, lse, found.contiguous(), log, log.stride(0), log.stride(1), tokens, heads, d,
        ROWS_AT_ONCE, padded_head(d), num_warps=4,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Libraries: (out, log of the sum of weights [q_heads, tokens]), and (dq, dk, dv)


def library_for(q: Tensor) -> Any:
    """Raises  UnsupportedError: heads or a dtype that the library does not take"""
    if not q.is_cuda:
        return Torch
    if q.dtype.itemsize != 2 or q.shape[-1] % 8:
        raise UnsupportedError(
            f"the library's attention takes 16 bits and d in multiples of 8, not {q.dtype} and "
            f"d={q.shape[-1]}; leave local= away"
        )
    is_new = torch.version.hip is None and torch.cuda.get_device_capability() >= CUDNN_FROM
    may = torch.backends.cuda.cudnn_sdp_enabled()
    return CuDNN if is_new and may and q.shape[-1] <= 128 else Flash


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[tokens, heads, d] as [1, heads, tokens, d], where they lie."""
    return [one.transpose(0, 1)[None] for one in tensors]


class Flash:
    """torch's FlashAttention-2."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple:
        out, log, *_ = torch.ops.aten._flash_attention_forward(
            q[None], k[None], v[None], None, None, q.shape[0], k.shape[0], 0.0, causal, False,
            scale=scale,
        )  # fmt: skip
        return out[0], log.view(q.shape[1], q.shape[0])

    @staticmethod
    def gradients(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
        causal: bool,
    ) -> tuple:  # fmt: skip
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        found = torch.ops.aten._flash_attention_backward(
            dout[None], q[None], k[None], v[None], out[None], lse.t().contiguous()[None], None,
            None, q.shape[0], k.shape[0], 0.0, causal, seed, seed, scale=scale,
        )  # fmt: skip
        return tuple(one[0] for one in found)


class CuDNN(Flash):
    """torch's cuDNN attention; gradients are FlashAttention-2's.

    cuDNN's take half as long, and were right by themselves (1 x H100). Within the ring, and behind
    gathered keys, they were wrong on 2 x H200 from 16,384 tokens of a rank on: not understood.
    """

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple:
        out, log, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            *_heads_first(q, k, v), None, True, 0.0, causal, False, scale=scale
        )
        return out[0].transpose(0, 1), log.view(q.shape[1], q.shape[0])


class Torch:
    """Plain torch, in fp32."""

    @staticmethod
    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple:
        mean, log = attending.weigh(q, k, v, attending.seen(q, k, causal), scale)
        return mean.to(q.dtype), log.t()

    @staticmethod
    def gradients(
        dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float,
        causal: bool,
    ) -> tuple:  # fmt: skip
        kv_heads = k.shape[1]
        log = lse.t().unflatten(0, (kv_heads, -1))[..., None]
        share = (attending.scores(q, k, attending.seen(q, k, causal), scale) - log).exp()
        slope, grouped = (one.float().unflatten(1, (kv_heads, -1)) for one in (dout, q))
        dv = torch.einsum("hgij,ihgd->jhd", share, slope)
        delta = (dout.float() * out.float()).sum(-1).t().unflatten(0, (kv_heads, -1))[..., None]
        back = share * (torch.einsum("ihgd,jhd->hgij", slope, v.float()) - delta) * scale
        dq = torch.einsum("hgij,jhd->ihgd", back, k.float()).flatten(1, 2)
        return dq, torch.einsum("hgij,ihgd->jhd", back, grouped), dv
