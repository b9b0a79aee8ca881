"""What orders ranks: waits, notifications, credits, the end of a call; and for whose tiles.

A wait or notify by rows and chunks takes `order` and `scope`, constants. In `begin`, `emit` and
`announce` several statements are for the same tiles: `if_own`, `if_other` and `own_or_other` run
them as one branch, `if_last` where a chunk is complete with this part of a tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.language import mapping, slots
from weft.tiles.hooks import partition, split_k, table

# ---------------------------------------------------------------------------------------------
# Whose tiles


@triton.jit
def if_own(at, rank, given, own: tl.constexpr, launch):
    if at.owner == rank:
        own(given, launch)


@triton.jit
def if_other(at, rank, given, other: tl.constexpr, launch):
    if at.owner != rank:
        other(given, launch)


@triton.jit
def own_or_other(at, rank, given, own: tl.constexpr, other: tl.constexpr, launch):
    if at.owner == rank:
        own(given, launch)
    else:
        other(given, launch)


@triton.jit
def other_or_own(at, rank, given, own: tl.constexpr, other: tl.constexpr, launch):
    if at.owner != rank:
        other(given, launch)
    else:
        own(given, launch)


@triton.jit
def sum_of_own(at, value, rank, given, own: tl.constexpr, launch):
    """`value` with what belongs to it, where the tile is an own one."""
    if at.owner == rank:
        value = own(given, launch)
    return value


@triton.jit
def if_last(counters, parts, at, part, rank, given, last: tl.constexpr, launch):
    """Another rank's tile is counted; with the last one of a chunk the chunk is complete."""
    if at.owner != rank:
        if partition.is_last_of_chunk(counters, at, part, parts):
            last(given, launch)


# ---------------------------------------------------------------------------------------------
# Waits


@triton.jit
def wait_rows(
    signals, split, at, e, world, unless_own: tl.constexpr, order: tl.constexpr, scope: tl.constexpr
):
    """Before a tile's rows are read: for the chunks that they are in."""
    if not unless_own or not at.is_own:
        word = mapping.channel_of_row(at.first, split)
        count = mapping.channel_of_row(at.end - 1, split) - word + 1
        wl.wait(signals + word, e, count, order=order, scope=scope, world=world)


@triton.jit
def wait_segment(
    signals, split, at, segment, turns, e, rank, world, num_ranks: tl.constexpr,
    unless_own: tl.constexpr, order: tl.constexpr, scope: tl.constexpr,
):  # fmt: skip
    """Before the rows of a segment are read that a tile sums over."""
    word = split_k.channel_of(at, segment, split, turns, rank, num_ranks)
    if not unless_own or word // split.chunks != rank:
        wl.wait(signals + word, e, order=order, scope=scope, world=world)


@triton.jit
def wait_tile(
    signals, parts, at, e, world, num_ranks: tl.constexpr, order: tl.constexpr, scope: tl.constexpr
):
    """Until the tile's owner has done it."""
    for part in range(parts.words):
        word = partition.signal_of(signals, at, part, at.owner, num_ranks, parts)
        wl.wait(word, e, order=order, scope=scope, world=world)


@triton.jit
def wait_sources(
    signals, experts, at, e, world, num_ranks: tl.constexpr, order: tl.constexpr,
    scope: tl.constexpr,
):  # fmt: skip
    """Until the ranks whose rows a tile has have sent theirs."""
    word = signals + at.lo * experts.chunks
    count = table.num_sources(at, num_ranks)
    wl.wait(word, e, count * experts.chunks, order=order, scope=scope, world=world)


@triton.jit
def wait_others(
    signals, parts, at, cells, value, e, rank, world, num_ranks: tl.constexpr,
    order: tl.constexpr, scope: tl.constexpr,
):  # fmt: skip
    """Until all other ranks have sent their shares of an own tile."""
    if cells.starts:
        first, end = partition.signals_of_rows(cells, value, parts)
        for part in range(first, end):
            for hop in range(1, num_ranks):
                source = (rank + hop) % num_ranks
                word = partition.signal_of(signals, at, part, source, num_ranks, parts)
                wl.wait(word, e, order=order, scope=scope, world=world)


@triton.jit
def wait_chunk(
    signals, parts, at, cells, e, rank, world, num_ranks: tl.constexpr, order: tl.constexpr,
    scope: tl.constexpr,
):  # fmt: skip
    """Until engines have brought all other ranks' shares of the chunk of an own tile."""
    if cells.starts:
        for hop in range(1, num_ranks):
            source = (rank + hop) % num_ranks
            word = signals + partition.chunk_of(at, source, parts)
            wl.wait(word, e, order=order, scope=scope, world=world)


