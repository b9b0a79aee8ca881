"""Which outcomes the memory model allows for a small program: enumeration of its executions.

The model is PTX's (release/acquire patterns, scopes, moral strength, proxies), cut down to what
the language offers; docs/memory_model.md says it in words. A program is a few threads of a few
instructions; every way in which its reads could be fed, and its writes ordered, is tried against
the axioms.

    po   program order           rf   a write and the read it feeds       co   order of writes
    fr   a read and a later write of what it read                         sw   release to acquire

Source  PTX ISA, "Memory Consistency Model"; Lustig et al., ASPLOS 2019
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations, product

from weft.base.errors import UsageError
from weft.base.vocabulary import Order, Scope


@dataclass(frozen=True)
class Access:
    """One instruction of a litmus program.

    `kind` is load, wait (a load that is repeated until it does not read 0), store, exchange or
    add; `order` None means a plain access, which synchronises with nothing. `proxy` says who
    touches the memory: "generic" (the program itself), "async" (TMA) or "engine" (a copy engine).
    """

    kind: str
    location: str
    value: int = 0
    register: str = ""
    order: Order | None = None
    scope: Scope = Scope.SYSTEM
    proxy: str = "generic"

    @property
    def reads(self) -> bool:
        return self.kind in ("load", "wait", "exchange", "add")

    @property
    def writes(self) -> bool:
        return self.kind in ("store", "exchange", "add")


@dataclass(frozen=True)
class ProxyFence:
    """Accesses through the generic and through another proxy are ordered across this point.

    `completes`: asynchronous stores issued before it have been performed.
    """

    completes: bool = False


@dataclass(frozen=True)
class Thread:
    """A program (or a stream) on rank `rank`, in order."""

    rank: int
    steps: tuple[Access | ProxyFence, ...]


@dataclass(frozen=True)
class Litmus:
    """A litmus program. `homes` says on which rank each location lives; it starts as 0.

    `weak` is the outcome that the test is about: registers and their values.
    """

    name: str
    threads: tuple[Thread, ...]
    homes: dict[str, int] = field(default_factory=dict)
    weak: dict[str, int] = field(default_factory=dict)

    @property
    def registers(self) -> tuple[str, ...]:
        return tuple(
            step.register
            for thread in self.threads
            for step in thread.steps
            if isinstance(step, Access) and step.register
        )


Outcome = tuple[int, ...]


@dataclass(frozen=True)
class _Event:
    index: int
    thread: int
    rank: int
    position: int
    step: Access | ProxyFence

    @property
    def access(self) -> Access:
        assert isinstance(self.step, Access), f"{self.step} accesses nothing"
        return self.step


def allowed_outcomes(test: Litmus) -> set[Outcome]:
    """Every final state of `test.registers`, in their order, that some legal execution has."""
    events = _events_of(test)
    program_order = _program_order(events)
    reads = [e for e in events if isinstance(e.step, Access) and e.step.reads]
    by_location = _writes_by_location(events)
    outcomes: set[Outcome] = set()
    for orders in product(*(permutations(writes) for writes in by_location.values())):
        coherence = dict(zip(by_location, orders))
        sources = [[None, *coherence.get(read.access.location, ())] for read in reads]
        for choice in product(*sources):
            fed = dict(zip(reads, choice))
            values = _values(events, fed)
            if values is None or not _is_legal(events, program_order, fed, coherence):
                continue
            outcomes.add(
                tuple(values[e] for e in events if isinstance(e.step, Access) and e.step.register)
            )
    return outcomes


def is_allowed(test: Litmus) -> bool:
    """May `test.weak` be seen?"""
    names = test.registers
    unknown = set(test.weak) - set(names)
    if unknown:
        raise UsageError(f"{test.name}: {sorted(unknown)} are no registers; it has {names}")
    return any(
        all(outcome[names.index(name)] == value for name, value in test.weak.items())
        for outcome in allowed_outcomes(test)
    )


def _events_of(test: Litmus) -> list[_Event]:
    events: list[_Event] = []
    for number, thread in enumerate(test.threads):
        for position, step in enumerate(thread.steps):
            events.append(_Event(len(events), number, thread.rank, position, step))
    return events


def _program_order(events: list[_Event]) -> set[tuple[_Event, _Event]]:
    """Pairs of one thread; an asynchronous store is before what follows its completion only."""
    pairs = set()
    for a, b in product(events, events):
        if a.thread != b.thread or a.position >= b.position:
            continue
        if _is_async_store(a):
            completed = any(
                isinstance(e.step, ProxyFence)
                and e.step.completes
                and e.thread == a.thread
                and a.position < e.position <= b.position
                for e in events
            )
            if not completed:
                continue
        pairs.add((a, b))
    return pairs


def _is_async_store(event: _Event) -> bool:
    return isinstance(event.step, Access) and event.step.proxy == "async" and event.step.writes


def _writes_by_location(events: list[_Event]) -> dict[str, list[_Event]]:
    found: dict[str, list[_Event]] = {}
    for event in events:
        if isinstance(event.step, Access) and event.step.writes:
            found.setdefault(event.step.location, []).append(event)
    return found


def _values(events: list[_Event], fed: dict[_Event, _Event | None]) -> dict[_Event, int] | None:
    """What each read returns; None where a wait would still wait, or values feed themselves."""
    written: dict[_Event, int] = {}
    read: dict[_Event, int] = {}
    pending = [e for e in events if isinstance(e.step, Access)]
    while pending:
        later = []
        for event in pending:
            step = event.step
            assert isinstance(step, Access)
            if step.reads:
                source = fed[event]
                if source is not None and source not in written:
                    later.append(event)
                    continue
                read[event] = 0 if source is None else written[source]
                if step.kind == "wait" and read[event] == 0:
                    return None
            if step.writes:
                written[event] = step.value + (read[event] if step.kind == "add" else 0)
        if len(later) == len(pending):
            return None
        pending = later
    return read


def _is_legal(
    events: list[_Event],
    program_order: set[tuple[_Event, _Event]],
    fed: dict[_Event, _Event | None],
    coherence: dict[str, tuple[_Event, ...]],
) -> bool:
    rf = {(source, read) for read, source in fed.items() if source is not None}
    co = {
        (first, second)
        for order in coherence.values()
        for i, first in enumerate(order)
        for second in order[i + 1 :]
    }
    fr = set()
    for read, source in fed.items():
        order = coherence.get(read.access.location, ())
        start = 0 if source is None else order.index(source) + 1
        fr |= {(read, write) for write in order[start:] if write is not read}
    # A read-modify-write reads what comes right before it.
    for read, source in fed.items():
        if read.access.writes:
            order = coherence[read.access.location]
            place = order.index(read)
            if source is not (order[place - 1] if place else None):
                return False
    observed = _closure({(w, r) for w, r in rf if _morally_strong(w, r)}, through_atomics=True)
    synchronises = {
        (w, r)
        for w, r in observed
        if w.access.order is not None
        and w.access.order.releases
        and r.access.order is not None
        and r.access.order.acquires
        and _morally_strong(w, r)
    }
    base = _closure(program_order | synchronises)
    preserved = {(a, b) for a, b in base if _keeps_proxies(a, b, base, events)}
    causes = preserved | {(a, c) for a, b in observed for b2, c in preserved if b is b2}
    if any((b, a) in co for a, b in causes):
        return False
    if any((b, a) in causes for a, b in rf) or any((b, a) in causes for a, b in fr):
        return False
    strong = {
        (a, b)
        for a, b in rf | co | fr | {p for p in program_order if _same_location(*p)}
        if _morally_strong(a, b)
    }
    return not any((e, e) in _closure(strong) for e in events)


def _morally_strong(a: _Event, b: _Event) -> bool:
    """Related in program order, or both strong with scopes that include the other; one proxy."""
    if not isinstance(a.step, Access) or not isinstance(b.step, Access):
        return False
    if a.step.proxy != b.step.proxy and {a.step.proxy, b.step.proxy} != {"generic", "engine"}:
        return False
    if a.thread == b.thread:
        return True
    if a.step.order is None or b.step.order is None:
        return False
    return _includes(a, b) and _includes(b, a)


def _includes(a: _Event, b: _Event) -> bool:
    scope = a.access.scope
    if scope is Scope.SYSTEM:
        return True
    return a.rank == b.rank if scope is Scope.DEVICE else a.thread == b.thread


def _same_location(a: _Event, b: _Event) -> bool:
    return (
        isinstance(a.step, Access)
        and isinstance(b.step, Access)
        and a.step.location == b.step.location
    )


def _keeps_proxies(
    a: _Event, b: _Event, base: set[tuple[_Event, _Event]], events: list[_Event]
) -> bool:
    """Does base causality hold between these two although they go through different proxies?

    An engine's accesses are ordered like generic ones: what it copies is in memory before the
    word it copies next. TMA needs a proxy fence on its own side.
    """
    for event, other in ((a, b), (b, a)):
        if not isinstance(event.step, Access) or event.step.proxy != "async":
            continue
        if (
            isinstance(other.step, Access)
            and other.step.proxy == "async"
            and other.thread == event.thread
        ):
            continue
        fenced = any(
            isinstance(fence.step, ProxyFence)
            and fence.thread == event.thread
            and ((a, fence) in base or a is fence)
            and ((fence, b) in base or b is fence)
            for fence in events
        )
        if not fenced:
            return False
    return True


def _closure(
    pairs: set[tuple[_Event, _Event]], *, through_atomics: bool = False
) -> set[tuple[_Event, _Event]]:
    """The transitive closure; only through read-modify-writes where asked."""
    closed = set(pairs)
    while True:
        more = {
            (a, d)
            for a, b in closed
            for c, d in closed
            if b is c and (not through_atomics or (b.access.reads and b.access.writes))
        } - closed
        if not more:
            return closed
        closed |= more


def placements(test: Litmus, num_ranks: int) -> Iterator[Litmus]:
    """`test` on one device, and spread over as many ranks as it has threads."""
    yield test
    ranks = {old: old % num_ranks for old in range(len(test.threads))}
    yield Litmus(
        f"{test.name}+across",
        tuple(Thread(ranks[i], thread.steps) for i, thread in enumerate(test.threads)),
        {name: ranks[home] for name, home in test.homes.items()},
        test.weak,
    )
