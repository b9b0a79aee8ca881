"""The fetch templates: every rank reads the others' memory where it lies, between two meetings.

    begin                         all ranks' parts may be read, and all ranks' results written
    for each tile i of this channel: parts i of all ranks' memory -> gathered, or summed
    end                           all have read, and what they wrote elsewhere is there

Where a rank's part is not in symmetric memory, its channels first put it there (`stage`). A
channel meets the channels of its number only (weft.tiles.mailboxes, whose steps are counted here
too): it reads what those have put, in place or staged. A call is two steps, however large it is. A
rank at the end may overwrite what was read: inputs in place, and what was staged.
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import mailboxes, move
from weft.tiles.exchange import steps_of, tile_of


@triton.jit
def stage(staged, x, shards, first_shard, end_shard, tiles, block: tl.constexpr):
    """This channel's tiles of some shards of x -> the same places of staged. shards: rounded"""
    for step in range(steps_of(tiles)):
        i = tile_of(step, block) + tl.arange(0, block)
        for index in range(first_shard, end_shard):
            mask, at = move.lives(shards, index, i), shards.shard * index + i
            tl.store(staged + at, tl.load(x + at, mask=mask), mask=mask)


@triton.jit
def begin(world, mail):
    """The first meeting; returns the number of the second."""
    step = mailboxes.steps_made(mail)
    mailboxes.announce(world, mail, step)
    mailboxes.wait_for_step(world, mail, step)
    return step + 1


@triton.jit
def end(world, mail, step):
    """The second meeting."""
    mailboxes.announce(world, mail, step)
    mailboxes.wait_for_step(world, mail, step)
    mailboxes.end(mail, step + 1)


@triton.jit
def gather(world, memory, out, shards, tiles, block: tl.constexpr):
    """What begins at `memory` of rank s -> shard s of out, for every rank. shards: rounded"""
    for step in range(steps_of(tiles)):
        i = tile_of(step, block) + tl.arange(0, block)
        for hop in tl.static_range(world.num_ranks):
            source = (wl.rank(world) + hop) % world.num_ranks
            mask = move.lives(shards, source, i)
            value = tl.load(wl.at(world, memory, source) + i, mask=mask)
            tl.store(out + shards.shard * source + i, value, mask=mask)


@triton.jit
def sum_of_all(world, memory, i, mask):
    """Elements i of all ranks' memory, added in the order of ranks in fp32, rounded once.

    All ranks' are on the way at once.
    """
    total = tl.load(wl.at(world, memory, 0) + i, mask=mask, other=0.0).to(tl.float32)
    for index in tl.static_range(1, world.num_ranks):
        part = tl.load(wl.at(world, memory, index) + i, mask=mask, other=0.0)
        total += part.to(tl.float32)
    return total.to(memory.dtype.element_ty)


@triton.jit
def reduce(world, memory, out, size, tiles, block: tl.constexpr):
    """The sum of `size` elements from `memory` on, over all ranks -> out."""
    for step in range(steps_of(tiles)):
        i = tile_of(step, block) + tl.arange(0, block)
        tl.store(out + i, sum_of_all(world, memory, i, i < size), mask=i < size)


@triton.jit
def reduce_for_all(world, memory, out, shared, shards, tiles, block: tl.constexpr):
    """The sums of own shard -> own out, and the others' `shared`: their out, or a place to copy it
    from. shards: rounded"""
    rank = wl.rank(world)
    for step in range(steps_of(tiles)):
        i = tile_of(step, block) + tl.arange(0, block)
        mask, at = move.lives(shards, rank, i), shards.shard * rank + i
        value = sum_of_all(world, memory, at, mask)
        for hop in tl.static_range(1, world.num_ranks):
            to = (rank + hop) % world.num_ranks
            wl.put(world, shared + at, value, to=to, mask=mask)
        tl.store(out + at, value, mask=mask)


@triton.jit
def copy_others(world, out, shared, shards, tiles, block: tl.constexpr):
    """The shards of all others: shared -> out, both here. shards: rounded"""
    for step in range(steps_of(tiles)):
        i = tile_of(step, block) + tl.arange(0, block)
        for hop in range(1, world.num_ranks):
            index = (wl.rank(world) + hop) % world.num_ranks
            mask, at = move.lives(shards, index, i), shards.shard * index + i
            tl.store(out + at, tl.load(shared + at, mask=mask), mask=mask)


# ---------------------------------------------------------------------------------------------
# Programs; see weft.tiles.exchange. `in_place`: x is in symmetric memory


@triton.jit
def pull(x, out, staged, arrived, steps, shards, incoming, world, block: tl.constexpr,
         vec: tl.constexpr, in_place: tl.constexpr, to_all: tl.constexpr,
         sums: tl.constexpr):  # fmt: skip
    shards, rank = move.rounded(shards, vec), wl.rank(world)
    incoming = shards if incoming is None else move.rounded(incoming, vec)
    tiles, mail = tl.cdiv(shards.shard, block), mailboxes.Mailbox(steps, arrived, staged)
    parts = x if in_place else staged
    if not in_place:
        if to_all:
            own = move.Shards(move.size_of(shards, rank) // vec * vec, shards.shard)
            stage(staged, x, own, 0, 1, tiles, block)
        else:
            stage(staged, x, shards, 0, world.num_ranks, tiles, block)
    second = begin(world, mail)
    if sums:
        size = move.size_of(shards, rank) // vec * vec
        reduce(world, parts + shards.shard * rank, out, size, tiles, block)
    else:
        rows = parts if to_all else parts + shards.shard * wl.rank(world)
        gather(world, rows, out, incoming, tiles, block)
    end(world, mail, second)


@triton.jit
def pull_twice(x, out, staged, arrived, steps, shards, world, block: tl.constexpr,
               vec: tl.constexpr, in_place: tl.constexpr, shares_out: tl.constexpr):  # fmt: skip
    """Each rank sums its shard, and all get it: in out where that is symmetric (`shares_out`)."""
    shards = move.rounded(shards, vec)
    tiles, mail = tl.cdiv(shards.shard, block), mailboxes.Mailbox(steps, arrived, staged)
    if in_place:
        parts, received = x, staged
    else:
        parts, received = staged, staged + shards.shard * world.num_ranks
        stage(parts, x, shards, 0, world.num_ranks, tiles, block)
    if shares_out:
        received = out
    second = begin(world, mail)
    reduce_for_all(world, parts, out, received, shards, tiles, block)
    end(world, mail, second)
    if not shares_out:
        copy_others(world, out, received, shards, tiles, block)
