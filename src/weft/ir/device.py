"""Device IR: what each rank's streams do, in the order in which the host queues it.

    program(ag_gemm, mesh=tp, results=(c,))
    x = buffer(bfloat16, (Part(m), 64), role=shared)
    x_ready = channel(x)
    notify(x_ready, stream=copy)

All ranks run the same plan. Within a stream statements follow each other; between streams `after`
orders, between ranks a channel alone: its words are announced by `notify`, `copy` or `launch` and
waited for by `wait` or `launch`. What reaches another rank's memory is ordered with what that rank
does only by a path over a channel; the rules below look for one.

A call uses one slot: its symmetric buffers and the words of all its channels. What `takes` credits
waits until all ranks have given back what the slot held before; what `gives` them ends the call.
A plan passes three stages: drawn (what moves and what runs), signalled (in which order), allocated
(which memory); a plan that says none has passed them all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from typing import Any, NamedTuple

from weft.base.dtypes import DTYPES
from weft.base.place import UNKNOWN, Place
from weft.ir import text
from weft.ir.choice import Choice
from weft.ir.legality import Rule, Violation, illegal, run
from weft.ir.order import Moment, Order
from weft.ir.tensor import TABLE, Size, Times

# The caller's, on this rank alone; the caller's, on the heap; fresh; fresh, on the heap; tables,
# which whoever makes them brings along.
ROLES = ("input", "shared", "local", "symmetric", "tables")
GIVEN, ON_HEAP = ("input", "shared"), ("shared", "symmetric")
NO_MEMORY = (*GIVEN, "tables")
STAGES = ("drawn", "signalled", "allocated")
# What a kernel is made of: a product in tiles; rows on their way to peers; work row by row; a
# product in tiles that tables say.
TEMPLATES = ("gemm", "move", "rows", "grouped")
# How many programs: one for each tile; as many as are resident; as pieces of data; one.
PROGRAMS = ("tiles", "resident", "pieces", "one")
# What a kernel of template `move` does within this rank: all own rows, or those of tiles that lie
# across two ranks' rows, to where they are gathered.
OWN_ROWS = ("stage", "edges")
NUM_RANKS = "num_ranks"  # a size that each call knows


@dataclass(frozen=True)
class Part:
    """This rank's part of a size, split as torch.chunk splits it."""

    size: Size


@dataclass(frozen=True)
class Buffer:
    """A tensor of each rank; its role says whose it is and whether peers reach it.

    `shares`: it lies where that buffer lies, which nobody needs any more when this one is written.
    """

    name: str
    dtype: str
    sizes: tuple[Size | Part, ...]
    role: str = "local"
    shares: str = ""
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Channel:
    """Signals that announce rows of `buffer`, which are `rows` in all: a static affine mapping.

    Each rank's part has `chunks` words, or one for each of the producer's `tiles`, which have
    `push_rows` rows and lie within a rank's part; with `columns` each word stands for so many of
    them only. The consumer's tiles have `tile_rows`: cuts=whole cuts all rows, so they may straddle
    two ranks' parts, cuts=part each rank's own; cuts=each: every rank announces all rows, on words
    of its own. A word is full when each of its producer's tiles has been announced `parts` times,
    num_ranks where every rank adds to it. cuts=experts: the consumer's tiles are those of `table`,
    each of one expert's rows, whose ranks are known on the device alone.

    to=all: every rank has words for all rows, from whom they are. to=owner: a rank has words for
    its own part, from each rank. `own`: this rank's own rows lie there from the start, and nothing
    announces them. by=packet: the data itself says that it has come. `along`: buffers of which the
    same words announce the same rows.
    """

    name: str
    buffer: str
    rows: Size
    chunks: int | str = 1
    push_rows: int = 1
    tile_rows: int = 1
    cuts: str = "whole"
    parts: int | str = 1
    columns: int = 0
    to: str = "all"
    own: str = ""
    by: str = "word"
    along: tuple[str, ...] = ()
    table: str = ""
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Call:
    """A call of a library: `function` of what it reads, into what it writes; collective or not.

    `tile_rows`: the height of the tiles that a router cuts, where kernels work by its tables.
    """

    function: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    stream: str = "main"
    dim: int | None = None
    eps: float | None = None
    top_k: int | None = None
    head: int | None = None
    base: float | None = None
    tile_rows: int = 0
    causal: bool | None = None
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Copy:
    """A copy engine moves each rank's rows, chunk by chunk, announcing each on `announces`.

    side=pull: from every peer's `source` into own `target`; side=push: from own to every peer's.
    """

    source: str
    target: str
    side: str
    announces: str
    stream: str = "copy"
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Do:
    """One operation inside a kernel: of buffers, or of values that it has in registers."""

    kind: str
    operands: tuple[str, ...]
    result: str
    eps: float | None = None


