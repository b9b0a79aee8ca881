"""Keys and values of own heads, kept between calls: contiguous, or in pages.

A pass of a model appends to every layer's, and ends with `advance`. How many tokens a sequence has
is on the device, so that a decode step can be recorded once and replayed for every token. `Ragged`
is a pass of sequences that have different numbers of new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from weft.base.errors import CapacityError, ShapeError
from weft.ops import flash_decode
from weft.runtime import init
from weft.runtime.world import World

HEAP_BYTES = 64 << 20  # of a world of one rank, whose only calls are flash_decode's


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Any, scale: float) -> Tensor:
    """q [batch, heads, tokens, d] over k, v [batch, kv_heads, keys, d]; causal without a mask."""
    is_causal = mask is None and q.shape[2] > 1
    if is_causal and q.shape[2] != k.shape[2]:
        raise ShapeError(
            f"attention: {q.shape[2]} tokens over {k.shape[2]} keys without a mask; pass mask=, "
            "which says what each token sees"
        )
    return functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=True
    )


def _last_of(q: Tensor, keys: int) -> Any:
    """A mask: q's tokens are the last of so many, each of which sees those before it."""
    tokens = q.shape[2]
    if q.is_cuda:  # by name, as fused kernels take no mask of booleans
        return causal_lower_right(tokens, keys)
    return torch.ones(tokens, keys, dtype=torch.bool, device=q.device).tril(keys - tokens)


def alone(world: World) -> World:
    """A world of this rank alone, by whose kernels it attends over its own cache. Collective."""
    if world.num_ranks == 1:
        return world
    own = [world.backend.seats.global_ranks[world.rank]]
    group = torch.distributed.new_group(own, use_local_synchronization=True)
    return init(group, name=f"{world.name}, alone", heap_bytes=HEAP_BYTES)


