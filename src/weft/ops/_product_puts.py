"""gemm_rs where copy engines carry the others' rows to their owners while the product runs.

Not an operator: a part of gemm_rs.py, which see.
"""

from __future__ import annotations

from typing import Any

import torch

from weft.ops import _products
from weft.plan.streams import Beside, refuse_recording, run_beside
from weft.plan.transfers import Carried, carry
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
        # Streams that have something to carry.
        self.turns = min(config.engines, (ranks - 1) * chunks)

    def run_on_slot(self, world: Any, a: Any, b: Any, out: Any) -> None:
        if world.is_recording():
            if self.instead is None:
                raise refuse_recording(
                    f"{self.problem.op}: transport={self.config.transport!r}",
                    "name no configuration, or one with another transport",
                )
            self.instead.run(world, a, b, out)
            return
        if self.instead and not self._is_ready:
            # While a call is recorded, neither memory is had nor are binaries loaded.
            self.instead.prepare(world, a, b, out)
            self._is_ready = True
        slot = world.workspace(self.problem.op, self.buffers, self.signals)
        beside = [self._beside(world, slot, turn) for turn in range(self.turns)]
        self.replays.run(
            (a.data_ptr(), b.data_ptr(), out.data_ptr(), slot.number),
            lambda: self.launch(world, slot, a, b, out),
            lambda: run_beside(world, self.replays, beside, world.current_stream()),
        )

    def _beside(self, world: Any, slot: Any, turn: int) -> Beside:
        """What one of the streams does, which take turns."""
        return Beside(STREAMS[turn], (slot.number, turn), lambda: self._carry(world, slot, turn))

    def _carry(self, world: Any, slot: Any, turn: int) -> None:
        chunks = world.num_ranks * self.config.chunks
        kept = slot.kept.view(chunks, self.padded_rows, -1)
        carried = Carried(kept, slot.partials, slot.rows_ready, slot.told, slot.tokens)
        carry(world, carried, self.problem.shard, turn=turn, turns=self.turns)

    def _operands(
        self, slot: Any, a: Any, b: Any, out: Any, is_sm90: bool, tma: bool
    ) -> tuple[Any, ...]:
        """As the program has them: a, kept, b, c."""
        left, right, own = super()._operands(slot, a, b, out, is_sm90, tma)
        kept = slot.kept
        if is_sm90:
            kept = gemm_sm90.descriptor(kept, _products.chunk_of(self.config))
        return left, kept, right, own
