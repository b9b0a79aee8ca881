"""Every execution of a small world, up to the order of steps that commute.

Stateless: an execution is run from its beginning, each time with another choice somewhere. Where
two steps race, the first one's place is where an execution that begins otherwise is owed (source
sets); a step that was explored from somewhere sleeps until something that it does not commute
with has happened (sleep sets), so that no two executions that are run to their end are the same
up to the order of steps that commute.

Source  Abdulla, Aronis, Jonsson, Sagonas: Source Sets: A Foundation for Optimal Dynamic Partial
        Order Reduction, J. ACM 2017; for additions that only waits look at: Aronis et al., Optimal
        Dynamic Partial Order Reduction with Observers, TACAS 2018
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from weft.base.counts import counted
from weft.base.report import Finding, Report
from weft.verify.determinism import nondeterministic
from weft.verify.exploration.execution import Abandoned, Diverged, Execution, TooLong
from weft.verify.exploration.partial_order import Race, Trace
from weft.verify.exploration.words import (
    Footprint,
    Process,
    WordKey,
    footprint,
    independent,
    merge,
)


@dataclass(frozen=True)
class Bounds:
    """What a search may use; whichever is reached first ends it.

    Units   megabytes: by which the most memory that the process has held may grow
    """

    executions: int = 100_000
    seconds: float = 600.0
    megabytes: float = 4096.0


@dataclass
class Ran:
    """What one execution showed: the checks' report, and what its ranks returned, as bytes."""

    report: Report
    outcome: bytes | None = None


# Runs the subject once, with this chooser in place of a seed.
Subject = Callable[[Execution], Ran]

# A choice: who stepped, and what of the step's own choices was taken.
Choice = tuple[Process, tuple[int, ...]]


@dataclass
class Found:
    """One finding, and the choices of an execution that shows it."""

    finding: Finding
    choices: list[Choice]


@dataclass
class Search:
    """The result. `bound` is empty exactly where the search is complete.

    `executions` were run to their end, no two alike; `abandoned` were seen to be like another on
    the way; `not_taken` counts the steps that could have come next and that no execution needed.
    """

    report: Report
    bound: str = ""
    executions: int = 0
    abandoned: int = 0
    not_taken: int = 0
    steps: int = 0
    seconds: float = 0.0
    outcomes: dict[bytes, list[Choice]] = field(default_factory=dict)
    found: list[Found] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        return not self.bound


@dataclass
class _Node:
    """A point of the execution: who could step, who does, who is owed, who need not."""

    enabled: dict[Process, int]
    process: Process
    sleep: dict[Process, Footprint]
    owed: list[Process]
    choices: list[int] = field(default_factory=list)
    options: list[int] = field(default_factory=list)
    footprint: Footprint = field(default_factory=dict)


class _Reordered(Exception):
    """Steps were taken to commute that do not, as the execution shows."""

    def __init__(self, execution: Execution) -> None:
        super().__init__()
        self.execution = execution


