"""Ranks that do alike, so that one of each class is enough to be played.

A plan's steps know of other ranks by how far on they are: rank r pushes to r - 1, r - 2, .. and
waits for r + 1, r + 2, .. So where all ranks have parts of one size, what r does at a time every
other one does then, of ranks as far from it: of one node all are alike, of equal nodes those with
one place in theirs, and of nodes on switches those with one place there. What comes from a rank of
a class came, at the same time, from the class's first one to whoever is as far from that.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from weft.base.fabric import Fabric
from weft.compiler.cost.plan_at import PlanAt
from weft.ir.device import Call

# What a rank waits for of itself, and of all: numbered by steps.
STEP, CALL = "step", "call"
# Of causal attention the last rank has the most keys.
UNLIKE = ("attention", "ag_attention")


def classes(at: PlanAt, fabric: Fabric) -> int:
    """Ranks 0 .. n - 1 stand for all: each for those n, 2 n, .. further on."""
    ranks = at.num_ranks
    causal = any(one.function in UNLIKE and one.causal for one in at.plan.of(Call))
    last = ranks - 1
    if causal or any(at.extents(name, 0) != at.extents(name, last) for name in at.buffers):
        return ranks
    sizes = {at.node_of.count(node) for node in set(at.node_of)}
    size = sizes.pop()
    if sizes:
        return ranks
    nodes = ranks // size
    if nodes == 1:
        return 1 if fabric.slow == 1 else ranks
    leaf = fabric.leaf if 0 < fabric.leaf < nodes else 1
    return ranks if nodes % leaf else size * leaf


class Arrivals(dict[Hashable, Any]):
    """What has arrived, by (what, who waits for it, from whom, ..); one of `count` ranks stands for
    each."""

    def __init__(self, count: int, num_ranks: int) -> None:
        super().__init__()
        self._count, self._num_ranks = count, num_ranks

    def _key(self, key: Any) -> Hashable:
        what, first, *rest = key
        if what == STEP:
            return key
        if what == CALL:
            return what, first, rest[0] % self._count
        shift = first - first % self._count
        return what, first - shift, (rest[0] - shift) % self._num_ranks, *rest[1:]

    def __getitem__(self, key: Hashable) -> Any:
        return super().__getitem__(self._key(key))

    def __setitem__(self, key: Hashable, value: Any) -> None:
        super().__setitem__(self._key(key), value)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(self._key(key))
