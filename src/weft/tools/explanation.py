"""What `weft explain` says, part by part: a title, lines for people, values for programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from weft.base.counts import counted
from weft.base.errors import UnsupportedError
from weft.base.hardware import Hardware
from weft.compiler import pipeline
from weft.compiler.compiled import Compiled
from weft.compiler.cost import choose
from weft.compiler.facts import Facts, Settings
from weft.compiler.lower import kernels, source
from weft.compiler.lower.supported import ENGINES
from weft.compiler.passes.engines import pairs
from weft.compiler.passes.place import place
from weft.ir import core, device, task
from weft.ir.choice import Choice
from weft.ir.device import Launch, Plan
from weft.ir.task import Program
from weft.tools.schedule import grouped
from weft.tools.schedule.chart import chart_of
from weft.tools.schedule.predicted import Played, Schedule, predict

if TYPE_CHECKING:
    from weft.tools.schedule.cut import Tile

# Of a kernel so many tiles are shown with their rows and words.
TILES_SHOWN = 6


@dataclass(frozen=True)
class Part:
    """One part of an explanation."""

    name: str
    title: str
    text: str
    values: Any = field(default=None)


@dataclass(frozen=True)
class Subject:
    """A traced program, and the call of it that is asked about.

    With `compiled` it is what that would run, where kernels that are not generated are libraries'.
    `settings` are what its user has settled, of one that was not compiled.
    """

    program: Program
    facts: Facts
    machine: Hardware
    compiled: Compiled | None = None
    settings: Settings = field(default_factory=Settings)

    @cached_property
    def stages(self) -> pipeline.Stages:
        if self.compiled is not None:
            return self.compiled.overlapped(self.facts)
        return pipeline.overlap(place(self.program), self.facts, self.settings)

    @property
    def plan(self) -> Plan:
        return self.stages.plan

    @cached_property
    def schedule(self) -> Schedule:
        facts = self.facts
        return predict(self.plan, facts.sizes, facts.num_ranks, self.machine, facts.nodes)


def parts_of(subject: Subject, wanted: Collection[str]) -> Iterator[Part]:
    """Those that are wanted, in the order in which a reader asks."""
    makers = {
        "choices": choices, "task": tasks, "device": plan, "mapping": mapping, "times": times,
    }  # fmt: skip
    for name, make in makers.items():
        if name in wanted:
            yield make(subject)
    for part in kernel_parts(subject) if {"core", "launch"} & set(wanted) else ():
        if part.name in wanted:
            yield part


# ---------------------------------------------------------------------------------------------


def choices(subject: Subject) -> Part:
    """What the passes have chosen and why, and what else could have been."""
    final = subject.stages.program
    made: list[Choice] = list(final.choices)
    lines = [f"{one.subject}: {one.what} {one.taken}\n    {one.why}" for one in made]
    values: dict[str, Any] = {
        "choices": [
            {"subject": one.subject, "what": one.what, "taken": one.taken, "why": one.why}
            for one in made
        ],
        "alternatives": [],
    }
    fused = subject.stages.tasks["fuse"]
    for collective, products in pairs(fused):
        if not products or products[0].kind == "grouped_matmul":  # there is one way, unpredicted
            continue
        ways = choose.ways(fused, products, collective, subject.facts)
        asked = (collective.name, "engine")
        taken = next((one.taken for one in made if (one.subject, one.what) == asked), "")
        lines += ["", f"{collective.name}: all ways, the first predicted to end first"]
        for way in ways:
            tile = " x ".join(map(str, way.tile)) or "its own tiles"
            mark = "*" if way is _first(ways, taken) else " "
            is_counted = isinstance(way.chunks, int) and way.chunks
            words = f", {counted(int(way.chunks), 'word')} a rank" if is_counted else ""
            made_by = _made_by(collective.kind, way.engine)
            us = f"{way.us:9.1f} us" if way.us is not None else "not measured"
            lines.append(f"  {mark} {us}  {way.engine} in {tile}{words}{made_by}")
            values["alternatives"].append({"subject": collective.name, **asdict(way)})
    return Part("choices", "What was chosen, and why", "\n".join(lines) or "nothing", values)


def _made_by(kind: str, engine: str) -> str:
    """What is to be said of an engine that kernels are not generated for."""
    if engine in (choose.LIBRARY, *ENGINES[kind]):
        return ""
    return "; its kernels are written by hand, none are generated"


def _first(ways: Sequence[choose.Way], engine: str) -> choose.Way | None:
    return next((way for way in ways if way.engine == engine), None)


def tasks(subject: Subject) -> Part:
    """Task IR after the passes of that level."""
    shown = {
        name: task.show(replace(program, choices=()), places=False)
        for name, program in subject.stages.tasks.items()
    }
    last = list(shown)[-1]
    title = f"Task level, after {', '.join(shown)}"
    return Part("task", title, shown[last].rstrip(), shown)


def plan(subject: Subject) -> Part:
    """Device IR: what each rank's streams do."""
    shown = device.show(subject.plan.bare, places=False).rstrip()
    return Part("device", "Device level: what each rank's streams do", shown, shown)


