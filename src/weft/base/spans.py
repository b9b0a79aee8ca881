"""Spans of time: (start, end), in any unit. What several cover, have in common, or leave over."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def union(spans: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same time as disjoint spans, in order."""
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            if end > joined[-1][1]:
                joined[-1] = (joined[-1][0], end)
        elif end > start:
            joined.append((start, end))
    return joined


def total(spans: Sequence[tuple[float, float]]) -> float:
    return sum(end - start for start, end in spans)


def intersection(
    first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]
) -> list[tuple[float, float]]:
    """The time that two lists of disjoint spans, in order, have in common."""
    common, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            common.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return common


def without(
    span: tuple[float, float], covered: Iterable[tuple[float, float]]
) -> list[tuple[float, float]]:
    """What of `span` none of `covered` holds, which is disjoint and in order."""
    at, end = span
    found = []
    for first, last in covered:
        if at < min(first, end):
            found.append((at, min(first, end)))
        at = max(at, last)
    if at < end:
        found.append((at, end))
    return found
