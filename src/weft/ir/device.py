"""Device IR: what each rank's streams do, in the order in which the host queues it.

    program(ag_gemm, mesh=tp, results=(c,))
    x = buffer(bfloat16, (Part(m), 64), role=input)
    gathered = buffer(bfloat16, (m, 64), role=symmetric)
    gathered_ready = channel(gathered, m)
    copy(x, gathered, push, gathered_ready)

All ranks run the same plan. Within a stream statements follow each other; between streams `after`
orders, between ranks a channel alone: its words are announced by `copy` or `launch` and
waited for by `wait` or `launch`. On one rank a copy of what tiles leave takes their tokens, which
are a channel too. What reaches another rank's memory is ordered with what that rank does only by a
path over a channel; the rules look for one.

A call uses one slot: its symmetric buffers and the words of all its channels. What `takes` credits
waits until all ranks have given back what the slot held before; what `gives` them ends the call.
A plan passes three stages: drawn (what moves and what runs), signalled (in which order), allocated
(which memory); a plan that says none has passed them all.

A step begins and ends; between the two it knows of what it awaits, and tells what it announces. By
these moments (`order.py`) passes and the rules (`device_rules.py`) ask whether one access is over
before another begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

from weft.base.place import UNKNOWN, Place
from weft.ir import text
from weft.ir.by_kind import ByKind
from weft.ir.choice import Choice
from weft.ir.order import Moment, Order
from weft.ir.tensor import Size

# The caller's; fresh; fresh, on the heap; tables, which whoever makes them brings along; boxes on
# the heap that hold packets alone, ever, in two halves that calls use in turns.
ROLES = ("input", "local", "symmetric", "tables", "packets")
ON_HEAP = ("symmetric", "packets")
# What is not laid out with the others.
NO_MEMORY = ("input", "tables", "packets")
STAGES = ("drawn", "signalled", "allocated")
# What a kernel is made of: a product in tiles; rows on their way to peers; work row by row; a
# product in tiles that tables say; a product for small m, whose tiles travel as packets.
TEMPLATES = ("gemm", "move", "rows", "grouped", "small")
# How many programs: one for each tile; as many as are resident; as pieces of data; one.
PROGRAMS = ("tiles", "resident", "pieces", "one")
# What a kernel of template `move` does within this rank: all own rows, or those of tiles that lie
# across two ranks' rows, to where they are gathered.
OWN_ROWS = ("stage", "edges")
# What a kernel of template `move` does that passes on, chunk by chunk, what other nodes have sent.
RELAY = "relay"
# What is added to a kernel's name for that of its launches for other ranks, chunk by chunk.
PIECES = "_pieces"
NUM_RANKS = "num_ranks"  # a size that each call knows


@dataclass(frozen=True)
class Part:
    """This rank's part of a size, split as torch.chunk splits it."""

    size: Size


@dataclass(frozen=True)
class Tiles:
    """The rows of a rank's full part of a size, up to whole tiles of `height`: on all ranks."""

    size: Size
    height: int


@dataclass(frozen=True)
class Buffer:
    """A tensor of each rank; its role says whose it is and whether peers reach it.

    `shares`: it lies where that buffer lies, which nobody needs any more when this one is written.
    """

    name: str
    dtype: str
    sizes: tuple[Size | Part | Tiles, ...]
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
    of its own. cuts=experts: the consumer's tiles are those of `table`, each of one expert's rows,
    whose ranks are known on the device alone.

    to=all: every rank has words for all rows, from whom they are. to=owner: a rank has words for
    its own part, from each rank. to=partner: a rank has words for what it adds up for the ranks of
    other nodes, from each rank of its own. to=engine: tokens of this rank alone, for each other
    rank's part; the last of the tiles that a word stands for sets it, and a copy takes it. `own`:
    this rank's own rows lie there from the start, and nothing announces them. by=packet: there are
    no words, the data itself says that it has come, and says nothing of other data. `along`:
    buffers of which the same words announce the same rows.
    """

    name: str
    buffer: str
    rows: Size
    chunks: int | str = 1
    push_rows: int = 1
    tile_rows: int = 1
    cuts: str = "whole"
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
    between: tuple[int, int] | None = None
    splits: int | None = None
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Copy:
    """A copy engine moves each rank's rows, chunk by chunk, announcing each on `announces`.

    side=push: from own `source` to every peer's `target`;
    side=parts: of own `source`, which has all ranks' rows, each peer's into that one's `target`,
    where each rank's are some columns;
    side=owner: of own `source` each peer's part into that one's `target`, where it lies by source.
    Each chunk waits for its token of `awaits`, if there are any: the stream does, and no SM. With
    `piece`, (chunk, chunks), it is of one chunk of columns, which a launch before it has made.
    """

    source: str
    target: str
    side: str
    announces: str
    stream: str = "copy"
    awaits: str = ""
    piece: tuple[int, ...] = ()
    place: Place = UNKNOWN


def scales_of(name: str) -> str:
    """What the buffer of a buffer's scales is called."""
    return f"{name}_scales"


