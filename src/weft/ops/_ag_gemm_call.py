"""What calls of ag_gemm with one problem and one configuration share: launches, copies, streams.

`Call` is what every way of doing it has; `SlotCall` does it by put or push, `LibraryCall` by NCCL
and cuBLAS, and `_ag_gemm_small.PacketCall` by packets.

Not an operator: a part of ag_gemm.py, which see.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from weft.language import triton_api
from weft.ops import _ag_gemm_scales
from weft.ops._ag_gemm_config import (
    Config,
    can_use_tma,
    chunk_of,
    shape_of,
    split_of,
    straddles,
    tile_of,
    turns_of,
)
from weft.plan import launches, moving, nccl, starts, transfers
from weft.plan.launches import Start
from weft.tiles import blocking, gathered_gemm, gemm_sm90, tile_scheduler
from weft.tiles.hooks.scales import push_scales

if TYPE_CHECKING:
    from weft.ops._ag_gemm_problem import Problem


class Call:
    """What calls with one problem and one configuration share on one rank: found once, kept."""

    def __init__(self, world: Any, problem: Problem, config: Config) -> None:
        self.problem, self.config = problem, config
        self.out_shape = (problem.m, problem.n)
        self.out_dtype = getattr(torch, problem.out_dtype)
        self.is_empty = 0 in (problem.m, problem.n, problem.k)
        # What all ranks must call alike.
        sizes = f"m={problem.m},n={problem.n},k={problem.k}"
        self.name = f"{config.op} {sizes} {problem.dtype} {config}"

    def run(self, world: Any, a: Any, b: Any, out: Any) -> None:
        """Queue the call on the current stream."""
        raise NotImplementedError


class LibraryCall(Call):
    """Nothing fused: NCCL, then cuBLAS."""

    def run(self, world: Any, a: Any, b: Any, out: Any) -> None:
        whole = torch.empty((self.problem.m, self.problem.k), dtype=a.dtype, device=a.device)
        nccl.all_gather(world, a, whole)
        self.multiply(whole, b, out)

    def multiply(self, gathered: Any, b: Any, out: Any) -> None:
        torch.mm(gathered, b, out=out)


class SlotCall(Call):
    """On a slot of the workspace, which ranks fill for each other."""

    def __init__(self, world: Any, problem: Problem, config: Config) -> None:
        super().__init__(world, problem, config)
        self.grid = (config.grid(problem, world.target), 1, 1)
        self.tma = config.tma and can_use_tma(problem, world.target)
        self.has_rows = problem.shard(world.rank)[0] < problem.shard(world.rank)[1]
        self.by_engine = config.transport == "ce_push"
        # Tiles that straddle ranks read own rows from the slot.
        self.straddles = straddles(problem, config)
        words = world.num_ranks * config.chunks
        self.buffers = {"gathered": ((problem.m, problem.k), getattr(torch, problem.dtype))}
        self.signals = {"rows_ready": (words, torch.int64), "fed": (words, torch.int32)}
        if problem.scaling:
            shape = (problem.m, _ag_gemm_scales.blocks_of(problem))
            self.buffers["scales"] = (shape, torch.float32)
        if config.template == "sm90":
            shares = (self.grid[0], config.first_wave)
            elements = tile_scheduler.partial_elements(config.tile_m, config.tile_n, *shares)
            self.buffers["partials"] = ((elements,), torch.float32)
            self.signals["summed"] = (tile_scheduler.partial_words(*shares), torch.int64)
        self.shape, self.split = shape_of(problem), split_of(problem, config)
        self.turns = turns_of(problem, config)
        # By whether TMA is used.
        self.tiles = [tile_of(problem, config, tma).as_constexpr() for tma in (False, True)]
        self.replays = world.replays()
        self._loaded: set[tuple[int, ...]] = set()
        # What was launched with aligned addresses, to be launched again.
        self._kernels: dict[Any, Any] = {}

    def run(
        self, world: Any, a: Any, b: Any, out: Any, scales: tuple[Any, Any] = (None, None)
    ) -> None:
        """As Call.run; `scales` of a and b, where those are fp8."""
        slot = world.workspace(self.config.op, self.buffers, self.signals)
        addresses = (None if x is None else x.data_ptr() for x in scales)
        self.replays.run(
            (a.data_ptr(), b.data_ptr(), out.data_ptr(), *addresses, slot.number),
            lambda: self.launch(world, slot, a, b, out, scales),
        )

    def launch(
        self, world: Any, slot: Any, a: Any, b: Any, out: Any,
        scales: tuple[Any, Any] = (None, None),
    ) -> None:  # fmt: skip
        # TMA asks this of addresses, and Triton specialises kernels by it: scales' too.
        given = (a, b, out) if scales[1] is None else (a, b, out, scales[1])
        alignment = tuple(tensor.data_ptr() % blocking.TMA_BYTES for tensor in given)
        is_aligned = not any(alignment)
        scaling = self._scaling(slot, scales[1])
        product = self._product(world, slot, a, b, out, not any(alignment[:3]), scaling)
        words = (slot.rows_ready, self.config.chunks, slot.arg, world.arg)
        take = Start(moving.take, (1, 1, 1), words, {"num_warps": 1})
        before = [self._edges(world, slot, a)] if self.straddles else []
        if self.by_engine and alignment not in self._loaded:
            # They wait for each other, and no binary is loaded while a kernel runs.
            for one in (take, *before, product):
                world.load(one.function, *one.arguments, **one.options)
            self._loaded.add(alignment)
        if scales[0] is not None:
            # Not kept to be launched again: scales lie at any address.
            self._start(self._push_scales(world, slot, scales[0], scaling), False)
        if not self.by_engine:
            self._start(product, is_aligned)
            return
        main, copier = world.current_stream(), world.stream("copy")
        copier.wait(main)
        with copier:
            self._start(take, True)
        for one in (*before, product):
            self._start(one, is_aligned)
        with copier:
            transfers.push(world, a, slot.gathered, slot.rows_ready, self.split)
        # weft: equivalent-mutant swap of record: whom a last word goes to waits for it
        main.wait(copier)

    def _edges(self, world: Any, slot: Any, a: Any) -> Start:
        """Own rows to the own slot, as far as tiles have them with others'. They take no credit:
        the call before has ended here, with all that others had for this slot."""
        config = self.config
        given = (a, slot.gathered, slot.arg, self.split, self.problem.k, False, world.arg)
        return Start(
            moving.edges, (config.feeders, 1, 1), (*given, config.tile_m, config.block),
            {"num_warps": starts.WARPS},
        )  # fmt: skip

    def _scaling(self, slot: Any, scale_b: Any) -> Any:
        """What kernels are told of scales: a Scaling, or None."""
        if not self.problem.scaling:
            return None
        return _ag_gemm_scales.scaling_of(slot, self.problem, scale_b)

    def _push_scales(self, world: Any, slot: Any, scale_a: Any, scaling: Any) -> Start:
        arguments = (
            scale_a, *_ag_gemm_scales.steps_of(scale_a), scaling, slot.arg, self.split, world.arg,
            _ag_gemm_scales.BLOCK,
        )  # fmt: skip
        grid = (world.num_ranks * _ag_gemm_scales.pieces_of(self.problem), 1, 1)
        options = {"num_warps": _ag_gemm_scales.NUM_WARPS}
        return Start(push_scales, grid, arguments, options)

    def _start(self, one: Start, is_aligned: bool) -> None:
        kernel = self._kernels.get(one.function) if is_aligned else None
        if kernel is not None:
            triton_api.relaunch(kernel, one.grid, *one.arguments)
            return
        kernel = one.function[one.grid](*one.arguments, **one.options)
        if is_aligned:
            self._kernels[one.function] = kernel

    def _product(
        self, world: Any, slot: Any, a: Any, b: Any, out: Any, aligned: bool, scaling: Any
    ) -> Start:
        """The launch that multiplies."""
        config, tma = self.config, self.tma and aligned
        # Addresses that TMA does not take: the plain template does the same, in the same tiles.
        is_sm90 = config.template == "sm90" and aligned
        own, gathered, right, result = a, slot.gathered, b, out
        if tma:
            describe = gemm_sm90.descriptor if is_sm90 else blocking.descriptor
            chunk = chunk_of(self.problem, config, is_sm90)
            gathered = describe(gathered, (config.tile_m, config.tile_k))
            # An empty shard has no address to describe; no tile is read from it.
            own = describe(a, (config.tile_m, config.tile_k)) if self.has_rows else gathered
            lies = (config.tile_n, config.tile_k, self.problem.b_is_nk)
            right = launches.describe_b(b, *lies, is_sm90)
            result = describe(out, chunk)
        per_block = self.problem.scaling == _ag_gemm_scales.BLOCKS
        given = (a, own, slot.gathered, gathered, right, result, scaling, slot.rows_ready, slot.fed)
        sized = (slot.arg, self.shape, self.split, self.turns)
        feeders = 0 if self.by_engine else config.feeders
        if is_sm90:
            arguments = (
                *given, slot.partials, slot.summed, *sized, world.arg, feeders, config.pieces,
                config.first_wave, self.by_engine, config.block, config.tile_m, config.tile_n,
                config.tile_k, config.num_stages, self.problem.b_is_nk, per_block,
            )  # fmt: skip
            options = {"num_warps": config.num_warps}
            return Start(gathered_gemm.ag_gemm_multiply_sm90, self.grid, arguments, options)
        arguments = (*given, *sized, self.tiles[tma], world.arg, config.pieces, feeders,
                     config.block, per_block)  # fmt: skip
        num_stages = config.num_stages if config.template == "plain" else 3
        options = {"num_warps": config.num_warps, "num_stages": num_stages}
        return Start(gathered_gemm.ag_gemm_multiply, self.grid, arguments, options)