@dataclass(frozen=True)
class Launch:
    """A kernel of the Core level; which channels its hooks wait for and announce.

    `pushes` are the buffers that it writes on other ranks; `body` is what it computes, in order.
    `tile` is (rows, columns, k) of a product, else (rows, columns); `order` is a swizzle's name.
    `spare` SMs are left free of a resident grid; `split_k` programs share one tile's sum.
    """

    kernel: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    pushes: tuple[str, ...] = ()
    awaits: tuple[str, ...] = ()
    announces: tuple[str, ...] = ()
    stream: str = "main"
    template: str = ""
    body: tuple[Do, ...] = ()
    tile: tuple[int, ...] = ()
    order: str = "rows"
    programs: str = "tiles"
    spare: int = 0
    split_k: int = 1
    takes: bool = False
    gives: bool = False
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Notify:
    """The stream announces all of this rank's words of `channel` to every rank."""

    channel: str
    stream: str = "main"
    takes: bool = False
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Wait:
    """The stream goes on when all words of `channel` are full; bounded."""

    channel: str
    stream: str = "main"
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Take:
    """The stream goes on when all ranks have given back what the slot held; bounded.

    The words that the next copy announces hold the call's epoch from then on, for it to take along.
    """

    stream: str = "main"
    place: Place = UNKNOWN

    @property
    def takes(self) -> bool:
        return True


@dataclass(frozen=True)
class After:
    """What comes next on `stream` waits for all that has been queued on `other`."""

    stream: str
    other: str
    place: Place = UNKNOWN


Step = Call | Copy | Launch | Notify | Wait | Take | After
Statement = Buffer | Channel | Choice | Step


@dataclass(frozen=True)
class Plan:
    """A rank's program; the same on all ranks."""

    name: str
    mesh: str
    statements: tuple[Statement, ...]
    results: tuple[str, ...] = ()
    stage: str = ""
    place: Place = UNKNOWN

    def of(self, kind: type) -> list:
        """The statements of one kind, in order."""
        return [one for one in self.statements if isinstance(one, kind)]

    @property
    def bare(self) -> Plan:
        """Without choices: what runs, and not why."""
        kept = tuple(one for one in self.statements if not isinstance(one, Choice))
        return replace(self, statements=kept)

    @cached_property
    def moments(self) -> Moments:
        """The order of what happens; found once, since rules and passes ask for it again."""
        return Moments(self)

    @property
    def steps(self) -> list[Step]:
        return [one for one in self.statements if isinstance(one, Step)]


RECORDS = {
    **text.words(Buffer, Channel, Call, Copy, Launch, Notify, Wait, Take, After, Choice),
    "Part": Part,
    "Times": Times,
    "Do": Do,
}


def show(plan: Plan, *, places: bool = True) -> str:
    """The plan as text; `parse` takes it back."""
    header = text.Header(plan.name, plan.mesh, plan.stage, plan.results, plan.place)
    return text.show([header, *plan.statements], places=places)


