"""Choices of experts to every rank, and the tables that each rank makes of them: two kernels.

    moe_route_tables     a router's: chooses by logits; every rank has the tables of all experts, or
                         of its own
    ep_dispatch_tables   a dispatch's: checks choices; each rank has the tables of its own experts

Both go through a block of own tokens at a time, store its choices and its counts on every rank, and
set its flag there. When the flags of all blocks are there, sums of counts are places: see
weft.tiles.route.
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.errors import CapacityError, UsageError, WeftError
from weft.language import mapping, slots
from weft.tiles import experts, route

# What the error word says, in its lowest bits; a rank behind it; then a number.
TOO_MANY, WRONG_CHOICE = tl.constexpr(1), tl.constexpr(2)
# Slots behind the last that are filled at a time.
FILLED = tl.constexpr(256)
RANK_BITS, NUMBER_BITS = tl.constexpr(4), tl.constexpr(20)


class Heard(NamedTuple):
    """The slot's arrays: ids, weights [tokens of all ranks, top_k], a dispatch's ids being numbers
    of own experts; counted [blocks, experts], a dispatch's [blocks, own experts + ranks]; wrong
    [blocks] of a dispatch, see experts.check; the flags of blocks."""

    ids: Any
    weights: Any
    counted: Any
    wrong: Any
    routed: Any

    @classmethod
    def of(cls, slot: Any) -> Heard:
        """Those that a slot has."""
        return cls(*[getattr(slot, name, None) for name in cls._fields])


class Blocks(NamedTuple):
    """How programs go through the tokens: `count` blocks of all ranks; what kernels are given; the
    slot's buffers and signals."""

    count: int
    tokens: route.Tokens
    cut: route.RouteBlocking
    memory: tuple[dict[str, Any], dict[str, Any]]

    @classmethod
    def of(
        cls, problem: Any, columns: int, step: int, programs: int, *, scoring: Any = None,
        apart: int = 0,
    ) -> Blocks:  # fmt: skip
        """Of `step` tokens at a time, so many blocks to a rank, at most, that each has one of so
        many programs. `columns` are counted for each block. scoring: of a router"""
        steps = ceil(problem.rows / step)
        length = max(1, ceil(steps / programs))
        blocks = ceil(steps / length)
        tokens = route.Tokens(
            problem.num_tokens,
            problem.rows,
            blocks,
            length * step,
            columns,
            problem.max_tiles,
            apart,
        )
        sizes = (columns, problem.num_ranks, problem.top_k)
        experts, sources, width = (max(2, triton.next_power_of_2(one)) for one in sizes)
        cut = route.RouteBlocking(
            step, experts, sources, problem.top_k, width, problem.tile_m, *(scoring or ())
        ).as_constexpr()
        count, chosen = problem.num_ranks * blocks, (problem.num_tokens, problem.top_k)
        buffers = {
            "ids": (chosen, torch.int32),
            "weights": (chosen, torch.float32),
            "counted": ((count, columns), torch.int32),
        }
        return cls(max(1, count), tokens, cut, (buffers, {"routed": (count, torch.int64)}))


@triton.jit
def _sort(world, made, heard, own, room, rank, e, tokens, cut, limited: tl.constexpr):
    """When all ranks' blocks are here: this program's blocks -> slots of `own` experts, from this
    rank's first one on; the last program's, the tables of tiles. `limited`: may there be more than
    `room` slots?

    Gives the counts by source, of all columns."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    blocks = world.num_ranks * tokens.blocks
    wl.wait(heard.routed, e, blocks, world=world)  # pairs with the notify of every rank's block
    # The last programs have the fewest blocks.
    share = tl.cdiv(blocks, num_programs)
    first = program * share
    own_first = rank * tokens.apart
    counts = route.count(heard.counted, own_first, first, tokens, cut, world.num_ranks)
    is_own = tl.arange(0, cut.experts) < own
    by_source = tl.where(is_own[None, :], counts.by_source, 0)
    if program == num_programs - 1:
        route.store_counts(made.counts, by_source, own, cut, world.num_ranks)
        fitting = by_source
        if limited:
            fitting = experts.fitting(by_source, room, cut.sources, world.num_ranks)
        route.cut_tiles(
            fitting, made.tiles, made.turns, made.num_tiles, rank, tokens, cut, world.num_ranks
        )  # fmt: skip
    begin = route.first_of(tl.sum(by_source, axis=0)) + counts.before
    for block in range(first, tl.minimum(first + share, blocks)):
        begin = route.place(
            heard.ids, heard.weights, block, begin, made.token_of, made.weight_of, made.slot_of,
            room, own_first, own, tokens, cut,
        )  # fmt: skip
    return counts.by_source


@triton.jit
def _fill_behind(made, counts, own, room, cut):
    """No token in the slots behind those of own experts: this program's part of them."""
    is_own = tl.arange(0, cut.experts) < own
    used = tl.sum(tl.where(is_own[None, :], counts, 0))
    first = used + tl.program_id(0) * FILLED
    for at in range(first, room, tl.num_programs(0) * FILLED):
        slot = at + tl.arange(0, FILLED)
        tl.store(made.token_of + slot, -1, mask=slot < room)
        tl.store(made.weight_of + slot, 0.0, mask=slot < room)


