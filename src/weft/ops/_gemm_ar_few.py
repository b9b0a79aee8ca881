"""gemm_ar for few rows, under one launch: packets carry each tile as soon as it is multiplied.

Not an operator: a part of gemm_ar.py, which see.

Plan
    each program   multiplies its share (tiles/gemm_small.py); whoever ends a tile sends it
    one_shot       to every rank, and each sums what all ranks have sent, in the order of ranks
    two_shot       tile t to rank t % num_ranks, which sums it likewise and sends the sum to all
Every rank gets the same bits: by one_shot from the same sums, by two_shot from one.

Signals
    words[2, ..]   packets, flagged with the call's epoch, in two halves that calls use in turns.
                   Who ends a call has had packets of it from all whose memory it writes in the
                   next, and they sent them after they had ended the call before: so no credit
    come           local: counts the programs that share a tile       (gemm_small)
    epoch, ticket  the slot's
"""

from __future__ import annotations

from math import ceil
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.language import slots
from weft.ops import _lanes, _products, _records
from weft.plan.launches import Start
from weft.tiles import blocking, gemm, gemm_small, rows


class Sent(NamedTuple):
    """Arguments of the hooks: `words` is the call's half, `num_m` rows of `tiles` tiles."""

    out: Any
    words: Any
    flag: Any
    rank: Any
    m: Any
    n: Any
    num_m: Any
    tiles: Any
    world: Any


@triton.jit
def _packets(tile, itemsize: tl.constexpr):
    """Offsets of a tile's packets, [tile.m, tile.n values]."""
    columns: tl.constexpr = tile.n * itemsize // 4
    return tl.arange(0, tile.m)[:, None] * columns + tl.arange(0, columns)[None, :]


