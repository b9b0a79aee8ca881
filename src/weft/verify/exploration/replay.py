"""One execution as a small file: the choices that lead to it, and what they were made of.

Only the steps are kept at which the execution does not take the usual one, so that a file says
what matters: "program (1, 0, 0) of rank 0's third launch steps here, before its time".
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from weft.base.errors import UsageError
from weft.base.report import Finding
from weft.base.versions import version_of
from weft.verify.exploration.execution import Diverged, Execution
from weft.verify.exploration.search import Choice, Subject, process_text, usual
from weft.verify.exploration.words import Process

FORMAT = 1

# What a run of a subject passes through, besides the subject itself.
ROOMS = ("base", "emulator", "language", "ops", "runtime", "tiles")
PACKAGES = ("torch", "triton", "numpy")

# Step number -> who takes it, and which of its own choices.
Turns = dict[int, Choice]


class Scripted:
    """A guide that takes the usual step but at `turns`; `taken` are those that it took.

    With `lenient` a turn that cannot be taken is left out, else it is an error.
    """

    def __init__(self, turns: Mapping[int, Choice], *, lenient: bool = False) -> None:
        self.turns = turns
        self.lenient = lenient
        self.taken: Turns = {}
        self._last: Process | None = None
        self._choices: tuple[int, ...] = ()
        self._number = 0

    def decide(self, execution: Execution, enabled: dict[Process, int]) -> Process:
        step = len(execution.trace.steps)
        process = usual(enabled, self._last)
        self._choices, self._number = (), 0
        turn = self.turns.get(step)
        if turn is not None:
            if turn[0] in enabled:
                if turn[0] != process or any(turn[1]):
                    self.taken[step] = turn
                process, self._choices = turn
            elif not self.lenient:
                raise Diverged(f"{process_text(turn[0])} cannot take step {step}")
        self._last = process
        return process

    def choose(self, execution: Execution, options: int, what: str) -> int:
        number = self._number
        self._number += 1
        if number >= len(self._choices):
            return 0
        if self._choices[number] >= options and not self.lenient:
            step = len(execution.trace.steps) - 1
            raise Diverged(f"step {step} has {options} ways to go on, not {self._choices[number]}")
        return min(self._choices[number], options - 1)


def turns_of(choices: list[Choice]) -> Turns:
    """Every step as a turn; `minimised` leaves the ones that matter."""
    return dict(enumerate(choices))


@dataclass(frozen=True)
class Replay:
    """`subject` says in the front end's words what is run; `turns` how; `finding` what it shows."""

    subject: Mapping[str, Any]
    turns: Turns
    finding: str
    sources: Mapping[str, str]
    versions: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "finding": self.finding,
            "subject": dict(self.subject),
            "turns": [[step, list(who), list(taken)] for step, (who, taken) in self.turns.items()],
            "sources": dict(self.sources),
            "versions": dict(self.versions),
        }

    def write(self, path: str) -> None:
        folder = os.path.dirname(path)
        if folder:
            os.makedirs(folder, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            json.dump(self.to_json(), file, indent=1)
            file.write("\n")

    def check(self, subject_file: str | None) -> None:
        """Is all that decides an execution as it was when this was recorded?

        Raises  UsageError: names what has changed
        """
        now, then = sources(subject_file), self.sources
        changed = [name for name in then if now.get(name) != then[name]]
        running = versions()
        changed += [
            f"{name} ({self.versions[name]}, now {running.get(name)})"
            for name in self.versions
            if running.get(name) != self.versions[name]
        ]
        if changed:
            raise UsageError(
                f"this replay was recorded with another {', '.join(changed)}: its choices mean"
                " nothing there; look for the finding again with --schedules or --exhaustive"
            )


def read_replay(path: str) -> Replay:
    """Raises  UsageError: no such file, or not one that `write` has written."""
    try:
        with open(path, encoding="utf-8") as file:
            values = json.load(file)
    except OSError as error:
        raise UsageError(f"cannot read the replay {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path} is no replay: {error}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else None
        raise UsageError(f"{path} is no replay of format {FORMAT}: it says {found!r}")
    try:
        turns = {step: (_process(who), tuple(taken)) for step, who, taken in values["turns"]}
        return Replay(
            values["subject"], turns, values["finding"], values["sources"], values["versions"]
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(f"{path} is no replay: {type(error).__name__} {error}") from None


def _process(values: list[Any]) -> Process:
    return tuple(tuple(v) if isinstance(v, list) else v for v in values)


def sources(subject_file: str | None) -> dict[str, str]:
    """A digest of each room's source that a run passes through, and of the subject's own file."""
    package = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    found = {f"weft.{room}": _digest(os.path.join(package, room)) for room in ROOMS}
    if subject_file is not None:
        found[os.path.basename(subject_file)] = _digest(subject_file)
    return found


def _digest(path: str) -> str:
    digest = hashlib.sha256()
    files = [path] if os.path.isfile(path) else []
    for folder, inner, names in os.walk(path):
        inner.sort()
        files += [os.path.join(folder, name) for name in sorted(names) if name.endswith(".py")]
    for name in files:
        with open(name, "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:16]


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    return found | {name: version_of(name) or "none" for name in PACKAGES}


def recorded(
    subject: Mapping[str, Any], turns: Turns, finding: Finding, subject_file: str | None
) -> Replay:
    return Replay(subject, turns, finding.kind, sources(subject_file), versions())


def shows(subject: Subject, turns: Turns, finding: Finding) -> Turns | None:
    """The turns that were taken, where an execution with `turns` shows `finding`; else None."""
    guide = Scripted(turns, lenient=True)
    ran = subject(Execution(guide))
    key = finding.key()
    return guide.taken if any(found.key() == key for found in ran.report) else None
