"""Relays: rows and sums on several nodes, in pieces, by the channels of move.py.

Each shard, or sum, crosses from node to node once, between two partners (weft.tiles.nodes).
`relay_chunks` does so beside a product, by chunks of rows of which a plan's channel says the words.
Signals are SET to the call's epoch e; pieces without rows are signalled too, so that whoever waits
need not know the sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import mapping, slots
from weft.tiles import move, nodes, reduce
from weft.tiles.hooks import partition

# ---------------------------------------------------------------------------------------------
# Rows to all ranks


@triton.jit
def give(world, gathered, word, e, x, piece, to, block: tl.constexpr):
    """Own piece -> the slot of rank `to`, and the word that says so."""
    move.send(world, gathered + piece.first, x + piece.offset, piece.size, to, block)
    wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def give_far(world, gathered, word, e, x, piece, block: tl.constexpr):
    """Own piece -> one partner on each other node."""
    rank = wl.rank(world)
    for hop in range(1, world.num_ranks):
        to = (rank + hop) % world.num_ranks
        if not wl.is_near(world, to):
            if nodes.is_partner(world, to, rank):
                give(world, gathered, word, e, x, piece, to, block)


@triton.jit
def give_near(world, gathered, word, e, x, piece, block: tl.constexpr):
    """Own piece -> the other ranks of this node."""
    rank = wl.rank(world)
    for hop in range(1, world.num_ranks):
        to = (rank + hop) % world.num_ranks
        if wl.is_near(world, to):
            give(world, gathered, word, e, x, piece, to, block)


@triton.jit
def pass_on(world, gathered, word, e, piece, block: tl.constexpr):
    """A far rank's piece -> the other ranks of this node, once it is in this rank's slot."""
    rows, rank = gathered + piece.first, wl.rank(world)
    wl.wait(word, e, world=world)  # pairs with give
    for hop in range(1, world.num_ranks):
        to = (rank + hop) % world.num_ranks
        if wl.is_near(world, to):
            move.send(world, rows, rows, piece.size, to, block)
            wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def relay_rows(x, out, gathered, rows_ready, slot, shards, world, block: tl.constexpr,
               vec: tl.constexpr):  # fmt: skip
    """Own piece -> near ranks, and one partner on each other node, which passes it on. rows_ready:
    int64[num_ranks * channels], by the source"""
    rank, e = wl.rank(world), move.begin(world, slot)
    own, word = move.own_piece(x, shards, rank, vec), move.signal_of(rows_ready, rank)
    # Far ranks first: their links are the slowest, and their partners pass it on.
    give_far(world, gathered, word, e, x, own, block)
    give_near(world, gathered, word, e, x, own, block)
    move.copy(out + own.first, x + own.offset, own.size, block)
    for hop in range(1, world.num_ranks):
        source = (rank + world.num_ranks - hop) % world.num_ranks
        if not wl.is_near(world, source):
            if nodes.is_partner(world, rank, source):
                piece = move.own_piece(x, shards, source, vec)
                pass_on(world, gathered, move.signal_of(rows_ready, source), e, piece, block)
    for hop in range(1, world.num_ranks):
        source = (rank + world.num_ranks - hop) % world.num_ranks
        piece = move.own_piece(x, shards, source, vec)
        wl.wait(move.signal_of(rows_ready, source), e, world=world)  # pairs with give and pass_on
        move.copy(out + piece.first, gathered + piece.first, piece.size, block)
    move.end(world, slot, e)


@triton.jit
def _chunk_of(index, chunk, split, columns):
    """The `Piece` of shard `index` that is its chunk; split: a StaticMapping of rows."""
    first, end = mapping.rows_of_rank(index, split)
    begin = min(first + chunk * split.chunk_rows, end)
    size = (min(begin + split.chunk_rows, end) - begin).to(tl.int64) * columns
    begin = begin.to(tl.int64) * columns
    return move.Piece(begin, begin - first.to(tl.int64) * columns, size)


@triton.jit
def relay_chunks(x, gathered, rows_ready, slot, split, columns, takes, world, tile_rows,
                 block: tl.constexpr):  # fmt: skip
    """The same beside a product of tiles of `tile_rows`, which waits for chunks. rows_ready:
    int64[num_ranks * split.chunks], by the source; all programs must be resident"""
    rank, e = wl.rank(world).to(tl.int32), slots.slot_epoch(slot)
    if takes:
        slots.slot_wait_free(world, slot, e)
    for chunk in range(tl.program_id(0), split.chunks, tl.num_programs(0)):
        own, word = _chunk_of(rank, chunk, split, columns), rows_ready + rank * split.chunks + chunk
        size = own.size
        if split.rank_rows % tile_rows == 0:  # no tile straddles ranks: own rows are read in place
            size *= 0
        # By this word the product knows that all programs here have begun, so read the epoch.
        # weft: equivalent-mutant narrow of notify: this rank's own product alone waits for it
        give(world, gathered, word, e, x, move.Piece(own.first, own.offset, size), rank, block)
        # Every other program begins with near ranks: so both kinds of links are in use.
        for turn in range(2):
            if (tl.program_id(0) + turn) % 2 == 0:
                give_far(world, gathered, word, e, x, own, block)
            else:
                give_near(world, gathered, word, e, x, own, block)
    for chunk in range(tl.program_id(0), split.chunks, tl.num_programs(0)):
        for hop in range(1, world.num_ranks):
            source = (rank + world.num_ranks - hop) % world.num_ranks
            if not wl.is_near(world, source):
                if nodes.is_partner(world, rank, source):
                    piece = _chunk_of(source, chunk, split, columns)
                    word = rows_ready + source * split.chunks + chunk
                    pass_on(world, gathered, word, e, piece, block)


# ---------------------------------------------------------------------------------------------
# Sums to the ranks of their shards


class Groups(NamedTuple):
    """Where a relay finds parts: group `node of d * per_node + seat of d // ranks of own node`
    holds the parts of shard d, `largest` of them, one for each seat. Rank d's own has its node's
    first group."""

    num_nodes: Any
    largest: Any
    per_node: Any


def groups_among(nodes: Sequence[int]) -> Groups:
    """For nodes of so many ranks."""
    return Groups(len(nodes), max(nodes), ceil(max(nodes) / min(nodes)))


class Sent(NamedTuple):
    """Arguments of `_emit_send`."""

    partial: Any
    to: Any
    world: Any


@triton.jit
def _emit_send(i, total, mask, args):
    """The sum so far, in fp32, to another rank. args: Sent"""
    wl.put(args.world, args.partial + i, total, to=args.to, mask=mask)


@triton.jit
def parts_of(groups):
    """How many parts a relay has room for."""
    return groups.num_nodes * groups.per_node * groups.largest


@triton.jit
def place_of(world, shard, rank, groups):
    """Which of them is that of `rank`, where its partner on this node relays shard `shard`."""
    return group_of(world, shard, groups) + nodes.seat_of(world, rank, wl.node(world))


@triton.jit
def group_of(world, shard, groups):
    """The first part of shard `shard` in the slot of the rank that relays it here."""
    node, here = nodes.node_of(world, shard), wl.node(world)
    seat = nodes.seat_of(world, shard, node) // nodes.node_size(world, here)
    return (node * groups.per_node + tl.where(node == here, 0, seat)) * groups.largest


@triton.jit
def _await_group(world, parts_ready, e, first, seat, size):
    """Until this channel's piece of every other rank of the node has come."""
    for other in range(size):
        if other != seat:
            wl.wait(move.signal_of(parts_ready, first + other), e, world=world)  # with relay_sums


