"""The report of a deadlock: all waits, what each waits for, and which lines have signalled it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from weft.base.counts import counted
from weft.base.place import Place
from weft.base.report import Finding, Side
from weft.base.user_place import is_users
from weft.emulator.device import Device
from weft.emulator.findings import element_name, tensor_name
from weft.emulator.programs import Program
from weft.emulator.reachable import signals_ahead, signals_of
from weft.emulator.shared_memory import SharedMemory
from weft.emulator.works import KernelWork, TokenWork, WordCopyWork, WordWait, WordWork

# So many of those who could have signalled are named.
MAX_SIGNALLERS = 4

# The kinds of a deadlock, causes before what follows from them.
ORDER = ("lost signal", "unsatisfiable wait", "residency", "deadlock")

BARRIER_REMEDY = (
    "arrive as often as mbarrier.init says, expect as many bytes as are loaded, and wait for the"
    " parity of the phase: that of how many have ended before"
)

Stuck = Program | WordWait


class Verdict(NamedTuple):
    """What one waiting line is: its kind, a line of the table, the other party, the remedy."""

    kind: str
    line: str = ""
    second: Side | None = None
    remedy: str = ""


class Deadlock:
    """No task can go on: all waits, and which of those left could still have signalled.

    `stuck` are the programs, and streams' tokens, that wait, `unstarted` the kernels with programs
    that found no room.
    """

    def __init__(self, device: Device, unstarted: list[KernelWork]) -> None:
        self.device = device
        self.checker = device.checker
        self.stuck: list[Stuck] = device.waiters.all()
        self.unstarted = unstarted

    def findings(self) -> list[Finding]:
        if self.checker.findings.failed or self.device.hosts.have_failed:
            return []  # what ended before its time is the cause, and is reported already
        found = [(self._judge(group), group) for group in self._groups()]
        if self.unstarted and all(verdict.kind != "residency" for verdict, _ in found):
            found = [(verdict._replace(kind="residency"), group) for verdict, group in found]
        # What cannot be satisfied is the cause of what waits for it: first, and with the table.
        found.sort(key=lambda one: ORDER.index(one[0].kind))
        message, remedy = (
            "every program that is left waits:",
            "signal before that wait: above is who could have",
        )
        if any(verdict.kind == "residency" for verdict, _ in found):
            message, remedy = _residency(self.unstarted, self.device.num_sms)
            remedy += self._beside()
        text = self._table(
            message, [self._waiting_line(group) + verdict.line for verdict, group in found]
        )
        if not found:
            for host in self.device.hosts:
                remedy = getattr(host.why, "remedy", remedy)
            return [Finding("deadlock", text, self._host_side(), remedy=remedy)]
        findings = []
        for verdict, group in found:
            side, cure = self._waiting_side(group[0]), verdict.remedy or remedy
            findings.append(Finding(verdict.kind, text, side, verdict.second, cure))
            # One table is enough: the other findings name their places.
            text, remedy = "the same deadlock, at another line", ""
        return findings

    def left_behind(self) -> str:
        """The table of those that wait where a rank's code has raised an error; "" without any."""
        message, lines = "meanwhile", [self._waiting_line(group) for group in self._groups()]
        text = self._table(message, lines)
        return "" if text == message else text

    def _groups(self) -> list[list[Stuck]]:
        """Those that wait at one line."""
        groups: dict[Any, list[Stuck]] = {}
        for waiter in self.stuck:
            waiting = waiter.waiting
            key = (waiting.place, waiting.allocation.name, _name(waiter))
            groups.setdefault(key, []).append(waiter)
        return list(groups.values())

    def _table(self, message: str, lines: list[str]) -> str:
        lines = [*lines, *self._host_lines(), *self._stream_lines()]
        return message + "".join(f"\n    {line}" for line in lines)

    def _judge(self, waiters: list[Stuck]) -> Verdict:
        """Why the waits at one line are in vain."""
        waiting = waiters[0].waiting
        lost = [found for one in waiters if (found := self.checker.ledger.lost(one.waiting))]
        if lost:
            value, side = lost[0]
            line = f"\n      it was {value} until it was set back at {_short(side.place)}"
            remedy = (
                "do not set a word back that somebody still waits for; count on, or use an epoch"
            )
            return Verdict("lost signal", line, side, remedy)
        if isinstance(waiting.allocation, SharedMemory):
            return Verdict("deadlock", remedy=BARRIER_REMEDY)
        if any(
            signals_of(work.kernel, work.args, waiting.allocation, self.checker.memory)
            for work in self.unstarted
        ):
            return Verdict("residency")
        able = self._able_to_signal(waiters)
        if able:
            return Verdict(
                "deadlock", "".join(f"\n      could be signalled by {who}" for who in able)
            )
        return Verdict(
            "unsatisfiable wait",
            "\n      nobody who runs, waits or is queued can signal it any more",
            remedy="signal once more, to this rank and word, or wait for what is signalled",
        )  # fmt: skip

    def _able_to_signal(self, waiters: list[Stuck]) -> list[str]:
        """Those who are left and may signal what these wait for, were they to go on."""
        awaited, memory = waiters[0].waiting.allocation, self.checker.memory
        found: dict[str, None] = {}
        for other in self.stuck:
            if isinstance(other, WordWait):
                continue  # what stands behind it is seen below
            kernel, frame = other.work.kernel, other.coroutine.gr_frame
            for place in signals_ahead(kernel, other.work.args, awaited, memory, frame):
                who = f"rank {other.rank} {kernel.name}{other.program}, which waits itself"
                if other is waiters[0]:
                    who = "itself, behind this wait"
                found[f"{who}: {_short(place)}"] = None
        for stream in self.device.all_streams.values():
            for work in (stream.active, *stream.queue):
                if isinstance(work, KernelWork) and work.next < work.total:
                    for place in signals_of(work.kernel, work.args, awaited, memory):
                        what = f"rank {stream.rank} {work.kernel.name}, which has not started"
                        found[f"{what}: {_short(place)}"] = None
                elif isinstance(work, (WordCopyWork, WordWork)):
                    if awaited.address <= work.dst < awaited.end:
                        what = "a copy" if isinstance(work, WordCopyWork) else work.kind
                        found[f"rank {stream.rank} {what}: {_short(work.place)}"] = None
        return list(found)[:MAX_SIGNALLERS]

    def _beside(self) -> str:
        """What else there is to do where kernels of two streams have to share a rank."""
        for work in self.unstarted:
            names = [
                s.name for s in self.device.streams(work.rank) if isinstance(s.active, KernelWork)
            ]
            if len(names) > 1:
                where = f"of streams {' and '.join(names)} on rank {work.rank}"
                return (
                    f"; nothing orders the kernels {where}: let one stream wait for the other, on"
                    " every rank in the same order, or launch grids that fit beside each other"
                )
        return ""

    def _host_lines(self) -> list[str]:
        waiting: dict[Any, list[int]] = {}
        for host in self.device.hosts:
            if not host.ended:
                waiting.setdefault((host.why, host.place), []).append(host.rank)
        return [
            f"the host of {_ranks_text(ranks)} waits for {why}\n      at {_deep(place)}"
            for (why, place), ranks in waiting.items()
        ]

    def _stream_lines(self) -> list[str]:
        lines = []
        for key, arrived in self.device.barriers.items():
            ranks = sorted(work.rank for work in arrived)
            lines.append(f"barrier {key}: only ranks {ranks} of {arrived[0].parties} have arrived")
        for stream in self.device.all_streams.values():
            if stream.queue:
                lines.append(
                    f"rank {stream.rank} stream {stream.name}: {len(stream.queue)} works behind,"
                    f" first {stream.queue[0].describe()}"
                )
        return lines

    def _host_side(self) -> Side:
        """The line to name where no program waits: a host's, else that of the first work left."""
        for host in self.device.hosts:
            if not host.ended:
                note = f"waits for {host.why}"
                return Side.at(host.place, rank=host.rank, kernel="host", note=note)
        stream = next(stream for stream in self.device.all_streams.values() if not stream.idle)
        work = stream.active or stream.queue[0]
        return Side.at(work.place, rank=stream.rank, kernel="host", note=f"queued the {work.kind}")

    def _waiting_side(self, waiter: Stuck) -> Side:
        waiting = waiter.waiting
        who = waiter.stream.identity(waiter.kind) if isinstance(waiter, WordWait) else None
        fields = {
            "tensor": tensor_name(waiting.allocation), "index": waiting.index,
            "note": f"sees {waiting.seen}, waits for {_wants(waiter)[0]}",
        }  # fmt: skip
        if who is not None:
            return Side.at(waiting.place, rank=who.rank, kernel=who.kernel, **fields)
        return self.checker.findings.side(waiter, waiting.place, **fields)

    def _waiting_line(self, waiters: list[Stuck]) -> str:
        waiter = waiters[0]
        waiting, (_, expects, now) = waiter.waiting, _wants(waiter)
        which, kind = "", "streams"
        if isinstance(waiter, Program):
            which, kind = waiter.program, "programs"
        line = (
            f"rank {waiter.rank} {_name(waiter)}{which} waits for"
            f" {element_name(waiting.allocation, waiting.index)} {expects}, which is {now}\n"
            f"      at {_deep(waiting.place)}"
        )
        work = waiter.work if isinstance(waiter, Program) else None
        if work is not None and _is_users(work.place) and not _is_users(waiting.place):
            line += f"\n      launched at {_short(work.place)}"
        if len(waiters) > 1:
            ranks = sorted({other.rank for other in waiters})
            line += (
                f"\n      {len(waiters)} {kind} wait at this line, on {_ranks_text(ranks)}, each"
                " for its own word or the same"
            )
        places = self.device.waiters.signallers.get((waiting.allocation.name, waiting.cell))
        others = {
            place
            for (name, _), known in self.device.waiters.signallers.items()
            if name == waiting.allocation.name
            for place in known
        }
        if places:
            line += "\n      signalled so far by " + "; ".join(sorted(_short(p) for p in places))
        elif others:
            line += "\n      never signalled; other words of it by " + "; ".join(
                sorted(_short(p) for p in others)
            )
        else:
            line += "\n      nobody has signalled any word of it"
        return line