def parse(source: str) -> Plan:
    """Raises  UsageError: with the line"""
    header, statements = text.read(source, RECORDS)
    return Plan(header.title, header.mesh, statements, header.results, header.stage, header.place)


# ---------------------------------------------------------------------------------------------
# What is legal


class Access(NamedTuple):
    """What a step does with a buffer; `far` says that it is also another rank's.

    `rows`: of the rank in whose memory they lie only its own, only others', or all.
    """

    buffer: str
    writes: bool
    far: bool = False
    rows: str = "all"

    def meets(self, other: Access) -> bool:
        """Is it of the same bytes?"""
        apart = {self.rows, other.rows} == {"own", "others"}
        return self.buffer == other.buffer and not apart


def accesses(step: Step) -> list[Access]:
    """The buffers that a step reads and writes."""
    if isinstance(step, Copy):
        is_pull = step.side == "pull"
        return [Access(step.source, False, is_pull, "own"),
                Access(step.target, True, not is_pull, "others")]  # fmt: skip
    if isinstance(step, Call | Launch):
        pushes = [Access(name, True, True) for name in getattr(step, "pushes", ())]
        reads = [Access(name, False) for name in step.reads]
        kinds = {do.kind for do in step.body} if isinstance(step, Launch) else set()
        rows = "own" if kinds and kinds <= set(OWN_ROWS) else "all"
        return [*reads, *[Access(name, True, rows=rows) for name in step.writes], *pushes]
    return []


def announced(step: Step) -> tuple[str, ...]:
    """The channels that a step announces."""
    if isinstance(step, Copy):
        return (step.announces,)
    if isinstance(step, Launch):
        return step.announces
    return (step.channel,) if isinstance(step, Notify) else ()


def awaited(step: Step) -> tuple[str, ...]:
    """The channels that a step waits for."""
    if isinstance(step, Launch):
        return step.awaits
    return (step.channel,) if isinstance(step, Wait) else ()


def _names(plan: Plan) -> Iterator[tuple[str, Place]]:
    buffers: set[str] = set()
    channels: set[str] = set()
    for one in plan.statements:
        if isinstance(one, Buffer | Channel):
            if one.name in buffers | channels:
                yield f"{one.name} is declared twice", one.place
            (buffers if isinstance(one, Buffer) else channels).add(one.name)
            for name in _named_buffers(one) - buffers:
                yield (
                    f"{text.word(type(one))} {one.name} names {name}, which is no buffer",
                    one.place,
                )
            continue
        if isinstance(one, Choice):
            continue
        for name in sorted({access.buffer for access in accesses(one)} - buffers):
            yield f"{text.word(type(one))} uses {name}, which is no buffer", one.place
        for name in sorted({*announced(one), *awaited(one)} - channels):
            yield f"{text.word(type(one))} names {name}, which is no channel", one.place
    if missing := [name for name in plan.results if name not in buffers]:
        yield f"{plan.name} returns {', '.join(missing)}, which are no buffers", plan.place


def _named_buffers(one: Buffer | Channel) -> set[str]:
    """What a declaration says of buffers before it."""
    named = (one.shares,) if isinstance(one, Buffer) else (
        one.buffer, one.own, one.table, *one.along)  # fmt: skip
    return {name for name in named if name}