def mapping(subject: Subject) -> Part:
    """Of some tiles of each kernel which rows they are, and on which words they wait or tell."""
    facts = subject.facts
    played = Played(subject.plan, facts.sizes, facts.num_ranks, subject.machine)
    rank = min(1, facts.num_ranks - 1)
    lines: list[str] = []
    values: list[dict[str, Any]] = []
    for launch in subject.plan.of(Launch):
        if launch.template == "grouped":
            shown = grouped.mapped(played, launch)
            lines += [f"{launch.kernel} on every rank: as many tiles as the table says",
                      f"      t  {shown['text']}"]  # fmt: skip
            values.append({"kernel": launch.kernel, **shown})
        if launch.template not in ("gemm", "rows"):
            continue
        tiles = played.tiles(rank, launch)
        ordered = f"{counted(len(tiles), 'tile')}, in this order"
        lines.append(f"{launch.kernel} on rank {rank}: {ordered}")
        for tile in _telling(tiles):
            shown = _mapped(played, launch, rank, tile)
            lines.append(f"  {tiles.index(tile):>5}  {shown['text']}")
            values.append({"kernel": launch.kernel, "rank": rank, **shown})
    return Part("mapping", "Mapping of a tile", "\n".join(lines) or "no tiles", values)


def _telling(tiles: Sequence[Tile]) -> list[Tile]:
    """The first, the first of each other owner or set of words, and the last."""
    found: dict[Any, Tile] = {}
    for tile in tiles:
        found.setdefault((tile.owner, tile.words), tile)
    shown = [*list(found.values())[:TILES_SHOWN], tiles[-1]] if tiles else []
    return sorted(dict.fromkeys(shown), key=tiles.index)


def _mapped(played: Played, launch: Launch, rank: int, tile: Tile) -> dict[str, Any]:
    """What the mapping says of one tile, for rank `rank`."""
    columns = f"columns {tile.i_n * launch.tile[1]} …"
    first = tile.i_m * tile.rows
    sums = launch.announces[0] if launch.announces else ""
    tokens = played.tokens_of(launch)
    is_cut = (launch.order.endswith("scatter") or tokens is not None) and sums
    most = (
        played.rows_of(played.channels[sums], tile.owner)
        if is_cut else played.extents_of(rank, launch)[0]
    )  # fmt: skip
    end = min(first + tile.rows, most)
    words = [f"{name}[{s}][{c}]" for name in launch.awaits for s, c in tile.words]
    if sums and played.channels[sums].by == "packet":
        boxes = launch.pushes[0]
        way = f"packets to {boxes} of all ranks, added to theirs"
        if is_cut:
            way = f"packets to {boxes} of rank {tile.owner}, whose sums come back as packets"
        if is_cut and tile.owner == rank:
            way = f"its own, added to packets in {boxes}; sums go to all as packets"
        text = f"rows {first} … {end - 1}, {columns}: {way}"
        return {"tile": [tile.i_m, tile.i_n], "owner": rank, "awaits": [], "text": text}
    if not is_cut:
        text = f"rows {first} … {end - 1}, {columns}: of rank {tile.owner}"
        text += f", after {', '.join(words)}" if words else ", there from the start"
        return {"tile": [tile.i_m, tile.i_n], "owner": tile.owner, "awaits": words, "text": text}
    if tokens is not None:
        return _carried(played, launch, rank, tile, f"rows {first} … {end - 1}, {columns}")
    word = f"{sums}[{rank}][{tile.i_m}, {tile.i_n}]"
    text = f"rows {first} … {end - 1} of rank {tile.owner}'s part, {columns}: "
    if tile.owner != rank:
        text += f"stored in its {launch.pushes[0]}, told by its {word}"
        return {"tile": [tile.i_m, tile.i_n], "owner": tile.owner, "announces": word, "text": text}
    words = [f"{sums}[{peer}][{tile.i_m}, {tile.i_n}]" for peer in played.peers(rank)]
    text += f"added to what {', '.join(words)} tell" if words else "its own"
    return {"tile": [tile.i_m, tile.i_n], "owner": rank, "awaits": words, "text": text}


