"""Mailboxes: ring buffers by which channels of all ranks hand each other tiles, step by step.

A *channel* is one program on every rank, with one number everywhere (weft.tiles.move). In a step
each channel fills its box on every other rank, announces that, and waits until all ranks have
filled its own boxes. This frees boxes, too: a channel that has waited for a step of a rank knows
that this rank is done with the boxes of some steps before. So `DEPTH` boxes in turn are enough, and
a call needs neither a credit at its beginning nor a ticket at its end.

    for step:   fill(step), announce(step);   one step behind:   wait(step - 1), take(step - 1)

A channel that fills `step` has waited for `step - 2` of all ranks, and these announced it after
they had taken `step - 4`: so 4 boxes. Packets are not one step behind: 2 boxes.

A word of each channel counts its steps, in memory, over all calls: the same launches are right
eager, captured and replayed, with shapes and numbers of channels that change from call to call.
Calls that share a mailbox come one after the other in a rank's stream order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl

DEPTH = tl.constexpr(4)
PACKET_DEPTH = tl.constexpr(2)
PACKET_BYTES = tl.constexpr(4)


class Mailbox(NamedTuple):
    """A channel's part of each array lies together: calls may differ in how many channels they use.

    steps: int64[channels], local: steps made. arrived: int64[channels * num_ranks]: arrived[l *
    num_ranks + src] steps of channel l of rank src are in its boxes here. boxes: [channels, DEPTH,
    boxes of a step, block] elements.
    """

    steps: Any
    arrived: Any
    boxes: Any


class PacketBoxes(NamedTuple):
    """As `Mailbox`; words: int64[channels, PACKET_DEPTH, num_ranks, block], zeroed once."""

    steps: Any
    words: Any


@triton.jit
def steps_made(mail):
    """How many steps this channel has made in earlier calls; the same on all ranks."""
    return tl.load(mail.steps + tl.program_id(0))


@triton.jit
def end(mail, steps):
    """This channel has made so many steps by now."""
    tl.store(mail.steps + tl.program_id(0), steps)


@triton.jit
def box(mail, step, index, boxes_of_step: tl.constexpr, block: tl.constexpr):
    """Where box `index` of a step begins; rank r fills its boxes on others at the same place."""
    turn = tl.program_id(0) * DEPTH + (step % DEPTH).to(tl.int32)
    return mail.boxes + (turn * boxes_of_step + index).to(tl.int64) * block


@triton.jit
def announce(world, mail, step):
    """Signal every rank that this channel's tiles of `step` are there."""
    word = mail.arrived + tl.program_id(0) * world.num_ranks + wl.rank(world)
    wl.notify_all(world, word, step + 1, op=wl.SignalOp.SET)


@triton.jit
def wait_for_step(world, mail, step):
    """Until all ranks' channels of this number have announced `step`; pairs with `announce`."""
    words = mail.arrived + tl.program_id(0) * world.num_ranks
    wl.wait(words, step + 1, world.num_ranks, world=world)


@triton.jit
def packet_box(mail, step, index, num_ranks: tl.constexpr, block: tl.constexpr):
    """Where the packets of rank `index` of a step begin."""
    turn = tl.program_id(0) * PACKET_DEPTH + (step % PACKET_DEPTH).to(tl.int32)
    return mail.words + (turn * num_ranks + index).to(tl.int64) * block


@triton.jit
def put_packets(world, mail, step, values, to, block: tl.constexpr):
    """values: int32[block] -> this rank's box on rank `to`."""
    words = packet_box(mail, step, wl.rank(world), world.num_ranks, block) + tl.arange(0, block)
    wl.put_packets(world, words, values, (step + 1).to(tl.int32), to=to)


@triton.jit
def wait_packets(world, mail, step, sources: tl.constexpr, block: tl.constexpr):
    """What all ranks have put: int32[sources, block], rows from num_ranks on being 0."""
    source, j = tl.arange(0, sources)[:, None], tl.arange(0, block)[None, :]
    words = packet_box(mail, step, source, world.num_ranks, block) + j
    flag = (step + 1).to(tl.int32)
    if sources == world.num_ranks:
        return wl.wait_packets(words, flag, world=world)
    else:
        here = (source < world.num_ranks) & (j >= 0)
        return wl.wait_packets(words, flag, world=world, mask=here)
