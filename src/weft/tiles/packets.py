"""The exchange templates by packets: for small parts, where a signal and its fence cost more.

As weft.tiles.exchange, but data carries its flag with it, 4 bytes in 8, so that there is nothing to
tell and nothing to fence. Sizes and offsets are in bytes; a packet's 4 bytes are read and written
as accesses of `width` bytes, 1, 2 or 4, as memory is aligned here: ranks may differ in that.

    part(to, i, args, width) -> values               packets i for rank `to`, as int32
    take(world, values, i, args, width)              values: int32[sources, block], a row per rank

Tiles are always sent whole, whatever is in them where a part has ended: so each rank learns from
each that it has come so far. All ranks' boxes are read at once, own included, which own packets
have filled like any other. `sources` is the power of two from num_ranks on; the rows above hold 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import mailboxes, move
from weft.tiles.exchange import Gathered, Sharded, Summed, Whole, steps_of, tile_of
from weft.tiles.mailboxes import PACKET_BYTES


@triton.jit
def tiles_of(size, block: tl.constexpr):
    """How many tiles `size` bytes are."""
    return tl.cdiv(size, PACKET_BYTES * block)


@triton.jit
def _integers(ptr, width: tl.constexpr):
    """The same memory as integers of `width` bytes."""
    if width == 4:
        return ptr.to(tl.pointer_type(tl.int32), bitcast=True)
    elif width == 2:
        return ptr.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        return ptr.to(tl.pointer_type(tl.int8), bitcast=True)


@triton.jit
def load(ptr, first, i, size, width: tl.constexpr):
    """The packets i, as int32, of what begins `first` bytes behind ptr and has `size` bytes."""
    words = _integers(ptr, width)
    if width == 4:
        value = tl.load(words + first // 4 + i, mask=4 * i < size, other=0)
    else:
        value = i.to(tl.int32) * 0
        for r in tl.static_range(PACKET_BYTES // width):
            at = i * (PACKET_BYTES // width) + r
            one = tl.load(words + first // width + at, mask=at * width < size, other=0)
            value |= (one.to(tl.int32) & ((1 << (8 * width)) - 1)) << (8 * width * r)
    return value


@triton.jit
def store(ptr, first, i, size, value, width: tl.constexpr):
    """The opposite of `load`. All may be tiles of two dimensions."""
    words = _integers(ptr, width)
    for r in tl.static_range(PACKET_BYTES // width):
        at = i * (PACKET_BYTES // width) + r
        one = (value >> (8 * width * r)).to(words.dtype.element_ty)
        tl.store(words + first // width + at, one, mask=at * width < size)


@triton.jit
def row(values, index):
    """Row `index` of values: integers, so that a sum with zeros takes it as it is."""
    chosen = tl.arange(0, values.shape[0])[:, None] == index
    return tl.sum(tl.where(chosen, values, 0), axis=0)


@triton.jit
def element(packet, r: tl.constexpr, dtype: tl.constexpr):
    """Element r of those in a packet, in fp32."""
    if dtype.primitive_bitwidth == 32:
        return packet.to(dtype, bitcast=True).to(tl.float32)
    else:
        return (packet >> (16 * r)).to(tl.int16).to(dtype, bitcast=True).to(tl.float32)


@triton.jit
def add(values, num_ranks: tl.constexpr, dtype: tl.constexpr):
    """Rows added in the order of ranks, in fp32, rounded once; packets again."""
    if dtype.primitive_bitwidth == 32:
        total = element(row(values, 0), 0, dtype)
        for index in tl.static_range(1, num_ranks):
            total += element(row(values, index), 0, dtype)
        return total.to(dtype).to(tl.int32, bitcast=True)
    else:
        first = row(values, 0)
        low, high = element(first, 0, dtype), element(first, 1, dtype)
        for index in tl.static_range(1, num_ranks):
            other = row(values, index)
            low += element(other, 0, dtype)
            high += element(other, 1, dtype)
        lower = low.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        return lower | (high.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def part_of_all(to, i, args, width: tl.constexpr):
    """Every rank gets all of x. args: Whole"""
    return load(args.x, 0, i, args.size, width)


@triton.jit
def part_of_shard(to, i, args, width: tl.constexpr):
    """A rank gets its shard of x. args: Sharded"""
    return load(args.x, args.shards.shard * to, i, move.size_of(args.shards, to), width)


@triton.jit
def gather(world, values, i, args, width: tl.constexpr):
    """Each rank's part -> its shard of out. args: Gathered"""
    source = tl.arange(0, values.shape[0])[:, None]
    size = tl.where(source < world.num_ranks, move.size_of(args.shards, source), 0)
    store(args.out, args.shards.shard * source, i[None, :], size, values, width)


