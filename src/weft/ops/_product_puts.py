"""A product of whose rows copy engines carry the others' to their owners while it runs.

Not an operator: a part of gemm_rs.py, which see; and of _plan.py, whose plans carry sums so too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch

from weft.base.errors import UsageError
from weft.base.place import UNKNOWN, Place
from weft.ir.device import After, Copy, Step
from weft.ops import _products
from weft.tiles import gemm_sm90

# Of the copy engines, as many as take turns.
STREAMS = ("copy", "copy 1", "copy 2", "copy 3")


class Carried(NamedTuple):
    """What engines carry from here, and where it lies.

    Shapes  kept: [num_ranks * chunks, rows of whole tiles, n / chunks], by owner; partials, on
            every rank: [num_ranks, chunks, rows, n / chunks], by source; words: [num_ranks *
            chunks], of which `arrived` are the owner's, by source, the others own ones, by owner
    """

    kept: torch.Tensor
    partials: torch.Tensor
    arrived: torch.Tensor
    told: torch.Tensor
    tokens: torch.Tensor


def carry(
    world: Any, one: Carried, shard: Callable[[int], tuple[int, int]], *, turn: int = 0,
    turns: int = 1,
) -> None:  # fmt: skip
    """Queue on the current stream what is carried, in the order in which tiles are multiplied; of
    `turns` streams this is the turn-th. `shard` gives the rows of a rank.

    Sync    each chunk behind its token; its rows, then the word that says so
    """
    rank, ranks, chunks = world.rank, world.num_ranks, one.partials.shape[1]
    for hop in range(1, ranks):
        owner = (rank + hop) % ranks
        first, end = shard(owner)
        theirs, words = world.peer(one.partials, owner), world.peer(one.arrived, owner)
        for chunk in range(chunks):
            if ((hop - 1) * chunks + chunk) % turns != turn:
                continue
            mine, there = owner * chunks + chunk, rank * chunks + chunk
            world.take_token(one.tokens[mine : mine + 1])
            if end > first:
                world.copy(theirs[rank, chunk, : end - first], one.kept[mine, : end - first])
            world.copy_word(words[there : there + 1], one.told[mine : mine + 1])


class Beside(NamedTuple):
    """What one stream does beside the product: what it depends on, and what queues it."""

    stream: str
    key: Hashable
    queue: Callable[[], None]


def carry_beside(world: Any, replays: Any, streams: Sequence[Beside], join: Any) -> None:
    """Queue what these streams do, all of it before any of it is recorded; `join`, a stream, goes
    on behind them."""
    if not streams:
        return
    one, *others = streams
    with (copier := world.stream(one.stream)):
        replays.run(one.key, one.queue, lambda: carry_beside(world, replays, others, join))
    # What is kept may be overwritten again.
    join.wait(copier)


def recordings(
    steps: Sequence[Step], carriers: Sequence[str]
) -> tuple[list[Step], dict[str, list[Step]]] | None:
    """A plan's steps that are recorded as one, and those beside them, by the stream that waits for
    tiles: of `carriers`. None where the plan has them in another order.

    Such a stream needs nothing but its tokens. It is queued behind all that sets them, and the
    caller goes on when it is done.
    """
    together: list[Step] = []
    beside: dict[str, list[Step]] = {name: [] for name in carriers}
    joined: set[str] = set()
    for one in steps:
        if isinstance(one, After) and one.other in beside:
            joined.add(one.other)
        elif joined and not isinstance(one, After):
            return None
        else:
            beside.get(one.stream, together).append(one)
    is_free = all(isinstance(one, Copy) for found in beside.values() for one in found)
    return (together, beside) if is_free and joined == {*beside} else None


def refuse_recording(told: str, remedy: str, place: Place = UNKNOWN) -> UsageError:
    """Of a call that a user records and that names such a transport."""
    return UsageError(
        f"{told} cannot be recorded: an engine's stream waits for tiles, and a graph might begin "
        f"with that wait, not with the product; {remedy}",
        place=place,
    )


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
            lambda: carry_beside(world, self.replays, beside, world.current_stream()),
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
