"""What calls of ag_attention with one problem and one configuration share: launches and copies.

Not an operator: a part of ag_attention.py, which see.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.ops._ag_attention_config import ENGINE, Config, Problem, shape_of, shards_of
from weft.plan import moving


class Call:
    """What calls with tensors like these share on one rank."""

    def __init__(
        self, world: Any, problem: Problem, config: Config, scale: float | None, attend: Any
    ) -> None:
        self.problem, self.config, self.attend = problem, config, attend
        self.name = (
            f"ag_attention m={problem.m} heads={problem.q_heads}/{problem.kv_heads} d={problem.d} "
            f"{problem.dtype} causal={problem.causal} sequences={problem.sequences} scale={scale} "
            f"{config}"
        )
        first, end = problem.shard(world.rank)
        self.shape = shape_of(problem, end - first, scale)
        self.shards = shards_of(problem, config)
        gathered = ((problem.m, problem.n), problem.torch_dtype)
        self.buffers = {"k_gathered": gathered, "v_gathered": gathered}
        self.signals = {"rows_ready": (world.num_ranks * config.chunks, torch.int64)}
        self.grid = (config.grid(problem, world.target), 1, 1)
        self.tile = config.tile(problem).as_constexpr()
        self._loaded: set[tuple[int, ...]] = set()
        self.replays = world.replays()

    def launch(self, world: Any, tensors: tuple) -> None:
        slot = world.workspace("ag_attention", self.buffers, self.signals)
        if self.config.transport != ENGINE:
            self._attend(world, slot, tensors)
            return
        addresses = (None if x is None else x.data_ptr() for x in tensors)
        self.replays.run((slot.number, *addresses), lambda: self._put(world, slot, tensors))

    def _arguments(self, world: Any, slot: Any, tensors: tuple) -> tuple:
        return (
            *tensors, slot.k_gathered, slot.v_gathered, slot.rows_ready, slot.arg, self.shape,
            self.shards, self.tile, world.arg, self.config.transport == ENGINE,
            self.problem.causal, self.config.block,
        )  # fmt: skip

    def _attend(self, world: Any, slot: Any, tensors: tuple) -> None:
        arguments = self._arguments(world, slot, tensors)
        self.attend[self.grid](*arguments, **self.config.options())

    def _put(self, world: Any, slot: Any, tensors: tuple) -> None:
        taking = (slot.rows_ready, self.config.chunks, slot.arg, world.arg)
        alignment = tuple(0 if x is None else x.data_ptr() % 16 for x in tensors)
        if alignment not in self._loaded:
            # They wait for each other, and no binary is loaded while a kernel runs.
            world.load(moving.take, *taking, num_warps=1)
            arguments = self._arguments(world, slot, tensors)
            world.load(self.attend, *arguments, **self.config.options())
            self._loaded.add(alignment)
        main, copier = world.current_stream(), world.stream("copy")
        copier.wait(main)
        with copier:
            moving.take[(1, 1, 1)](*taking, num_warps=1)
        self._attend(world, slot, tensors)
        with copier:
            self._copies(world, slot, tensors[1], tensors[2])
        # weft: equivalent-mutant swap of record: what it does not cover is the last word, which the
        # rank that waits for it awaits before it gives the slot back
        main.wait(copier)

    def _copies(self, world: Any, slot: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        """Own keys to rank + 1, + 2, ..., in the order in which those ask for them; behind each
        chunk its word, which holds e here since the slot was taken."""
        problem, config = self.problem, self.config
        own_first, own_end = problem.shard(world.rank)
        rows, words = config.chunk_rows(problem), slot.rows_ready
        for hop in range(problem.peers(world.rank)):
            to = (world.rank + 1 + hop) % world.num_ranks
            theirs = world.peer(words, to)
            for chunk in range(config.chunks):
                first = min(own_first + chunk * rows, own_end)
                end = min(first + rows, own_end)
                for mine, gathered in ((k, slot.k_gathered), (v, slot.v_gathered)):
                    if end > first:
                        part = mine[first - own_first : end - own_first].flatten(1)
                        world.copy(world.peer(gathered, to)[first:end], part)
                word = world.rank * config.chunks + chunk
                world.copy_word(theirs[word : word + 1], words[word : word + 1])
