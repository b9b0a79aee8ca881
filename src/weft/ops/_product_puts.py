"""A product of whose rows copy engines carry the others' to their owners while it runs.

Not an operator: a part of gemm_rs.py, which see.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.base.errors import UsageError
from weft.ops import _products
from weft.tiles import gemm_sm90

# Of the copy engines, as many as take turns.
STREAMS = ("copy", "copy 1", "copy 2", "copy 3")


class PutCall(_products.Call):
    """Tiles are stored at home; who stores a chunk's last sets its token, which the copy engine's
    stream takes before it puts the chunk's rows and their word.

    A stream that waits must come behind the launch that it waits for. Of two streams the host's
    order says so; of two branches of one graph nothing does. So the product and what the engine
    does are recorded each by itself, and the call is not to be recorded whole: then `instead` is
    made, of which all that it needs is there from the first call on.
    """

    def __init__(
        self, world: Any, problem: Any, config: Any, program: Any, instead: _products.Call | None
    ) -> None:
        ranks, chunks = problem.num_ranks, config.chunks
        width = problem.n // chunks
        parts = config.parts(problem, world.target)
        # Whole tiles, so that none reaches into another part's.
        self.padded_rows = parts.tiles_m * parts.tile_m
        buffers = {
            "partials": ((ranks, chunks, problem.rows, width), problem.torch_dtype),
            "kept": ((ranks * chunks * self.padded_rows, width), problem.torch_dtype),
        }
        words = (ranks * chunks, torch.int64)
        signals = dict.fromkeys(("rows_ready", "stored", "told", "tokens"), words)
        super().__init__(world, problem, config, program, buffers, signals)
        self.instead, self._is_ready = instead, instead is None

    def run(self, world: Any, a: Any, b: Any, out: Any) -> None:
        if world.is_recording():
            if self.instead is None:
                raise UsageError(
                    f"{self.problem.op}: transport={self.config.transport!r} cannot be recorded: "
                    "an engine's stream waits for tiles, and a graph might begin with that wait, "
                    "not with the product; name no configuration, or one with another transport"
                )
            self.instead.run(world, a, b, out)
            return
        if self.instead and not self._is_ready:
            # While a call is recorded, neither memory is had nor are binaries loaded.
            self.instead.prepare(world, a, b, out)
            self._is_ready = True
        slot = world.workspace(self.problem.op, self.buffers, self.signals)
        self.replays.run(
            (a.data_ptr(), b.data_ptr(), out.data_ptr(), slot),
            lambda: self.launch(world, slot, a, b, out),
            lambda: self._carry_beside(world, slot, world.current_stream()),
        )

    def _carry_beside(self, world: Any, slot: Any, main: Any, turn: int = 0) -> None:
        """Queue what the streams do from `turn` on: all of it before any of it is recorded."""
        if turn == self.config.engines:
            return
        with (copier := world.stream(STREAMS[turn])):
            self.replays.run(
                (slot, turn),
                lambda: self._carry(world, slot, turn),
                lambda: self._carry_beside(world, slot, main, turn + 1),
            )
        # What is kept may be overwritten again.
        main.wait(copier)

    def _carry(self, world: Any, slot: Any, turn: int) -> None:
        """Queue what one stream does, in the order in which tiles are multiplied."""
        rank, ranks, chunks = world.rank, world.num_ranks, self.config.chunks
        kept = slot.kept.view(ranks * chunks, self.padded_rows, -1)
        for hop in range(1, ranks):
            owner = (rank + hop) % ranks
            first, end = self.problem.shard(owner)
            theirs, words = world.peer(slot.partials, owner), world.peer(slot.rows_ready, owner)
            for chunk in range(chunks):
                if ((hop - 1) * chunks + chunk) % self.config.engines != turn:
                    continue
                mine, there = owner * chunks + chunk, rank * chunks + chunk
                world.take_token(slot.tokens[mine : mine + 1])
                if end > first:
                    rows = kept[mine, : end - first]
                    world.copy(theirs[rank, chunk, : end - first], rows)
                world.copy_word(words[there : there + 1], slot.told[mine : mine + 1])

    def _operands(
        self, slot: Any, a: Any, b: Any, out: Any, is_sm90: bool, tma: bool
    ) -> tuple[Any, ...]:
        """As the program has them: a, kept, b, c."""
        left, right, own = super()._operands(slot, a, b, out, is_sm90, tma)
        kept = slot.kept
        if is_sm90:
            kept = gemm_sm90.descriptor(kept, _products.chunk_of(self.config))
        return left, kept, right, own