def with_room(findings: list[Finding], needed: int) -> list[Finding]:
    """The findings of a deadlock that ended once a rank could hold `needed` programs."""
    enough = f"as it is, a rank would have to hold {needed} programs at once"
    return [
        replace(finding, remedy=f"{finding.remedy}; {enough}") if finding.remedy else finding
        for finding in findings
    ]


def _residency(unstarted: list[KernelWork], num_sms: int) -> tuple[str, str]:
    """(message, remedy) for grids of which a part finds no room."""
    works = "; ".join(
        f"{work.describe()} on rank {work.rank}: {work.total - work.next} of {work.total} programs"
        " have not started"
        for work in unstarted
    )
    room = counted(num_sms, "program")
    return (
        f"{works}: a rank holds {room} at a time, and those that run wait for those that cannot"
        " start:",
        f"launch at most {room} that wait for each other, or launch the one they wait for first",
    )


def _name(waiter: Stuck) -> str:
    """The kernel's name, or that of the stream."""
    if isinstance(waiter, WordWait):
        return f"stream {waiter.stream.name}"
    return f"{waiter.work.kernel.name}{waiter.partition}"


def _wants(waiter: Stuck) -> tuple[str, str, str]:
    """What a wait is for: as a side's note says it, as the table does, and what is there now."""
    waiting = waiter.waiting
    expected, allocation = waiting.expected, waiting.allocation
    if isinstance(allocation, SharedMemory):
        phase = f"phase {waiting.seen} of"
        barrier = allocation.barriers.get(waiting.cell)
        return f"the end of {phase}", f"to end its phase {waiting.seen}", f"at {barrier}"
    if waiting.is_packet:
        flag = f"a packet of flag {expected}"
        return f"{flag} in", f"for {flag}", f"of flag {waiting.seen}"
    word = allocation.view(np.dtype(f"i{allocation.cell_bytes}"))[waiting.cell]
    if isinstance(waiter, TokenWork):
        return "the token 1 in", "= 1, a token", str(word)
    if isinstance(waiter, WordWait):
        return f"{waiter.wanted} in", waiter.wanted, str(word)
    if expected is None:
        return "a change of", "another value", str(word)
    return f"at least {expected} in", f">= {expected}", str(word)


def _is_users(place: Place) -> bool:
    return (frame := place.outermost) is not None and is_users(frame.file) is True


def _short(place: Place) -> str:
    frame = place.outermost
    return "an unknown place" if frame is None else f"{frame.file}:{frame.line}"


def _deep(place: Place) -> str:
    """The place as text, its chain of calls set in as far as a line of the table is."""
    return str(place).replace("\n", "\n    ")


def _ranks_text(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