@dataclass(frozen=True)
class Do:
    """One operation inside a kernel: of buffers, or of values that it has in registers. `scaling`
    says that a product's operands have scales, in buffers of `scales_of` their names; `between`,
    `head` and `base` are a task's."""

    kind: str
    operands: tuple[str, ...]
    result: str
    eps: float | None = None
    scaling: str = ""
    between: tuple[int, int] | None = None
    head: int | None = None
    base: float | None = None


@dataclass(frozen=True)
class Launch:
    """A kernel of the Core level; which channels its hooks wait for and announce.

    `pushes` are the buffers that it writes on other ranks; `body` is what it computes, in order.
    `tile` is (rows, columns, k) of a product, else (rows, columns); `order` is a swizzle's name.
    `spare` SMs are left free of a resident grid; `split_k` programs share one tile's sum. `piece`
    is (chunk, chunks): of a product that chunk of the columns, and all other ranks' rows.
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
    piece: tuple[int, ...] = ()
    place: Place = UNKNOWN

    @property
    def fused(self) -> str:
        """The kernel of the program whose tasks it does; launches of pieces have one beside it."""
        return self.kernel.removesuffix(PIECES)


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


Step = Call | Copy | Launch | Wait | Take | After
Statement = Buffer | Channel | Choice | Step


class Access(NamedTuple):
    """What a step does with a buffer; `far` says that it is also another rank's.

    `rows`: of the rank in whose memory they lie only its own, only others', or all; of others only
    those of its node (near), or sums of other nodes (far); or some columns of them, a piece.
    """

    buffer: str
    writes: bool
    far: bool = False
    rows: str = "all"

    def meets(self, other: Access) -> bool:
        """Is it of the same bytes?"""
        both = {self.rows, other.rows}
        apart = both in ({"own", "others"}, {"near", "far"})
        apart = apart or (len(both) == 2 and all(one.startswith(PIECE) for one in both))
        return self.buffer == other.buffer and not apart


# What rows are called of which a step has one chunk of columns.
PIECE = "piece "


def piece_of(step: Copy | Launch) -> str:
    """As `Access.rows` names it; "all" where a step has no piece."""
    return PIECE + text.value(step.piece) if step.piece else "all"


def accesses(step: Step) -> list[Access]:
    """The buffers that a step reads and writes."""
    if isinstance(step, Copy):
        if step.side == "owner":
            rows = piece_of(step)
            return [Access(step.source, False, rows=rows), Access(step.target, True, True, rows)]
        if step.side == "parts":
            return [Access(step.source, False), Access(step.target, True, True, "others")]
        return [Access(step.source, False, rows="own"), Access(step.target, True, True, "others")]
    if isinstance(step, Call | Launch):
        to = _pushed_rows(step)
        pushes = [Access(name, True, True, rows) for name, rows in to]
        reads = [Access(name, False) for name in step.reads]
        kinds = {do.kind for do in step.body} if isinstance(step, Launch) else set()
        rows = "own" if kinds and kinds <= set(OWN_ROWS) else "all"
        if isinstance(step, Launch) and step.piece:
            rows = piece_of(step)
        return [*reads, *[Access(name, True, rows=rows) for name in step.writes], *pushes]
    return []


def _pushed_rows(step: Call | Launch) -> list[tuple[str, str]]:
    """The buffers that a step writes on other ranks, and whose rows: sums for other nodes go by a
    relay, to near ranks those that a product pushes beside what it gives the relay."""
    pushes = step.pushes if isinstance(step, Launch) else ()
    rows = ["all"] * len(pushes)
    if isinstance(step, Launch) and is_relay(step) and not {*pushes} & {*step.reads}:
        rows = ["far"] * len(pushes)
    elif isinstance(step, Launch) and len(pushes) > 1 and step.body[-1].kind == "reduce_scatter":
        rows[0] = "near"
    return list(zip(pushes, rows, strict=True))


def is_relay(step: Step) -> bool:
    """Does it pass on what it waits for? Then it waits for some words of a channel alone."""
    return isinstance(step, Launch) and any(do.kind == RELAY for do in step.body)


def adds_up(step: Step) -> bool:
    """Does it relay sums? Then all that it writes on other ranks follows what it waits for."""
    return is_relay(step) and not {*announced(step)} & {*awaited(step)}


def puts_far(plan: Plan, launch: Launch) -> bool:
    """Over several nodes, does a product's kernel put tiles to other nodes' ranks? What a relay
    takes from it stays within the node."""
    partners = {one.name for one in plan.of(Channel) if one.to == "partner"}
    return bool(launch.pushes) and not partners & {*launch.announces}


def announced(step: Step) -> tuple[str, ...]:
    """The channels that a step announces."""
    if isinstance(step, Copy):
        return (step.announces,)
    return step.announces if isinstance(step, Launch) else ()


def awaited(step: Step) -> tuple[str, ...]:
    """The channels that a step waits for."""
    if isinstance(step, Launch):
        return step.awaits
    if isinstance(step, Copy):
        return (step.awaits,) if step.awaits else ()
    return (step.channel,) if isinstance(step, Wait) else ()


class Moments:
    """The order of a plan's moments, and which of them an access lies between."""

    def __init__(self, channels: Sequence[Channel], steps: Sequence[Step]) -> None:
        self.buffers_of = {one.name: {one.buffer, *one.along} for one in channels}
        self.by_packet = {one.name for one in channels if one.by == "packet"}
        self.tokens = {one.name for one in channels if one.to == "engine"}
        self.shares = {one.name for one in channels if one.to == "partner"}
        self.order = Order()
        self.steps = steps
        self.end = Moment(len(self.steps) + 1, "begin")  # what the caller does next
        add, last = self.order.add, {}
        caller = Moment(0, "end")
        for i, step in enumerate(self.steps, 1):
            begin, end = Moment(i, "begin"), Moment(i, "end")
            add(begin, end)
            # The caller's work lies on the main stream; another begins when a step orders it.
            before = last.get(step.stream, caller if step.stream == "main" else None)
            if before is not None:
                add(before, begin)
            if isinstance(step, After):
                add(last.get(step.other, caller), begin)
            last[step.stream] = end
            for name in announced(step):
                # A put says so where it has written alone: of what it reads here nobody hears, but
                # for who comes behind it on a stream.
                add(begin, Moment(i, "announced", name))
                add(Moment(i, "announced", name), end)
            for name in awaited(step):
                add(begin, Moment(i, "arrived", name))
                add(Moment(i, "arrived", name), end)
                is_behind = isinstance(step, Copy) or is_relay(step)
                for sent in announced(step) if is_behind else ():
                    add(Moment(i, "arrived", name), Moment(i, "announced", sent))
        add(last.get("main", caller), self.end)
        self._add_channels()
        self.order.close()

    def _add_channels(self) -> None:
        """But for packets: they say of themselves that they have come, and order nothing else; and
        for what relays wait for, which is not all."""
        takers: dict[str, list[int]] = {}
        for j, taker in enumerate(self.steps, 1):
            for name in awaited(taker):
                passes_on = is_relay(taker) and name in announced(taker)
                if name not in self.by_packet and not passes_on:
                    takers.setdefault(name, []).append(j)
        for i, giver in enumerate(self.steps, 1):
            for name in announced(giver):
                is_far = name not in self.tokens  # which are for this rank's own engine
                for j in takers.get(name, ()):
                    sent, arrived = Moment(i, "announced", name), Moment(j, "arrived", name)
                    self.order.add(sent, arrived, far=is_far)

    def done(self, i: int, access: Access) -> list[Moment]:
        """When step i is done with a buffer: at its end, or, written, when it has announced it."""
        sent = [] if not access.writes else [*self._of(i, "announced", announced, access.buffer)]
        return [Moment(i, "end"), *sent]

    def read(self, i: int, access: Access) -> list[Moment]:
        """When step i is done with a buffer on all ranks that give the slot back: what it passes on
        it has read when those have it, and each gives the slot back only then."""
        step = self.steps[i - 1]
        sent = announced(step) if is_relay(step) else ()
        return [*self.done(i, access), *(Moment(i, "announced", name) for name in sent)]

    def begun(self, i: int, access: Access) -> list[Moment]:
        """What is before one of these is before step i's use of a buffer: readers wait for it."""
        if 1 <= i <= len(self.steps) and isinstance(self.steps[i - 1], Copy):
            return self.started(i)
        known = [] if access.writes else [*self._of(i, "arrived", awaited, access.buffer)]
        return [Moment(i, "begin"), *known]

    def started(self, i: int) -> list[Moment]:
        """What is before one of these is before all that step i does on other ranks: a copy moves
        what it has taken a token for, a relay adds up shares that have come."""
        step = self.steps[i - 1]
        known = awaited(step) if isinstance(step, Copy) or adds_up(step) else ()
        return [Moment(i, "begin"), *(Moment(i, "arrived", name) for name in known)]

    def credited(self, i: int) -> list[Moment]:
        """When step i, which takes credits, has them: at its end, or when it sets a token or gives
        a relay its share."""
        known = self.tokens | self.shares
        sent = [name for name in announced(self.steps[i - 1]) if name in known]
        return [Moment(i, "end"), *(Moment(i, "announced", name) for name in sent)]

    def _of(self, i: int, what: str, named: Any, buffer: str) -> Iterator[Moment]:
        if 1 <= i <= len(self.steps):
            for name in named(self.steps[i - 1]):
                if buffer in self.buffers_of.get(name, ()):
                    yield Moment(i, what, name)

    def before(self, i: int, a: Access, j: int, b: Access) -> bool:
        """Is step i done with its access before step j begins with its own?

        On every rank, where one of the two is to another rank's memory.
        """
        return self.order.before(self.done(i, a), self.begun(j, b), a.far or b.far)


