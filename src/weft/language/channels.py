"""Channels, on the device: tiles of a buffer that every rank has, and signals that announce them.

Computation and communication each choose their own tiles; the channel's mapping joins them
(weft.language.mapping). Plain `@triton.jit` on top of the primitives, the same for every target;
the host side is weft.runtime.channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from weft.language.addressing import at, rank
from weft.language.mapping import f_channel, f_count, f_shape
from weft.language.one_sided import put
from weft.language.signals import notify, notify_all, wait


class ChannelArg(NamedTuple):
    """A channel as a kernel sees it, in the producer's or in the consumer's view of its tiles."""

    data: Any  # symmetric [rows, cols]
    cols: Any
    ready: Any  # symmetric int64, one word per channel: how many tiles have come, ever
    base: Any  # local int64, one per channel: those of earlier rounds
    peers: Any  # symmetric int64 [tiles, num_ranks]: the last round that a peer is done with
    free: Any  # symmetric int64, one word per rank: the last round that it has ended; or None
    epoch: Any  # local int64 word: rounds that are over
    parts: Any  # tl.constexpr: how often each tile is announced, e.g. once per column tile
    mapping: Any


@triton.jit
def tile_pointers(channel, i, column, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr):
    """Where tile i from `column` lies here, and which elements of it exist.

    Shapes  pointers and mask: [TILE_ROWS, TILE_COLS]
    """
    first, end = f_shape(i, channel.mapping)
    rows = first + tl.arange(0, TILE_ROWS)
    cols = column + tl.arange(0, TILE_COLS)
    pointers = channel.data + rows.to(tl.int64)[:, None] * channel.cols + cols[None, :]
    return pointers, (rows < end)[:, None] & (cols < channel.cols)[None, :]


@triton.jit
def tile_push(world, channel, i, column, values, to):
    """Write `values`, tile i from `column` on, into the channel's buffer on rank `to`.

        data[f_shape(i), column : column + width]@to  <-  values

    Shapes  values: [at least f_shape's rows, width]; what is outside is not written
    Sync    none: announce it with tile_notify
    Source  TileLink tile_push_data
    """
    pointers, inside = tile_pointers(channel, i, column, values.shape[0], values.shape[1])
    put(world, pointers, values.to(channel.data.dtype.element_ty), to=to, mask=inside)


@triton.jit
def tile_pull(world, channel, i, column, source, TILE_ROWS: tl.constexpr, TILE_COLS: tl.constexpr):
    """Tile i from `column` on, as near rank `source` has it; zeros outside.

        result  =  data[f_shape(i), column : column + TILE_COLS]@source

    Sync    `source` has said that it is there: peer_tile_wait, or a barrier
    Raises  FarPointerError: source is in another scale-up domain (emulator)
    Source  TileLink tile_pull_data
    """
    pointers, inside = tile_pointers(channel, i, column, TILE_ROWS, TILE_COLS)
    return tl.load(at(world, pointers, source), mask=inside, other=0.0)


@triton.jit
def tile_notify(world, channel, i, to):
    """Announce to rank `to` that tile i has been written there.

        for c in f_channel(i):   ready[c]@to  <-  ready[c]@to + 1

    Sync    releases, as notify; call it `parts` times per tile
    Source  TileLink producer_tile_notify
    """
    first, count = f_channel(i, channel.mapping)
    for c in range(first, first + count):
        notify(world, channel.ready + c, to=to)


@triton.jit
def tile_wait(world, channel, i):
    """Wait until every row of tile i has come.

        for c in f_channel(i):   wait  ready[c] >= base[c] + f_count(c) * parts

    Sync    pairs with tile_notify, or with the host's rank_notify; bounded
    Source  TileLink consumer_tile_wait
    """
    first, count = f_channel(i, channel.mapping)
    for c in range(first, first + count):
        expected = tl.load(channel.base + c) + f_count(c, channel.mapping) * channel.parts
        wait(channel.ready + c, at_least=expected, world=world)


@triton.jit
def peer_tile_notify(world, channel, i, to):
    """Tell rank `to` that this rank is done with tile i in this round: made it, or read it.

        peers[i, own rank]@to  <-  epoch + 1

    Sync    releases, as notify
    Source  TileLink peer_tile_notify
    """
    e = tl.load(channel.epoch) + 1
    notify(world, channel.peers + i * world.num_ranks + rank(world), e, to=to, op="set")


@triton.jit
def peer_tile_wait(world, channel, i, peer):
    """Wait until rank `peer` has said in this round that it is done with tile i.

        wait  peers[i, peer] >= epoch + 1

    Sync    pairs with peer_tile_notify; bounded
    Source  TileLink peer_tile_wait
    """
    e = tl.load(channel.epoch) + 1
    wait(channel.peers + i * world.num_ranks + peer, at_least=e, world=world)


@triton.jit
def channel_wait_free(world, channel, to):
    """Wait until rank `to` has ended all earlier rounds: what it has read may be overwritten.

        wait  free[to] >= epoch

    Before the first tile_push of a round to `to`, and, where ranks pull, before one's own tiles
    are made anew, for each rank that pulls.

    Sync    pairs with the end of the round on `to` (channel_advance); bounded
    """
    tl.static_assert(channel.free is not None, "the channel was made without credits=True")
    wait(channel.free + to, at_least=tl.load(channel.epoch), world=world)


@triton.jit
def channel_advance(world, channel, first, count):
    """End a round for channels first .. first + count - 1; by one program, behind the others.

        base[c]  <-  base[c] + f_count(c) * parts;      epoch  <-  epoch + 1
        free[own rank]@p  <-  epoch                     for every rank p, if there are credits

    Sync    runs in a launch after all those of the round (`Channel.advance` on the host does).
            Credits tell all ranks that this one has read what it reads
    """
    for c in range(first, first + count):
        words = channel.base + c
        tl.store(words, tl.load(words) + f_count(c, channel.mapping) * channel.parts)
    e = tl.load(channel.epoch) + 1
    tl.store(channel.epoch, e)
    if channel.free is not None:
        notify_all(world, channel.free + rank(world), e, op="set")