@triton.jit
def _there(at, tile, args, itemsize: tl.constexpr):
    """Which of a tile's packets hold anything."""
    per: tl.constexpr = 4 // itemsize
    row = at.i_m * tile.m + tl.arange(0, tile.m)
    column = at.i_n * tile.n + tl.arange(0, tile.n // per) * per
    return (row < args.m)[:, None] & (column < args.n)[None, :]


@triton.jit
def _box(args, index, tile, itemsize: tl.constexpr):
    """The packets of box `index`, each of a tile."""
    size: tl.constexpr = tile.m * tile.n * itemsize // 4
    return args.words + index.to(tl.int64) * size + _packets(tile, itemsize)


@triton.jit
def _number(at, args):
    """The place of a tile in gemm_small's order."""
    return at.i_n * args.num_m + at.i_m


@triton.jit
def _to_all(at, value, index, args):
    """A tile -> box `index` of every rank, this one too."""
    itemsize: tl.constexpr = args.out.dtype.element_ty.primitive_bitwidth // 8
    data = value.to(args.out.dtype.element_ty)
    mask = _there(at, rows.Tile(value.shape[0], value.shape[1]), args, itemsize)
    box = _box(args, index, rows.Tile(value.shape[0], value.shape[1]), itemsize)
    for hop in range(1, args.world.num_ranks + 1):
        to = (args.rank + hop) % args.world.num_ranks
        # weft: equivalent-mutant peer+1 of at: every rank gets the same, in another order
        wl.put_packets(args.world, box, data, args.flag, to=to, mask=mask)


@triton.jit
def _send_to_all(at, cells, value, args):
    """args: Sent"""
    tile_index = args.rank * args.tiles + _number(at, args)
    _to_all(at, value, tile_index, args)


@triton.jit
def _send_to_owner(at, cells, value, args):
    """args: Sent"""
    itemsize: tl.constexpr = args.out.dtype.element_ty.primitive_bitwidth // 8
    t, ranks = _number(at, args), args.world.num_ranks
    index = args.rank * tl.cdiv(args.tiles, ranks) + t // ranks
    mask = _there(at, rows.Tile(value.shape[0], value.shape[1]), args, itemsize)
    box = _box(args, index, rows.Tile(value.shape[0], value.shape[1]), itemsize)
    data = value.to(args.out.dtype.element_ty)
    wl.put_packets(args.world, box, data, args.flag, to=t % ranks, mask=mask)


@triton.jit
def _receive(at, tile, index, args):
    """The tile in box `index`, when it has come, in fp32."""
    itemsize: tl.constexpr = args.out.dtype.element_ty.primitive_bitwidth // 8
    mask, box = _there(at, tile, args, itemsize), _box(args, index, tile, itemsize)
    value = wl.wait_packets(
        box, args.flag, world=args.world, mask=mask, dtype=args.out.dtype.element_ty
    )
    return value.to(tl.float32)


@triton.jit
def _sum(at, tile, index, pitch, args):
    """What all ranks have sent of a tile, in the order of ranks; boxes are `pitch` apart."""
    total = _receive(at, tile, index, args)
    for source in range(1, args.world.num_ranks):
        total += _receive(at, tile, index + source * pitch, args)
    return total


@triton.jit
def _store(at, value, tile, args):
    row = at.i_m * tile.m + tl.arange(0, tile.m)
    column = at.i_n * tile.n + tl.arange(0, tile.n)
    mask = (row < args.m)[:, None] & (column < args.n)[None, :]
    pointers = args.out + row.to(tl.int64)[:, None] * args.n + column[None, :]
    tl.store(pointers, value.to(args.out.dtype.element_ty), mask=mask)


@triton.jit
def _take_one_shot(program, num_programs, tile, args):
    """args: Sent"""
    for t in range(program, args.tiles, num_programs):
        at = gemm_small.tile_at(t, args.num_m)
        _store(at, _sum(at, tile, t, args.tiles, args), tile, args)


@triton.jit
def _take_two_shot(program, num_programs, tile, args):
    """args: Sent"""
    ranks = args.world.num_ranks
    most = tl.cdiv(args.tiles, ranks)
    for i in range(program, most, num_programs):
        if i * ranks + args.rank < args.tiles:
            t = i * ranks + args.rank
            at = gemm_small.tile_at(t, args.num_m)
            _to_all(at, _sum(at, tile, i, most, args), ranks * most + t, args)
    for t in range(program, args.tiles, num_programs):
        at = gemm_small.tile_at(t, args.num_m)
        _store(at, _receive(at, tile, ranks * most + t, args), tile, args)


@triton.jit
def gemm_ar_few(a, b, out, words, sums, come, slot, shape, half, tile, world,
                two_shot: tl.constexpr):  # fmt: skip
    """words: int64[2 * half]"""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    flag, mine = e.to(tl.int32), words + (e % 2) * half
    m, n = tl.cast(shape.m, tl.int32), tl.cast(shape.n, tl.int32)
    num_m = tl.cdiv(m, tile.m)
    tiles = num_m * tl.cdiv(n, tile.n)
    send: tl.constexpr = _send_to_owner if two_shot else _send_to_all
    # Written out each time: a variable would make numbers of the world's constants.
    gemm_small.gemm_small(
        b, shape, tile, gemm_small.Partials(sums, come), program, num_programs,
        gemm.ready_always, gemm.Always(a, m),
        send, Sent(out, mine, flag, rank, m, n, num_m, tiles, world),
    )  # fmt: skip
    take: tl.constexpr = _take_two_shot if two_shot else _take_one_shot
    take(program, num_programs, tile, Sent(out, mine, flag, rank, m, n, num_m, tiles, world))
    # weft: equivalent-mutant swap of atomic: behind the last one comes this rank's own next call
    slots.slot_advance(slot, e, num_programs)


# ---------------------------------------------------------------------------------------------
# The host


def cut_of(problem: Any, target: Target) -> blocking.Blocking:
    """Narrow tiles with many stages: as much of B under way as fits."""
    usual = next(blocking.candidates(problem.m, problem.n, problem.k, problem.dtype, target))
    tile_m = min(64, max(16, _lanes.power_of_two(problem.m)))
    if target.backend != "cuda" or problem.itemsize != 2 or not problem.can_use_tma(target):
        cut = (min(usual.tile_m, tile_m), usual.tile_n, usual.tile_k, 4, usual.num_stages)
        return blocking.Blocking(*cut)
    return next(gemm_small.cuts(tile_m, problem.n, target))


def grid_of(problem: Any, config: Any, target: Target) -> int:
    """Programs: up to as many as are resident at once, two to an SM where they fit."""
    tiles, num_k = tiles_of(problem, config), ceil(problem.k / config.tile_k)
    if target.backend == "emu":
        return min(tiles * num_k, target.num_sms, 3)
    # Tiles leave as packets, not by TMA.
    most = gemm_small.most_resident(config.blocking, problem.dtype, problem.dtype, False, target)
    return gemm_small.programs_for(tiles, num_k, most)


def tiles_of(problem: Any, config: Any) -> int:
    return ceil(problem.m / config.tile_m) * ceil(problem.n / config.tile_n)


class FewCall(_products.Call):
    """One launch, on memory of its own."""

    def __init__(self, world: Any, problem: Any, config: Any) -> None:
        super().__init__(world, problem, config, None, {}, {})
        if self.is_empty:
            return
        self.grid = (grid_of(problem, config, world.target), 1, 1)
        tiles, ranks = tiles_of(problem, config), problem.num_ranks
        boxes = (ranks * ceil(tiles / ranks) + tiles) if self.two_shot else ranks * tiles
        size = config.tile_m * config.tile_n * problem.itemsize // _lanes.PACKET_BYTES
        self.half = boxes * size
        # Calls that share words agree on who writes each.
        self.key = f"gemm_ar.{config.transport}.{tiles}x{size}"
        elements = gemm_small.partial_elements(config.tile_m, config.tile_n, self.grid[0])
        self.buffers = {"sums": ((elements,), torch.float32)}
        self.signals = {"words": (2 * self.half, torch.int64), "come": (tiles, torch.int32)}

    @property
    def two_shot(self) -> bool:
        return self.config.transport == "two_shot"

    def run_on_slot(self, world: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        slot = world.workspace(self.key, self.buffers, self.signals, num_slots=1)
        self.replays.run(
            (a.data_ptr(), b.data_ptr(), out.data_ptr(), slot.number),
            lambda: self.launch(world, slot, a, b, out),
        )

    def launch(self, world: Any, slot: Any, a: Any, b: Any, out: Any) -> None:
        aligned = blocking.are_aligned(a, b, out)
        tma = self.tma and aligned
        left, right, _ = self._operands(slot, a, b, out, False, tma)
        arguments = (
            left, right, out, slot.words, slot.sums, slot.come, slot.arg, self.shape, self.half,
            self.tiles[tma], world.arg, self.two_shot,
        )  # fmt: skip
        options = _products.options_of(self.config, False)
        self.start(Start(gemm_ar_few, self.grid, arguments, options), aligned)


def record(problem: Any, config: Any, target: Target) -> tuple[Any, KernelRecord]:
    """The kernel, and how it is compiled for rows that begin at 16 bytes."""
    tma = config.tma and problem.can_use_tma(target)
    tile_m, tile_n, tile_k = config.tile_m, config.tile_n, config.tile_k
    b_block = (tile_n, tile_k) if problem.b_is_nk else (tile_k, tile_n)
    types = {
        "a": _records.operand(problem.dtype, (tile_m, tile_k), tma),
        "b": _records.operand(problem.dtype, b_block, tma),
        "out": _records.operand(problem.dtype, (), False),
        "words": "*i64",
        "sums": "*fp32",
        "come": "*i32",
        "half": "i32",
    }
    tile, two_shot = _products.tile_of(problem, config, tma), config.transport == "two_shot"
    return _records.record(
        gemm_ar_few, "gemm_ar.few", problem.num_ranks, types, tuples={"shape": gemm.Shape},
        constants={"tile": tile, "two_shot": two_shot},
        options=_products.options_of(config, False),
        aligned=[*_records.aligned_sizes("shape", _products.shape_of(problem)), "half"],
    )  # fmt: skip
