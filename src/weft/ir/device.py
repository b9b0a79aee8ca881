"""Device IR: what each rank's streams do, in the order in which the host queues it.

    program(ag_gemm, mesh=tp, results=(c,))
    x = buffer(bfloat16, (Part(m), 64), role=shared)
    x_ready = channel(x)
    notify(x_ready, stream=copy)

All ranks run the same plan. Within a stream statements follow each other; between streams `after`
orders, between ranks a channel alone: its words are announced by `notify`, `copy` or `launch` and
waited for by `wait` or `launch`. What reaches another rank's memory is ordered with what that rank
does only by a path over a channel; the rules below look for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from weft.base.dtypes import DTYPES
from weft.base.place import UNKNOWN, Place
from weft.ir import text
from weft.ir.legality import Rule, Violation, illegal, run

# The caller's, on this rank alone; the caller's, on the heap; fresh; fresh, on the heap.
ROLES = ("input", "shared", "local", "symmetric")
GIVEN, ON_HEAP = ("input", "shared"), ("shared", "symmetric")


@dataclass(frozen=True)
class Part:
    """This rank's part of a size, split as torch.chunk splits it."""

    size: int | str


@dataclass(frozen=True)
class Buffer:
    """A tensor of each rank; its role says whose it is and whether peers reach it."""

    name: str
    dtype: str
    sizes: tuple[int | str | Part, ...]
    role: str = "local"
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Channel:
    """Signals that announce rows of `buffer`, which are `rows` in all: a static affine mapping.

    Each rank's part has `chunks` words; the producer's tiles have `push_rows` rows and lie within
    a rank's part. The consumer's have `tile_rows`: cuts=whole cuts all rows, so they may straddle
    two ranks' parts, cuts=part each rank's own. A word is full when each of its producer's tiles
    has been announced `parts` times, num_ranks where every rank adds to it.
    """

    name: str
    buffer: str
    rows: int | str
    chunks: int = 1
    push_rows: int = 1
    tile_rows: int = 1
    cuts: str = "whole"
    parts: int | str = 1
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Call:
    """A call of a library: `function` of what it reads, into what it writes; collective or not."""

    function: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    stream: str = "main"
    dim: int | None = None
    eps: float | None = None
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
class Launch:
    """A kernel of the Core level; which channels its hooks wait for and announce.

    `pushes` are the buffers that it writes on other ranks.
    """

    kernel: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    pushes: tuple[str, ...] = ()
    awaits: tuple[str, ...] = ()
    announces: tuple[str, ...] = ()
    stream: str = "main"
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Notify:
    """The stream announces all of this rank's words of `channel` to every rank."""

    channel: str
    stream: str = "main"
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Wait:
    """The stream goes on when all words of `channel` are full; bounded."""

    channel: str
    stream: str = "main"
    place: Place = UNKNOWN


@dataclass(frozen=True)
class After:
    """What comes next on `stream` waits for all that has been queued on `other`."""

    stream: str
    other: str
    place: Place = UNKNOWN


Step = Call | Copy | Launch | Notify | Wait | After
Statement = Buffer | Channel | Step


@dataclass(frozen=True)
class Plan:
    """A rank's program; the same on all ranks."""

    name: str
    mesh: str
    statements: tuple[Statement, ...]
    results: tuple[str, ...] = ()
    place: Place = UNKNOWN

    def of(self, kind: type) -> list:
        """The statements of one kind, in order."""
        return [one for one in self.statements if isinstance(one, kind)]

    @property
    def steps(self) -> list[Step]:
        return [one for one in self.statements if not isinstance(one, Buffer | Channel)]


RECORDS = {
    **text.words(Buffer, Channel, Call, Copy, Launch, Notify, Wait, After),
    "Part": Part,
}


def show(plan: Plan, *, places: bool = True) -> str:
    """The plan as text; `parse` takes it back."""
    header = text.Header(plan.name, plan.mesh, results=plan.results, place=plan.place)
    return text.show([header, *plan.statements], places=places)


def parse(source: str) -> Plan:
    """Raises  UsageError: with the line"""
    header, statements = text.read(source, RECORDS)
    return Plan(header.title, header.mesh, statements, header.results, header.place)


# ---------------------------------------------------------------------------------------------
# What is legal


class Access(NamedTuple):
    """What a step does with a buffer; `far` says that it is also another rank's."""

    buffer: str
    writes: bool
    far: bool = False


def accesses(step: Step) -> list[Access]:
    """The buffers that a step reads and writes."""
    if isinstance(step, Copy):
        is_pull = step.side == "pull"
        return [Access(step.source, False, is_pull), Access(step.target, True, not is_pull)]
    if isinstance(step, Call | Launch):
        pushes = [Access(name, True, True) for name in getattr(step, "pushes", ())]
        reads = [Access(name, False) for name in step.reads]
        return [*reads, *[Access(name, True) for name in step.writes], *pushes]
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
            if isinstance(one, Channel) and one.buffer not in buffers:
                yield f"channel {one.name} announces {one.buffer}, which is no buffer", one.place
            continue
        for name in sorted({access.buffer for access in accesses(one)} - buffers):
            yield f"{text.word(type(one))} uses {name}, which is no buffer", one.place
        for name in sorted({*announced(one), *awaited(one)} - channels):
            yield f"{text.word(type(one))} names {name}, which is no channel", one.place
    if missing := [name for name in plan.results if name not in buffers]:
        yield f"{plan.name} returns {', '.join(missing)}, which are no buffers", plan.place


