"""A failing execution with as few turns as may be: what is left is what it takes to fail."""

from __future__ import annotations

import time

from weft.base.report import Finding
from weft.verify.exploration.replay import Turns, shows, turns_of
from weft.verify.exploration.search import Choice, Subject


def minimised(
    subject: Subject, choices: list[Choice], finding: Finding, *, runs: int = 100,
    seconds: float = 10.0,
) -> Turns:  # fmt: skip
    """The turns of an execution that still shows `finding`, none of which can be left out.

    Halves, quarters and so on of the turns are left out in turn (delta debugging), for at most
    `runs` executions or `seconds`; what is known then is returned.
    """
    best = shows(subject, turns_of(choices), finding)
    if best is None:  # it takes more than the choices: nothing to leave out
        return turns_of(choices)
    end = time.monotonic() + seconds
    parts = 1
    while best and runs > 0 and time.monotonic() < end:
        steps = sorted(best)
        size = -(-len(steps) // parts)
        for first in range(0, len(steps), size):
            gone = set(steps[first : first + size])
            runs -= 1
            fewer = shows(subject, {s: t for s, t in best.items() if s not in gone}, finding)
            if fewer is not None and len(fewer) < len(best):
                best = fewer
                parts = max(1, parts - 1)
                break
            if runs <= 0 or time.monotonic() >= end:
                break
        else:
            if size == 1:
                break
            parts = min(2 * parts, len(steps))
    return best
