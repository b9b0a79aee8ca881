"""weft's collectives on inputs in symmetric memory, as torch's operators over it have theirs.

Each function takes a benchmark's case and returns a Variant, whose rows stand beside weft's own on
plain tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weft.ops._baselines.nccl import restored
from weft.tune.case import Case
from weft.tune.variants import Variant

NAME = "weft in place"
# The last case's inputs of a world: their memory is given back when the next one's are made.
_last: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()


def symmetric_sets(case: Case) -> list[torch.Tensor]:
    """Each set's x on the world's heap. Collective."""
    for tensor in _last.pop(case.world, ()):
        case.world.free(tensor)
    xs = [inputs["x"] for inputs in case.sets]
    # Alike on all ranks: a shard may have fewer rows than others.
    rows = case.problem.m if len(xs[0]) == case.problem.m else case.problem.rows
    found = [case.world.empty((rows, *x.shape[1:]), x.dtype) for x in xs]
    _last[case.world] = found
    return [there[: len(x)].copy_(x) for there, x in zip(found, xs, strict=True)]


def moved(case: Case) -> Variant:
    """x is symmetric, out is not."""

    def call(x: torch.Tensor) -> Callable[[], Any]:
        return lambda: case.card.run(case.world, case.problem, {"x": x})

    return Variant(NAME, [call(x) for x in symmetric_sets(case)])


def all_reduce(case: Case) -> Variant:
    """The sum takes the place of x."""
    from weft.ops.all_reduce import all_reduce

    buffers = symmetric_sets(case)
    calls = [lambda x=x: all_reduce(x, world=case.world, out=x) for x in buffers]
    return Variant(NAME, calls, before=restored(case, buffers))
