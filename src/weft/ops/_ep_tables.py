"""The tables of a dispatch: every rank's choices told to every rank, and what each makes of them.

Not an operator: the first kernel of ep_dispatch, and what it says is wrong. See there for the plan
and its signals; moe_route's is the same with the choosing.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.errors import CapacityError, UsageError, WeftError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.language import slots
from weft.ops import _ep, _lanes
from weft.ops._ep import Config, Problem
from weft.ops.moe_route import Tables, blocks_of
from weft.tiles import experts as ep
from weft.tiles import route

# What the word of errors says, in its lowest bits; a rank behind it; then a number.
TOO_MANY, WRONG_CHOICE = tl.constexpr(1), tl.constexpr(2)
RANK_BITS, NUMBER_BITS = tl.constexpr(4), tl.constexpr(20)
# Programs, of which each has an SM for itself, and blocks of each rank's tokens, at most: all
# programs add up the counts of all blocks.
MOST_PROGRAMS = 64


def _programs(config: Config) -> int:
    return min(config.lanes, MOST_PROGRAMS)


def _tokens(problem: Problem, config: Config) -> route.Tokens:
    columns = problem.own_experts + problem.num_ranks
    blocks = blocks_of(problem.rows, config.batch, _programs(config))
    return route.Tokens(problem.num_tokens, problem.rows, *blocks, columns, problem.max_tiles)


def _cut(problem: Problem, config: Config) -> route.Cut:
    columns = _lanes.power_of_two(problem.own_experts + problem.num_ranks)
    sources = max(2, _lanes.power_of_two(problem.num_ranks))
    width = config.extents(problem, 1).width
    return route.Cut(
        config.batch, columns, sources, problem.top_k, width, problem.tile_m, False
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The program


class Heard(NamedTuple):
    """The slot's arrays: ids, weights [num_ranks * rows, top_k], experts being own ones; counted
    [blocks, own experts + ranks]; wrong [blocks], see experts.check."""

    ids: Any
    weights: Any
    counted: Any
    wrong: Any
    routed: Any


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
        checked = ep.check(asked, row, k, cut.top_k, split.experts, cut.width)
        wrong = tl.where(wrong == 0, checked.wrong, wrong)
        tl.store(made.ids + place, checked.ids, mask=mask)
        weights = tl.load(made.weights + place, mask=mask, other=0.0)
        there = (rank * tokens.rows).to(tl.int64) * cut.top_k + place
        # Places without a token hold no choice.
        room = (row < tokens.rows)[:, None] & (k < cut.top_k)[None, :]
        for hop in range(world.num_ranks):
            to = (rank + hop) % world.num_ranks
            local = ep.local_to(checked.ids, to, split.own)
            wl.put(world, heard.ids + there, local, to=to, mask=room)
            # weft: equivalent-mutant peer+1 of at: every rank is given the same, in another order
            wl.put(world, heard.weights + there, weights, to=to, mask=room)
            found = ep.tally(checked.ids, to, split, cut.experts)
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
def _say_what_is_wrong(errors, heard, by_source, blocks, tokens, cut, split,
                       num_ranks: tl.constexpr):  # fmt: skip
    """A word, if a rank gets more than it has room for, or a choice was wrong: the first block's
    that has one. The same on all ranks."""
    word = tl.cast(0, tl.int64)
    column = tl.arange(0, cut.experts)
    slots = tl.sum(by_source, axis=0)
    for to in range(num_ranks):
        needed = tl.sum(tl.where(column == split.own + to, slots, 0), axis=0).to(tl.int64)
        said = (needed << NUMBER_BITS) | (to << RANK_BITS) | TOO_MANY
        word = tl.where((needed > split.room) & (word == 0), said, word)
    for at in range(0, blocks, route.BLOCKS):
        block = at + tl.arange(0, route.BLOCKS)
        wrong = tl.load(heard.wrong + block, mask=block < blocks, other=0).to(tl.int64)
        said = (wrong << NUMBER_BITS) | ((block // tokens.blocks) << RANK_BITS) | WRONG_CHOICE
        first = tl.min(tl.where(wrong > 0, block, ep.NEVER), axis=0)
        found = tl.sum(tl.where(block == first, said, 0), axis=0)
        word = tl.where((word & WRONG_CHOICE) != 0, word, tl.where(first == ep.NEVER, word, found))
    if word != 0:
        tl.store(errors, word)


@triton.jit
def _fill(token_of, weight_of, first, room, block: tl.constexpr):
    """No token in the slots from `first` on: this program's part of them."""
    for at in range(first + tl.program_id(0) * block, room, tl.num_programs(0) * block):
        slot = at + tl.arange(0, block)
        tl.store(token_of + slot, -1, mask=slot < room)
        tl.store(weight_of + slot, 0.0, mask=slot < room)