def _fields(plan: Plan) -> Iterator[tuple[str, Place]]:
    for buffer in plan.of(Buffer):
        dtypes = (TABLE,) if buffer.role == "tables" else DTYPES
        if buffer.role not in ROLES or buffer.dtype not in dtypes:
            told = f"role={buffer.role}, dtype={buffer.dtype}; roles are {', '.join(ROLES)}"
            yield f"buffer {buffer.name} has {told}", buffer.place
    for channel in plan.of(Channel):
        for name in ("chunks", "push_rows", "tile_rows", "parts"):
            number, words = getattr(channel, name), {"parts": NUM_RANKS, "chunks": "tiles"}
            if number < 1 if isinstance(number, int) else number != words.get(name):
                told = f"{name}={number}; it is 1 or more"
                yield f"channel {channel.name} has {told}", channel.place
        yield from _spelled(channel, f"channel {channel.name}", _CHANNEL_WORDS)
    for copy in plan.of(Copy):
        yield from _spelled(copy, f"copy of {copy.source}", {"side": ("pull", "push")})
    for launch in plan.of(Launch):
        yield from _spelled(launch, f"launch of {launch.kernel}", _LAUNCH_WORDS)
        if min((*launch.tile, launch.split_k)) < 1 or launch.spare < 0:
            told = f"tile={launch.tile}, split_k={launch.split_k}, spare={launch.spare}"
            yield (
                f"launch of {launch.kernel} has {told}; they are 1 or more, 0 or more",
                launch.place,
            )


_CHANNEL_WORDS = {"cuts": ("whole", "part", "each", "experts"), "to": ("all", "owner"),
                  "by": ("word", "packet")}  # fmt: skip
_LAUNCH_WORDS = {"template": ("", *TEMPLATES), "programs": PROGRAMS}


def _spelled(one: Channel | Copy | Launch, told: str, words: Mapping[str, tuple[str, ...]]):
    """Fields that hold another word than they may."""
    for name, known in words.items():
        if (given := getattr(one, name)) not in known:
            may = " or ".join(word for word in known if word)
            yield f"{told} has {name}={given}; it is {may}", one.place


def _bodies(plan: Plan) -> Iterator[tuple[str, Place]]:
    for launch in plan.of(Launch):
        known, made = set(launch.reads), set()
        for do in launch.body:
            for name in do.operands:
                if name not in known:
                    told = f"{do.result} = {do.kind} of {name}"
                    yield (
                        f"{launch.kernel} does {told}, which it neither reads nor makes",
                        launch.place,
                    )
            known.add(do.result)
            made.add(do.result)
        for name in launch.writes if launch.body else ():
            if name not in made:
                yield (
                    f"{launch.kernel} writes {name}, which nothing in its body makes",
                    launch.place,
                )


def _reach(plan: Plan) -> Iterator[tuple[str, Place]]:
    roles = {buffer.name: buffer.role for buffer in plan.of(Buffer)}
    for step in plan.steps:
        for access in accesses(step):
            name = access.buffer
            if access.far and roles[name] not in ON_HEAP:
                told = f"other ranks' parts of {name} are reached, but its role is {roles[name]}"
                yield f"{told}: it must be {' or '.join(ON_HEAP)}", step.place


def _paired(plan: Plan) -> Iterator[tuple[str, Place]]:
    gives = {name for step in plan.steps for name in announced(step)}
    takes = {name for step in plan.steps for name in awaited(step)}
    for channel in plan.of(Channel):
        if channel.name in takes - gives:
            yield f"{channel.name} is waited for and nobody announces it", channel.place
        if channel.name in gives - takes:
            yield f"{channel.name} is announced and nobody waits for it", channel.place


