"""Experts that are split over ranks: tokens to their ranks and back, in tiles of tokens.

Rank d has experts d * own .. d * own + own - 1 (torch.chunk); choices below 0 are none. A token is
known by its place among those of all ranks, source * rows + i, here, on its way and on its way
back: no place is given out, and none has to be told. So rows of a rank's tokens lie where it says
they do, each once, whatever experts they are for.

    check      a block of choices -> which of them are none, since they are wrong
    tally      a block of choices -> how many each expert of a rank has; how many each rank has
    fitting    counts -> those that `room` slots hold, in the order of slots
    send       rows of own tokens -> those ranks that have any of their experts
    pass_on    the same of another node's rank -> those ranks of this node
    take       rows of a source's tokens -> each of their slots
    add        rows by slot -> for each token of a source the weighted sum of its slots
    add_node   these sums of a node's ranks -> their sum, to a source on another node
    collect    shares of all ranks -> own tokens
    send_choices    rows by slot -> a place of each choice on its token's rank
    add_up_choices  rows of own tokens' choices -> their weighted sums

Where `num_nodes` is more than one, rows are relayed: rows of a rank's tokens cross to another node,
and back, once, by the partner of that rank there (weft.tiles.nodes). Else it is 1.

Tokens' choices and slots come in tiles of [tokens, width], rows in tiles of [tokens, block], so
that no thread waits for a branch. Signals are the kernels' alone, at the end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

import weft.language as wl
from weft.tiles import move, nodes, relay, route

# Above every choice and every slot.
NEVER = tl.constexpr((1 << 31) - 1)


class Split(NamedTuple):
    """`experts` of all ranks, `own` to a rank; a rank has up to `rows` tokens with top_k choices
    each, this one `tokens`; `room` slots."""

    experts: Any
    own: Any
    rows: Any
    tokens: Any
    top_k: Any
    room: Any


class Extents(NamedTuple):
    """How much of rows a program has at a time; a kernel takes it `as_constexpr`. `width` is a
    power of two that holds top_k; rows begin at multiples of `vec` elements."""

    tokens: Any
    width: Any
    block: Any
    vec: Any

    def as_constexpr(self) -> Extents:
        return Extents(*map(tl.constexpr, self))


class Checked(NamedTuple):
    """[block, width] choices, none for those that are wrong; the first of these, see `check`."""

    ids: Any
    wrong: Any


@triton.jit
def choice(ids, k, which):
    """[block] the choices in column `which` of ids: [block, width]."""
    return tl.sum(tl.where(k[None, :] == which, ids, 0), axis=1)


@triton.jit
def check(ids, row, k, top_k, experts, width: tl.constexpr):
    """The `Checked` of ids: [block, width], of rows `row`.

    wrong: 0, or 1 + 2 * (row * width + k) of the first choice that is no expert; 1 more where it is
    one that its token has already.
    """
    again = (ids != ids).to(tl.int32)
    for which in range(top_k):
        same = (ids == choice(ids, k, which)[:, None]) & (k > which)[None, :]
        again |= same.to(tl.int32)
    is_again = (again != 0) & (ids >= 0)
    is_wrong = is_again | (ids < -1) | (ids >= experts)
    place = 1 + 2 * (row[:, None] * width + k[None, :]) + is_again.to(tl.int32)
    first = tl.min(tl.min(tl.where(is_wrong, place, NEVER), axis=1), axis=0)
    return Checked(tl.where(is_wrong, -1, ids), tl.where(first == NEVER, 0, first))


@triton.jit
def local_to(ids, to, own):
    """Choices as rank `to` counts its experts; of others' experts none."""
    local = ids - to * own
    return tl.where((ids >= 0) & (local >= 0) & (local < own), local, -1)