@triton.jit
def sum_parts(world, values, i, args, width: tl.constexpr):
    """All ranks' parts, summed in the order of ranks -> out. args: Summed"""
    total = add(values, world.num_ranks, args.out.dtype.element_ty)
    store(args.out, 0, i, args.size, total, width)


@triton.jit
def exchange(world, mail, tiles, part: tl.constexpr, part_args, take: tl.constexpr, take_args,
             width: tl.constexpr, sources: tl.constexpr, block: tl.constexpr):  # fmt: skip
    """All tiles once, one after the other."""
    base, steps = mailboxes.steps_made(mail), steps_of(tiles)
    for step in range(steps):
        i = tile_of(step, block) + tl.arange(0, block)
        for hop in range(1, world.num_ranks + 1):
            to = (wl.rank(world) + hop) % world.num_ranks
            mailboxes.put_packets(
                world, mail, base + step, part(to, i, part_args, width), to, block
            )
        values = mailboxes.wait_packets(world, mail, base + step, sources, block)
        take(world, values, i, take_args, width)
    mailboxes.end(mail, base + steps)


@triton.jit
def exchange_twice(world, mail, tiles, part: tl.constexpr, part_args, dtype: tl.constexpr,
                   take: tl.constexpr, take_args, width: tl.constexpr, sources: tl.constexpr,
                   block: tl.constexpr):  # fmt: skip
    """Parts to their ranks; each one's sum, of elements of dtype, to all."""
    base, steps = mailboxes.steps_made(mail), steps_of(tiles)
    for step in range(steps):
        now = base + 2 * step
        i = tile_of(step, block) + tl.arange(0, block)
        for hop in range(1, world.num_ranks + 1):
            to = (wl.rank(world) + hop) % world.num_ranks
            mailboxes.put_packets(world, mail, now, part(to, i, part_args, width), to, block)
        values = mailboxes.wait_packets(world, mail, now, sources, block)
        total = add(values, world.num_ranks, dtype)
        for hop in range(1, world.num_ranks + 1):
            to = (wl.rank(world) + hop) % world.num_ranks
            # weft: equivalent-mutant peer+1 of at: every rank gets the same, in another order
            mailboxes.put_packets(world, mail, now + 1, total, to, block)
        values = mailboxes.wait_packets(world, mail, now + 1, sources, block)
        take(world, values, i, take_args, width)
    mailboxes.end(mail, base + 2 * steps)


# ---------------------------------------------------------------------------------------------
# Programs; see weft.tiles.exchange


@triton.jit
def push_packets(x, out, words, steps, shards, incoming, world, block: tl.constexpr,
                 width: tl.constexpr, sources: tl.constexpr, to_all: tl.constexpr,
                 sums: tl.constexpr):  # fmt: skip
    shards, mail = move.rounded(shards, 1), mailboxes.PacketBoxes(steps, words)
    incoming = shards if incoming is None else move.rounded(incoming, 1)
    size = move.size_of(shards, wl.rank(world))
    if to_all and sums:
        shards, size = move.Shards(shards.total, shards.total), shards.total
    take: tl.constexpr = sum_parts if sums else gather
    taken = Summed(x, out, size) if sums else Gathered(x, out, incoming)
    if to_all:
        # weft: equivalent-mutant peer+1 of at: every rank gets the same packets, in another order
        exchange(
            world, mail, tiles_of(shards.shard, block), part_of_all, Whole(x, size), take, taken,
            width, sources, block,
        )  # fmt: skip
    else:
        exchange(
            world, mail, tiles_of(shards.shard, block), part_of_shard, Sharded(x, shards), take,
            taken, width, sources, block,
        )  # fmt: skip


@triton.jit
def push_packets_twice(x, out, words, steps, shards, world, block: tl.constexpr,
                       width: tl.constexpr, sources: tl.constexpr):  # fmt: skip
    """Each rank sums its shard, and all get it."""
    shards = move.rounded(shards, 1)
    exchange_twice(
        world, mailboxes.PacketBoxes(steps, words), tiles_of(shards.shard, block),
        part_of_shard, Sharded(x, shards), out.dtype.element_ty,
        gather, Gathered(x, out, shards), width, sources, block,
    )  # fmt: skip
