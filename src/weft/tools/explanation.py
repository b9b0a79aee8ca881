"""What `weft explain` says, part by part: a title, lines for people, values for programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from weft.base.counts import counted
from weft.base.errors import UnsupportedError
from weft.base.hardware import Hardware, hardware_of
from weft.base.schedule import Schedule, Span
from weft.compiler import pipeline
from weft.compiler.compiled import Compiled
from weft.compiler.cost import choose
from weft.compiler.cost.plan_at import PlanAt
from weft.compiler.cost.plans import predict
from weft.compiler.facts import Facts, Settings
from weft.compiler.lower import kernels, source
from weft.compiler.passes.engines import BY_REQUEST, pairs
from weft.compiler.passes.place import place
from weft.ir import core, device, task
from weft.ir.device import Launch, Plan
from weft.ir.task import Program
from weft.tools.schedule.chart import chart_of, engine_of


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
    `settings` are what its user has settled, of one that was not compiled. `called` are the stages
    of the plan that an operator's call runs.
    """

    program: Program
    facts: Facts
    machine: Hardware
    compiled: Compiled | None = None
    settings: Settings = field(default_factory=Settings)
    called: pipeline.Stages | None = None

    @cached_property
    def stages(self) -> pipeline.Stages:
        if self.called is not None:
            return self.called
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
    made, alternatives = list(subject.stages.program.choices), []
    lines = [f"{one.subject}: {one.what} {one.taken}\n    {one.why}" for one in made]
    taken_ways = [{"subject": one.subject, "what": one.what, "taken": one.taken, "why": one.why}
            for one in made]  # fmt: skip
    fused = subject.stages.tasks["fuse"]
    for collective, products in pairs(fused):
        if not products or products[0].kind == "grouped_matmul":  # there is one way, unpredicted
            continue
        ways = choose.ways(fused, products, collective, subject.facts)
        asked = (collective.name, "engine")
        taken = next((one.taken for one in made if (one.subject, one.what) == asked), "")
        first = next((way for way in ways if way.engine == taken), None)
        lines += ["", f"{collective.name}: all ways, the first predicted to end first"]
        for way in ways:
            tile = " x ".join(map(str, way.tile)) or "its own tiles"
            is_counted = isinstance(way.chunks, int) and way.chunks
            words = f", {counted(int(way.chunks), 'chunk')} a rank" if is_counted else ""
            if way.engine in BY_REQUEST:
                words += "; its kernels are written by hand, none are generated"
            us = f"{way.us:9.1f} us" if way.us is not None else "not measured"
            lines.append(f"  {'*' if way is first else ' '} {us}  {way.engine} in {tile}{words}")
            alternatives.append({"subject": collective.name, **asdict(way)})
    values = {"choices": taken_ways, "alternatives": alternatives}
    return Part("choices", "What was chosen, and why", "\n".join(lines) or "nothing", values)


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
    """Of each owner's tiles of a kernel which rows they are, and which signals say so."""
    facts = subject.facts
    at = PlanAt(subject.plan, facts.sizes, facts.num_ranks, facts.nodes)
    rank = min(1, facts.num_ranks - 1)
    lines: list[str] = []
    values: list[dict[str, Any]] = []
    for launch in subject.plan.of(Launch):
        if launch.template == "grouped":
            lines.append(f"{launch.kernel} on every rank: as many tiles as the table says")
            found = [_by_table(at, launch)]
        elif launch.template in ("gemm", "rows"):
            tile, gathered = " x ".join(map(str, launch.tile[:2])), at.gathered_by(launch)
            straddles = gathered and at.rows_of(gathered, 0) % launch.tile[0]
            both = "; a tile across two ranks' rows waits for both" if straddles else ""
            lines.append(f"{launch.kernel} on rank {rank}: tiles of {tile}, in this order{both}")
            found = [{"rank": rank, "owner": owner, **_mapped(at, launch, rank, owner)}
                     for owner in at.owners(rank, launch)]  # fmt: skip
        else:
            continue
        lines += [f"  {one['text']}" for one in found]
        values += [{"kernel": launch.kernel, **one} for one in found]
    return Part("mapping", "Mapping of tiles", "\n".join(lines) or "no tiles", values)


