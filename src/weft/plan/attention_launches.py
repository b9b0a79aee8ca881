"""Launches of attention's templates on one rank: over keys that are gathered meanwhile, by copy
engines too; of decode, whose parts all ranks merge; and of gradients."""

from __future__ import annotations

from math import ceil, prod
from typing import Any

import torch
import triton

from weft.base.target import Target
from weft.language.mapping import StaticMapping
from weft.plan import moving, transfers
from weft.plan.attention_blocks import list_all_visible
from weft.plan.sequence_shards import shards_in
from weft.tiles import attention, attention_blocking, attention_decode
from weft.tiles.attention_backward import Given, Where, attention_gradients
from weft.tiles.attention_gather import Shards, ag_attention_attend
from weft.tiles.attention_merge import flash_decode_kernel


class GatheredAttention:
    """Calls with one problem and one configuration on one rank: found once, launched often.

    `problem` has m tokens, its ranks' shards, heads and d, `causal` and the number of sequences;
    `config` the tile, chunks, pushers and the transport: "ce_push" is a copy-engine push.
    """

    def __init__(self, world: Any, problem: Any, config: Any, scale: float | None = None) -> None:
        self.problem, self.config = problem, config
        self.by_engine = config.transport == "ce_push"
        self.name = (
            f"{problem.op} m={problem.m} heads={problem.q_heads}/{problem.kv_heads} d={problem.d} "
            f"{problem.dtype} causal={problem.causal} sequences={problem.sequences} scale={scale} "
            f"{'zigzag ' if problem.zigzag else ''}{config}"
        )
        self.first, self.end = problem.shard(world.rank)
        # Zigzag, every rank has keys that others see.
        self.is_one_way = problem.causal and not problem.zigzag
        self.bounds: Any = (None, None)
        if problem.zigzag:
            size = (2, world.num_ranks, self.end - self.first)
            self.bounds = torch.empty(size, dtype=torch.int32, device=world.device)
        gathered = ((problem.gathered_rows, problem.n), problem.torch_dtype)
        self.buffers = {"k_gathered": gathered, "v_gathered": gathered}
        self.signals = {"rows_ready": (world.num_ranks * config.chunks, torch.int64)}
        shape = attention.Shape.of(
            self.end - self.first, problem.q_heads, problem.kv_heads, problem.d, scale
        )
        tile = attention.Tile.of(config.tile_m, config.tile_n, d=problem.d, pack=config.pack)
        shards = shards_of(problem, config)
        self.split = StaticMapping.of(problem.gathered_rows, world.num_ranks, chunks=config.chunks)
        self.constant = (
            shape, shards, tile.as_constexpr(), world.arg, self.by_engine,
            self.is_one_way, config.block,
        )  # fmt: skip
        self.grid = (config.grid(problem, world.target), 1, 1)
        self.options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        self._loaded: set[tuple[int, ...]] = set()
        self.replays = world.replays()

    def launch(self, world: Any, tensors: tuple) -> None:
        """tensors: q, k, v, out, lse, cu_seqlens or None"""
        slot = world.workspace(self.problem.op, signals=self.signals, shared=self.buffers)
        if self.problem.zigzag:
            tensors = self._listed(world, tensors)
        if not self.by_engine:
            self.attend(slot, tensors)
            return
        addresses = (None if x is None else x.data_ptr() for x in tensors)
        self.replays.run((slot.number, *addresses), lambda: self._put(world, slot, tensors))

    def _listed(self, world: Any, tensors: tuple) -> tuple:
        """What queries see is listed, so that nothing else says it."""
        *most, cu_seqlens = tensors
        problem = self.problem
        lie = shards_in(world, problem.m, True, cu_seqlens)
        list_all_visible(
            lie, *self.bounds, rank=world.rank, hop=0, rows=problem.rows, causal=problem.causal
        )
        return *most, None

    def attend(self, slot: Any, tensors: tuple) -> None:
        ag_attention_attend[self.grid](*self._arguments(slot, tensors), **self.options)

    def _arguments(self, slot: Any, tensors: tuple) -> tuple:
        arrays = (slot.k_gathered, slot.v_gathered, slot.rows_ready, slot.arg)
        return *tensors, *self.bounds, *arrays, *self.constant

    def _put(self, world: Any, slot: Any, tensors: tuple) -> None:
        taking = (slot.rows_ready, self.config.chunks, slot.arg, world.arg)
        alignment = tuple(0 if x is None else x.data_ptr() % 16 for x in tensors)
        if alignment not in self._loaded:
            # They wait for each other, and no binary is loaded while a kernel runs.
            world.load(moving.take, *taking, num_warps=1)
            world.load(ag_attention_attend, *self._arguments(slot, tensors), **self.options)
            self._loaded.add(alignment)
        main, copier = world.current_stream(), world.stream("copy")
        # weft: equivalent-mutant swap of record: what a call begins with is the list of what
        # queries see, which copies do not read
        copier.wait(main)
        with copier:
            moving.take[(1, 1, 1)](*taking, num_warps=1)
        self.attend(slot, tensors)
        with copier:
            # Own keys to rank + 1, + 2, ..., in the order in which those ask for them.
            last = world.num_ranks - (world.rank if self.is_one_way else 0)
            peers = [(world.rank + hop) % world.num_ranks for hop in range(1, last)]
            own = (one.flatten(1) for one in tensors[1:3])
            arrays = [*zip(own, (slot.k_gathered, slot.v_gathered), strict=True)]
            moves = transfers.pushes(world, peers, arrays, slot.rows_ready, self.split)
            transfers.queue(world, moves)
        # weft: equivalent-mutant swap of record: what it does not cover is the last signal, which
        # the rank that waits for it awaits before it releases the slot
        main.wait(copier)