# ---------------------------------------------------------------------------------------------
# The router's


@triton.jit
def _choose_block(world, logits, bias, ids, weights, heard, block, rank, e, tokens, cut):
    """Own block -> experts and weights, here and on every rank; and how many each expert has."""
    own_first, own_end = mapping.part_of(tokens.m, rank, tokens.rows)
    own = own_end - own_first
    k = tl.arange(0, cut.width)
    expert = tl.arange(0, cut.experts)
    counts = tl.zeros((cut.experts,), tl.int32)
    first = block * tokens.length
    for at in range(first, tl.minimum(first + tokens.length, own), cut.block):
        row = at + tl.arange(0, cut.block)
        chosen = route.choose(logits, bias, row, own, tokens, cut)
        place = row[:, None] * cut.top_k + k[None, :]
        mask = (row < own)[:, None] & (k < cut.top_k)[None, :]
        tl.store(ids + place, chosen.ids, mask=mask)
        tl.store(weights + place, chosen.weights, mask=mask)
        there = rank * tokens.rows * cut.top_k + place
        for hop in range(1, world.num_ranks + 1):
            to = (rank + hop) % world.num_ranks
            # weft: equivalent-mutant peer+1 of at: every rank is given the same, in another order
            wl.put(world, heard.ids + there, chosen.ids, to=to, mask=mask)
            # weft: equivalent-mutant peer+1 of at: as above
            wl.put(world, heard.weights + there, chosen.weights, to=to, mask=mask)
        counts += chosen.counts
    index = rank * tokens.blocks + block
    counted = heard.counted + index * tokens.experts + expert
    for hop in range(1, world.num_ranks + 1):
        to = (rank + hop) % world.num_ranks
        # weft: equivalent-mutant peer+1 of at: as above
        wl.put(world, counted, counts, to=to, mask=expert < tokens.experts)
    wl.notify_all(world, heard.routed + index, e, op=wl.SignalOp.SET)


@triton.jit
def moe_route_tables(logits, bias, made, heard, slot, tokens, cut, world, split: tl.constexpr):
    """made: Tables, the results; heard: Heard; bias: of experts, or None. split: of own experts"""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    for block in range(program, tokens.blocks, num_programs):
        _choose_block(
            world, logits, bias, made.ids, made.weights, heard, block, rank, e, tokens, cut
        )  # fmt: skip
    room, own = tokens.m * cut.top_k, tokens.experts
    if split:
        own = tokens.apart
    counts = _sort(world, made, heard, own, room, rank, e, tokens, cut, limited=False)
    if split:
        _fill_behind(made, counts, own, room, cut)
    slots.slot_finish(world, slot, e, num_programs)


# ---------------------------------------------------------------------------------------------
# A dispatch's


