"""Who relays between nodes: device functions on the world's table.

A shard crosses from one node to another once, between two *partners*; within a node it is shared
out among near ranks. The partner of rank r on node k is

    the rank of node k whose seat is   seat of r mod (ranks of node k)

so links are used evenly where nodes are alike, and every rank has one partner on every node where
they are not. Its partner on its own node is itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import world_layout as layout


@triton.jit
def node_of(world, peer):
    """The number of `peer`'s node."""
    return tl.load(world.table + layout.PEER_BASES + world.num_ranks + peer).to(tl.int32)


@triton.jit
def seat_of(world, peer, node):
    """How many ranks of `node` come before `peer`: the seat of a rank on its own node.

    Not the local rank, which counts ranks that are not in this world too.
    """
    # Word by word, all of them under way at once: Gluon would ask for the layout of a tensor.
    nodes, before = world.table + layout.PEER_BASES + world.num_ranks, 0
    for other in tl.static_range(world.num_ranks):
        before += (tl.load(nodes + other) == node).to(tl.int32) * (other < peer)
    return before


@triton.jit
def node_size(world, node):
    """How many ranks `node` has."""
    return seat_of(world, world.num_ranks, node)


@triton.jit
def partner_of(world, of, node):
    """The partner of rank `of` on `node`."""
    seat = seat_of(world, of, node_of(world, of)) % node_size(world, node)
    nodes, before, partner = world.table + layout.PEER_BASES + world.num_ranks, 0, 0
    for other in tl.static_range(world.num_ranks):
        is_on_node = (tl.load(nodes + other) == node).to(tl.int32)
        partner += other * is_on_node * (before == seat)
        before += is_on_node
    return partner


@triton.jit
def is_partner(world, peer, of):
    """Is `peer` the partner of rank `of` on its own node?"""
    return partner_of(world, of, node_of(world, peer)) == peer


@triton.jit
def num_nodes(world):
    """How many nodes there are, where each one's ranks lie one behind the other."""
    nodes = world.table + layout.PEER_BASES + world.num_ranks
    before, number = tl.load(nodes), 1
    for peer in tl.static_range(1, world.num_ranks):
        node = tl.load(nodes + peer)
        number += (node != before).to(tl.int32)
        before = node
    return number
