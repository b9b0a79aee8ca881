"""A call of an operator whose tiles say themselves when they waited and worked: run, and drawn.

It is a measurement, of a kernel that also writes this down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.base.schedule import Span
from weft.base.target import Target
from weft.language import world_layout as layout
from weft.tools.check import Work, inputs_on
from weft.tools.words import shape_text

if TYPE_CHECKING:
    from weft.tune.clocks import Offset
    from weft.tune.tile_times import TileTimes

# Records that there is room for, of 96 bytes each, which hosts tell each other of. Tiles further on
# in the order are left out.
MOST_TILES = 1 << 15
# Calls before the one that counts, on GPUs: kernels are compiled and loaded, slots allocated.
WARM_CALLS = 3
# One process compiles what all need.
SILENCE_S = 300.0


class Traced(NamedTuple):
    """Tiles of all ranks on rank 0's clock; `clocks` by rank."""

    tiles: Sequence[TileTimes]
    clocks: Sequence[Offset]


def traced_on_gpus(work: Work, transport: str, *, seed: int) -> Traced:
    """One call after a few that warm up, one process and one GPU for each rank.

    Raises  RanksStopped: a process failed; UsageError: a kernel that leaves no trace
    """
    from weft.tune.processes import messages_from_gpus

    (found,) = messages_from_gpus(
        _gpu_rank, work.num_ranks, work, transport, seed, silence_s=SILENCE_S
    )
    return gathered(work, *found)


def _gpu_rank(
    rank: int, send: Callable[[Any], None], work: Work, transport: str, seed: int
) -> None:
    """One rank's process."""
    send(call_traced(work, transport, seed))


def call_traced(
    work: Work, transport: str, seed: int
) -> tuple[list[list[list[int]]], list[Offset]]:
    """On one rank: the call; returns every rank's records, and how their clocks differ.

    Without a transport it is the operator's own choice.
    """
    import weft
    from weft.tune.clocks import offsets

    world = weft.init(trace_tiles=MOST_TILES)
    config = config_for(work, transport, world.target) if transport else None
    mine = inputs_on(world, work, seed)
    for _ in range(WARM_CALLS):
        work.op.run(world, work.problem(), mine, config)
    clocks = offsets(world)
    world.trace.zero_()
    world.barrier()
    work.op.run(world, work.problem(), mine, config)
    world.synchronize()
    records = world.trace.tolist()
    kept = [words for words in records if words[layout.TRACE_START]]
    everyone = world.backend.exchange(kept, world.meeting_timeout_s)
    world.close()
    return everyone, clocks


def config_for(work: Work, transport: str, target: Target) -> Any:
    """The operator's first configuration by `transport`.

    Raises  UsageError: the operator knows no such transport here, with those it knows
    """
    configs = list(work.op.candidates(work.problem(), target))
    known = [getattr(config, "transport", "") for config in configs]
    if transport not in known:
        there = ", ".join(dict.fromkeys(filter(None, known))) or "one way only"
        raise UsageError(
            f"--transport {transport}: {work.op.name} knows {there} for "
            f"{shape_text(work.shape)} on {counted(work.num_ranks, 'rank')}, {target}"
        )
    return configs[known.index(transport)]


def gathered(work: Work, records: list[list[list[int]]], clocks: list[Offset]) -> Traced:
    """All ranks' records on one clock.

    Raises  UsageError: there are none
    """
    from weft.tune.tile_times import read

    tiles = [tile for rank, own in enumerate(records) for tile in read(own, rank, clocks[rank].ns)]
    if not tiles:
        raise UsageError(
            f"weft trace: {work.op.name} with {shape_text(work.shape)} ran no kernel that leaves a "
            "trace of its tiles; products by the GEMM templates do, not those by packets or by "
            "libraries: take another --transport, or larger sizes"
        )
    return Traced(tiles, clocks)


def spans_of(tiles: Sequence[TileTimes]) -> list[Span]:
    """What each program did, in microseconds by rank 0's clock: as if it had an SM of its own."""
    from weft.tune.tile_times import waits_of

    found: list[Span] = []

    def add(tile: TileTimes, what: str, start: float, end: float, kind: str) -> None:
        if end > start:
            name = f"{tile.what or f'tile {tile.i_m}, {tile.i_n}'}: {what}"
            found.append(Span(tile.rank, f"sm {tile.program}", name, start / 1e3, end / 1e3, kind))

    for tile, waits in waits_of(tiles):
        for start, end in waits:
            add(tile, "its operands are not there yet", start, end, "wait")
        for part in tile.parts:
            add(tile, "work" if tile.what else "multiply", part.begun, part.summed, "work")
            add(tile, "other ranks' sums come, and are added", part.summed, part.combined, "wait")
            add(tile, "store and announce", part.combined, part.end, "work")
    return found