@triton.jit
def tally(ids, to, split, columns: tl.constexpr):
    """[columns] how many of the choices each expert of rank `to` has; from split.own on: how many
    each rank's experts have."""
    column = tl.arange(0, columns)
    chosen = tl.reshape(ids, (ids.numel,))
    local = local_to(chosen, to, split.own)
    rank = tl.where(chosen >= 0, split.own + chosen // split.own, -1)
    hit = (local[:, None] == column[None, :]) | (rank[:, None] == column[None, :])
    return tl.sum(hit.to(tl.int32), axis=0)


@triton.jit
def fitting(by_source, room, sources: tl.constexpr, num_ranks: tl.constexpr):
    """[sources, experts] counts: what is left of them in the first `room` slots."""
    inside = route.up_to(by_source, sources, num_ranks) - by_source
    first = route.first_of(tl.sum(by_source, axis=0))[None, :] + inside
    return tl.minimum(by_source, tl.maximum(room - first, 0))


@triton.jit
def _choices(ids, i, end, top_k, width: tl.constexpr):
    """[tokens, width] what rows i of ids say, -1 behind `end` and behind top_k."""
    k = tl.arange(0, width)
    mask = (i < end)[:, None] & (k < top_k)[None, :]
    return tl.load(ids + i.to(tl.int64)[:, None] * top_k + k[None, :], mask=mask, other=-1)


@triton.jit
def _any(hit):
    """[tokens] is any of a row so?"""
    return tl.max(hit.to(tl.int32), axis=1) > 0


@triton.jit
def ranks_of(ids, i, split, width: tl.constexpr):
    """[tokens, width] whose experts own tokens i have chosen; -1: nobody's."""
    chosen = _choices(ids, i, split.tokens, split.top_k, width)
    return tl.where(chosen >= 0, chosen // split.own, -1)


@triton.jit
def _nodes_of(world, ranks):
    """[tokens, width] whose nodes' ranks these are; -1: nobody's."""
    return tl.where(ranks >= 0, nodes.node_of(world, tl.maximum(ranks, 0)), -1)


@triton.jit
def by_way_of(world, ranks, rank, num_nodes: tl.constexpr):
    """[tokens, width] with whom rank `rank` exchanges rows of `ranks`: with these themselves, or,
    relayed, with its partners on their nodes."""
    if num_nodes > 1:
        there = _nodes_of(world, ranks)
        for node in range(num_nodes):
            if node != wl.node(world):
                ranks = tl.where(there == node, nodes.partner_of(world, rank, node), ranks)
    return ranks


@triton.jit
def is_way(world, peer):
    """Is `peer` of this node, or this rank's partner on its own?"""
    return wl.is_near(world, peer) | nodes.is_partner(world, peer, wl.rank(world))


@triton.jit
def send(world, gathered, x, ids, source, row, split, tile, num_nodes: tl.constexpr,
         is_onward: tl.constexpr):  # fmt: skip
    """This channel's tiles of a source's tokens -> `gathered` of all ranks that have experts of
    theirs, or of their nodes' partners. is_onward: of the other ranks of this node alone."""
    row, rank = tl.cast(row, tl.int64) // tile.vec * tile.vec, wl.rank(world).to(tl.int32)
    for begin in range(
        tl.program_id(0) * tile.tokens, split.tokens, tl.num_programs(0) * tile.tokens
    ):
        i = begin + tl.arange(0, tile.tokens)
        ranks = ranks_of(ids, i, split, tile.width)
        if is_onward:
            is_near = (_nodes_of(world, ranks) == wl.node(world)) & (ranks != rank)
            ranks = tl.where(is_near, ranks, -1)
        else:
            ranks = by_way_of(world, ranks, rank, num_nodes)
        is_sent = _any(ranks >= 0)
        there = (source * split.rows + i).to(tl.int64)
        for start in range(0, row, tile.block):
            column = start + tl.arange(0, tile.block)
            inside = (column < row)[None, :]
            mine = x + i.to(tl.int64)[:, None] * row + column[None, :]
            values = tl.load(mine, mask=is_sent[:, None] & inside)
            place = gathered + there[:, None] * row + column[None, :]
            for hop in range(world.num_ranks):
                to = (rank + hop) % world.num_ranks
                goes = _any(ranks == to)
                if num_nodes == 1:
                    wl.put(world, place, values, to=to, mask=goes[:, None] & inside)
                elif tl.max(goes.to(tl.int32), axis=0) > 0:  # most far ranks get nothing from here
                    wl.put(world, place, values, to=to, mask=goes[:, None] & inside)


@triton.jit
def send_ids(world, chosen, ids, rank, split, tile, num_nodes: tl.constexpr):
    """This channel's tiles of own tokens' choices -> `chosen` of the partner on each other node."""
    k = tl.arange(0, tile.width)
    for begin in range(
        tl.program_id(0) * tile.tokens, split.rows, tl.num_programs(0) * tile.tokens
    ):
        i = begin + tl.arange(0, tile.tokens)
        mine = _choices(ids, i, split.tokens, split.top_k, tile.width)
        place = (rank * split.rows + i).to(tl.int64)[:, None] * split.top_k + k[None, :]
        mask = (i < split.rows)[:, None] & (k < split.top_k)[None, :]
        for node in range(num_nodes):
            if node != wl.node(world):
                partner = nodes.partner_of(world, rank, node)
                wl.put(world, chosen + place, mine, to=partner, mask=mask)


@triton.jit
def notify_ways(world, word, e, num_nodes: tl.constexpr):
    """Set `word` on all ranks that `send` sends to: relayed, this node's and own partners."""
    if num_nodes == 1:
        wl.notify_all(world, word, e, op=wl.SignalOp.SET)
    else:
        for hop in range(world.num_ranks):
            to = (wl.rank(world) + hop) % world.num_ranks
            if is_way(world, to):
                wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def pass_on(world, rows, scales, chosen, word, e, source, split, tile, scale_tile,
            num_nodes: tl.constexpr):  # fmt: skip
    """A far rank's rows that are here -> the other ranks of this node that have experts of theirs,
    and the word that says so. rows, scales: Rows"""
    wl.wait(word, e, world=world)  # pairs with notify_ways
    rank = wl.rank(world)
    first = (source * split.rows).to(tl.int64)
    ids = chosen + first * split.top_k
    split = Split(
        split.experts, split.own, split.rows, split.rows, split.top_k, split.room
    )  # fmt: skip
    send(world, rows.gathered, rows.gathered + first * rows.row, ids, source, rows.row, split, tile,
         num_nodes, True)  # fmt: skip
    if scale_tile is not None:
        send(world, scales.gathered, scales.gathered + first * scales.row, ids, source, scales.row,
             split, scale_tile, num_nodes, True)  # fmt: skip
    for hop in range(1, world.num_ranks):
        to = (rank + hop) % world.num_ranks
        if wl.is_near(world, to):
            wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def take(out, gathered, slot_of, source, row, split, tile):
    """This channel's tiles of a source's tokens -> out, whose rows are slots."""
    row = tl.cast(row, tl.int64) // tile.vec * tile.vec
    for begin in range(
        tl.program_id(0) * tile.tokens, split.rows, tl.num_programs(0) * tile.tokens
    ):
        i = begin + tl.arange(0, tile.tokens)
        token = source * split.rows + i
        end = (source + 1) * split.rows
        here = _any(_choices(slot_of, token, end, split.top_k, tile.width) >= 0)
        for start in range(0, row, tile.block):
            column = start + tl.arange(0, tile.block)
            inside = (column < row)[None, :]
            place = gathered + token.to(tl.int64)[:, None] * row + column[None, :]
            values = tl.load(place, mask=here[:, None] & inside)
            for k in range(split.top_k):
                slot = tl.load(slot_of + token.to(tl.int64) * split.top_k + k, mask=here, other=-1)
                fits = (slot >= 0) & (slot < split.room)
                to = out + slot.to(tl.int64)[:, None] * row + column[None, :]
                tl.store(to, values, mask=fits[:, None] & inside)


@triton.jit
def clear_free(out, token_of, row, split, tile):
    """Zeros in all slots that nobody has."""
    row = tl.cast(row, tl.int64) // tile.vec * tile.vec
    for begin in range(
        tl.program_id(0) * tile.tokens, split.room, tl.num_programs(0) * tile.tokens
    ):
        slot = begin + tl.arange(0, tile.tokens)
        free = tl.load(token_of + slot, mask=slot < split.room, other=0) < 0
        for start in range(0, row, tile.block):
            column = start + tl.arange(0, tile.block)
            zeros = tl.zeros((tile.tokens, tile.block), out.dtype.element_ty)
            to = out + slot.to(tl.int64)[:, None] * row + column[None, :]
            tl.store(to, zeros, mask=free[:, None] & (column < row)[None, :])


@triton.jit
def _sums(y, slots, weight_of, column, n, split, tile, weighted: tl.constexpr):
    """[tokens, block] in fp32: rows of y in `slots`, added up by slot, so by expert."""
    total = tl.zeros((tile.tokens, tile.block), tl.float32)
    last = tl.full((tile.tokens,), -1, tl.int32)
    for _ in range(split.top_k):
        slot = tl.min(tl.where(slots > last[:, None], slots, NEVER), axis=1)
        there = slot < split.room
        mask = there[:, None] & (column < n)[None, :]
        place = y + slot.to(tl.int64)[:, None] * n + column[None, :]
        value = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        if weighted:
            weight = tl.load(weight_of + slot, mask=there, other=0.0)
            value = value * weight[:, None]
        total += value
        last = slot
    return total


@triton.jit
def add(world, shares, has, y, slot_of, weight_of, place, of, to, n, split, tile,
        weighted: tl.constexpr):  # fmt: skip
    """This channel's tiles of the tokens of rank `of` -> part `place` of `shares` of rank `to`,
    which asks there, in `has`, who has a share at all; None: it knows."""
    dtype: tl.constexpr = y.dtype.element_ty
    for begin in range(
        tl.program_id(0) * tile.tokens, split.rows, tl.num_programs(0) * tile.tokens
    ):
        i = begin + tl.arange(0, tile.tokens)
        token = of * split.rows + i
        slots = _choices(slot_of, token, (of + 1) * split.rows, split.top_k, tile.width)
        goes = _any(slots >= 0)
        there = (place * split.rows + i).to(tl.int64)
        if has is not None:
            wl.put(world, has + there, goes.to(tl.int32), to=to, mask=i < split.rows)
        for start in range(0, n, tile.block):
            column = start + tl.arange(0, tile.block)
            share = _sums(y, slots, weight_of, column, n, split, tile, weighted).to(dtype)
            at = shares + there[:, None] * n + column[None, :]
            wl.put(world, at, share, to=to, mask=goes[:, None] & (column < n)[None, :])


@triton.jit
def _share(shares, row, here, column, n):
    """[tokens, block] in fp32: shares in `row`, zeros where none is `here`."""
    place = shares + row.to(tl.int64)[:, None] * n + column[None, :]
    mask = here[:, None] & (column < n)[None, :]
    return tl.load(place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def add_node(world, shares, relayed, has, first, size, rank, to, n, split, tile):
    """This channel's tiles of the tokens of a far rank `to`: what the `size` ranks of this node
    have given, parts `first` and so on, added up in the order of seats -> its `shares`."""
    dtype: tl.constexpr = shares.dtype.element_ty
    for begin in range(
        tl.program_id(0) * tile.tokens, split.rows, tl.num_programs(0) * tile.tokens
    ):
        i = begin + tl.arange(0, tile.tokens)
        for start in range(0, n, tile.block):
            column = start + tl.arange(0, tile.block)
            total = tl.zeros((tile.tokens, tile.block), tl.float32)
            goes = i < 0
            for seat in range(size):
                row = (first + seat) * split.rows + i
                here = tl.load(has + row, mask=i < split.rows, other=0) > 0
                total += _share(relayed, row, here, column, n)
                goes |= here
            there = (rank * split.rows + i).to(tl.int64)
            place = shares + there[:, None] * n + column[None, :]
            mask = goes[:, None] & (column < n)[None, :]
            wl.put(world, place, total.to(dtype), to=to, mask=mask)


@triton.jit
def collect(out, shares, ids, n, world, split, tile, num_nodes: tl.constexpr):
    """This channel's tiles of own tokens: shares of all ranks that have any, added up in fp32 in
    the order of ranks, which is that of experts; relayed, another node's sum comes where its
    partner does."""
    dtype: tl.constexpr = out.dtype.element_ty
    rank = wl.rank(world).to(tl.int32)
    for begin in range(
        tl.program_id(0) * tile.tokens, split.tokens, tl.num_programs(0) * tile.tokens
    ):
        i = begin + tl.arange(0, tile.tokens)
        ranks = by_way_of(world, ranks_of(ids, i, split, tile.width), rank, num_nodes)
        for start in range(0, n, tile.block):
            column = start + tl.arange(0, tile.block)
            total = tl.zeros((tile.tokens, tile.block), tl.float32)
            for source in range(world.num_ranks):
                here = _any(ranks == source)
                total += _share(shares, source * split.rows + i, here, column, n)
            place = out + i.to(tl.int64)[:, None] * n + column[None, :]
            mask = (i < split.tokens)[:, None] & (column < n)[None, :]
            tl.store(place, total.to(dtype), mask=mask)


@triton.jit
def send_choices(world, shares, y, slot_of, to, n, split, tile):
    """This channel's tiles of the tokens of rank `to`: rows by slot -> each choice's place there,
    as they are. Zeros for choices that had no room: their token's rank cannot tell."""
    for begin in range(
        tl.program_id(0) * tile.tokens, split.rows, tl.num_programs(0) * tile.tokens
    ):
        i = begin + tl.arange(0, tile.tokens)
        token = to * split.rows + i
        slots = _choices(slot_of, token, (to + 1) * split.rows, split.top_k, tile.width)
        for k in range(split.top_k):
            slot = choice(slots, tl.arange(0, tile.width), k)
            goes, fits = slot >= 0, (slot >= 0) & (slot < split.room)
            there = (i * split.top_k + k).to(tl.int64)
            for start in range(0, n, tile.block):
                column = start + tl.arange(0, tile.block)
                inside = (column < n)[None, :]
                mine = y + slot.to(tl.int64)[:, None] * n + column[None, :]
                value = tl.load(mine, mask=fits[:, None] & inside, other=0.0)
                place = shares + there[:, None] * n + column[None, :]
                wl.put(world, place, value, to=to, mask=goes[:, None] & inside)


@triton.jit
def add_up_choices(out, shares, ids, weights, n, split, tile, weighted: tl.constexpr):
    """This channel's tiles of own tokens: rows of their choices, added up in fp32 in the order of
    choices, as weft.compiler.experts.scatter_rows does it."""
    dtype: tl.constexpr = out.dtype.element_ty
    for begin in range(
        tl.program_id(0) * tile.tokens, split.tokens, tl.num_programs(0) * tile.tokens
    ):
        i = begin + tl.arange(0, tile.tokens)
        chosen = _choices(ids, i, split.tokens, split.top_k, tile.width)
        for start in range(0, n, tile.block):
            column = start + tl.arange(0, tile.block)
            inside = (column < n)[None, :]
            total = tl.zeros((tile.tokens, tile.block), tl.float32)
            for k in range(split.top_k):
                here = choice(chosen, tl.arange(0, tile.width), k) >= 0
                row = (i * split.top_k + k).to(tl.int64)
                place = shares + row[:, None] * n + column[None, :]
                value = tl.load(place, mask=here[:, None] & inside, other=0.0).to(tl.float32)
                if weighted:
                    value = value * tl.load(weights + row, mask=here, other=0.0)[:, None]
                # The first one is not added to zero: of -0 that would make +0.
                total = tl.where(k == 0, value, total + value)
            place = out + i.to(tl.int64)[:, None] * n + column[None, :]
            mask = (i < split.tokens)[:, None] & inside
            tl.store(place, total.to(dtype), mask=mask)


# ---------------------------------------------------------------------------------------------
# Kernels


class Rows(NamedTuple):
    """x: [own tokens, row] elements -> gathered -> out: [capacity, row]."""

    x: Any
    out: Any
    gathered: Any
    row: Any


class Relayed(NamedTuple):
    """Where a rank finds what it passes on of a combine. shares: a part for each rank of this node
    and each far rank that this one is the partner of, by relay.Groups; has: int32 of each such
    token, is there a share; ready: int64 of each part and channel."""

    shares: Any
    has: Any
    ready: Any
    groups: Any


@triton.jit
def _arrive(world, rows, scales, slot_of, rows_ready, source, e, split, tile, scale_tile):
    """From a source to its tokens' slots."""
    wl.wait(move.signal_of(rows_ready, source), e, world=world)  # with notify_ways and pass_on
    take(rows.out, rows.gathered, slot_of, source, rows.row, split, tile)
    if scale_tile is not None:
        take(scales.out, scales.gathered, slot_of, source, scales.row, split, scale_tile)


@triton.jit
def ep_dispatch_rows(rows, scales, ids, chosen, slot_of, token_of, rows_ready, slot, split, tile,
                     scale_tile, world, clear: tl.constexpr, num_nodes: tl.constexpr):  # fmt: skip
    """Own tokens to the ranks of their experts, channel by channel; then from each source to
    their slots.

    rows: Rows; scales: the same of what goes with them, where scale_tile is; chosen: int32, where
    relayed rows' choices come, by token
    """
    rank = wl.rank(world).to(tl.int32)
    e = move.begin(world, slot)
    if num_nodes > 1:
        send_ids(world, chosen, ids, rank, split, tile, num_nodes)
    send(world, rows.gathered, rows.x, ids, rank, rows.row, split, tile, num_nodes, False)
    if scale_tile is not None:
        send(world, scales.gathered, scales.x, ids, rank, scales.row, split, scale_tile, num_nodes,
             False)  # fmt: skip
    notify_ways(world, move.signal_of(rows_ready, rank), e, num_nodes)
    for hop in range(world.num_ranks):
        source = (rank + world.num_ranks - hop) % world.num_ranks
        if num_nodes == 1:
            _arrive(world, rows, scales, slot_of, rows_ready, source, e, split, tile, scale_tile)
        elif wl.is_near(world, source):  # while those of other nodes are on their way
            _arrive(world, rows, scales, slot_of, rows_ready, source, e, split, tile, scale_tile)
    if num_nodes > 1:
        for hop in range(1, world.num_ranks):
            source = (rank + world.num_ranks - hop) % world.num_ranks
            if not wl.is_near(world, source):
                if nodes.is_partner(world, rank, source):
                    word = move.signal_of(rows_ready, source)
                    pass_on(world, rows, scales, chosen, word, e, source, split, tile, scale_tile,
                            num_nodes)  # fmt: skip
        for hop in range(1, world.num_ranks):
            source = (rank + world.num_ranks - hop) % world.num_ranks
            if not wl.is_near(world, source):
                _arrive(world, rows, scales, slot_of, rows_ready, source, e, split, tile,
                        scale_tile)  # fmt: skip
    move.end(world, slot, e)
    if clear:
        clear_free(rows.out, token_of, rows.row, split, tile)
        if scale_tile is not None:
            clear_free(scales.out, token_of, scales.row, split, scale_tile)


@triton.jit
def _give_far(world, relayed, y, slot_of, weights, e, n, split, tile, weighted: tl.constexpr):
    """Shares of far ranks' tokens -> the rank of this node that relays them. relayed: Relayed"""
    rank = wl.rank(world).to(tl.int32)
    for hop in range(1, world.num_ranks):
        of = (rank + hop) % world.num_ranks
        if not wl.is_near(world, of):
            to = nodes.partner_of(world, of, wl.node(world))
            place = relay.place_of(world, of, rank, relayed.groups)
            add(world, relayed.shares, relayed.has, y, slot_of, weights, place, of, to, n, split,
                tile, weighted)  # fmt: skip
            word = move.signal_of(relayed.ready, place)
            wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def _relay_far(world, shares, relayed, shares_ready, e, n, split, tile):
    """This node's sums of far ranks' tokens -> these, of those ranks that this one relays for."""
    rank, node = wl.rank(world).to(tl.int32), wl.node(world)
    size = nodes.node_size(world, node)
    for hop in range(1, world.num_ranks):
        to = (rank + hop) % world.num_ranks
        if not wl.is_near(world, to):
            if nodes.is_partner(world, rank, to):
                first = relay.group_of(world, to, relayed.groups)
                for seat in range(size):
                    word = move.signal_of(relayed.ready, first + seat)
                    wl.wait(word, e, world=world)  # pairs with _give_far
                add_node(world, shares, relayed.shares, relayed.has, first, size, rank, to, n,
                         split, tile)  # fmt: skip
                word = move.signal_of(shares_ready, rank)
                wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def _give(world, shares, y, slot_of, weights, shares_ready, e, to, n, split, tile,
          weighted: tl.constexpr, by_choice: tl.constexpr):  # fmt: skip
    """Shares of a rank's tokens -> that rank."""
    rank = wl.rank(world).to(tl.int32)
    if by_choice:
        send_choices(world, shares, y, slot_of, to, n, split, tile)
    else:
        add(world, shares, None, y, slot_of, weights, rank, to, to, n, split, tile, weighted)
    wl.notify(world, move.signal_of(shares_ready, rank), e, to=to, op=wl.SignalOp.SET)


@triton.jit
def ep_combine_rows(y, out, shares, relayed, ids, slot_of, weights, shares_ready, slot, n, split,
                    tile, world, weighted: tl.constexpr, by_choice: tl.constexpr,
                    num_nodes: tl.constexpr):  # fmt: skip
    """Shares of each rank's tokens to that rank, channel by channel; then own tokens' sums.

    A share is the sum of a rank's slots, `weights` being theirs; by_choice: one choice's row, and
    `weights` are own tokens'. relayed: Relayed, where there are several nodes
    """
    rank = wl.rank(world).to(tl.int32)
    n = tl.cast(n, tl.int64) // tile.vec * tile.vec  # seen to be a multiple, which it is
    e = move.begin(world, slot)
    if num_nodes > 1:  # they have the longest way
        _give_far(world, relayed, y, slot_of, weights, e, n, split, tile, weighted)
    for hop in range(1, world.num_ranks + 1):
        to = (rank + hop) % world.num_ranks
        if num_nodes == 1:
            _give(world, shares, y, slot_of, weights, shares_ready, e, to, n, split, tile, weighted,
                  by_choice)  # fmt: skip
        elif wl.is_near(world, to):
            _give(world, shares, y, slot_of, weights, shares_ready, e, to, n, split, tile, weighted,
                  by_choice)  # fmt: skip
    if num_nodes > 1:
        _relay_far(world, shares, relayed, shares_ready, e, n, split, tile)
    for source in range(world.num_ranks):
        word = move.signal_of(shares_ready, source)
        if num_nodes == 1:
            wl.wait(word, e, world=world)  # pairs with _give
        elif is_way(world, source):
            wl.wait(word, e, world=world)  # pairs with _give and _relay_far
    if by_choice:
        add_up_choices(out, shares, ids, weights, n, split, tile, weighted)
    else:
        collect(out, shares, ids, n, world, split, tile, num_nodes)
    move.end(world, slot, e)