def _fields(plan: Plan) -> Iterator[tuple[str, Place]]:
    for buffer in plan.of(Buffer):
        if buffer.role not in ROLES or buffer.dtype not in DTYPES:
            told = f"role={buffer.role}, dtype={buffer.dtype}; roles are {', '.join(ROLES)}"
            yield f"buffer {buffer.name} has {told}", buffer.place
    for channel in plan.of(Channel):
        for name in ("chunks", "push_rows", "tile_rows", "parts"):
            number = getattr(channel, name)
            if number < 1 if isinstance(number, int) else (name, number) != ("parts", "num_ranks"):
                told = f"{name}={number}; it is 1 or more"
                yield f"channel {channel.name} has {told}", channel.place
        if channel.cuts not in ("whole", "part"):
            told = f"cuts={channel.cuts}; it is whole or part"
            yield f"channel {channel.name} has {told}", channel.place
    for copy in plan.of(Copy):
        if copy.side not in ("pull", "push"):
            yield f"copy of {copy.source} has side={copy.side}; it is pull or push", copy.place


def _reach(plan: Plan) -> Iterator[tuple[str, Place]]:
    roles = {buffer.name: buffer.role for buffer in plan.of(Buffer)}
    for step in plan.steps:
        for name, _, far in accesses(step):
            if far and roles[name] not in ON_HEAP:
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


class Order:
    """Which step is before which: `near` on its own rank, `far` on every rank.

    Step 0 is the caller, before all others; the i-th step of the plan is i + 1.
    """

    def __init__(self, plan: Plan) -> None:
        steps = plan.steps
        size = len(steps) + 1
        self.near = [[False] * size for _ in range(size)]
        self.far = [[False] * size for _ in range(size)]
        last: dict[str, int] = {}
        for i, step in enumerate(steps, 1):
            self.near[last.get(step.stream, 0)][i] = True
            if isinstance(step, After):
                self.near[last.get(step.other, 0)][i] = True
            last[step.stream] = i
        for i, giver in enumerate(steps, 1):
            for j, taker in enumerate(steps, 1):
                # A kernel that waits for what its own launch announces: its programs run at once.
                if i != j and set(announced(giver)) & set(awaited(taker)):
                    self.near[i][j] = self.far[i][j] = True
        for k in range(size):
            for i in range(size):
                if self.near[i][k]:
                    for j in range(size):
                        if self.near[k][j]:
                            self.near[i][j] = True
                            self.far[i][j] |= self.far[i][k] or self.far[k][j]


def _cycles(plan: Plan) -> Iterator[tuple[str, Place]]:
    order = Order(plan)
    for i, step in enumerate(plan.steps, 1):
        if order.near[i][i] and awaited(step):
            told = f"{text.word(type(step))} waits for {', '.join(awaited(step))}, whose"
            yield f"{told} announcement waits for it: queue the announcement first", step.place


def _ordered(plan: Plan) -> Iterator[tuple[str, Place]]:
    order, steps = Order(plan), plan.steps
    given = [Access(one.name, True) for one in plan.of(Buffer) if one.role in GIVEN]
    touches = [(0, one) for one in given]
    touches += [(i, one) for i, step in enumerate(steps, 1) for one in accesses(step)]
    for (i, a), (j, b) in combinations(touches, 2):
        if a.buffer != b.buffer or i == j or not (a.writes or b.writes):
            continue
        if i == 0 and b.writes:  # nothing of the caller's is lost: the plan writes anew
            continue
        before = order.far if a.far or b.far else order.near
        if not (before[i][j] or before[j][i]):
            by = "a channel" if a.far or b.far else "a stream, `after` or a channel"
            told = f"{_told(steps, i, a)} and {_told(steps, j, b)} of {a.buffer} are not ordered"
            yield f"{told}: {by} must", steps[j - 1].place


def _told(steps: list[Step], i: int, access: Access) -> str:
    verb = "the writing" if access.writes else "the reading"
    return f"{verb} by {text.word(type(steps[i - 1])) if i else 'the caller'}"


def _written(plan: Plan) -> Iterator[tuple[str, Place]]:
    order = Order(plan)
    writers: dict[str, list[int]] = {}
    for buffer in plan.of(Buffer):
        if buffer.role in GIVEN:
            writers.setdefault(buffer.name, []).append(0)
    for i, step in enumerate(plan.steps, 1):
        for access in accesses(step):
            if access.writes:
                writers.setdefault(access.buffer, []).append(i)
    for j, step in enumerate(plan.steps, 1):
        for access in accesses(step):
            before = [i for i in writers.get(access.buffer, ()) if i == j or order.near[i][j]]
            if not access.writes and not before:
                told = f"{text.word(type(step))} reads {access.buffer}"
                yield f"{told}, which nothing before it writes", step.place
    for name in plan.results:
        if name not in writers:
            yield f"{plan.name} returns {name}, which nothing writes", plan.place


RULES = (
    Rule("names", "a name means one thing, before it is used", _names),
    Rule("fields", "words and numbers that the runtime takes", _fields),
    Rule("reach", "peers find only what lies at one place on the heap", _reach, "signals"),
    Rule("paired", "a lone half of a signal is a hang or a waste", _paired, "signals"),
    Rule("cycles", "all ranks run this plan: what waits for itself hangs", _cycles, "order"),
    Rule("written", "fresh memory holds nothing", _written, "order"),
    Rule("ordered", "two accesses, one a write, that nothing orders are a race", _ordered, "order"),
)


def check(plan: Plan) -> list[Violation]:
    """Every breach; rules that ask for an order are run once names and signals make sense."""
    return run(RULES, plan, ("", "signals", "order"))


def require(plan: Plan) -> Plan:
    """The plan itself. Raises  IllegalError: with all breaches, and the user's lines"""
    if violations := check(plan):
        raise illegal(f"Device IR of {plan.name}", violations)
    return plan