class Explorer:
    """Guides one execution after the other through the tree of choices.

    Without `reduce` every order of all steps is run: a reference for tiny programs.
    """

    def __init__(self, subject: Subject, *, reduce: bool = True) -> None:
        self.subject = subject
        self.reduce = reduce
        self.nodes: list[_Node] = []
        self.ordered: frozenset[WordKey] = frozenset()
        self.tight: frozenset[int] = frozenset()
        self._fresh = 0  # steps from here on are new in this execution
        self._not_taken = 0
        self._choice = 0

    # ---- the guide of one execution

    def decide(self, execution: Execution, enabled: dict[Process, int]) -> Process:
        position = len(execution.trace.steps)
        self._choice = 0
        if self.reduce and execution.trace.is_dominated:
            raise Abandoned  # the other order of that race is owed, and shows no less
        if position < len(self.nodes):
            node = self.nodes[position]
            if node.process not in enabled:
                raise Diverged(f"{process_text(node.process)} cannot take step {position} again")
            return node.process
        sleep = self._asleep(execution.trace)
        awake = [process for process in enabled if process not in sleep]
        if not awake:
            raise Abandoned
        last = self.nodes[-1].process if self.nodes else None
        process = usual({p: enabled[p] for p in awake}, last)
        owed = [process] if self.reduce else list(awake)
        self.nodes.append(_Node(enabled, process, sleep, owed))
        return process

    def _asleep(self, trace: Trace) -> dict[Process, Footprint]:
        if not self.nodes or not self.reduce:
            return {}
        before = self.nodes[-1]
        if not before.sleep:
            return {}
        done = footprint(trace.steps[-1].accesses)
        return {p: f for p, f in before.sleep.items() if independent(f, done)}

    def choose(self, execution: Execution, options: int, what: str) -> int:
        node = self.nodes[len(execution.trace.steps) - 1]
        number = self._choice
        self._choice += 1
        if number == len(node.choices):
            node.choices.append(0)
            node.options.append(options)
        node.options[number] = options
        return node.choices[number]

    # ---- the tree

    def run_once(self) -> tuple[Execution, Ran | None]:
        """The next execution; no report where it was abandoned as like another."""
        execution = Execution(self, ordered=self.ordered, tight=self.tight)
        try:
            ran = self.subject(execution)
        except Abandoned:
            ran = None
        execution.trace.end()
        if not (execution.visibility.unordered <= self.ordered and execution.crowded <= self.tight):
            raise _Reordered(execution)
        self._learn(execution.trace)
        return execution, ran

    def start_over(self, execution: Execution) -> None:
        """There is more that does not commute than was thought."""
        self.ordered |= execution.visibility.unordered
        self.tight |= execution.crowded
        self.nodes.clear()
        self._fresh = self._not_taken = 0

    def _learn(self, trace: Trace) -> None:
        for node, step in zip(self.nodes, trace.steps, strict=False):
            merge(node.footprint, footprint(step.accesses))
        if not self.reduce:
            return
        for race in trace.races:
            if race.second >= self._fresh:
                self._owe(trace, race)

    def _owe(self, trace: Trace, race: Race) -> None:
        node = self.nodes[race.first]
        begins = trace.initials(race)
        if any(process in node.owed for process in begins):
            return
        second = trace.steps[race.second].process
        wanted = [second] if second in begins else begins[:1]
        if all(process in node.enabled for process in wanted):
            node.owed += wanted
        else:  # it takes somebody else first, and who is not known
            node.owed += [p for p in node.enabled if p not in node.owed]

    def advance(self) -> bool:
        """Go to the next choice that is owed; says whether there is one."""
        while self.nodes:
            node = self.nodes[-1]
            if self._next_choice(node):
                self._fresh = len(self.nodes) - 1
                return True
            node.sleep[node.process] = node.footprint
            left = [process for process in node.owed if process not in node.sleep]
            if left:
                node.process, node.footprint = left[0], {}
                node.choices, node.options = [], []
                self._fresh = len(self.nodes) - 1
                return True
            self._not_taken += sum(process not in node.sleep for process in node.enabled)
            self.nodes.pop()
        return False

    @staticmethod
    def _next_choice(node: _Node) -> bool:
        while node.choices:
            if node.choices[-1] + 1 < node.options[-1]:
                node.choices[-1] += 1
                return True
            node.choices.pop()
            node.options.pop()
        return False