@triton.jit
def _tell_choices(world, ids, made, heard, block, rank, e, tokens, cut, split):
    """A block of own choices -> every rank, as it counts experts; and how many each has."""
    k = tl.arange(0, cut.width)
    column = tl.arange(0, cut.experts)
    source = tl.arange(0, cut.sources)[:, None]
    counts = tl.zeros((cut.sources, cut.experts), tl.int32)  # for each rank
    wrong = tl.cast(0, tl.int32)
    first = block * tokens.length
    for at in range(first, tl.minimum(first + tokens.length, tokens.rows), cut.block):
        row = at + tl.arange(0, cut.block)
        place = row.to(tl.int64)[:, None] * cut.top_k + k[None, :]
        mask = (row < split.tokens)[:, None] & (k < cut.top_k)[None, :]
        asked = tl.load(ids + place, mask=mask, other=-1)
        checked = experts.check(asked, row, k, cut.top_k, split.experts, cut.width)
        wrong = tl.where(wrong == 0, checked.wrong, wrong)
        tl.store(made.ids + place, checked.ids, mask=mask)
        weights = tl.load(made.weights + place, mask=mask, other=0.0)
        there = (rank * tokens.rows).to(tl.int64) * cut.top_k + place
        # Places without a token hold no choice.
        room = (row < tokens.rows)[:, None] & (k < cut.top_k)[None, :]
        for hop in range(world.num_ranks):
            to = (rank + hop) % world.num_ranks
            local = experts.local_to(checked.ids, to, split.own)
            wl.put(world, heard.ids + there, local, to=to, mask=room)
            # weft: equivalent-mutant peer+1 of at: every rank is given the same, in another order
            wl.put(world, heard.weights + there, weights, to=to, mask=room)
            found = experts.tally(checked.ids, to, split, cut.experts)
            counts += tl.where(source == to, found[None, :], 0)
    index = rank * tokens.blocks + block
    counted = heard.counted + index * tokens.experts + column
    for hop in range(world.num_ranks):
        to = (rank + hop) % world.num_ranks
        found = route.row_of(counts, to, cut.sources)
        wl.put(world, counted, found, to=to, mask=column < tokens.experts)
        # weft: equivalent-mutant peer+1 of at: as above
        wl.put(world, heard.wrong + index, wrong, to=to)
    wl.notify_all(world, heard.routed + index, e, op=wl.SignalOp.SET)


@triton.jit
def _say_what_is_wrong(
    errors, heard, by_source, tokens, cut, split, num_ranks: tl.constexpr
):  # fmt: skip
    """A word, if a rank gets more than it has room for, or a choice was wrong: the first block's
    that has one. The same on all ranks."""
    word = tl.cast(0, tl.int64)
    column = tl.arange(0, cut.experts)
    slots = tl.sum(by_source, axis=0)
    for to in range(num_ranks):
        needed = tl.sum(tl.where(column == split.own + to, slots, 0), axis=0).to(tl.int64)
        said = (needed << NUMBER_BITS) | (to << RANK_BITS) | TOO_MANY
        word = tl.where((needed > split.room) & (word == 0), said, word)
    blocks = num_ranks * tokens.blocks
    for at in range(0, blocks, route.BLOCKS):
        block = at + tl.arange(0, route.BLOCKS)
        wrong = tl.load(heard.wrong + block, mask=block < blocks, other=0).to(tl.int64)
        said = (wrong << NUMBER_BITS) | ((block // tokens.blocks) << RANK_BITS) | WRONG_CHOICE
        first = tl.min(tl.where(wrong > 0, block, experts.NEVER), axis=0)
        found = tl.sum(tl.where(block == first, said, 0), axis=0)
        found = tl.where(first == experts.NEVER, word, found)
        word = tl.where((word & WRONG_CHOICE) != 0, word, found)
    if word != 0:
        tl.store(errors, word)


@triton.jit
def ep_dispatch_tables(ids, made, heard, errors, slot, tokens, cut, split, world):
    """made: Tables, whose weights are there; heard: Heard. It waits for no credits: a rank that has
    sent the rows of a call before is done with its choices."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    for block in range(program, tokens.blocks, num_programs):
        _tell_choices(world, ids, made, heard, block, rank, e, tokens, cut, split)
    counts = _sort(
        world, made, heard, split.own, split.room, rank, e, tokens, cut, limited=True
    )  # fmt: skip
    if program == num_programs - 1:
        _say_what_is_wrong(errors, heard, counts, tokens, cut, split, world.num_ranks)
    _fill_behind(made, counts, split.own, split.room, cut)


def explain(problem: Any, word: int) -> WeftError:
    """The error that ep_dispatch_tables has stored in a word, for a dispatch's problem."""
    low, high = RANK_BITS.value, NUMBER_BITS.value
    kind, number = word & ((1 << low) - 1), word >> high
    rank = (word >> low) & ((1 << (high - low)) - 1)
    if kind == TOO_MANY.value:
        return CapacityError(
            f"ep_dispatch: rank {rank} gets {number} rows for its experts but has room for "
            f"capacity={problem.capacity}; what came behind was left out, so results are wrong. "
            f"Pass capacity={number} or more; without it there is room for {problem.most_slots}"
        )
    token, choice = divmod((number - 1) // 2, max(2, triton.next_power_of_2(problem.top_k)))
    what = f"ep_dispatch: choice {choice} of token {token} of rank {rank}"
    if (number - 1) % 2:
        return UsageError(
            f"{what} is an expert that the token has already; it was left out. A token's top_k "
            "experts must differ"
        )
    return UsageError(
        f"{what} is no expert; it was left out. Experts are 0 .. {problem.experts - 1}, and -1 is "
        "none"
    )
