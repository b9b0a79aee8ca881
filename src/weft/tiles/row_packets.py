"""The template for few whole rows: every rank sums all of them, and packets bring the shares.

    for i in this program's share of the tiles of rows:
        at    = order(i, ...)             which tile is next: an Owned, of one part for all rows
        value = ready(at, ...)            where this rank's share of it lies; loaded, in fp32
        emit(at, ...)                     -> every other rank: `send`
    for i in the same share:
        value = combine(at, ...)          with the other ranks' shares: `add_shares`
        result(at, value, ...)            what becomes of the rows, here as on every rank

All is sent before anything is waited for. Nothing is announced: a packet says itself that it has
come, by the call's epoch, which is its flag. What `combine` reads beside packets it loads first.

For more rows the template is weft.tiles.rows, with hooks from here: `push` a share to who owns the
rows, which then has `add_shares`, and `send`s the sums, which the others `take`.

Packets lie in boxes, words[row, source, half, packet], which hold packets alone, ever; rows are
those of an owner's part, where there are owners. A box has one writer, however many rows calls
have. Calls use the halves in turns. Every row is summed from all ranks' shares: who has ended a
call knows that all ranks have begun it, and so have ended the one before. So there is no credit.

A tile is tile.m whole rows, in columns up to the power of two `tile.n`, of 16 or 32 bits each.

Source  `one_shot` and `two_shot` of weft.ops.all_reduce_rms_norm; NCCL's LL protocol
"""

from __future__ import annotations

import triton
import triton.language as tl

import weft.language as wl
from weft.language import slots
from weft.tiles import composition, fragments, rows
from weft.tiles.hooks import partition


@triton.jit
def every_row(hooks: tl.constexpr, arrays, slot, mapping, tile, world):
    """The kernel. mapping: partition.Parts of one part that has all rows, with num_n = 1

    Sync    what the hooks do; programs wait for those of their number on other ranks, so all of
            them must be resident
    """
    _every_row(
        composition.Launch(
            wl.rank(world).to(tl.int32), slots.slot_epoch(slot), tl.program_id(0),
            tl.num_programs(0), None, None, arrays, None, None, mapping, slot, world, 0,
        ), tile, hooks,
    )  # fmt: skip


@triton.jit
def _every_row(given, tile, composed: tl.constexpr):
    hooks: tl.constexpr = composed.within(given)
    launch = composition.leaves(given)
    parts = given.mapping
    hooks.begin(launch)
    order_args = hooks.arrange(parts.tiles_m, tile.m, launch)
    for i in tl.range(given.program, parts.tiles_m, given.num_programs, flatten=False):
        at = hooks.order(i, parts.tiles_m, 1, order_args)
        value = rows.share(at, tile, parts, launch, hooks)
        hooks.emit(at, fragments.Cells(at.row, 0, 0, True), value, tile, launch)
    for i in tl.range(given.program, parts.tiles_m, given.num_programs, flatten=False):
        at = hooks.order(i, parts.tiles_m, 1, order_args)
        value = rows.share(at, tile, parts, launch, hooks)
        value = hooks.combine(at, fragments.Cells(at.row, 0, 0, True), value, tile, launch)
        hooks.result(at, value, tile, launch)
    hooks.end(launch)


@triton.jit
def in_rows(i, num_m, num_n, args):
    """The order from the first row to the last. A tile is of the one part that there is."""
    return partition.Owned(i, 0, 0, i * args.parts.tile_m, args.parts.m)


@triton.jit
def _packets(words, source, x, at, tile, parts, e, num_ranks: tl.constexpr):
    """The packets of a tile from `source`, and which there are; each of 32 bits of x's dtype."""
    per: tl.constexpr = 32 // x.dtype.element_ty.primitive_bitwidth
    width: tl.constexpr = tile.n // per
    row = at.row + tl.arange(0, tile.m)
    c = tl.arange(0, width)
    box = (row.to(tl.int64) * num_ranks + source) * 2 + e % 2
    mask = (row < at.end)[:, None] & (c * per < parts.n)[None, :]
    return words + box[:, None] * width + c[None, :], mask


@triton.jit
def send(words, x, parts, at, fragment, tile, e, rank, world, num_ranks: tl.constexpr):
    """What this rank has of a tile, in x's dtype -> every other rank."""
    there, mask = _packets(words, rank, x, at, tile, parts, e, num_ranks)
    value, flag = fragment.to(x.dtype.element_ty), e.to(tl.int32)
    for hop in range(1, num_ranks):
        to = (rank + hop) % num_ranks
        wl.put_packets(world, there, value, flag, to=to, mask=mask)


@triton.jit
def push(words, x, parts, at, fragment, tile, e, rank, world, num_ranks: tl.constexpr):
    """This rank's share of a tile -> who owns its rows."""
    there, mask = _packets(words, rank, x, at, tile, parts, e, num_ranks)
    value, flag = fragment.to(x.dtype.element_ty), e.to(tl.int32)
    wl.put_packets(world, there, value, flag, to=at.owner, mask=mask)


@triton.jit
def take(words, x, parts, at, tile, e, world, num_ranks: tl.constexpr):
    """What a tile's owner has sent of it, in fp32.

    Sync    waits for its packets
    """
    return _taken(words, at.owner, x, parts, at, tile, e, world, num_ranks)


@triton.jit
def _taken(words, source, x, parts, at, tile, e, world, num_ranks: tl.constexpr):
    """What `source` has sent of a tile."""
    dtype: tl.constexpr = x.dtype.element_ty
    there, mask = _packets(words, source, x, at, tile, parts, e, num_ranks)
    flag = e.to(tl.int32)
    return wl.wait_packets(there, flag, world=world, mask=mask, dtype=dtype).to(tl.float32)


@triton.jit
def add_shares(words, x, parts, at, value, tile, e, rank, world, num_ranks: tl.constexpr):
    """All ranks' shares of a tile in the order of ranks, in fp32; value is this one's.

    Sync    waits for the packets of each other rank
    """
    total = tl.zeros((tile.m, tile.n), tl.float32)
    for source in range(num_ranks):
        if source == rank:
            total += value
        else:
            total += _taken(words, source, x, parts, at, tile, e, world, num_ranks)
    return total
