"""Launches of attention to one block of keys after another, forward and backward, on one rank."""

from __future__ import annotations

from math import ceil
from typing import Any

import torch
from torch import Tensor

from weft.base.target import Target
from weft.plan.sequence_shards import Shards, most_rows
from weft.tiles import attention, attention_blocking
from weft.tiles.attention_backward import Given, Where, attention_gradients
from weft.tiles.attention_blocks import attend_block, list_visible

LISTED_AT_ONCE = 1024


def list_all_visible(
    shards: Shards, lo: Tensor, hi: Tensor, *, rank: int, hop: int, rows: int, causal: bool
) -> None:
    """What queries see of the blocks of rank - hop, - hop - 1, .. : int32 [blocks, own tokens]. Of
    a block the rows, plus `rows` times its rank."""
    (hops, tokens), columns = lo.shape, shards.table.shape[2]
    if tokens:
        list_visible[(ceil(tokens / LISTED_AT_ONCE), hops)](
            shards.table, lo, hi, rank, hop, rows, tokens, columns, columns.bit_length(),
            shards.num_ranks, causal, LISTED_AT_ONCE, num_warps=4,
        )  # fmt: skip


class BlockAttention:
    """A rank's queries, which meet keys of one rank after the other.

        blocks.see(source)                   by which the next two go
        blocks.attend(k, v, ..)              the state with this block
        blocks.queries(..); blocks.keys(..)  gradients of this block

    Shapes  q: [own tokens, q_heads, d]; k, v: [tokens of the source or more, kv_heads, d]; lse:
            fp32 [own tokens, q_heads]. All contiguous
    """

    def __init__(
        self, q: Tensor, kv_heads: int, shards: Shards, *, rank: int, causal: bool,
        scale: float | None, target: Target,
    ) -> None:  # fmt: skip
        self.q, self.kv_heads, self.shards, self.rank = q, kv_heads, shards, rank
        self.causal, self.target = causal, target
        self.tokens, self.q_heads, self.d = q.shape
        self.source = rank
        self.shape = attention.Shape.of(self.tokens, self.q_heads, kv_heads, self.d, scale)
        self.lo, self.hi = q.new_empty(2, self.tokens, dtype=torch.int32)

    @property
    def num_keys(self) -> int:
        """In the block that is seen."""
        return self.shards.rows(self.source)

    def see(self, source: int) -> None:
        """The next block is this rank's."""
        self.source = source
        hop = (self.rank - source) % self.shards.num_ranks
        lo, hi = self.lo[None], self.hi[None]
        list_all_visible(self.shards, lo, hi, rank=self.rank, hop=hop, rows=0, causal=self.causal)

    def attend(
        self, k: Tensor, v: Tensor, mean: Tensor | None, lse: Tensor, out: Tensor, *,
        is_first: bool, is_last: bool,
    ) -> None:  # fmt: skip
        """mean: fp32, as q, what has come of the blocks before; with the last it goes to `out`."""
        if not self.tokens:
            return
        cut = attention_blocking.forward(self.d, self.q.dtype.itemsize, self.target)
        group = self.q_heads // self.kv_heads
        # Where tokens fill no tile, heads do.
        pack = group if self.tokens < cut.m and group <= cut.m else 1
        tile = attention.Tile.of(cut.m, cut.n, d=self.d, pack=pack)
        grid = (ceil(self.tokens / tile.tokens) * (self.q_heads // pack),)
        attend_block[grid](
            self.q, k, v, mean, lse, out, self.lo, self.hi, self.num_keys, self.shape,
            tile.as_constexpr(), is_first, is_last, **cut.options,
        )  # fmt: skip

    def given(self, k: Tensor, v: Tensor, out: Tensor, dout: Tensor, lse: Tensor) -> Given:
        """What gradients go by; of all blocks together are out and lse."""
        delta = torch.empty_like(lse)
        return Given(self.q, k, v, out, dout, lse, delta, self.lo, self.hi)

    def queries(self, given: Given, dq: Tensor, *, adds: bool, dlse: Tensor | None = None) -> None:
        """dq of this block, or (`adds`) to what is there of others. dlse: as lse, if it has one"""
        self._gradients(given, dlse, dq, None, None, adds=adds)

    def keys(self, given: Given, dk: Tensor, dv: Tensor, *, adds: bool) -> None:
        """dk and dv of this block, likewise, behind `queries` of it."""
        self._gradients(given, None, None, dk, dv, adds=adds)

    def _gradients(self, given: Given, dlse: Any, dq: Any, dk: Any, dv: Any, *, adds: bool) -> None:
        of_keys = dq is None
        where = Where(0, self.num_keys, 0, 1, self.tokens.bit_length())
        cut = attention_blocking.backward(
            self.d, self.q.dtype.itemsize, self.target, of_keys=of_keys
        )
        units = ceil(self.tokens / cut.m) * self.q_heads
        if of_keys:
            units = ceil(self.num_keys / cut.n) * self.kv_heads
        if units:
            tile = attention.Tile.of(cut.m, cut.n, d=self.d).as_constexpr()
            attention_gradients[(units,)](
                given, dlse, dq, dk, dv, None, self.shape, where, tile, of_keys, False, True,
                adds, **cut.options,
            )  # fmt: skip


def gradients(
    blocks: BlockAttention, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor,
    dlse: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, and dk and dv of all ranks' keys, of which each rank's begin at its number times the most
    that one has. Shapes as weft.plan.attention_launches.gradients has them"""
    shards = blocks.shards
    most = most_rows(shards.m, shards.num_ranks)
    # Behind ranks that have less, zeros.
    make = torch.zeros_like if shards.m % shards.num_ranks else torch.empty_like
    dk, dv = make(k), make(v)
    total = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    dout, dlse = dout.contiguous(), None if dlse is None else dlse.contiguous()
    for hop in range(shards.num_ranks):
        source = (blocks.rank - hop) % shards.num_ranks
        there = slice(source * most, (source + 1) * most)
        blocks.see(source)
        given = blocks.given(k[there], v[there], out, dout, lse)
        blocks.queries(given, total, adds=hop > 0, dlse=dlse)
        blocks.keys(given, dk[there], dv[there], adds=False)
    return total.to(out.dtype), dk, dv
