"""A call of an operator whose tiles say themselves when they waited and worked: run, and drawn.

On GPUs it is a measurement, of a kernel that also writes this down; on the emulator the same in
simulated time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from weft.base.errors import UsageError
from weft.base.schedule import Span
from weft.language import world_layout as layout
from weft.tools.check import Work, inputs_on
from weft.tools.schedule.chart import Chart, chart_of
from weft.tools.schedule.runs import config_for
from weft.tools.words import shape_text

if TYPE_CHECKING:
    from weft.tune.clocks import Offset
    from weft.tune.tile_times import Figures, TileTimes

# Records that there is room for, of 96 bytes each: on GPUs, whose hosts tell each other of them,
# and on the emulator, which looks after each word. Tiles further on in the order are left out.
MOST_TILES, FEW_TILES = 1 << 15, 1 << 12
# Calls before the one that counts, on GPUs: kernels are compiled and loaded, slots allocated.
WARM_CALLS = 3
# One process compiles what all need.
SILENCE_S = 300.0


@dataclass(frozen=True)
class Traced:
    """Tiles of all ranks on rank 0's clock; `figures` and `clocks` by rank; `target` is where."""

    target: str
    tiles: Sequence[TileTimes]
    figures: Sequence[Figures]
    clocks: Sequence[Offset]

    def to_json(self) -> dict[str, Any]:
        clocks = [{"rank": rank, "offset_us": one.ns / 1e3, "error_us": one.error_ns / 1e3}
                  for rank, one in enumerate(self.clocks)]  # fmt: skip
        return {
            "target": self.target, "clocks": clocks,
            "totals": [one._asdict() for one in self.figures],
        }  # fmt: skip


def traced_emulated(
    work: Work, transport: str, hardware: str, *, seed: int, num_sms: int
) -> Traced:
    """One call under the schedule of `seed`, in the simulated time of `hardware`.

    Raises  FindingError: what the emulator found; UsageError: no such transport or hardware, or
            a kernel that leaves no trace
    """
    import weft

    nodes = work.nodes or 1
    with weft.emulated(work.num_ranks, nodes, seed, num_sms, hardware=hardware) as session:
        results = session.run(partial(call_traced, work, transport, seed))
    return gathered(work, "emu", *results[0])


def traced_on_gpus(work: Work, transport: str, *, seed: int) -> Traced:
    """One call after a few that warm up, one process and one GPU for each rank.

    Raises  RanksStopped: a process failed; UsageError: a kernel that leaves no trace
    """
    from weft.tune.processes import messages_from_gpus

    (found,) = messages_from_gpus(
        _gpu_rank, work.num_ranks, work, transport, seed, silence_s=SILENCE_S
    )
    return gathered(work, "cuda", *found)


def _gpu_rank(
    rank: int, send: Callable[[Any], None], work: Work, transport: str, seed: int
) -> None:
    """One rank's process."""
    send(call_traced(work, transport, seed, room=MOST_TILES, warm_calls=WARM_CALLS))


def call_traced(
    work: Work, transport: str, seed: int, *, room: int = FEW_TILES, warm_calls: int = 0
) -> tuple[list[list[list[int]]], list[Offset]]:
    """On one rank: the call; returns every rank's records, and how their clocks differ.

    Without a transport it is the operator's own choice on GPUs, the first on the emulator.
    """
    import weft
    from weft.tune.clocks import offsets

    world = weft.init(trace_tiles=room)
    config = None
    if transport or world.target.backend == "emu":
        config = config_for(work, transport, world.target)
    mine = inputs_on(world, work, seed)
    for _ in range(warm_calls):
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


def gathered(
    work: Work, target: str, records: list[list[list[int]]], clocks: list[Offset]
) -> Traced:
    """All ranks' records on one clock.

    Raises  UsageError: there are none
    """
    from weft.tune.tile_times import figures, read

    tiles = [tile for rank, own in enumerate(records) for tile in read(own, rank, clocks[rank].ns)]
    if not tiles:
        raise UsageError(
            f"--traced: {work.op.name} with {shape_text(work.shape)} ran no kernel that leaves a "
            "trace of its tiles; products by the GEMM templates do, not those by packets or by "
            "libraries: take another --transport, or larger sizes"
        )
    begin = min(tile.start for tile in tiles)
    totals = [figures([tile for tile in tiles if tile.rank == rank], rank, begin)
              for rank in range(work.num_ranks)]  # fmt: skip
    return Traced(target, tiles, totals, clocks)


def drawn(found: Traced) -> Chart:
    """A row for each program, as if it had an SM of its own."""
    chart = chart_of(spans_of(found.tiles))
    ours = {one.rank: one for one in found.figures}
    # What one consumer stores while another multiplies counts once.
    totals = []
    for one in chart.totals:
        own = ours[one.rank]
        waited = own.waiting_us + own.combining_us
        totals.append(replace(one, work_us=own.computing_us, wait_us=waited))
    return replace(chart, totals=tuple(totals))


def spans_of(tiles: Sequence[TileTimes]) -> list[Span]:
    """What each program did, in microseconds by rank 0's clock."""
    from weft.tune.tile_times import by_program, waits_of

    found: list[Span] = []

    def add(tile: TileTimes, what: str, start: int, end: int, kind: str) -> None:
        if end > start:
            name = f"tile {tile.i_m}, {tile.i_n}: {what}"
            found.append(Span(tile.rank, f"sm {tile.program}", name, start / 1e3, end / 1e3, kind))

    for rank in sorted({tile.rank for tile in tiles}):
        for own in by_program(tile for tile in tiles if tile.rank == rank).values():
            for tile, waits in waits_of(own):
                for start, end in waits:
                    add(tile, "its operands are not there yet", start, end, "wait")
                for part in tile.parts:
                    add(tile, "multiply", part.begun, part.summed, "work")
                    add(tile, "other ranks' sums come, and are added", part.summed, part.combined,
                        "wait")  # fmt: skip
                    add(tile, "store and announce", part.combined, part.end, "work")
    return found


def as_words(found: Figures) -> tuple[str, ...]:
    """One rank's figures under HEAD."""
    longest = [f"{one['waited_us']:.1f} µs, tile {one['tile'][0]}, {one['tile'][1]}"
               for one in found.longest_waits[:1]]  # fmt: skip
    sums = (found.waiting_us, found.combining_us, found.computing_us)
    return (
        str(found.rank), f"{found.end_us:.1f} µs", str(found.programs), str(found.tiles),
        *(f"{one:.1f} µs" for one in sums), f"{found.busy:.0%}", *(longest or ["–"]),
    )  # fmt: skip


HEAD = (
    "rank", "ends at", "programs", "tiles", "they wait", "they combine", "they compute", "busy",
    "longest wait",
)  # fmt: skip