class Moments:
    """The order of a plan's moments, and which of them an access lies between."""

    def __init__(self, plan: Plan) -> None:
        self.told_by = {one.name: {one.buffer, *one.along} for one in plan.of(Channel)}
        self.order = Order()
        self.steps = plan.steps
        self.end = Moment(len(self.steps) + 1, "begin")  # what the caller does next
        add, last = self.order.add, {}
        caller = Moment(0, "end")
        for i, step in enumerate(self.steps, 1):
            begin, end = Moment(i, "begin"), Moment(i, "end")
            add(begin, end)
            # The caller's work lies on the main stream; another begins when it is told to.
            before = last.get(step.stream, caller if step.stream == "main" else None)
            if before is not None:
                add(before, begin)
            if isinstance(step, After):
                add(last.get(step.other, caller), begin)
            last[step.stream] = end
            for name in announced(step):
                if isinstance(step, Copy):  # it says of all that it moves when it is over
                    add(end, Moment(i, "told", name))
                    continue
                add(begin, Moment(i, "told", name))
                add(Moment(i, "told", name), end)
            for name in awaited(step):
                add(begin, Moment(i, "known", name))
                add(Moment(i, "known", name), end)
        add(last.get("main", caller), self.end)
        self._add_channels()
        self.order.close()

    def _add_channels(self) -> None:
        takers: dict[str, list[int]] = {}
        for j, taker in enumerate(self.steps, 1):
            for name in awaited(taker):
                takers.setdefault(name, []).append(j)
        for i, giver in enumerate(self.steps, 1):
            # What a rank fetches it tells itself.
            is_far = not (isinstance(giver, Copy) and giver.side == "pull")
            for name in announced(giver):
                for j in takers.get(name, ()):
                    told, known = Moment(i, "told", name), Moment(j, "known", name)
                    self.order.add(told, known, far=is_far)

    def done(self, i: int, access: Access) -> list[Moment]:
        """When step i is done with a buffer: at its end, or, written, when it has announced it."""
        told = [] if not access.writes else [*self._of(i, "told", announced, access.buffer)]
        return [Moment(i, "end"), *told]

    def begun(self, i: int, access: Access) -> list[Moment]:
        """What is before one of these is before step i's use of a buffer: readers wait for it."""
        known = [] if access.writes else [*self._of(i, "known", awaited, access.buffer)]
        return [Moment(i, "begin"), *known]

    def _of(self, i: int, what: str, named: Any, buffer: str) -> Iterator[Moment]:
        if 1 <= i <= len(self.steps):
            for name in named(self.steps[i - 1]):
                if buffer in self.told_by.get(name, ()):
                    yield Moment(i, what, name)

    def before(self, i: int, a: Access, j: int, b: Access) -> bool:
        """Is step i done with its access before step j begins with its own?

        On every rank, where one of the two is to another rank's memory.
        """
        return self.order.before(self.done(i, a), self.begun(j, b), a.far or b.far)


def _cycles(plan: Plan) -> Iterator[tuple[str, Place]]:
    moments = plan.moments
    for i, step in enumerate(plan.steps, 1):
        for name in awaited(step):
            if moments.order.is_cyclic(Moment(i, "known", name)):
                told = f"{text.word(type(step))} waits for {name}, whose announcement waits for it"
                yield f"{told}: queue the announcement first", step.place


def _ordered(plan: Plan) -> Iterator[tuple[str, Place]]:
    moments, steps = plan.moments, plan.steps
    given = [Access(one.name, True) for one in plan.of(Buffer) if one.role in GIVEN]
    touches = [(0, one) for one in given]
    touches += [(i, one) for i, step in enumerate(steps, 1) for one in accesses(step)]
    for (i, a), (j, b) in combinations(touches, 2):
        if not a.meets(b) or i == j or not (a.writes or b.writes):
            continue
        if i == 0 and b.writes:  # nothing of the caller's is lost: the plan writes anew
            continue
        if not (moments.before(i, a, j, b) or moments.before(j, b, i, a)):
            by = "a channel" if a.far or b.far else "a stream, `after` or a channel"
            told = f"{_told(steps, i, a)} and {_told(steps, j, b)} of {a.buffer} are not ordered"
            yield f"{told}: {by} must", steps[j - 1].place


def _told(steps: list[Step], i: int, access: Access) -> str:
    verb = "the writing" if access.writes else "the reading"
    return f"{verb} by {text.word(type(steps[i - 1])) if i else 'the caller'}"