@triton.jit
def ep_dispatch_tables(ids, made, heard, errors, slot, tokens, cut, split, world,
                       packets: tl.constexpr):  # fmt: skip
    """made: Tables, whose weights are there; heard: Heard"""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    if packets:
        slots.slot_wait_free(world, slot, e)
    for block in range(program, tokens.blocks, num_programs):
        _tell_choices(world, ids, made, heard, block, rank, e, tokens, cut, split)
    blocks = world.num_ranks * tokens.blocks
    wl.wait(heard.routed, e, blocks, world=world)  # pairs with _tell_choices of all ranks
    # The last programs have the fewest blocks.
    share = tl.cdiv(blocks, num_programs)
    first = program * share
    counts = route.count(heard.counted, first, tokens, cut, world.num_ranks)
    is_own = tl.arange(0, cut.experts) < split.own
    by_source = tl.where(is_own[None, :], counts.by_source, 0)
    if program == num_programs - 1:
        route.store_counts(made.counts, by_source, split.own, cut, world.num_ranks)
        fitting = ep.fitting(by_source, split.room, cut.sources, world.num_ranks)
        route.cut_tiles(
            fitting, made.tiles, made.turns, made.num_tiles, rank, tokens, cut, world.num_ranks
        )  # fmt: skip
        _say_what_is_wrong(
            errors, heard, counts.by_source, blocks, tokens, cut, split, world.num_ranks
        )  # fmt: skip
    slots_of = tl.sum(by_source, axis=0)
    begin = route.first_of(slots_of) + counts.before
    for block in range(first, tl.minimum(first + share, blocks)):
        begin = route.place(
            heard.ids, heard.weights, block, begin, made.token_of, made.weight_of, made.slot_of,
            split.room, tokens, cut,
        )  # fmt: skip
    _fill(made.token_of, made.weight_of, tl.sum(slots_of, axis=0), split.room, 256)


# ---------------------------------------------------------------------------------------------
# The host


def memory(problem: Problem, config: Config) -> tuple[dict, dict]:
    """Buffers of the slot, and how many words of each signal."""
    blocks = problem.num_ranks * _tokens(problem, config).blocks
    choices = (problem.num_tokens, problem.top_k)
    buffers = {
        "ids": (choices, torch.int32),
        "weights": (choices, torch.float32),
        "counted": ((blocks, problem.own_experts + problem.num_ranks), torch.int32),
        "wrong": ((blocks,), torch.int32),
    }
    return buffers, {"routed": blocks}


def make(
    world: Any, problem: Problem, config: Config, slot: Any, x: Any, ids: Any, weights: Any
) -> Tables:
    """A handle's tables, of this rank's ids and weights. Collective. slot: None without tokens."""
    own = x.shape[0]
    made = _ep.empty_tables(problem, own, weights, x.device)
    if slot is None:
        for one in (made.counts, made.tiles, made.num_tiles):
            one.zero_()
        torch.arange(problem.max_tiles, dtype=torch.int32, out=made.turns)
        return made
    heard = Heard(slot.ids, slot.weights, slot.counted, slot.wrong, slot.routed)
    # Programs that have at least a block of tokens.
    tokens = _tokens(problem, config)
    grid = min(_programs(config), problem.num_ranks * tokens.blocks)
    ep_dispatch_tables[(grid,)](
        ids, made, heard, _error_word(world, problem), slot.arg, tokens,
        _cut(problem, config).as_constexpr(), _ep.split_of(problem, own), world.arg,
        config.by_packets, num_warps=config.num_warps,
    )  # fmt: skip
    return made


def _error_word(world: Any, problem: Problem) -> torch.Tensor:
    """Where the kernel says what is wrong with a problem's choices."""
    # All that a message says.
    sizes = (problem.capacity, problem.most_slots, problem.experts, problem.top_k)
    key = ("ep_dispatch.errors", *sizes)
    word = world.calls.get(key)
    if word is None:
        word = world.calls[key] = world.error_word(partial(explain, problem))
    return word


def explain(problem: Problem, word: int) -> WeftError:
    """The error that the kernel has said in a word."""
    low, high = RANK_BITS.value, NUMBER_BITS.value
    kind, number = word & ((1 << low) - 1), word >> high
    rank = (word >> low) & ((1 << (high - low)) - 1)
    if kind == TOO_MANY.value:
        return CapacityError(
            f"ep_dispatch: rank {rank} gets {number} rows for its experts but has room for "
            f"capacity={problem.capacity}; what came behind was left out, so results are wrong. "
            f"Pass capacity={number} or more; without it there is room for {problem.most_slots}"
        )
    token, choice = divmod((number - 1) // 2, max(2, _lanes.power_of_two(problem.top_k)))
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


def record(problem: Problem, config: Config, target: Target) -> tuple[Any, KernelRecord]:
    """The kernel as `compile` builds it."""
    word, number = "*i32", "*fp32"
    types = {
        "made": [word, number, word, number, word, word, word, word, word],
        "heard": [word, number, word, word, "*i64"],
        "errors": "*i64",
    }
    constants = {
        "made": Tables(*[None] * len(Tables._fields)),
        "heard": Heard(*[None] * len(Heard._fields)),
        "cut": _cut(problem, config),
        "packets": config.by_packets,
    }
    options = {"num_warps": config.num_warps}
    return _ep.record(ep_dispatch_tables, problem, config, target, types, constants, options)
