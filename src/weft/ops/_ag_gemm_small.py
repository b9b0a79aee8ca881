"""ag_gemm for few rows, under one launch: packets bring the rows, all programs read B alike.

Not an operator: a part of ag_gemm.py, which see.

Plan
    each program   sends its piece of the own rows to all ranks as packets, and waits for the same
                   piece of theirs (tiles/packets.py); leaves all of them in `gathered`, says so
                   waits until all programs here have; multiplies its share (tiles/gemm_small.py)
No slot and no credit: boxes of packets are free by the exchange's own rule, and all else is this
rank's alone, whose calls come one after the other.

Signals
    words      [programs, 2, ranks, block]  packets; flagged with their program's step
    unpacked   local: counts programs whose piece is in `gathered`, call after call: full at
               calls * programs. `calls` is kept by each program for itself
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.language import triton_api
from weft.ops._ag_gemm_call import Call
from weft.ops._ag_gemm_config import Config, can_use_tma, shape_of, tile_of
from weft.plan import vectors
from weft.tiles import (
    blocking,
    exchange,
    gemm,
    gemm_small,
    mailboxes,
    move,
    packets,
)
from weft.tiles.move import Shards

if TYPE_CHECKING:
    from weft.ops._ag_gemm_problem import Problem


class Unpacked(NamedTuple):
    """Arguments of `_ready`; tuples last (see tiles/hooks/gather.py)."""

    rows: Any
    m: Any
    unpacked: Any
    full: Any
    world: Any


@triton.jit
def _ready(at, segment, tile, args):
    """Every program here has left its piece. args: Unpacked"""
    # Pairs with multiply_few's notify.
    wl.wait(args.unpacked, args.full, scope=wl.Scope.DEVICE, world=args.world)
    return gemm.Rows(source=args.rows, first=at.i_m * tile.m, end=args.m)


@triton.jit
def multiply_few(a, gathered, rows, b, c, words, steps, calls, unpacked, sums, come, shape, shards,
                 tile, world, width: tl.constexpr, sources: tl.constexpr,
                 block: tl.constexpr):  # fmt: skip
    """`rows` and `b` are what is multiplied: descriptors, or pointers. `shards` cut the gathered
    bytes."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    call = tl.load(calls + program) + 1
    shards = move.rounded(shards, 1)
    own = move.size_of(shards, wl.rank(world))
    # weft: equivalent-mutant peer+1 of at: every rank gets the same packets, in another order
    packets.exchange(
        world, mailboxes.PacketBoxes(steps, words), packets.tiles_of(shards.shard, block),
        packets.part_of_all, exchange.Whole(a, own),
        packets.gather, exchange.Gathered(a, gathered, shards), width, sources, block,
    )  # fmt: skip
    # weft: equivalent-mutant swap, incomplete of notify: what comes last before it is this
    # program's own count of steps, and no store is asynchronous
    wl.notify(world, unpacked, 1, to=wl.rank(world), op=wl.SignalOp.ADD, scope=wl.Scope.DEVICE)
    m = tl.cast(shape.m, tl.int32)
    # Config.check holds the grid to `most_resident` programs
    gemm_small.gemm_small(
        b, shape, tile, gemm_small.Partials(sums, come), program, num_programs,
        _ready, Unpacked(rows, m, unpacked, call * num_programs, world),
        gemm.emit_store, gemm.Stored(c, shape),
    )  # fmt: skip
    tl.store(calls + program, call)


class PacketCall(Call):
    """One launch, on memory of its own."""

    def __init__(self, world: Any, problem: Problem, config: Config) -> None:
        super().__init__(world, problem, config)
        self.tma = config.tma and can_use_tma(problem, world.target)
        programs, block = config.feeders, config.block
        self._workspace = f"ag_gemm.{programs}x{block}"
        sums = gemm_small.partial_elements(config.tile_m, config.tile_n, programs)
        self._buffers = {
            "gathered": ((problem.m, problem.k), getattr(torch, problem.dtype)),
            "sums": ((sums,), torch.float32),
        }
        words = programs * mailboxes.PACKET_DEPTH.value * world.num_ranks * block
        self._signals = {
            "words": (words, torch.int64),
            "steps": (programs, torch.int64),
            "calls": (programs, torch.int64),
            "unpacked": (1, torch.int64),
            "come": (config.blocking.num_tiles(problem.m, problem.n), torch.int32),
        }
        self._row_bytes = problem.k * problem.itemsize
        self._shards = Shards(problem.m * self._row_bytes, problem.rows * self._row_bytes)
        self._tiles = [tile_of(problem, config, tma).as_constexpr() for tma in (False, True)]
        self._sources = vectors.power_of_two(world.num_ranks)
        self._kernel: Any = None
        self.replays = world.replays()

    def run(self, world: Any, a: Any, b: Any, out: Any) -> None:
        slot = world.workspace(self._workspace, self._buffers, self._signals, num_slots=1)
        self.replays.run(
            (a.data_ptr(), b.data_ptr(), out.data_ptr(), slot.number),
            lambda: self._launch(world, slot, a, b, out),
        )

    def _launch(self, world: Any, slot: Any, a: Any, b: Any, out: Any) -> None:
        aligned = blocking.are_aligned(a, b, out)
        width = min(vectors.PACKET_BYTES, vectors.width_of(self._row_bytes, a, slot.gathered))
        own, gathered = vectors.as_words(width, a, slot.gathered)
        tma = self.tma and aligned
        arguments = (
            own, gathered, *self._operands(slot, b, out, tma), slot.words, slot.steps, slot.calls,
            slot.unpacked, slot.sums, slot.come, shape_of(self.problem), self._shards,
            self._tiles[tma], world.arg, width, self._sources, self.config.block,
        )  # fmt: skip
        grid = (self.config.feeders, 1, 1)
        if aligned and self._kernel is not None:
            triton_api.relaunch(self._kernel, grid, *arguments)
            return
        kernel = multiply_few[grid](
            *arguments, num_warps=self.config.num_warps, num_stages=self.config.num_stages
        )
        if aligned:
            self._kernel = kernel

    def _operands(self, slot: Any, b: Any, out: Any, tma: bool) -> tuple[Any, Any, Any]:
        """Rows, weights and result: descriptors, or tensors."""
        if not tma:
            return slot.gathered, b, out
        config = self.config
        if self.problem.b_is_nk:
            weights = blocking.descriptor(b.t(), (config.tile_n, config.tile_k))
        else:
            weights = blocking.descriptor(b, (config.tile_k, config.tile_n))
        rows = blocking.descriptor(slot.gathered, (config.tile_m, config.tile_k))
        return rows, weights, blocking.descriptor(out, (config.tile_m, config.tile_n))