def shards_of(problem: Any, config: Any) -> Shards:
    """How keys are cut into chunks, and how many sequences there are."""
    return Shards(
        problem.gathered_rows, max(1, problem.rows), config.chunks,
        max(1, ceil(problem.rows / config.chunks)), problem.n, config.pushers, problem.sequences,
        (problem.sequences + 1).bit_length(),
    )  # fmt: skip


class MergedDecode:
    """Calls of decode attention with one problem and one configuration on one rank.

    `problem` has m sequences, heads and caches of n keys; `config` the tile, splits and the
    transport: "ll", or "sm_push".
    """

    def __init__(self, world: Any, problem: Any, config: Any, scale: float) -> None:
        self.problem, self.config, self.scale = problem, config, scale
        self.by_packets = config.transport == "ll"
        # Caches may be of any size on each rank, and each splits its own.
        sizes = f"m={problem.m},heads={problem.heads}/{problem.kv_heads},k={problem.k}"
        self.name = f"{problem.op} {sizes} {problem.dtype} scale={scale} {config.transport}"
        heads = (problem.heads, problem.kv_heads)
        self.shape = attention.Shape.of(problem.m, *heads, problem.k, scale)
        pack = attention_decode.pack_of(problem.group, config.tile_m)
        tile = attention.Tile.of(config.tile_m, config.tile_n, d=problem.k, pack=pack, tokens=1)
        self.tile, tiles = tile.as_constexpr(), config.tiles(problem)
        self.grid = (config.grid(problem, world.target), 1, 1)
        self.options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        self.capacity = triton.next_power_of_2(max(1, tiles))
        # Calls that share boxes agree on which rank writes each.
        box = tile.m * (tile.d + 1)
        self.key = f"{problem.op}.{config.transport}.{self.capacity}x{box}"
        boxes = problem.num_ranks * self.capacity * box
        come = {"come": (self.capacity, torch.int32)}
        self.request: dict[str, Any] = {
            "shared": {"boxes": ((boxes,), torch.float32)},
            "signals": {"ready": (problem.num_ranks * self.capacity, torch.int64), **come},
        }
        if self.by_packets:
            self.request = {"signals": {"boxes": (2 * boxes, torch.int64), **come}, "num_slots": 1}
        self._cells, self._width = (tiles * config.splits, tile.m), tile.d
        self.replays = world.replays()

    def launch(self, world: Any, tensors: tuple) -> None:
        """tensors: q, k_cache, v_cache, lengths, block_table or None, out"""
        slot = world.workspace(self.key, **self.request)
        # Of this rank alone: calls come one after the other.
        cells, d = prod(self._cells), self._width
        local = world.scratch(self.problem.op, 4 * cells * (d + 1)).view(torch.float32)
        partials = attention_decode.Partials(
            local[: cells * d].view(*self._cells, d),
            local[cells * d : cells * (d + 1)].view(self._cells), slot.come,
        )  # fmt: skip
        addresses = [local.data_ptr(), *(0 if one is None else one.data_ptr() for one in tensors)]
        self.replays.run(
            (*addresses, slot.number), lambda: self._start(world, slot, partials, *tensors)
        )

    def _start(
        self, world: Any, slot: Any, partials: Any, q: Any, k_cache: Any, v_cache: Any,
        lengths: Any, table: Any, out: Any,
    ) -> None:  # fmt: skip
        cache: Any = attention_decode.Contiguous(k_cache, v_cache, self.problem.n)
        if table is not None:
            cache = attention_decode.Paged(*cache, table, k_cache.shape[1], table.shape[1])
        flash_decode_kernel[self.grid](
            q, cache, lengths, out, slot.boxes, None if self.by_packets else slot.ready,
            partials, slot.arg, self.shape, self.config.splits, self.capacity,
            self.tile, world.arg, self.by_packets, **self.options,
        )  # fmt: skip


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    dout: torch.Tensor, dlse: torch.Tensor | None, *, first: int, causal: bool,
    cu_seqlens: torch.Tensor | None, scale: float | None, target: Target,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, and dk and dv of all positions, of queries from position `first` on.

    Shapes  q, out, dout: [tokens, q_heads, d]; k, v: [positions, kv_heads, d]; lse, dlse: [tokens,
            q_heads]; gradients as q, k and v
    Dtypes  sums in fp32, in a fixed order; each gradient is rounded once
    """
    tokens, q_heads, d = q.shape
    positions, kv_heads, _ = k.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    shape = attention.Shape.of(tokens, q_heads, kv_heads, d, scale)
    sequences = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    steps, halves = (sequences + 1).bit_length(), tokens.bit_length()
    where = Where(first, positions, sequences, steps, halves)
    lo, hi = (torch.empty(tokens, dtype=torch.int32, device=q.device) for _ in range(2))
    given = Given(q, k, v, out, dout.contiguous(), lse, torch.empty_like(lse), lo, hi)
    dlse = None if dlse is None else dlse.contiguous()
    for of_keys in (False, True):
        cut = attention_blocking.backward(d, q.dtype.itemsize, target, of_keys=of_keys)
        units = ceil(positions / cut.n) * kv_heads if of_keys else ceil(tokens / cut.m) * q_heads
        if units:
            tile = attention.Tile.of(cut.m, cut.n, d=d).as_constexpr()
            attention_gradients[(units,)](
                given, dlse, dq, dk, dv, cu_seqlens, shape, where, tile, of_keys, causal,
                **cut.options,
            )  # fmt: skip
    return dq, dk, dv