class Cache:
    """`length` keys and values of each of `batch` sequences, in every layer.

    alone: a world of this rank alone; with it, steps of one token are flash_decode's, which reads
    the keys that are there. Without it torch's own attention reads all of the cache.

    Shapes  keys, values: [layers, batch, length, kv_heads, head_dim], kv_heads a rank's own;
            lengths: int32[batch], the tokens that each sequence has
    Sync    stream-ordered; can be recorded, but for the first tokens after `reset`, and replayed
            with `advance` in the recording
    """

    def __init__(
        self, layers: int, batch: int, length: int, kv_heads: int, head_dim: int, *,
        device: torch.device | str, dtype: torch.dtype, alone: World | None = None,
    ) -> None:  # fmt: skip
        rows = self._rows(batch, length)
        self.keys, self.values = (
            torch.zeros(layers, *rows, kv_heads, head_dim, device=device, dtype=dtype)
            for _ in range(2)
        )
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.length, self.most, self.is_empty, self.alone = length, 0, True, alone
        if alone is not None and alone.num_ranks != 1:
            raise ShapeError(
                f"cache: alone is a world of {alone.num_ranks} ranks; its keys are this rank's "
                "own: pass weft.layers.alone(world)"
            )

    def positions(self, tokens: int) -> Tensor:
        """[batch, tokens]: where the next tokens of each sequence stand.

        Raises  CapacityError: there is no room for them
        """
        if self.most + tokens > self.length:
            raise CapacityError(
                f"cache: {tokens} more tokens behind {self.most} in a cache of {self.length}; make "
                "it longer, or reset() it for other sequences"
            )
        return self.lengths[:, None].long() + torch.arange(tokens, device=self.lengths.device)

    def advance(self, tokens: int) -> None:
        """`tokens` more of each sequence are in every layer."""
        self.lengths += tokens
        self.most, self.is_empty = self.most + tokens, False

    def reset(self) -> None:
        """Other sequences come."""
        self.lengths.zero_()
        self.most, self.is_empty = 0, True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float) -> Tensor:
        """Append k and v, [batch, kv_heads, tokens, d], and attend over all that are there."""
        at = self.positions(q.shape[2])
        for kept, new in ((self.keys, k), (self.values, v)):
            kept[layer][self._places(at)] = new.transpose(1, 2).to(kept.dtype)
        if self.is_empty:  # first tokens see each other alone
            return attend(q, k, v, None, scale)
        return self._attend_kept(q, layer, self.lengths + q.shape[2], self._table(), scale)

    def _attend_kept(
        self, q: Tensor, layer: int, lengths: Tensor, table: Tensor | None, scale: float
    ) -> Tensor:
        """Attend over what is kept of sequences that have `lengths` tokens, of which q's are the
        last, in pages `table`."""
        keys, values = self.keys[layer], self.values[layer]
        if self.alone is not None and q.shape[2] == 1:
            found = flash_decode(
                q[:, :, 0].contiguous(), keys, values, lengths, world=self.alone, scale=scale,
                block_table=table,
            )  # fmt: skip
            return found[:, :, None]
        k, v = self._kept(keys, table), self._kept(values, table)
        own = torch.arange(1 - q.shape[2], 1, device=lengths.device)
        at = lengths[:, None, None, None] + own[:, None]
        seen = torch.arange(k.shape[2], device=lengths.device) < at
        return attend(q, k, v, seen, scale)

    def _rows(self, batch: int, length: int) -> tuple[int, ...]:
        """The sizes of a layer's keys before their heads."""
        return batch, length

    def _places(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Where tokens stand in a layer's keys."""
        return torch.arange(at.shape[0], device=at.device)[:, None], at

    def _table(self) -> Tensor | None:
        """flash_decode's."""
        return None

    def _kept(self, rows: Tensor, table: Tensor | None) -> Tensor:
        """[batch, kv_heads, length, d] of a layer."""
        return rows.transpose(1, 2)


class PagedCache(Cache):
    """The same in pages of `page` tokens; `table` says which each sequence has.

    pages: how many there are, by default as many as `batch` full sequences need

    Shapes  keys, values: [layers, pages, page, kv_heads, head_dim]; table: int32[batch, length /
            page], a caller's to fill: before tokens come, it must name pages for them
    """

    def __init__(
        self, layers: int, batch: int, length: int, kv_heads: int, head_dim: int, *, page: int,
        pages: int | None = None, **rest: Any,
    ) -> None:  # fmt: skip
        if length % page:
            raise ShapeError(f"cache: length={length} is no multiple of page={page}; round it up")
        self.page, self.pages = page, batch * length // page if pages is None else pages
        super().__init__(layers, batch, length, kv_heads, head_dim, **rest)
        width = length // page
        table = torch.arange(batch * width, dtype=torch.int32, device=self.lengths.device)
        self.table = table.remainder(max(self.pages, 1)).view(batch, width)

    def _rows(self, batch: int, length: int) -> tuple[int, ...]:
        return self.pages, self.page

    def _places(self, at: Tensor) -> tuple[Tensor, Tensor]:
        return self.table.gather(1, at // self.page).long(), at % self.page

    def _table(self) -> Tensor | None:
        return self.table

    def _kept(self, rows: Tensor, table: Tensor | None) -> Tensor:
        assert table is not None
        return rows[table.long()].flatten(1, 2).transpose(1, 2)


@dataclass(frozen=True)
class Chunk:
    """Tokens of a sequence at `rows` of a `Ragged` pass, the last of its `keys` tokens in `pages`,
    int64 on the device; the first ones need no pages."""

    rows: slice
    keys: int
    pages: Tensor | None


class Ragged:
    """What a pass of several sequences keeps in a paged cache, and sees of it.

    Their tokens stand one after the other in a batch of one: first those of sequences that have one
    new token each, then chunks of prompts.

    Shapes  places: int64[tokens], where each stands in a layer's pages: page * size of a page + its
            row there; lengths, table: int32[sequences], int32[sequences, pages], of those with one
            new token, which lengths count
    Sync    stream-ordered; without chunks it can be recorded, and replayed with other numbers in
            these tensors
    """

    def __init__(
        self, cache: PagedCache, places: Tensor, lengths: Tensor, table: Tensor,
        chunks: Sequence[Chunk] = (),
    ) -> None:  # fmt: skip
        self.cache, self.places, self.chunks = cache, places, chunks
        self.lengths, self.table = lengths, table

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, scale: float) -> Tensor:
        """Append k and v, [1, kv_heads, tokens, d]; each sequence attends over its own."""
        cache = self.cache
        for kept, new in ((cache.keys, k), (cache.values, v)):
            kept[layer].flatten(0, 1)[self.places] = new[0].transpose(0, 1).to(kept.dtype)
        found = []
        if ones := self.lengths.shape[0]:
            each = q[:, :, :ones].transpose(0, 2)
            y = cache._attend_kept(each, layer, self.lengths, self.table, scale)
            found.append(y.transpose(0, 2))
        for one in self.chunks:
            new = [part[:, :, one.rows] for part in (q, k, v)]
            mask = None
            if one.pages is not None:
                new[1:] = (
                    kept[layer][one.pages].flatten(0, 1)[None, : one.keys].transpose(1, 2)
                    for kept in (cache.keys, cache.values)
                )
                mask = _last_of(new[0], one.keys)
            found.append(attend(*new, mask, scale))
        return torch.cat(found, 2)