def _carried(played: Played, launch: Launch, rank: int, tile: Tile, region: str) -> dict[str, Any]:
    """Of a tile that an engine carries, or to which is added what engines have brought."""
    (tokens,), (sums,) = launch.announces, launch.awaits
    chunk = tile.i_n // played.tiles_of_chunk(launch, played.channels[tokens])
    shown = {"tile": [tile.i_m, tile.i_n], "owner": tile.owner}
    text = f"{region} of rank {tile.owner}'s part: "
    if tile.owner != rank:
        word = f"{tokens}[{tile.owner}][{chunk}]"
        text += f"kept here until an engine carries it; the chunk's last one sets {word}"
        return {**shown, "announces": word, "text": text}
    words = [f"{sums}[{peer}][{chunk}]" for peer in played.peers(rank)]
    text += f"added to what engines bring, told by {', '.join(words)}" if words else "its own"
    return {**shown, "awaits": words, "text": text}


def times(subject: Subject) -> Part:
    """Predicted time, engine by engine, of the rank that ends last."""
    found = subject.schedule
    chart = chart_of(found.spans, found.signals)
    if not chart.totals:
        return Part("times", "Predicted time", "nothing runs", {"end_us": 0.0})
    last = max(chart.totals, key=lambda one: one.end_us)
    lines = [f"{chart.end_us:.1f} us in all, by the constants of {subject.machine.name}"]
    engines = []
    for row in [row for row in chart.rows if row.rank == last.rank]:
        bars = [bar for lane in row.lanes for bar in lane.bars if bar.kind not in ("program",)]
        busy = sum(bar.end_us - bar.start_us for bar in bars if bar.kind != "wait")
        waits = sum(bar.end_us - bar.start_us for bar in bars if bar.kind == "wait")
        begin, end = min(bar.start_us for bar in bars), max(bar.end_us for bar in bars)
        count = max(1, len(row.lanes))
        engine = {
            "engine": row.title, "lanes": count, "from_us": begin, "to_us": end,
            "busy_us": busy / count, "waits_us": waits / count,
        }  # fmt: skip
        engines.append(engine)
        many = f" ({count}, each on average)" if count > 1 else ""
        message = f", waits {waits / count:.1f}" if waits else ""
        lines.append(f"  {row.title + many:<40} {begin:7.1f} to {end:7.1f}: busy "
                     f"{busy / count:.1f} us{message}")  # fmt: skip
    if last.moved_us:
        lines.append(f"  of {last.moved_us:.1f} us in which data moves, {last.hidden:.0%} is behind"
                     " computation")  # fmt: skip
    values = {"end_us": chart.end_us, "rank": last.rank, "engines": engines}
    title = f"Predicted time, engine by engine, on rank {last.rank}"
    return Part("times", title, "\n".join(lines), values)


def kernel_parts(subject: Subject) -> Iterator[Part]:
    """Core IR of each kernel, and the call that launches it with its hooks."""
    for launch in subject.plan.of(Launch):
        if launch.template == "move":
            continue
        try:
            kernel = kernels.lower_launch(subject.plan, launch)
            text = source.shown(kernel)
        except UnsupportedError as error:
            yield Part("core", f"Core level: {launch.kernel}", f"no hooks: {error}")
            continue
        shown = core.show(kernel, places=False).rstrip()
        yield Part("core", f"Core level: {launch.kernel}", shown, shown)
        yield Part("launch", f"What is launched: {launch.kernel}", text, text)


def as_json(parts: Sequence[Part]) -> Mapping[str, Any]:
    """Parts by name; of those that come once for each kernel a list."""
    found: dict[str, Any] = {}
    for part in parts:
        value = part.values if part.values is not None else part.text
        if part.name in ("core", "launch"):
            found.setdefault(part.name, []).append(value)
        else:
            found[part.name] = value
    return found
