"""Tiles of other nodes' rows go by a partner on this node, who adds up the node's shares of them.

    push_near      `emit`: a near rank's tile -> its `partials`
    push_partner   `emit`: a far rank's tile -> `relayed` of its partner here, maybe this rank
    add_relayed    `combine`: near ranks' shares of an own tile, and other nodes' sums of it

A node's sum comes from the partner there, by whose rank it lies and is announced, as a share does.
All tiles are stored within the node, in either template: nothing is put.

Units  relayed: [parts of a relay, rows, n], by `relay.Groups`; its words have as many to a tile
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import fragments, nodes, relay
from weft.tiles.hooks import partition, reduce, signals


@triton.jit
def push_near(partials, parts, at, cells, fragment, rank, world):
    """A near rank's tile -> its partials, this rank's part of them."""
    if wl.is_near(world, at.owner):
        _store(partials, rank, at.owner, parts, at, cells, fragment, world)


@triton.jit
def _store(target, index, to, parts, at, cells, fragment, world):
    """A tile -> part `index` of `target` on rank `to`, which is near."""
    value = fragments.in_registers(fragment)
    offset, mask = partition.offsets(at, cells, value, parts)
    there = wl.at(world, target + partition.place_of(index, at, parts), to)
    tl.store(there + offset, value.to(target.dtype.element_ty), mask=mask)


@triton.jit
def push_partner(relayed, parts, groups, at, cells, fragment, rank, world):
    """A far rank's tile -> its part of the partner's `relayed`, this rank's seat of it."""
    if not wl.is_near(world, at.owner):
        place = relay.place_of(world, at.owner, rank, groups)
        to = nodes.partner_of(world, at.owner, wl.node(world))
        _store(relayed, place, to, parts, at, cells, fragment, world)


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
    gives = wl.is_near(world, source)
    if not gives:
        gives = nodes.is_partner(world, source, rank)
    return gives


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
    first = partials + at.row.to(tl.int64) * n
    i, j, mask = reduce.cells_of(at, cells, cells.column, value, n, parts)
    for hop in range(1, num_ranks):
        source = (rank + hop) % num_ranks
        if _gives(world, source, rank):
            value = reduce.add_share(value, first, source, i, j, mask, cells.column, n, parts)
    return value
