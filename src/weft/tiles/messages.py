"""Messages from one rank to another: kernels of the two that take part, and of nobody else.

The receiver has some boxes for each rank that may send to it. A message is bytes, cut into pieces.
Its header says how long it is, how it is cut, and in which box it lies. So the receiver need not
know how it was sent, nor the sender how it is taken.

    sender    until the box is free:  header -> receiver;  piece by piece -> its box there
    receiver  header;  piece by piece  box -> out;  then the message is taken

Messages of one sender to one receiver are numbered e = 1, 2, .. on the device of each, and taken in
that order. The sender's host names the box, in turns: a box twice in a row is slower, never wrong,
for the sender waits until the message that lay in it last is taken. Headers lie at e modulo the
number of boxes. Of so many messages and one more two have the same box, so the sender that writes
header e has waited, for this message or for one before, until message e - boxes was taken.

Signals (SET to the message's number e)
    heads[e % boxes]                header e may be read. By the sender
    arrived[box * MOST_PIECES + i]  piece i is in the box. By the sender, or its copy engine
    taken                           message e is out of its box: the credit. By the receiver
    sent, used[box], received, tickets  one's own: numbers of messages, and programs that are done
Source  the design's section 4; MPI's eager protocol for header and box
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.language import slots
from weft.language.world_arg import SlotArg
from weft.tiles import move

MOST_PIECES = tl.constexpr(512)
HEADER_WORDS = tl.constexpr(4)
# Pieces of an engine are large: of those with more blocks than this, programs share one.
UNIT_BLOCKS = tl.constexpr(8)
# Of what is wrong with a message, in one integer: bytes that came, above bytes that there is
# room for.
MOST_CAME, MOST_ROOM = tl.constexpr((1 << 31) - 1), tl.constexpr((1 << 32) - 1)


class Line(NamedTuple):
    """What a rank has of the way to one rank, and from another: the sender's words for its peer,
    the receiver's for its own.

    sent, received: int64[1]; used: int64[boxes]; tickets: int32[2], of the sender's programs and of
    the receiver's. On the heap: heads: int64[boxes]; headers: int64[boxes, HEADER_WORDS]; arrived:
    int64[boxes, MOST_PIECES]; taken: int64[1].
    """

    sent: Any
    used: Any
    received: Any
    tickets: Any
    heads: Any
    headers: Any
    arrived: Any
    taken: Any


@triton.jit
def _begin(world, line, box_index):
    """The box is free: what lay in it last is taken. Pairs with the end of `take`."""
    wl.wait(line.taken, tl.load(line.used + box_index), world=world)


@triton.jit
def _announce(world, line, e, box_index, num_bytes, piece_bytes, peer, boxes):
    """Header e; one program."""
    turn = (e % boxes).to(tl.int32)
    header = line.headers + turn * HEADER_WORDS
    wl.put(world, header, num_bytes, to=peer)
    wl.put(world, header + 1, piece_bytes, to=peer)
    wl.put(world, header + 2, tl.cast(box_index, tl.int64), to=peer)
    wl.notify(world, line.heads + turn, e, to=peer, op=wl.SignalOp.SET)


@triton.jit(do_not_specialize=["box_index", "peer", "num_bytes", "piece_bytes", "boxes"])
def push(x, box, line, box_index, peer, num_bytes, piece_bytes, boxes, world,
         block: tl.constexpr, vec: tl.constexpr):  # fmt: skip
    """All of a message by stores: x -> `box` of rank `peer`. Programs take pieces in turn."""
    item: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    slot = SlotArg(line.sent, line.tickets, line.taken)
    e = slots.slot_epoch(slot)
    num_bytes, piece_bytes = tl.cast(num_bytes, tl.int64), tl.cast(piece_bytes, tl.int64)
    _begin(world, line, box_index)
    if tl.program_id(0) == 0:
        _announce(world, line, e, box_index, num_bytes, piece_bytes, peer, boxes)
    size, piece = num_bytes // item // vec * vec, piece_bytes // item // vec * vec
    arrived = line.arrived + box_index * MOST_PIECES
    pieces = tl.cdiv(num_bytes, piece_bytes).to(tl.int32)
    for i in range(tl.program_id(0), pieces, tl.num_programs(0)):
        first = i * piece
        move.send(world, box + first, x + first, tl.minimum(piece, size - first), peer, block)
        wl.notify(world, arrived + i, e, to=peer, op=wl.SignalOp.SET)
    # weft: equivalent-mutant swap of atomic: what the last program stores is for this rank's own
    # next send, which comes later in stream order
    if slots.slot_is_last(slot, tl.num_programs(0)):
        tl.store(line.used + box_index, e)
        tl.store(line.sent, e)


@triton.jit(do_not_specialize=["box_index", "peer", "num_bytes", "piece_bytes", "boxes"])
def begin(line, box_index, peer, num_bytes, piece_bytes, boxes, world):
    """One program, before a copy engine's transfers into a box: it is free, and header e is there.

    `sent` is then e, which the engine takes behind each piece to that piece's word.
    """
    e = tl.load(line.sent) + 1
    _begin(world, line, box_index)
    num_bytes, piece_bytes = tl.cast(num_bytes, tl.int64), tl.cast(piece_bytes, tl.int64)
    _announce(world, line, e, box_index, num_bytes, piece_bytes, peer, boxes)
    tl.store(line.used + box_index, e)
    tl.store(line.sent, e)


@triton.jit(do_not_specialize=["peer", "room_bytes", "box_bytes", "boxes"])
def take(out, in_boxes, line, errors, peer, room_bytes, box_bytes, boxes, world,
         block: tl.constexpr, vec: tl.constexpr):  # fmt: skip
    """The next message of rank `peer` -> out, which has `room_bytes`.

    in_boxes: all boxes of this line, `box_bytes` each. A message of another length is taken out of
    its box and goes nowhere; `errors` says so.
    """
    item: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    slot = SlotArg(line.received, line.tickets + 1, line.taken)
    e = slots.slot_epoch(slot)
    turn = (e % boxes).to(tl.int32)
    wl.wait(line.heads + turn, e, world=world)  # pairs with _announce
    header = line.headers + turn * HEADER_WORDS
    num_bytes, piece_bytes = tl.load(header), tl.load(header + 1)
    box_index, room_bytes = tl.load(header + 2), tl.cast(room_bytes, tl.int64)
    room = tl.where(num_bytes == room_bytes, room_bytes // item // vec * vec, 0)
    piece = piece_bytes // item // vec * vec
    box = in_boxes + (box_index * box_bytes) // item // vec * vec
    arrived = line.arrived + box_index * MOST_PIECES
    # Programs take units in turn: pieces, or parts of them.
    parts = tl.minimum(tl.maximum(piece // (UNIT_BLOCKS * block), 1), tl.num_programs(0))
    line_of: tl.constexpr = move.LINE_BYTES // item
    unit = tl.cdiv(tl.cdiv(piece, parts), line_of) * line_of
    units = (tl.cdiv(num_bytes, piece_bytes) * parts).to(tl.int32)
    for i in range(tl.program_id(0), units, tl.num_programs(0)):
        which, offset = i // parts, i % parts * unit
        wl.wait(arrived + which, e, world=world)  # pairs with push, or with the engine's word
        first = which * piece + offset
        size = tl.minimum(tl.minimum(unit, piece - offset), room - first)
        move.copy(out + first, box + first, size, block)
    if slots.slot_is_last(slot, tl.num_programs(0)):
        if num_bytes != room_bytes:
            said = tl.minimum(num_bytes, MOST_CAME) << 32 | tl.minimum(room_bytes, MOST_ROOM)
            tl.store(errors, said)
        tl.store(line.received, e)
        # weft: equivalent-mutant swap of notify: `received` is for this rank's own next call, which
        # comes later in stream order; no other rank reads it
        wl.notify(world, line.taken, e, to=peer, op=wl.SignalOp.SET)
