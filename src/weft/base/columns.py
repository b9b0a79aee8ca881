"""Trees of plain values that are alike at many sizes, kept as one: numbers as runs over the sizes.

    merge([{"m": 4, "on": "main"}, {"m": 5, "on": "main"}, {"m": 6, "on": "main"}])
        -> {"m": {"runs": [[0, 4, 1]]}, "on": "main"}

A run [i, value, step] says that from the i-th tree on the number is value, value + step, and so on.
What is linear in the sizes is one run; what is rounded up to tiles is a run for each tile. Nothing
is fitted: `at` gives each number as it was.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

RUNS = "runs"


def form_of(tree: Any) -> str:
    """What trees that can be merged have in common: everything but their numbers."""
    return json.dumps(_form(tree), sort_keys=True)


def _form(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _form(one) for name, one in tree.items()}
    if isinstance(tree, (list, tuple)):
        return [_form(one) for one in tree]
    return 0 if type(tree) is int else tree


def merge(trees: Sequence[Any]) -> Any:
    """One tree of several of one form."""
    first = trees[0]
    if isinstance(first, dict):
        return {name: merge([one[name] for one in trees]) for name in first}
    if isinstance(first, (list, tuple)):
        return [merge(several) for several in zip(*trees, strict=True)]
    if type(first) is not int or all(one == first for one in trees):
        return first
    return {RUNS: _runs(trees)}


def _runs(values: Sequence[int]) -> list[list[int]]:
    runs: list[list[int]] = []
    for i, value in enumerate(values):
        if runs:
            begin, first, step = runs[-1]
            if i == begin + 1:
                runs[-1][2] = value - first
                continue
            if value == first + step * (i - begin):
                continue
        runs.append([i, value, 0])
    return runs


def at(tree: Any, i: int) -> Any:
    """The i-th of the trees that were merged."""
    if isinstance(tree, dict):
        runs = tree.get(RUNS)
        if runs is None:
            return {name: at(one, i) for name, one in tree.items()}
        begin, value, step = runs[bisect_right(runs, i, key=lambda run: run[0]) - 1]
        return value + step * (i - begin)
    if isinstance(tree, list):
        return [at(one, i) for one in tree]
    return tree
