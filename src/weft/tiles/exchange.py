"""The exchange templates: every rank has a part for each rank, tile by tile, with two hooks.

    for each tile i of this channel:
        box of own rank@r  <-  part(r, i)       for every other rank r
        take(i, boxes)                          what has come

`part` says what goes to whom, `take` what becomes of what has come: gathered, or summed. One step
behind another, so that one tile is on the way while the one before is taken. Tiles are dealt to
channels in turn: channel l of L has tiles l, l + L, ...  A hook is a `@triton.jit` function, given
as a constexpr together with one tuple of arguments:

    part(to, first, args, block) -> values, mask    elements first .. first + block - 1 of what rank
                                                    `to` gets
    take(world, boxes, first, args, block)          those of rank s lie at boxes + s * block; one's
                                                    own box is empty

Sync    the protocol is the mailbox's; all ranks call with the same tiles, channels and block
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import mailboxes, move, reduce


class Whole(NamedTuple):
    """Arguments of `part_of_all`: x has `size` elements (of `packets`: bytes)."""

    x: Any
    size: Any


class Sharded(NamedTuple):
    """Arguments of `part_of_shard`: x is cut into `shards` (move.Shards, rounded)."""

    x: Any
    shards: Any


class Gathered(NamedTuple):
    """Arguments of `gather`: one's own part, and what comes of all ranks' parts."""

    own: Any
    out: Any
    shards: Any


class Summed(NamedTuple):
    """Arguments of `sum_parts`: one's own part and the sum, which have `size` elements."""

    own: Any
    out: Any
    size: Any


@triton.jit
def part_of_all(to, first, args, block: tl.constexpr):
    """Every rank gets all of x. args: Whole"""
    i = first + tl.arange(0, block)
    return tl.load(args.x + i, mask=i < args.size), i < args.size


@triton.jit
def part_of_shard(to, first, args, block: tl.constexpr):
    """A rank gets its shard of x. args: Sharded"""
    i = first + tl.arange(0, block)
    mask = move.lives(args.shards, to, i)
    return tl.load(args.x + args.shards.shard * to + i, mask=mask), mask


@triton.jit
def gather(world, boxes, first, args, block: tl.constexpr):
    """Each rank's part -> its shard of out. args: Gathered"""
    rank = wl.rank(world)
    _to_shard(args.out, args.own + first, rank, first, args.shards, block)
    gather_others(world, boxes, first, args, block)


@triton.jit
def gather_others(world, boxes, first, args, block: tl.constexpr):
    """The parts of all other ranks -> their shards of out. args: Gathered"""
    for hop in range(1, world.num_ranks):
        source = (wl.rank(world) + world.num_ranks - hop) % world.num_ranks
        _to_shard(args.out, boxes + source * block, source, first, args.shards, block)


@triton.jit
def _to_shard(out, rows, index, first, shards, block: tl.constexpr):
    j = tl.arange(0, block)
    mask = move.lives(shards, index, first + j)
    tl.store(out + shards.shard * index + first + j, tl.load(rows + j, mask=mask), mask=mask)


@triton.jit
def sum_parts(world, boxes, first, args, block: tl.constexpr):
    """All ranks' parts, summed in the order of ranks -> out; and the sum. args: Summed"""
    j = tl.arange(0, block)
    mask = first + j < args.size
    parts = reduce.Parts(args.own + first, boxes, tl.cast(block, tl.int32), wl.rank(world))
    total = reduce.add(world.num_ranks, reduce.load_part, parts, j, mask)
    value = total.to(args.out.dtype.element_ty)
    tl.store(args.out + first + j, value, mask=mask)
    return value, mask


@triton.jit
def steps_of(tiles):
    """How many tiles this channel has."""
    return (tiles + tl.num_programs(0) - 1 - tl.program_id(0)) // tl.num_programs(0)


@triton.jit
def tile_of(step, block: tl.constexpr):
    """Where this channel's tile `step` begins in each part."""
    return (tl.cast(step, tl.int64) * tl.num_programs(0) + tl.program_id(0)) * block


@triton.jit
def _send(world, box, part: tl.constexpr, part_args, first, block: tl.constexpr):
    rank = wl.rank(world)
    for hop in range(1, world.num_ranks):
        to = (rank + hop) % world.num_ranks
        values, mask = part(to, first, part_args, block)
        wl.put(world, box + tl.arange(0, block), values, to=to, mask=mask)