def search(
    subject: Subject, bounds: Bounds | None = None, *, reduce: bool = True,
    deterministic: bool = False, on_execution: Callable[[Search], None] | None = None,
    stop_at_first: bool = False,
) -> Search:  # fmt: skip
    """Explore `subject` until everything was seen or one of `bounds` is reached.

    With `deterministic` ranks that return other bytes than in another execution are a finding.
    """
    bounds = bounds or Bounds()
    explorer = Explorer(subject, reduce=reduce)
    started, held = time.monotonic(), megabytes()
    result: Search | None = None
    while True:
        try:
            execution, ran = explorer.run_once()
        except Diverged as error:
            bound = f"the subject does not do the same twice: {error}"
            return _closed(result, bound, explorer, started)
        except TooLong:
            return _closed(result, "an execution of too many steps", explorer, started)
        except _Reordered as error:
            explorer.start_over(error.execution)
            result = None
            continue
        if result is None:
            result = Search(Report("", 0, schedules=0))
        _file(result, execution, ran, deterministic)
        if on_execution is not None:
            on_execution(result)
        if stop_at_first and result.found:
            return _closed(result, "the first finding", explorer, started)
        if not explorer.advance():
            return _closed(result, _reservation(execution), explorer, started)
        bound = _reached(bounds, result, started, held)
        if bound:
            return _closed(result, bound, explorer, started)


def _file(result: Search, execution: Execution, ran: Ran | None, deterministic: bool) -> None:
    """Take over what one execution showed."""
    trace = execution.trace
    if ran is None:
        result.abandoned += 1
        return
    result.executions += 1
    result.report.op, result.report.ranks = ran.report.op, ran.report.ranks
    result.report.schedules += 1
    result.report.launches += ran.report.launches
    result.steps = max(result.steps, len(trace.steps) - trace.ghosts)
    findings = list(ran.report)
    choices = choices_of(trace)
    if ran.outcome is not None and not findings:
        if deterministic and result.outcomes and ran.outcome not in result.outcomes:
            findings.append(nondeterministic(ran.report))
        result.outcomes.setdefault(ran.outcome, choices)
    for finding in findings:
        if result.report.add(finding):
            result.found.append(Found(finding, choices))


def _closed(result: Search | None, bound: str, explorer: Explorer, started: float) -> Search:
    result = result or Search(Report("", 0, schedules=0))
    result.bound = bound
    result.report.complete, result.report.bound = not bound, bound
    result.not_taken = explorer._not_taken
    result.seconds = time.monotonic() - started
    return result


def _reservation(execution: Execution) -> str:
    """Why the search cannot speak for all schedules although it has seen all it knows of."""
    return "a host polls memory: what it sees when is not explored" if execution.polls else ""


def _reached(bounds: Bounds, result: Search, started: float, held: float) -> str:
    if result.executions >= bounds.executions:
        return counted(bounds.executions, "execution")
    if time.monotonic() - started >= bounds.seconds:
        return f"{bounds.seconds:g} seconds"
    if megabytes() - held >= bounds.megabytes:
        return f"{bounds.megabytes:g} MB of memory"
    return ""


def megabytes() -> float:
    """The most memory that this process has held."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def choices_of(trace: Trace) -> list[Choice]:
    real = len(trace.steps) - trace.ghosts
    return [(s.process, tuple(taken for taken, _ in s.choices)) for s in trace.steps[:real]]


def usual(enabled: dict[Process, int], last: Process | None) -> Process:
    """Who steps where nothing decides: the most urgent, and of these who stepped last."""
    return min(enabled, key=lambda process: (enabled[process], process != last))


def process_text(process: Process) -> str:
    kind, *rest = process
    return f"{kind} {'.'.join(str(part) for part in rest)}"


def outcome_bytes(values: Iterable[Any]) -> bytes:
    """A digest of what ranks returned: tensors by their bytes, all else by what it prints as."""
    import hashlib

    digest = hashlib.sha256()

    def take(value: Any) -> None:
        if isinstance(value, (tuple, list)):
            digest.update(b"(")
            for item in value:
                take(item)
            digest.update(b")")
        elif hasattr(value, "untyped_storage"):
            import torch

            flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
            digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
            digest.update(flat.numpy().tobytes())
        else:
            digest.update(repr(value).encode())

    take(list(values))
    return digest.digest()