def _written(plan: Plan) -> Iterator[tuple[str, Place]]:
    moments = plan.moments
    writers: dict[str, list[tuple[int, Access]]] = {}
    for buffer in plan.of(Buffer):
        if buffer.role in GIVEN:
            writers.setdefault(buffer.name, []).append((0, Access(buffer.name, True)))
    for i, step in enumerate(plan.steps, 1):
        for access in accesses(step):
            if access.writes:
                writers.setdefault(access.buffer, []).append((i, access))
    for j, step in enumerate(plan.steps, 1):
        for access in accesses(step):
            is_written = any(
                i == j or moments.order.before(moments.done(i, one), moments.begun(j, access))
                for i, one in writers.get(access.buffer, ())
            )
            if not access.writes and not is_written:
                told = f"{text.word(type(step))} reads {access.buffer}"
                yield f"{told}, which nothing before it writes", step.place
    for name in plan.results:
        if name not in writers:
            yield f"{plan.name} returns {name}, which nothing writes", plan.place


def _inside(plan: Plan) -> Iterator[tuple[str, Place]]:
    """Of one launch: a kernel that reads what its own launch pushes."""
    told_by = {one.name: {one.buffer, *one.along} for one in plan.of(Channel)}
    for launch in plan.of(Launch):
        both = {*launch.announces} & {*launch.awaits}
        for name in sorted(
            {*launch.pushes} & {*launch.reads} - set().union(*(told_by[one] for one in both))
        ):
            told = f"{launch.kernel} reads {name}, which its launch on other ranks pushes"
            yield f"{told}: it must announce and await a channel of {name}", launch.place
        if both and launch.programs != "resident":
            told = f"{launch.kernel} waits for what its own launch announces"
            yield f"{told}: programs={launch.programs} must be resident", launch.place


def _joined(plan: Plan) -> Iterator[tuple[str, Place]]:
    """By streams alone: whoever records the plan ends on the stream on which it began."""
    last = {step.stream: i for i, step in enumerate(plan.steps)}
    joins = {one.other: i for i, one in enumerate(plan.steps)
             if isinstance(one, After) and one.stream == "main"}  # fmt: skip
    for stream, i in last.items():
        if stream != "main" and joins.get(stream, -1) < i:
            told = f"{text.word(type(plan.steps[i]))} on stream {stream} may run when the caller"
            yield f"{told} goes on: the main stream must come after it", plan.steps[i].place


def _returned(plan: Plan) -> Iterator[tuple[str, Place]]:
    moments, end = plan.moments, len(plan.steps) + 1
    given = {buffer.name for buffer in plan.of(Buffer) if buffer.role in GIVEN}
    for i, step in enumerate(plan.steps, 1):
        for access in accesses(step):
            next_use = Access(access.buffer, True)
            if not access.far or access.buffer not in given:
                continue
            if not moments.before(i, access, end, next_use):
                told = f"{text.word(type(step))} reads other ranks' {access.buffer}"
                yield f"{told}: a channel must tell them when it may change again", step.place


def _credits(plan: Plan) -> Iterator[tuple[str, Place]]:
    heap = {buffer.name for buffer in plan.of(Buffer) if buffer.role == "symmetric"}
    steps, moments = plan.steps, plan.moments
    if not any(_uses_slot(step, heap) for step in steps):
        return
    takers = [i for i, step in enumerate(steps, 1) if getattr(step, "takes", False)]
    ends = [Moment(i, "end") for i in takers]
    for i, step in enumerate(steps, 1):
        behind = i in takers or moments.order.before(ends, [Moment(i, "begin")])
        if _uses_slot(step, heap) and not behind:
            told = f"{text.word(type(step))} writes the slot before credits are taken"
            yield f"{told}: other ranks may still read what it held", step.place
    givers = [i for i, step in enumerate(steps, 1) if getattr(step, "gives", False)]
    if len(givers) != 1:
        yield f"{plan.name} gives its slot back {len(givers)} times; once is right", plan.place
    for i, step in enumerate(steps, 1):
        for access in accesses(step):
            given = [Moment(giver, "end") for giver in givers]
            if not givers or access.buffer not in heap:
                continue
            if not moments.order.before(moments.done(i, access), given):
                told = f"{text.word(type(step))} uses {access.buffer} and is not before what gives"
                yield f"{told} it back", step.place


