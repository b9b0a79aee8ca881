"""How much work something is: calls, whoever else is at work; and which cases CI alone runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def calls_of(function: Callable[[], object]) -> int:
    """How many calls of Python functions `function()` makes in this thread, itself among them."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def slow_but(first: Iterable[tuple], others: Iterable[tuple]) -> list[Any]:
    """Cases of a test, of which `make test` runs the first ones alone."""
    first = list(first)
    rest = (one for one in others if one not in first)
    return [*first, *(pytest.param(*one, marks=pytest.mark.slow) for one in rest)]
