"""What calls of ag_moe with one problem and one configuration share on one rank.

Not an operator: a part of ag_moe.py, which see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.records import KernelRecord
from weft.compiler.lower import source
from weft.ir import core
from weft.language import slots
from weft.ops import _moe, _records
from weft.ops._ag_gemm_call import STAGE_WARPS, put_beside
from weft.ops._ag_gemm_config import Shards
from weft.ops._ag_gemm_rows import feed, own_rows, places
from weft.ops._product_launch import Start
from weft.ops.moe_route import Routing
from weft.tiles import blocking, gemm

if TYPE_CHECKING:
    from weft.ops.ag_moe import Config, Problem

# Elements that a program of `stage` copies at once.
BLOCK = 8192


@triton.jit
def stage(x, gathered, rows_ready, shard_ready, slot, shape, shards, world, block: tl.constexpr):
    """Copy own tokens to the own slot, where tiles have them with others'; and have the word that
    engines copy behind them. Product and copies come behind this kernel."""
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    own_first, own_end = own_rows(rank, shards, shape.m)
    first = own_first.to(tl.int64) * shape.k
    size = (own_end - own_first).to(tl.int64) * shape.k
    feed(world, gathered, x, first, first, size, tl.program_id(0), tl.num_programs(0), rank,
         places, block)  # fmt: skip
    if tl.program_id(0) == 0:
        # weft: equivalent-mutant value+1, narrow of notify: own tokens are there in stream order
        wl.notify(world, rows_ready + rank, e, to=rank, op=wl.SignalOp.SET,
                  order=wl.Order.RELAXED, scope=wl.Scope.DEVICE)  # fmt: skip
        # weft: equivalent-mutant narrow of notify: it orders nothing itself
        wl.notify(world, shard_ready + rank, e, to=rank, op=wl.SignalOp.SET, order=wl.Order.RELAXED)


class Call:
    """Launches, copies, and what they are told."""

    def __init__(self, world: Any, problem: Problem, config: Config, kernel: core.Kernel) -> None:
        self.problem, self.config, self.twins = problem, config, source.load(kernel)
        dtype = problem.torch_dtype
        self.buffers = {"gathered": ((problem.m, problem.k), dtype)}
        self.signals = {
            "rows_ready": (problem.num_ranks * config.words, torch.int64),
            "shard_ready": (problem.num_ranks, torch.int64),
        }
        self.is_put = config.transport == "put"
        first, end = problem.shard(world.rank)
        self.has_tokens = first < end
        self.grid = (config.grid(problem, world.target), 1, 1)
        self.num_sms = world.target.num_sms
        if config.template == "sm90":
            sums, summed = config.num_sums(problem, world.target)
            self.buffers["sums"] = ((sums,), torch.float32)
            self.signals["summed"] = (summed, torch.int64)
        self.sizes = (_moe.shape_of(problem), config.experts(problem, config.words))
        self.replays = world.replays()
        self._loaded: set[tuple[bool, ...]] = set()

    def run(self, world: Any, x: Any, b: Any, out: Any, routing: Routing) -> None:
        slot = world.workspace("ag_moe", self.buffers, self.signals)
        tables = _moe.tables_of(routing)
        given = (x, b, out, *tables)
        self.replays.run(
            (*(one.data_ptr() for one in given), slot.number),
            lambda: self._launch(world, slot, x, b, out, tables),
        )

    def _launch(self, world: Any, slot: Any, x: Any, b: Any, out: Any, tables: Any) -> None:
        # Kernels for Hopper read B by TMA, and move 16 bytes at once.
        aligned = blocking.are_aligned(x, b, out)
        multiply = self._multiplying(world, slot, x, b, out, tables, aligned)
        if not self.is_put:
            _start(multiply)
            return
        shards = shards_of(self.problem)
        staged = Start(
            stage, (self.num_sms, 1, 1),
            (x, slot.gathered, slot.rows_ready, slot.shard_ready, slot.arg,
             tokens_of(self.problem), shards, world.arg, BLOCK),
            {"num_warps": STAGE_WARPS},
        )  # fmt: skip
        # Triton specialises kernels by each address.
        kind = tuple(one.data_ptr() % 16 == 0 for one in (x, b, out, *tables))
        if kind not in self._loaded:
            # The product waits for copies, and no binary is loaded while a kernel runs.
            for one in (staged, multiply):
                world.load(one.function, *one.arguments, **one.options)
            self._loaded.add(kind)
        _start(staged)
        if self.has_tokens:
            # What says that slots are free comes before: twelve warps of the product for Hopper
            # have all registers of an SM, and nothing runs beside it.
            copier = put_beside(world, slot, x, self.problem, shards, lambda: _start(multiply))
            # The engines still read x.
            world.current_stream().wait(copier)
        else:
            _start(multiply)

    def _multiplying(
        self, world: Any, slot: Any, x: Any, b: Any, out: Any, tables: Any, aligned: bool
    ) -> Start:
        """The launch of the product."""
        config = self.config
        is_sm90 = config.template == "sm90" and aligned
        tile = config.tile(self.problem, is_sm90)
        arrays = (out, slot.gathered, slot.rows_ready, tables)
        if is_sm90:
            sums = (slot.sums, slot.summed)
            rest = (*sums, slot.arg, *self.sizes, world.arg, tile.m, tile.n, tile.k,
                    config.num_stages, tile.b_is_nk)  # fmt: skip
            arguments = (_moe.describe_b(b, config), *arrays, *rest)
        else:
            arguments = (b, *arrays, slot.arg, *self.sizes, tile.as_constexpr(), world.arg)
        if not self.is_put:
            arguments = (x, *arguments)
        fn = self.twins.sm90 if is_sm90 else self.twins.plain
        return Start(fn, self.grid, arguments, config.options(is_sm90))


def _start(one: Start) -> None:
    one.function[one.grid](*one.arguments, **one.options)


def tokens_of(problem: Problem) -> gemm.Shape:
    """Tokens as what moves them sees them."""
    return gemm.Shape(problem.m, problem.n, problem.k, problem.k, problem.n, problem.n)


def shards_of(problem: Problem) -> Shards:
    """A rank's tokens in one chunk."""
    return Shards(problem.rows, 1, problem.rows, 1, 1, 1)


def staging(problem: Problem) -> tuple[Any, KernelRecord]:
    """The kernel that runs before the product, as a record."""
    pointer = _records.operand(problem.dtype, (), False)
    words = dict.fromkeys(("rows_ready", "shard_ready"), "*i64")
    return _records.record(
        stage, "ag_moe.stage", problem.num_ranks, {"x": pointer, "gathered": pointer, **words},
        tuples={"shape": gemm.Shape, "shards": Shards}, constants={"block": BLOCK},
        options={"num_warps": STAGE_WARPS, "num_stages": 1},
        aligned=_records.aligned_sizes("shape", tokens_of(problem)),
    )  # fmt: skip