def _uses_slot(step: Step, heap: set[str]) -> bool:
    """Does it write the slot, or words of it that peers read?"""
    return bool({access.buffer for access in accesses(step) if access.writes} & heap
                or announced(step))  # fmt: skip


def _shared(plan: Plan) -> Iterator[tuple[str, Place]]:
    buffers = {buffer.name: buffer for buffer in plan.of(Buffer)}
    for buffer in buffers.values():
        if not buffer.shares:
            continue
        other = buffers[buffer.shares]
        if buffer.role != other.role or buffer.role in GIVEN:
            told = f"{buffer.name} is {buffer.role} and shares the memory of {other.name}"
            yield f"{told}, which is {other.role}; both must be local or symmetric", buffer.place
        alike = [one for one in buffers.values() if other.name in (one.name, one.shares)]
        for one in alike:
            if one.name < buffer.name and not are_apart(plan, one.name, buffer.name):
                told = f"{one.name} and {buffer.name} share memory and are in use at once"
                yield f"{told}: their accesses are not ordered", buffer.place


def are_apart(plan: Plan, first: str, second: str) -> bool:
    """Is one of two buffers over and done with, on all ranks that touch it, before the other?"""
    moments = plan.moments
    uses: dict[str, list[tuple[int, Access]]] = {first: [], second: []}
    for i, step in enumerate(plan.steps, 1):
        for access in accesses(step):
            if access.buffer in uses:
                uses[access.buffer].append((i, access))
    for name in {first, second} & {*plan.results}:
        uses[name].append((len(plan.steps) + 1, Access(name, False)))
    return any(
        all(i != j and moments.before(i, a, j, b) for i, a in uses[one] for j, b in uses[other])
        for one, other in ((first, second), (second, first))
    )


RULES = (
    Rule("names", "a name means one thing, before it is used", _names, "drawn"),
    Rule("fields", "words and numbers that the runtime takes", _fields, "drawn"),
    Rule("bodies", "what a kernel computes follows from what it reads", _bodies, "body"),
    Rule("reach", "peers find only what lies at one place on the heap", _reach, "body"),
    Rule("paired", "a lone half of a signal is a hang or a waste", _paired, "signalled"),
    Rule("inside", "programs of one launch know of each other by signals alone", _inside,
         "signalled"),
    Rule("cycles", "all ranks run this plan: what waits for itself hangs", _cycles, "order"),
    Rule("written", "fresh memory holds nothing", _written, "order"),
    Rule("ordered", "two accesses, one a write, that nothing orders are a race", _ordered, "order"),
    Rule("joined", "a recording ends on the stream on which it began", _joined, "order"),
    Rule("returned", "what the caller has may change when the call is over", _returned, "order"),
    Rule("credits", "the slot is used again by the next call", _credits, "allocated"),
    Rule("shared", "what lies in one place is not needed at once", _shared, "allocated"),
)  # fmt: skip
# Rules are run stage by stage: those that ask for an order once names and signals make sense.
_CHECKED = {"drawn": ("drawn", "body"), "signalled": ("drawn", "body", "signalled", "order"),
            "allocated": ("drawn", "body", "signalled", "order", "allocated")}  # fmt: skip


def check(plan: Plan) -> list[Violation]:
    """Every breach of the rules that hold at the plan's stage."""
    stage = plan.stage or STAGES[-1]
    if stage not in STAGES:
        told = f"{plan.name} is at stage {stage}; there are {', '.join(STAGES)}"
        return [Violation("stage", told, plan.place)]
    return run(RULES, plan, _CHECKED[stage])


def require(plan: Plan) -> Plan:
    """The plan itself. Raises  IllegalError: with all breaches, and the user's lines"""
    if violations := check(plan):
        raise illegal(f"Device IR of {plan.name}", violations)
    return plan
