"""What is legal is a table that is run: every rule over a whole program, every breach reported."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from weft.base.errors import IllegalError
from weft.base.place import UNKNOWN, Place

T = TypeVar("T")


@dataclass(frozen=True)
class Violation:
    """One breach: the rule's name, what is wrong with which values and the remedy, and where."""

    rule: str
    message: str
    place: Place = UNKNOWN

    def __str__(self) -> str:
        at = f"\n  at {self.place}" if self.place.frames else ""
        return f"{self.message}  [{self.rule}]{at}"


@dataclass(frozen=True)
class Rule:
    """A row of a level's table. `since` is the stage from which on it holds; "" is always.

    `breaches(program)` yields (message, place); `why` is the reason, for the reader of the table.
    """

    name: str
    why: str
    breaches: Callable[[Any], Iterable[tuple[str, Place]]]
    since: str = ""


def legal(title: str, program: T, violations: Sequence[Violation]) -> T:
    """The program itself. Raises  IllegalError: with all breaches, and the user's lines"""
    if not violations:
        return program
    problem = "\n".join(map(str, violations))
    message = f"{title}: breaches of the rules: {len(violations)}\n{problem}"
    raise IllegalError(message, violations=tuple(violations))


def run(rules: Sequence[Rule], program: Any, stages: Sequence[str]) -> list[Violation]:
    """Every breach of the rules that hold from these stages on, up to the first stage with any.

    Later rules read what earlier ones have found sound; beside a breach they would repeat it.
    """
    found: list[Violation] = []
    for stage in stages:
        for rule in rules:
            if rule.since == stage:
                found += [Violation(rule.name, *breach) for breach in rule.breaches(program)]
        if found:
            break
    return found