@triton.jit
def wait_all(
    signals, by, e, program, num_programs, world, num_ranks: tl.constexpr, by_last: tl.constexpr,
    order: tl.constexpr, scope: tl.constexpr,
):  # fmt: skip
    """For every chunk of every rank; `by_last`, by the last program alone."""
    if not by_last or program == num_programs - 1:
        wl.wait(signals, e, by.chunks * num_ranks, order=order, scope=scope, world=world)


# ---------------------------------------------------------------------------------------------
# Notifications


@triton.jit
def notify_owner(
    signals, parts, at, part, e, rank, world, num_ranks: tl.constexpr, order: tl.constexpr,
    scope: tl.constexpr,
):  # fmt: skip
    """A tile's owner, when its stores there are complete."""
    first, end = partition.signals_of(part, parts)
    for each in range(first, end):
        word = partition.signal_of(signals, at, each, rank, num_ranks, parts)
        wl.notify(world, word, e, to=at.owner, op="set", order=order, scope=scope)


@triton.jit
def notify_all(
    signals, parts, at, part, e, rank, world, num_ranks: tl.constexpr, order: tl.constexpr,
    scope: tl.constexpr,
):  # fmt: skip
    """Every rank, when an own tile's stores are complete."""
    first, end = partition.signals_of(part, parts)
    for each in range(first, end):
        word = partition.signal_of(signals, at, each, rank, num_ranks, parts)
        wl.notify_all(world, word, e, op="set", order=order, scope=scope)


@triton.jit
def notify_fed(
    signals, experts, to, e, rank, program, world, order: tl.constexpr, scope: tl.constexpr
):
    """Rank `to`, when this program's share of own rows is there."""
    word = signals + rank * experts.chunks + program
    wl.notify(world, word, e, to=to, op="set", order=order, scope=scope)


@triton.jit
def notify_pushed(
    signals, split, to, chunk, e, rank, world, order: tl.constexpr, scope: tl.constexpr
):
    """Rank `to`, when a chunk of own rows is there."""
    word = signals + rank * split.chunks + chunk
    # weft: equivalent-mutant swap, incomplete of notify: the counter before it is for this rank's
    # own next call, in stream order, and no store before it is asynchronous
    wl.notify(world, word, e, to=to, op="set", order=order, scope=scope)


@triton.jit
def notify_chunk(signals, parts, at, e, rank, world, order: tl.constexpr, scope: tl.constexpr):
    """Set here when a chunk is stored: what the engine copies to its owner."""
    word = signals + partition.chunk_of(at, at.owner, parts)
    if order == wl.Order.RELAXED:
        # weft: equivalent-mutant narrow of notify: it orders nothing itself
        wl.notify(world, word, e, to=rank, op="set", order=order, scope=scope)
    else:
        wl.notify(world, word, e, to=rank, op="set", order=order, scope=scope)


@triton.jit
def notify_engine(signals, parts, at, rank, world, order: tl.constexpr, scope: tl.constexpr):
    """A token, set here behind that, which the copy engine's stream takes."""
    word = signals + partition.chunk_of(at, at.owner, parts)
    # weft: equivalent-mutant incomplete of notify: who counted a part of the chunk has completed it
    wl.notify(world, word, 1, to=rank, op="set", order=order, scope=scope)


# ---------------------------------------------------------------------------------------------
# Credits, and the end of a call


@triton.jit
def credit(world, slot, e):
    """Before anything is written to a peer."""
    slots.slot_wait_free(world, slot, e)


@triton.jit
def finish(world, slot, e, num_programs):
    """The last program gives the slot back to every rank."""
    # weft: equivalent-mutant drop of complete_stores: what went to other ranks was complete when
    # it was announced; stores of the result, when the kernel has ended
    # weft: equivalent-mutant incomplete of notify: no other rank reads the result, as above
    slots.slot_finish(world, slot, e, num_programs)


@triton.jit
def finish_alone(world, slot, e, num_programs):
    """The same, where no hook writes to another rank."""
    # weft: equivalent-mutant drop of complete_stores: only stores of the result are
    # asynchronous, which are complete when the kernel has ended, and no other rank reads
    # weft: equivalent-mutant incomplete of notify: only stores of the result, as above
    slots.slot_finish(world, slot, e, num_programs)


@triton.jit
def advance(slot, e, num_programs):
    """The last program moves the slot on to the next call, which other ranks need not hear of."""
    # weft: equivalent-mutant swap of atomic: behind the last one comes this rank's own next call
    slots.slot_advance(slot, e, num_programs)
