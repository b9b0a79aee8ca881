"""Own rows go to all ranks: before a product, by those of its programs that have the fewest tiles,
or by kernels of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.language import mapping
from weft.tiles import fragments, hierarchy

# Elements that a program has under way at once.
FED = tl.constexpr(16384)


@triton.jit
def first_of(experts, program, num_programs):
    """A program's place among those that multiply: the ones that feed come last."""
    return (program + num_programs - experts.chunks) % num_programs


@triton.jit
def feed_all(
    x, gathered, experts, program, rank, shape, world, num_ranks: tl.constexpr, given,
    fed: tl.constexpr, launch,
):  # fmt: skip
    """Own tokens go to every rank, by the first programs; then `fed(to)`."""
    if program < experts.chunks:
        for hop in range(num_ranks):
            to = (rank + hop) % num_ranks
            feed(x, gathered, to, program, rank, shape.k, experts, world)
            fed(to, given, launch)


@triton.jit
def feed(x, gathered, to, channel, rank, k, experts, world):
    """Every channels-th block of own tokens -> where they belong among all of rank `to`'s."""
    k = fragments.aligned(k)
    own = tl.minimum(tl.maximum(experts.m - rank * experts.rows, 0), experts.rows)
    size = own.to(tl.int64) * k
    there = gathered + (rank * experts.rows).to(tl.int64) * k
    for start in range(channel * FED, size, experts.chunks * FED):
        i = start + fragments.line_index(FED)
        wl.put(world, there + i, x + i, to=to, mask=i < size)


@triton.jit
def store_piece(world, target, source, first, own_first, size, piece, pieces, to,
                block: tl.constexpr):  # fmt: skip
    """Store one of `pieces` of the `size` elements from `first` on in rank `to`'s target; `source`
    has them from `own_first` on."""
    length = tl.cdiv(tl.cdiv(size, pieces), 16) * 16
    there = first + piece * length
    here = source + (there - own_first)
    # All pieces may have more than int32 counts; one has not.
    end = min(size - piece * length, length).to(tl.int32)
    for start in range(0, end, block):
        i = start + fragments.line_index(block)
        wl.put(world, target + there + i, here + i, to=to, mask=i < end)


@triton.jit
def if_pusher(turns, program, num_programs, given, pusher: tl.constexpr, launch):
    """What communication CTAs do: the last programs, which have the fewest tiles, and those that
    are needed last."""
    if num_programs - 1 - program < turns.pushers:
        pusher(given, launch)


@triton.jit
def receiver(turn, rank, world, by_node: tl.constexpr):
    """To which rank own rows go turn-th: the one behind first, which needs them first, or `by_node`
    as weft.tiles.hierarchy says; last this one itself."""
    to = (rank + world.num_ranks - 1 - turn) % world.num_ranks
    if by_node:
        hop = (1 + turn) % world.num_ranks
        to = hierarchy.receiver(hop, rank, hierarchy.nodes_of(world))
    return to


@triton.jit
def push_own(
    a, gathered, counts, split, by_node: tl.constexpr, turns, block: tl.constexpr, program,
    num_programs, rank, shape, world, given, pushed: tl.constexpr, launch,
):  # fmt: skip
    """Own rows go to every rank, by communication CTAs: chunk by chunk, each by so many pieces; the
    CTA that stores the last piece of a chunk then calls pushed(to, chunk, given, launch).

    On this rank only tiles that straddle ranks read them. counts[to * chunks + chunk] counts
    pieces, and is 0 before and after.
    """
    own_first, own_end = mapping.rows_of_rank(rank, split)
    pieces = turns.pieces
    pieces_of_rank = split.chunks * pieces
    for unit in range(num_programs - 1 - program, world.num_ranks * pieces_of_rank, turns.pushers):
        to = receiver(unit // pieces_of_rank, rank, world, by_node)
        chunk = unit % pieces_of_rank // pieces
        first = min(own_first + chunk * split.chunk_rows, own_end)
        size = (min(first + split.chunk_rows, own_end) - first).to(tl.int64) * shape.k
        if to == rank:
            if world.num_ranks == 1 or split.rank_rows % split.tile_rows == 0:
                size *= 0  # none, of the same type
        store_piece(world, gathered, a, first.to(tl.int64) * shape.k,
                    own_first.to(tl.int64) * shape.k, size, unit % pieces, pieces, to,
                    block)  # fmt: skip
        counter = counts + to * split.chunks + chunk
        # weft: equivalent-mutant drop of complete_stores: no store of this kernel before it is
        # asynchronous; those of its result come later
        done = wl.atomic_add(counter, 1, order=wl.Order.ACQ_REL, scope=wl.Scope.DEVICE) + 1
        if done == pieces:
            tl.store(counter, 0)
            pushed(to, chunk, given, launch)
