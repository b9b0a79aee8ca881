"""What is known when a program is called, and what its user has settled beforehand.

Both are the same on all ranks, so that all choose alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from weft.base.target import Target, parse_target

# Sizes of one class get one plan: two classes to each doubling.
SMALLEST_CLASS = 16


@dataclass(frozen=True)
class Facts:
    """Of a call: the sizes that the program calls by name, the ranks, and where they run.

    `nodes` counts the ranks of each scale-up domain; () is one domain. `is_recorded`: the call is
    one of a graph that the user records.
    """

    sizes: Mapping[str, int] = field(default_factory=dict)
    num_ranks: int = 4
    target: Target = field(default_factory=lambda: parse_target("cuda:90"))
    nodes: tuple[int, ...] = ()
    is_recorded: bool = False

    @property
    def num_nodes(self) -> int:
        return max(1, len(self.nodes))

    def key(self) -> tuple[Any, ...]:
        """Calls with one key get one plan."""
        classes = tuple((name, class_of(size)) for name, size in sorted(self.sizes.items()))
        return classes, self.num_ranks, self.target, self.nodes, self.is_recorded

    def representative(self) -> Facts:
        """The largest call of its class, for which the plan of all of them is made."""
        sizes = {name: class_of(size) for name, size in self.sizes.items()}
        return replace(self, sizes=sizes)


def class_of(size: int) -> int:
    """The next of 1, 16, 24, 32, 48, 64, 96, ..."""
    if size <= SMALLEST_CLASS:
        return size if size <= 1 else SMALLEST_CLASS
    power = 1 << (size - 1).bit_length()
    return 3 * power // 4 if size <= 3 * power // 4 else power


@dataclass(frozen=True)
class Settings:
    """What the user settles, by the name of a task; what is left out the compiler chooses.

    `engines` takes "library" too: then nothing of that kernel is fused.
    """

    tiles: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    engines: Mapping[str, str] = field(default_factory=dict)
    chunks: Mapping[str, int] = field(default_factory=dict)