class NodeParts(NamedTuple):
    """Arguments of `_load_node`: parts of own node's ranks, sums of other nodes."""

    partials: Any
    stride: Any
    node: Any
    size: Any
    near: Any


@triton.jit
def _load_node(index, i, mask, args):
    """The sum of a node, own node's from its parts. args: NodeParts"""
    if index == args.node:
        value = reduce.add(args.size, reduce.load_part, args.near, i, mask)
    else:
        value = tl.load(args.partials + args.stride * index + i, mask=mask, other=0.0)
    return value


@triton.jit
def relay_sums(x, out, parts, partials, parts_ready, partials_ready, slot, shards, groups, world,
               block: tl.constexpr, vec: tl.constexpr):  # fmt: skip
    """A node's parts of shard d are summed by the partner of d there, the nodes' sums by d. parts
    and parts_ready by `Groups`; partials: fp32[num_nodes, shard]; partials_ready by the node"""
    rank, node, e = wl.rank(world), wl.node(world), move.begin(world, slot)
    seat, size = nodes.seat_of(world, rank, node), nodes.node_size(world, node)
    stride = tl.cast(shards.shard, tl.int64) // vec * vec
    for hop in range(1, world.num_ranks):
        shard = (rank + hop) % world.num_ranks
        to = nodes.partner_of(world, shard, node)
        if to != rank:
            place = group_of(world, shard, groups) + seat
            piece = move.own_piece(x, shards, shard, vec)
            received = parts + stride * place + piece.offset
            move.send(world, received, x + piece.first, piece.size, to, block)
            word = move.signal_of(parts_ready, place)
            wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)
    for hop in range(1, world.num_ranks):
        shard = (rank + hop) % world.num_ranks
        if not wl.is_near(world, shard):
            if nodes.partner_of(world, shard, node) == rank:
                first = group_of(world, shard, groups)
                piece = move.own_piece(x, shards, shard, vec)
                _await_group(world, parts_ready, e, first, seat, size)
                received = parts + stride * first + piece.offset
                partial = partials + stride * node + piece.offset
                reduce.reduce(
                    piece.size, size,
                    reduce.load_part, reduce.Parts(x + piece.first, received, stride, seat),
                    _emit_send, Sent(partial, shard, world), block,
                )  # fmt: skip
                word = move.signal_of(partials_ready, node)
                wl.notify(world, word, e, to=shard, op=wl.SignalOp.SET)
    own = move.own_piece(x, shards, rank, vec)
    first = group_of(world, rank, groups)
    _await_group(world, parts_ready, e, first, seat, size)
    for other in range(groups.num_nodes):
        if other != node:
            wl.wait(move.signal_of(partials_ready, other), e, world=world)
    near = reduce.Parts(x + own.first, parts + stride * first + own.offset, stride, seat)
    reduce.reduce(
        own.size, groups.num_nodes,
        _load_node, NodeParts(partials + own.offset, stride, node, size, near),
        reduce.emit_store, reduce.Stored(out + own.offset), block,
    )  # fmt: skip
    move.end(world, slot, e)