@triton.jit
def exchange(world, mail, tiles, part: tl.constexpr, part_args, take: tl.constexpr, take_args,
             block: tl.constexpr):  # fmt: skip
    """All tiles once: gathered, exchanged or summed, as the hooks say."""
    num_ranks: tl.constexpr = world.num_ranks
    base, steps = mailboxes.steps_made(mail), steps_of(tiles)
    for step in range(steps + 1):
        if step < steps:
            own = mailboxes.box(mail, base + step, wl.rank(world), num_ranks, block)
            _send(world, own, part, part_args, tile_of(step, block), block)
            mailboxes.announce(world, mail, base + step)
        if step > 0:
            mailboxes.wait_for_step(world, mail, base + step - 1)
            boxes = mailboxes.box(mail, base + step - 1, 0, num_ranks, block)
            take(world, boxes, tile_of(step - 1, block), take_args, block)
    mailboxes.end(mail, base + steps)


@triton.jit
def exchange_twice(world, mail, tiles, part: tl.constexpr, part_args, summed,
                   take: tl.constexpr, take_args, block: tl.constexpr):  # fmt: skip
    """Parts to their ranks; each one's sum of them to all. summed: Summed

    A step tells of two boxes of each rank: its parts of one tile, and its sums of the one before.
    """
    num_ranks: tl.constexpr = world.num_ranks
    rank, base, steps = wl.rank(world), mailboxes.steps_made(mail), steps_of(tiles)
    for step in range(steps + 2):
        now = base + step
        if step < steps:
            own = mailboxes.box(mail, now, rank, 2 * num_ranks, block)
            _send(world, own, part, part_args, tile_of(step, block), block)
        if step > 0:
            mailboxes.wait_for_step(world, mail, now - 1)
            if step <= steps:
                boxes = mailboxes.box(mail, now - 1, 0, 2 * num_ranks, block)
                first = tile_of(step - 1, block)
                values, mask = sum_parts(world, boxes, first, summed, block)
                own = mailboxes.box(mail, now, num_ranks + rank, 2 * num_ranks, block)
                for hop in range(1, num_ranks):
                    to = (rank + hop) % num_ranks
                    wl.put(world, own + tl.arange(0, block), values, to=to, mask=mask)
            if step > 1:
                boxes = mailboxes.box(mail, now - 1, num_ranks, 2 * num_ranks, block)
                take(world, boxes, tile_of(step - 2, block), take_args, block)
        if step <= steps:
            mailboxes.announce(world, mail, now)
    mailboxes.end(mail, base + steps + 1)


# ---------------------------------------------------------------------------------------------
# Programs. `to_all`: each rank gets all of x, not its shard of it; `sums`: what comes is added, not
# put one part behind the other. `incoming` says how parts lie in out where not as shards of x do.


@triton.jit
def push(x, out, boxes, arrived, steps, shards, incoming, world, block: tl.constexpr,
         vec: tl.constexpr, to_all: tl.constexpr, sums: tl.constexpr):  # fmt: skip
    shards = move.rounded(shards, vec)
    incoming = shards if incoming is None else move.rounded(incoming, vec)
    rank = wl.rank(world)
    own = x if to_all else x + shards.shard * rank
    size = move.size_of(shards, rank) // vec * vec
    if to_all and sums:
        shards, size = move.Shards(shards.total, shards.total), shards.total
    exchange(
        world, mailboxes.Mailbox(steps, arrived, boxes), tl.cdiv(shards.shard, block),
        part_of_all if to_all else part_of_shard, Whole(x, size) if to_all else Sharded(x, shards),
        sum_parts if sums else gather,
        Summed(own, out, size) if sums else Gathered(own, out, incoming), block,
    )  # fmt: skip


@triton.jit
def push_twice(x, out, boxes, arrived, steps, shards, world, block: tl.constexpr,
               vec: tl.constexpr):  # fmt: skip
    """Each rank sums its shard, and all get it."""
    shards = move.rounded(shards, vec)
    own = shards.shard * wl.rank(world)
    summed = Summed(x + own, out + own, move.size_of(shards, wl.rank(world)) // vec * vec)
    exchange_twice(
        world, mailboxes.Mailbox(steps, arrived, boxes), tl.cdiv(shards.shard, block),
        part_of_shard, Sharded(x, shards), summed, gather_others, Gathered(x, out, shards), block,
    )  # fmt: skip
