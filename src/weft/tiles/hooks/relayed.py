"""Tiles of other nodes' rows go by a partner on this node, who adds up the node's shares of them.

    push_near      `emit`: a near rank's tile -> its `partials`
    push_partner   `emit`: a far rank's tile -> `relayed` of its partner here, maybe this rank
    add_relayed    `combine`: near ranks' shares of an own tile, and other nodes' sums of it

A node's sum comes from the partner there, by whose rank it lies and is announced, as a share does.

Units  relayed: [parts of a relay, rows, n], by `relay.Groups`; its words have as many to a tile
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import fragments, nodes, relay
from weft.tiles.hooks import partition, scatter, signals


@triton.jit
def push_near(partials, parts, at, cells, fragment, rank, world):
    """A near rank's tile -> its partials, this rank's part of them."""
    if wl.is_near(world, at.owner):
        scatter.push(partials, parts, at, cells, fragment, rank, world)


@triton.jit
def push_partner(relayed, parts, groups, at, cells, fragment, rank, world):
    """A far rank's tile -> its part of the partner's `relayed`, this rank's seat of it."""
    if not wl.is_near(world, at.owner):
        value = fragments.in_registers(fragment)
        offset, mask = partition.offsets(at, cells, value, parts)
        place = relay.place_of(world, at.owner, rank, groups)
        there = relayed + partition.place_of(place, at, parts) + offset
        to = nodes.partner_of(world, at.owner, wl.node(world))
        wl.put(world, there, value.to(relayed.dtype.element_ty), to=to, mask=mask)


@triton.jit
def notify_near(
    words, parts, at, part, e, rank, world, num_ranks: tl.constexpr, order: tl.constexpr,
    scope: tl.constexpr,
):  # fmt: skip
    """A tile's owner, if it is near, when its stores there are complete."""
    if wl.is_near(world, at.owner):
        signals.notify_owner(words, parts, at, part, e, rank, world, num_ranks, order, scope)


@triton.jit
def notify_partner(
    words, parts, groups, at, part, e, rank, world, order: tl.constexpr, scope: tl.constexpr
):
    """The partner of a far tile's owner, when its stores there are complete."""
    if not wl.is_near(world, at.owner):
        first, end = partition.signals_of(part, parts)
        to = nodes.partner_of(world, at.owner, wl.node(world))
        place = relay.place_of(world, at.owner, rank, groups)
        for each in range(first, end):
            word = partition.signal_of(words, at, each, place, relay.parts_of(groups), parts)
            wl.notify(world, word, e, to=to, op="set", order=order, scope=scope)


@triton.jit
def _gives(world, source, rank):
    """Does `source` send a share, or its node's sum, of the tiles of `rank`?"""
    return wl.is_near(world, source) | nodes.is_partner(world, source, rank)


@triton.jit
def wait_relayed(
    words, parts, at, cells, value, e, rank, world, num_ranks: tl.constexpr,
    order: tl.constexpr, scope: tl.constexpr,
):  # fmt: skip
    """Until all shares and sums of an own tile are here; and, by the word of this rank itself, the
    relay here has begun, so has read the epoch."""
    if cells.starts:
        first, end = partition.signals_of_rows(cells, value, parts)
        for part in range(first, end):
            for hop in range(num_ranks):
                source = (rank + hop) % num_ranks
                if _gives(world, source, rank):
                    word = partition.signal_of(words, at, part, source, num_ranks, parts)
                    wl.wait(word, e, order=order, scope=scope, world=world)


@triton.jit
def add_relayed(partials, parts, at, cells, value, rank, world, num_ranks: tl.constexpr):
    """value + near ranks' shares of this own tile, and other nodes' sums of it."""
    n = fragments.aligned(parts.n)
    offset, mask = partition.offsets(at, cells, value, parts)
    for hop in range(1, num_ranks):
        source = (rank + hop) % num_ranks
        if _gives(world, source, rank):
            rows = partials + (source.to(tl.int64) * parts.rows + at.row) * n
            value += tl.load(rows + offset, mask=mask, other=0.0).to(tl.float32)
    return value