@triton.jit
def _sum_tile(world, relayed, partials, at, parts, first, size, shard, block_m: tl.constexpr,
              block_n: tl.constexpr):  # fmt: skip
    """The sum of a node's parts of a tile -> its owner's partials, this rank's part of them."""
    n = min(parts.n, (at.i_n + 1) * parts.tile_n)
    stride = tl.cast(parts.n, tl.int64) * parts.rows
    received = relayed + stride * first
    there = partials + stride * wl.rank(world)
    for row in range(0, parts.tile_m, block_m):
        rows = row + tl.arange(0, block_m)[:, None]
        for column in range(at.i_n * parts.tile_n, n, block_n):
            columns = column + tl.arange(0, block_n)[None, :]
            mask = (rows < parts.tile_m) & (at.row + rows < at.end) & (columns < n)
            i = (at.row + rows).to(tl.int64) * parts.n + columns
            # No part is this rank's elsewhere: its own product has brought its own one, too.
            total = reduce.add(size, reduce.load_part, reduce.Parts(received, received, stride, -1),
                               i, mask)  # fmt: skip
            wl.put(world, there + i, total.to(partials.dtype.element_ty), to=shard, mask=mask)


@triton.jit
def relay_tiles(relayed, partials, relayed_ready, partials_ready, slot, parts, groups, world,
                block_m: tl.constexpr, block_n: tl.constexpr):  # fmt: skip
    """Sums of this node's shares of other nodes' tiles, beside the kernel that makes them. Words:
    those of tiles (partition.signal_of); relayed_ready by `place_of`, partials_ready by the rank
    that has sent. Who gives a share has credits of all ranks, so none are waited for. All programs
    must be resident, and no more than a rank has own tiles"""
    rank, e = wl.rank(world).to(tl.int32), slots.slot_epoch(slot)
    node, tiles = wl.node(world), parts.tiles_m * parts.num_n
    size, num_ranks = nodes.node_size(world, node), world.num_ranks
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        at = partition.Owned(tile // parts.num_n, tile % parts.num_n, rank, 0, 0)
        for part in range(parts.words):
            # By this word the product knows that this program has read the epoch.
            word = partition.signal_of(partials_ready, at, part, rank, num_ranks, parts)
            # weft: equivalent-mutant narrow of notify: this rank's own product waits for it
            wl.notify(world, word, e, to=rank, op=wl.SignalOp.SET)
    for hop in range(1, num_ranks):
        shard = (rank + hop) % num_ranks
        if not wl.is_near(world, shard):
            if nodes.partner_of(world, shard, node) == rank:
                first = group_of(world, shard, groups)
                end = min(max(parts.m - shard * parts.rows, 0), parts.rows)
                for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
                    i_m = tile // parts.num_n
                    at = partition.Owned(i_m, tile % parts.num_n, shard, i_m * parts.tile_m, end)
                    for part in range(parts.words):
                        for other in range(size):
                            word = partition.signal_of(
                                relayed_ready, at, part, first + other, parts_of(groups), parts
                            )
                            wl.wait(word, e, world=world)  # pairs with hooks.relayed.notify_partner
                    _sum_tile(world, relayed, partials, at, parts, first, size, shard, block_m,
                              block_n)  # fmt: skip
                    for part in range(parts.words):
                        word = partition.signal_of(partials_ready, at, part, rank, num_ranks, parts)
                        wl.notify(world, word, e, to=shard, op=wl.SignalOp.SET)
