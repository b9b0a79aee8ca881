"""How the nodes of a cluster are joined, and how even its GPUs are: what a simulation adds to a
machine's record.

Each GPU has a port of its own, and GPUs of one seat in their nodes are a rail: their ports hang on
switches of that rail alone. `leaf` nodes share such a switch; what goes further, or to another
rail, passes a second level.

Source  NVIDIA's reference architectures of DGX SuperPOD (rails, 32 nodes to a leaf, no
        oversubscription); what a second level adds is a guess: docs/scaling.md.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.errors import UsageError


@dataclass(frozen=True)
class Fabric:
    """`leaf`: nodes whose rails share a switch, 0 if all do, and rails too; `oversubscription`: how
    much more comes into the second level from below than it carries at once, so that much slower is
    each transfer through it; `hop_us`: its way is so much longer. `slow`: of each node the first
    GPU's products take so many times as long: one that is hot, or shared."""

    leaf: int = 0
    oversubscription: float = 1.0
    hop_us: float = 1.0
    slow: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("leaf", 0), ("oversubscription", 1), ("hop_us", 0), ("slow", 1)):
            value = getattr(self, name)
            if not value >= least or value == float("inf"):
                raise UsageError(f"fabric: {name}={value!r} must be a number from {least} on")
