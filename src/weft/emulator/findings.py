"""What an emulated machine has found, in words: both sides, their lines, the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from weft.base.errors import (
    DeadlockError,
    DeterminismError,
    EndlessLoopError,
    FarPointerError,
    FindingError,
    NotSymmetricError,
    OutOfBoundsError,
    PeerError,
    RaceError,
    ResidencyError,
    SignalError,
    UninitializedError,
    UsageError,
)
from weft.base.place import Place
from weft.base.report import Finding, Report, Side
from weft.base.vocabulary import Scope
from weft.emulator import remedies
from weft.emulator.clocks import Agents, Identity
from weft.emulator.memory import Allocation, index_text
from weft.emulator.observation import Watch
from weft.emulator.remedies import Age, Before
from weft.emulator.shared_memory import SharedMemory

# What a session raises for each kind of finding; docs/findings.md says what each means.
ERRORS: dict[str, type[Exception]] = {
    "race": RaceError,
    "deadlock": DeadlockError,
    "unsatisfiable wait": DeadlockError,
    "residency": ResidencyError,
    "lost signal": SignalError,
    "doubled signal": SignalError,
    "unused signal": SignalError,
    "epoch not advanced": SignalError,
    "unbounded wait": SignalError,
    "stale signal": SignalError,
    "stale flag": SignalError,
    "plain spin": SignalError,
    "nondeterministic result": DeterminismError,
    "wrong answer": FindingError,
    "error": FindingError,
    "uninitialised": UninitializedError,
    "out of bounds": OutOfBoundsError,
    "misaligned": UsageError,
    "far pointer": FarPointerError,
    "peer": PeerError,
    "not symmetric": NotSymmetricError,
    "endless loop": EndlessLoopError,
    "assertion": AssertionError,
}

# What is wrong with a single access: in words, what its side does, the remedy.
FAULTS = {
    "uninitialised": (
        "{element} is read, but nothing has written it", "reads",
        "write it first, or wait for the rank that does",
    ),
    "stale signal": (
        "the wait for {element} is satisfied by what memory held before: nothing has written the"
        " word since it was allocated", "waits for",
        "take signals from world.signals or a workspace: zeroed and never recycled",
    ),
    "plain spin": (
        "a loop waits for {element} with plain loads: a compiler may read the word once, and"
        " nothing read afterwards is ordered", "spins on",
        "wait with wl.wait, or poll with an acquire atomic",
    ),
    "stale flag": (
        "{element} holds a packet of flag {flag} already: whoever waits for it cannot tell the new"
        " one from the old", "puts", "give every round another flag, not 0 in zeroed memory",
    ),
    "epoch not advanced": (
        "{element} is set from {seen} back to {value}: an epoch did not advance", "sets",
        "signal words only grow; derive the value from the slot's epoch",
    ),
}  # fmt: skip

# Findings of one kind and pair of lines are reported once; so many different ones are kept.
MAX_FINDINGS = 64


class Weak(NamedTuple):
    """Why a signal did not order what it seems to: in words, and the line alone, its cause."""

    text: str
    cause: str


class Findings:
    """The report of one machine; `error` is what its first finding raises.

    `failed`: a program could not go on, so that others may now wait for it in vain. `enough`: one
    of them is all that is asked for, as `is_enough` says.
    """

    def __init__(
        self, name: str, num_ranks: int, agents: Agents, watches: Sequence[Watch] = ()
    ) -> None:
        self.report = Report(name, num_ranks)
        self.agents = agents
        self.error: Exception | None = None
        self.failed = False
        self.enough = False
        self.is_enough: Callable[[Finding], bool] = lambda finding: False
        self.watches = watches
        self._arrivals: set[tuple[str, int]] = set()
        # Why a signal between two agents did not order them; the ledger knows.
        self.weak_link: Callable[[Any, int, str], Weak | None] = lambda by, earlier, kind: None
        # By a write's segment the writer of what it has overwritten; shadow memory knows.
        self.overwritten: Callable[[int], int | None] = lambda segment: None

    def find(self, finding: Finding, error: type[Exception] | None = None) -> None:
        """File a finding; the first one decides which error the session raises."""
        if self.failed and self.error is not None:
            finding = replace(finding, follows=True)
        if len(self.report.findings) >= MAX_FINDINGS or not self.report.add(finding):
            return
        for watch in self.watches:
            watch.found(finding)
        self.enough = self.enough or self.is_enough(finding)
        if self.error is None:
            kind = error or ERRORS.get(finding.kind, FindingError)
            if issubclass(kind, FindingError):
                self.error = kind(str(finding), finding=finding)
            else:
                self.error = kind(str(finding))
                self.error.finding = finding  # type: ignore[attr-defined]

    def side(self, program: Any, place: Place, **fields: Any) -> Side:
        """The side of a finding that `program` (or an actor, or nobody) takes."""
        if program is None:
            return Side.at(place, **fields)
        return self.side_of(program.agent, place, **fields)

    def side_of(self, agent: int, place: Place, **fields: Any) -> Side:
        """The same of an agent, by its number."""
        identity = self.agents.identity[agent]
        who = {"rank": identity.rank, "kernel": identity.kernel, "program": identity.program}
        return Side.at(place, **{**who, **fields})

    def race(
        self, by: Any, allocation: Allocation, cell: int, what: str, kind: str, earlier: int,
        loc: Any, segment: int, found: int,
    ) -> None:  # fmt: skip
        """Two accesses that nothing orders; `kind` says what the earlier one, a segment, was.

        `segment` is the later one's. `found` is the segment that had written the element before
        both: what an earlier read found there says which of the two came too early.
        """
        place = by.place_of(loc)
        index = index_of(allocation, cell)
        agents = self.agents
        identity = agents.identity[agents.segment_agent[earlier]]
        tensor, cause = tensor_name(allocation), ""
        if kind == "scope":
            narrow = self._narrow(what, segment, place, earlier)
            message = (
                f"{element_name(allocation, index)} is used by rank {by.rank} and rank"
                f" {identity.rank}, but {narrow} reaches only one of them"
            )
            remedy = (
                'scope SYSTEM there, the default of wl.wait and wl.notify ("sys" in tl.atomic_*)'
            )
            first_note = "waits for" if what == "wait" else "updates atomically"
            second_note = "used atomically"
        else:
            now, name = agents.identity[by.agent], element_name(allocation, index)
            message = f"nothing orders this {what} of {name} after the {kind}"
            remedy = remedies.put_in_order(what, kind, now, identity)
            first_note = {"read": "reads", "write": "writes"}.get(what, "accesses atomically")
            second_note = {"read": "read", "write": "wrote"}.get(kind, "accessed atomically")
            late = self._overrun(by, what, kind, identity)
            if isinstance(allocation, SharedMemory):
                remedy = remedies.in_block(what, kind)
            elif late and allocation.heap_offset is not None:
                message = f"{message}: {late}"
                remedy = remedies.GIVE_CREDIT
            elif weak := self.weak_link(by, earlier, kind):
                message, cause = f"{message}: {weak.text}", weak.cause
                asynchronous = "asynchronous" in weak.text
                remedy = remedies.COMPLETE_IT if asynchronous else remedies.STRENGTHEN_IT
            elif (what, kind) == ("wait", "write") and self._is_reset(what, kind, now, identity):
                message = f"{message}: a stale wait, which what was there before may end"
                remedy = remedies.START_FIRST
            elif {what, kind} & {"atomic", "atomic access", "wait"} and cell in allocation.sync:
                if self._is_reset(what, kind, now, identity):
                    message = f"{message}: a signal word is reset while others may signal it"
                    remedy = remedies.RESET_IT
            elif kind == "read":
                before = self._before(found, allocation, now, identity)
                message, remedy = remedies.write_behind_read(name, what, now, identity, before)
            elif (what, kind) == ("read", "write"):
                before = self._before(self.overwritten(earlier), allocation, identity, now)
                message, remedy = remedies.read_behind_write(name, now, identity, before)
        finding = Finding(
            "race", message,
            self.side(by, place, tensor=tensor, index=index, note=first_note),
            self.side_of(
                agents.segment_agent[earlier], agents.segment_place[earlier], tensor=tensor,
                index=index, note=second_note, step=agents.segment_step[earlier],
            ),
            remedy, cause,
        )  # fmt: skip
        self.find(finding)

    def _narrow(self, what: str, segment: int, place: Place, earlier: int) -> str:
        """Which access has the scope that is too small, and where it is."""
        scopes = self.agents.segment_scope
        own = scopes[segment]
        if own is not None and own is not Scope.SYSTEM:
            return f"scope {own.name} of the {what} at {place.outermost}"
        other = scopes[earlier]
        where = self.agents.segment_place[earlier].outermost
        return f"scope {'unknown' if other is None else other.name} of the access at {where}"

    @staticmethod
    def _is_reset(what: str, kind: str, now: Identity, then: Identity) -> bool:
        """Is one of the two a torch operation that writes?"""
        writer = {"write": now}.get(what) or {"write": then}.get(kind)
        return writer is not None and str(writer.kernel).startswith("torch (")

    def _overrun(self, by: Any, what: str, kind: str, earlier: Identity) -> str:
        """What a rank that is a call ahead does to one that is behind; "" if it is no such race."""
        now = self.agents.identity[by.agent]
        writer, reader = (now, earlier) if (what, kind) == ("write", "read") else (earlier, now)
        if {what, kind} != {"read", "write"} or writer.rank == reader.rank:
            return ""
        if not writer.call > reader.call > 0:
            return ""
        return (
            f"rank {writer.rank}, in its call {writer.call} of {writer.kernel}, overwrites what"
            f" rank {reader.rank} still reads in its call {reader.call} of {reader.kernel}"
        )

    def _before(
        self, found: int | None, allocation: Allocation, writer: Identity, reader: Identity
    ) -> Before:
        """What lay where one reads and another writes, before the write: what `found`, a segment,
        had left."""
        if found is None:
            return Before()
        if found == Agents.NOTHING:
            return Before("memory that nothing had written", Age.NOTHING)
        if found == Agents.BEFORE:
            if allocation.heap_offset is not None and writer.rank != reader.rank:
                return Before("the zeros with which it was allocated", Age.NOTHING)
            return Before("what was there before anything ran", Age.OLD)
        before = self.agents.identity[self.agents.segment_agent[found]]
        if before.kernel == "host" or before.kernel.startswith("torch ("):
            return Before("what torch had written", Age.OLD)
        if before.kernel != writer.kernel or writer.call == 0:
            return Before()
        if before.call == writer.call:
            return Before("what the same call had written", Age.SAME_CALL)
        left = f"what call {before.call} of {before.kernel} had left"
        if reader.call != writer.call:
            return Before(left, Age.SOME_CALL)
        return Before(f"{left}, in call {writer.call}", Age.EARLIER_CALL)

    def arrival(
        self, by: Any, allocation: Allocation, cell: int, earlier: Iterable[int], loc: int
    ) -> None:
        """A float is added where others have added: note two of which nothing says who is first."""
        line = (by.work.kernel.name, loc)
        if line in self._arrivals:
            return
        agents = self.agents
        unordered = (s for s in earlier if not (by.owns(s) or agents.known(s, by.clock)))
        segment = next(unordered, None)
        if segment is None:
            return
        self._arrivals.add(line)
        index = index_of(allocation, cell)
        where = {"tensor": tensor_name(allocation), "index": index}
        second = self.side_of(
            agents.segment_agent[segment], agents.segment_place[segment], note="added a float to",
            **where,
        )  # fmt: skip
        first = self.side(by, by.place_of(loc), note="adds a float to", **where)
        self.report.arrivals.append((first, second))

    def fault(
        self,
        kind: str,
        by: Any,
        loc: Any,
        allocation: Allocation | None = None,
        index: Any = 0,
        **values: Any,
    ) -> None:
        """A finding of FAULTS, of one side, about an element of `allocation`."""
        message, note, remedy = FAULTS[kind]
        if allocation is not None:
            values["element"] = element_name(allocation, index)
        self._one_sided(kind, message.format(**values), by, loc, note, remedy, allocation, index)

    def _one_sided(
        self, kind: str, message: str, by: Any, loc: Any, note: str, remedy: str,
        allocation: Allocation | None, index: Any,
    ) -> None:  # fmt: skip
        where = {"tensor": tensor_name(allocation), "index": index} if allocation else {}
        side = self.side(by, by.place_of(loc), note=note, **where)
        self.find(Finding(kind, message, side, remedy=remedy))

    def out_of_bounds(self, by: Any, address: int, itemsize: int, what: str, loc: Any) -> None:
        near, flat = by.memory.nearest(address), 0
        message = f"{what} address {address:#x}, which belongs to no tensor"
        if near is not None:
            flat = (address - near.address) // itemsize
            shape = f", shape {list(near.shape)}" if near.shape else ""
            message = (
                f"{what} element {flat} of {tensor_name(near)} of rank {near.rank}, which has"
                f" {near.nbytes // itemsize} elements{shape}"
            )
        remedy = "mask the access, or check sizes and strides"
        self._one_sided("out of bounds", message, by, loc, what, remedy, near, flat)

    def check_set(self, by: Any, allocation: Allocation, index, kind, value, loc: int) -> None:
        """A SET that takes a signal word backwards loses a signal for whoever counts on it."""
        seen = allocation.view(kind)[index]
        is_back = seen > value and int(seen) - int(value) < 1 << (kind.itemsize * 8 - 1)
        if is_back and not (value == 0 or seen == kind.type(1)):
            self.fault("epoch not advanced", by, loc, allocation, index, seen=seen, value=value)

    def failure(
        self, by: Any, error: type[Exception], kind: str, message: str, place: Place, remedy: str,
        **fields: Any,
    ) -> None:  # fmt: skip
        """Something after which a program cannot go on."""
        self.failed = True
        self.find(Finding(kind, message, self.side(by, place, **fields), remedy=remedy), error)


def tensor_name(allocation: Allocation) -> str:
    return f"{allocation.name}@rank{allocation.rank}"


def element_name(allocation: Allocation, index: int | tuple[int, ...]) -> str:
    """`rows_ready@rank1[3]`"""
    return f"{tensor_name(allocation)}[{index_text(index)}]"


def index_of(allocation: Allocation, cell: int) -> int | tuple[int, ...]:
    """The element that a cell is, or is part of, in the tensor's own shape."""
    address = allocation.address + cell * allocation.cell_bytes
    return allocation.index(address, allocation.cell_bytes)