def _mapped(at: PlanAt, launch: Launch, rank: int, owner: int) -> dict[str, Any]:
    """What the mapping says of one owner's tiles on rank `rank`: the words of tile i, j."""
    if gathered := at.gathered_by(launch):
        each, all_rows = at.rows_of(gathered, 0), at.extents_of(rank, launch)[0]
        rows = f"rows {owner * each} … {min((owner + 1) * each, all_rows) - 1}"
        if owner == rank:
            return {"awaits": [], "text": f"{rows} of rank {owner}: there from the start"}
        chunks = range(at.chunks_of(gathered))
        words = [f"{name}[{owner}][{chunk}]" for name in launch.awaits for chunk in chunks]
        return {"awaits": words, "text": f"{rows} of rank {owner}: after {_from_to(words)}"}
    parts, sums = at.parts_of(launch), launch.announces[0] if launch.announces else ""
    num_rows = at.rows_of(parts[0], owner) if parts else at.extents_of(rank, launch)[0]
    rows = f"rows 0 … {num_rows - 1}"
    relayed = next((one for one in launch.announces if at.channels[one].to == "partner"), "")
    by_packet = bool(sums) and at.channels[sums].by == "packet"
    if not parts:
        way = f"packets to {launch.pushes[0]} of all ranks, added to theirs" if by_packet else "own"
        return {"awaits": [], "text": f"{rows}: {way}"}
    text = f"{rows} of rank {owner}'s part: "
    tokens = at.tokens_of(launch)
    if tokens is not None:
        sums, tell = launch.awaits[0], f"{tokens.name}[{owner}]"
        each = [f"[{chunk}]" for chunk in range(at.chunks_of(tokens))]
        way = "staged until a copy engine sends them; the last tile of a chunk sets "
    else:
        tell, each = f"{sums}[{rank}]", ["[i, j]"]
        way = f"stored in its {launch.pushes[0]}, announced by its " if launch.pushes else ""
    if by_packet:
        boxes = launch.pushes[0]
        way = f"packets to {boxes} of rank {owner}, whose sums come back as packets"
        if owner == rank:
            way = f"its own, added to packets in {boxes}; sums go to all as packets"
        return {"awaits": [], "text": text + way}
    peers = at.peers(rank)
    if relayed and owner not in (rank, *at.near(rank)):
        partner, buffer = at.partner_here(rank, owner), at.channels[relayed].buffer
        tell = f"{relayed}[{owner}, {rank}]"
        way = f"stored in {buffer} of rank {partner}, which sends on the node's sum; announced by "
    elif relayed:
        peers = [*at.near(rank), *at.partners(rank)]
    if owner != rank:
        words = [tell + one for one in each]
        return {"announces": words, "text": f"{text}{way}{_from_to(words)}"}
    words = [f"{sums}[{peer}]{one}" for one in each for peer in peers]
    way = f"added to what {', '.join(words)} announce" if words else "its own"
    return {"awaits": words, "text": text + way}


def _from_to(words: Sequence[str]) -> str:
    return " … ".join(dict.fromkeys((words[0], words[-1]))) if words else ""


def _by_table(at: PlanAt, launch: Launch) -> dict[str, Any]:
    """Of a grouped product, which rows are whose the device alone knows: the same for all tiles."""
    table = next(do.operands[2] for do in launch.body if do.kind == "grouped_matmul")
    (m, top_k, _), columns = at.extents(table, 0), f"columns j * {launch.tile[1]} …"
    text = f"tile t of {table}.tiles: slots first … end - 1 of one expert, of {m * top_k}, "
    text += f"in turn {table}.turns; {columns}: "
    if not launch.awaits:
        return {"table": table, "awaits": [], "text": f"{text}there from the start"}
    channel = at.channels[launch.awaits[0]]
    words = [f"{channel.name}[lo … hi][0 … {at.chunks_of(channel) - 1}]"]
    text += f"after {words[0]}, of the ranks whose tokens it has"
    return {"table": table, "awaits": words, "text": text}


def times(subject: Subject) -> Part:
    """Predicted time, engine by engine, of the rank that ends last."""
    found = subject.schedule
    chart = chart_of(found.spans, found.signals)
    if not chart.totals:
        return Part("times", "Predicted time", "nothing runs", {"end_us": 0.0})
    last = max(chart.totals, key=lambda one: one.end_us)
    target, whose = subject.facts.target, subject.machine.name
    if hardware_of(target) is None:
        whose += f", as no machine of {target} was measured (--hw names others)"
    lines = [f"{chart.end_us:.1f} us in all, by the constants of {whose}"]
    engines = []
    own: dict[str, list[Span]] = {}
    for bar in chart.spans:
        if bar.rank == last.rank:
            own.setdefault(engine_of(bar.lane), []).append(bar)
    for engine, bars in own.items():
        count = len({bar.lane for bar in bars})
        waits, busy = (
            sum(bar.end_us - bar.start_us for bar in bars if (bar.kind == "wait") == is_wait)
            / count for is_wait in (True, False)
        )  # fmt: skip
        begin, end = min(bar.start_us for bar in bars), max(bar.end_us for bar in bars)
        engines.append({"engine": engine, "lanes": count, "from_us": begin, "to_us": end,
                        "busy_us": busy, "waits_us": waits})  # fmt: skip
        many = f" ({count}, each on average)" if count > 1 else ""
        message = f", waits {waits:.1f}" if waits else ""
        lines.append(f"  {engine + many:<40} {begin:7.1f} to {end:7.1f}: busy {busy:.1f} us"
                     f"{message}")  # fmt: skip
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
        if launch.template == "small":
            home = "gathered_gemm" if launch.body[0].kind == "all_gather" else "gemm_packets"
            text = f"the kernel for small m, tiles/{home}.py, which takes no hooks"
            yield Part("core", f"Core level: {launch.kernel}", text)
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