@dataclass(frozen=True)
class Plan(ByKind):
    """A rank's program; the same on all ranks."""

    name: str
    mesh: str
    statements: tuple[Statement, ...]
    results: tuple[str, ...] = ()
    stage: str = ""
    place: Place = UNKNOWN

    @property
    def bare(self) -> Plan:
        """Without choices: what runs, and not why."""
        kept = tuple(one for one in self.statements if not isinstance(one, Choice))
        return replace(self, statements=kept)

    @cached_property
    def moments(self) -> Moments:
        """The order of what happens; found once, since rules and passes ask for it again."""
        return Moments(self.of(Channel), self.steps)

    @cached_property
    def steps(self) -> list[Step]:
        return [one for one in self.statements if isinstance(one, Step)]

    @cached_property
    def lifetimes(self) -> dict[str, tuple[int, int]]:
        """Of each buffer the first and the last step that uses it; a result lives on behind the
        last. Steps are numbered from 1 on, as they are listed."""
        found: dict[str, tuple[int, int]] = {}
        for i, step in enumerate(self.steps, 1):
            for access in accesses(step):
                first, _ = found.get(access.buffer, (i, i))
                found[access.buffer] = (first, i)
        for name in self.results:
            found[name] = (found.get(name, (0, 0))[0], len(self.steps) + 1)
        return found


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


def show(plan: Plan, *, places: bool = True) -> str:
    """The plan as text."""
    header = text.Header(plan.name, plan.mesh, plan.stage, plan.results, plan.place)
    return text.show([header, *plan.statements], places=places)
