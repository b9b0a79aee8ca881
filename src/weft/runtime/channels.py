"""Channels, on the host: a buffer that every rank has, signals per chunk, and what moves chunks.

    channel = world.channel("rows", (m, k), torch.bfloat16, chunks=4, push_rows=64)
    kernel[grid](world.arg, channel.produced(), ...)        wl.tile_push, wl.tile_notify
    kernel[grid](world.arg, channel.consumed(128), ...)     wl.tile_wait
    channel.advance()                                       this round is over

On streams, for copy engines: `rank_copy`, `rank_notify`, `rank_wait`. A round's data may be
overwritten when its readers have ended the round: with credits=True, kernels ask by
wl.channel_wait_free, streams by `rank_wait_free`; else a `world.barrier()` lies between rounds.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.errors import PeerError, ShapeError, UsageError
from weft.base.whole_numbers import extents_of, whole_number
from weft.language.channels import ChannelArg, channel_advance, channel_wait_free
from weft.language.mapping import (
    DynamicMapping,
    StaticMapping,
    as_python,
    f_count,
    rows_of_rank,
)
from weft.runtime.symmetric_memory import SymmetricMemory


@triton.jit
def announce_part(world, channel, first, count, to):
    """All tiles of these channels at once: a copy engine has moved them."""
    for c in range(first, first + count):
        wl.notify(world, channel.ready + c, f_count(c, channel.mapping) * channel.parts, to=to)


@triton.jit
def await_part(world, channel, first, count):
    """A stream waits for these channels; launched upstream of every grid that fills the device."""
    for c in range(first, first + count):
        expected = tl.load(channel.base + c) + f_count(c, channel.mapping) * channel.parts
        wl.wait(channel.ready + c, at_least=expected, world=world)


@triton.jit
def await_credit(world, channel, to):
    """A stream waits until rank `to` has ended all earlier rounds."""
    channel_wait_free(world, channel, to)


@triton.jit
def end_round(world, channel, first, count):
    channel_advance(world, channel, first, count)


class Channel:
    """One channel; made by `world.channel` on every rank with the same arguments."""

    def __init__(
        self,
        world: SymmetricMemory,
        name: str,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        chunks: int = 1,
        push_rows: int = 64,
        parts: int = 1,
        num_tiles: int = 0,
        credits: bool = False,
    ) -> None:
        shape = extents_of(f"channel {name!r}", shape)
        if len(shape) != 2:
            raise ShapeError(f"channel {name!r}: shape {tuple(shape)}; it is (rows, columns)")
        for what, value in (("chunks", chunks), ("push_rows", push_rows), ("parts", parts)):
            whole_number(f"channel {name!r}: {what}", value, at_least=1)
        whole_number(f"channel {name!r}: num_tiles", num_tiles)
        self.world: SymmetricMemory = world
        self.name: str = name
        self.rows: int = shape[0]
        self.cols: int = shape[1]
        self.parts: int = parts
        self.chunks: int = chunks
        self.push_rows: int = push_rows
        self.num_channels: int = world.num_ranks * chunks
        self._static = StaticMapping.of(
            self.rows, world.num_ranks, chunks=chunks, push_rows=push_rows
        )
        num_tiles = max(num_tiles, self._static.num_tiles, 1)
        self.data: torch.Tensor = world.empty(shape, dtype, name=f"{name}.data")
        self.ready: torch.Tensor = world.signals(
            self.num_channels, torch.int64, name=f"{name}.ready"
        )
        self.peers: torch.Tensor = world.signals(
            num_tiles * world.num_ranks, torch.int64, name=f"{name}.peers"
        )
        self.free: torch.Tensor | None = None
        if credits:
            self.free = world.signals(world.num_ranks, torch.int64, name=f"{name}.free")
        local = world.backend.local_words
        self.base: torch.Tensor = local([0] * self.num_channels, torch.int64, f"{name}.base")
        self.epoch: torch.Tensor = local([0], torch.int64, f"{name}.epoch")

    def produced(self) -> ChannelArg:
        """For kernels that make tiles: each rank's rows in tiles of `push_rows`."""
        return self._arg(self._static.as_constexpr())

    def consumed(self, tile_rows: int) -> ChannelArg:
        """For kernels that use tiles: all rows in tiles of `tile_rows`."""
        mapping = StaticMapping.of(
            self.rows,
            self.world.num_ranks,
            chunks=self.chunks,
            push_rows=self.push_rows,
            tile_rows=tile_rows,
        )
        return self._arg(mapping.as_constexpr())

    def tabled(
        self,
        first: torch.Tensor,
        end: torch.Tensor,
        rank: torch.Tensor,
        channel: torch.Tensor,
        count: torch.Tensor,
    ) -> ChannelArg:
        """For kernels whose tiles are in int32 tables that the device fills at run time."""
        return self._arg(DynamicMapping(first, end, rank, channel, count))

    def _arg(self, mapping) -> ChannelArg:
        return ChannelArg(
            self.data,
            self.cols,
            self.ready,
            self.base,
            self.peers,
            self.free,
            self.epoch,
            tl.constexpr(self.parts),
            mapping,
        )

    @property
    def tiles_per_rank(self) -> int:
        """Of the producer's view: rank r makes tiles r * tiles_per_rank and on."""
        return self._static.tiles_per_rank

    def rows_of(self, rank: int) -> slice:
        """The rows that are rank `rank`'s part, as torch.chunk splits them."""
        if not 0 <= rank < self.world.num_ranks:
            raise PeerError(
                f"channel {self.name!r}: rank {rank} is outside 0 .. {self.world.num_ranks - 1}"
            )
        return slice(*as_python(rows_of_rank)(rank, self._static))

    # ---- on the current stream

    def rank_copy(self, *, to: int) -> None:
        """Copy this rank's rows of `data` to near rank `to` by a copy engine; see rank_notify."""
        rows = self.rows_of(self.world.rank)
        if to != self.world.rank and rows.stop > rows.start:
            self.world.copy(self.world.peer(self.data, to)[rows], self.data[rows])

    def rank_notify(self, *, to: int) -> None:
        """Announce all of this rank's rows on rank `to`, behind what this stream did before."""
        self.rows_of(to)  # checks the rank
        first = self.world.rank * self.chunks
        arg = self.produced()
        announce_part[(1,)](self.world.arg, arg, first, self.chunks, to, num_warps=1)

    def rank_wait(self, rank: int) -> None:
        """Hold this stream until all of rank `rank`'s rows are here. Bounded."""
        self.rows_of(rank)
        first = rank * self.chunks
        await_part[(1,)](self.world.arg, self.produced(), first, self.chunks, num_warps=1)

    def rank_wait_free(self, *, to: int) -> None:
        """Hold this stream until rank `to` has ended all earlier rounds. Bounded."""
        self.rows_of(to)
        if self.free is None:
            raise UsageError(f"channel {self.name!r} has no credits; make it with credits=True")
        await_credit[(1,)](self.world.arg, self.produced(), to, num_warps=1)

    def advance(self, arg: ChannelArg | None = None) -> None:
        """End the round, behind this stream's work of the round; `arg` where tables count.

        Every rank announces every channel once per round, or the next round's waits are wrong.
        With credits it tells the others that this rank has read the round's data.
        """
        arg = arg or self.produced()
        end_round[(1,)](self.world.arg, arg, 0, self.num_channels, num_warps=1)
