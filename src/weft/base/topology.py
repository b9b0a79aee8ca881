"""Which ranks share a node: scale-up domains of equal or unequal size, in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weft.base.counts import counted
from weft.base.errors import UsageError

DEFAULT_RANKS = 4


class Seat(NamedTuple):
    """Where one rank sits; `local_size` ranks are on its node."""

    node: int
    local_rank: int
    local_size: int


def sizes_of(nodes: Sequence[int]) -> tuple[int, ...]:
    """How many ranks each node has, by the node of each rank."""
    return tuple(nodes.count(node) for node in sorted(set(nodes)))


@dataclass(frozen=True)
class Topology:
    """Nodes by their sizes: `(3, 1)` is ranks 0 to 2 on one node and rank 3 on another."""

    sizes: tuple[int, ...]

    @classmethod
    def of(cls, ranks: int | None = None, nodes: int | Sequence[int] = 1) -> Topology:
        """`ranks` over `nodes`: a number of nodes, the first ones larger by one where it does not
        divide; or the nodes' sizes, whose sum is then the number of ranks.

        Raises  UsageError: fewer ranks than nodes, an empty node, sizes that miss `ranks`
        """
        if isinstance(nodes, int):
            ranks = DEFAULT_RANKS if ranks is None else ranks
            if ranks < 1 or not 1 <= nodes <= ranks:
                raise UsageError(
                    f"cannot emulate {counted(ranks, 'rank')} on {counted(nodes, 'node')}; ask "
                    "for at least one rank, and for 1 .. ranks nodes"
                )
            size, larger = divmod(ranks, nodes)
            return cls(tuple(size + (node < larger) for node in range(nodes)))
        sizes = tuple(nodes)
        if not sizes or any(not isinstance(size, int) or size < 1 for size in sizes):
            raise UsageError(f"nodes={nodes!r}: each node's size is a number of ranks, at least 1")
        if ranks is not None and ranks != sum(sizes):
            raise UsageError(
                f"nodes of {text_of(sizes)} ranks hold {sum(sizes)}, not {ranks}; leave the number "
                "of ranks out, or make the sizes add up to it"
            )
        return cls(sizes)

    @property
    def num_ranks(self) -> int:
        return sum(self.sizes)

    @property
    def num_nodes(self) -> int:
        return len(self.sizes)

    def seat(self, rank: int) -> Seat:
        first = 0
        for node, size in enumerate(self.sizes):
            if rank < first + size:
                return Seat(node, rank - first, size)
            first += size
        raise IndexError(f"rank {rank} of {self.num_ranks}")

    def __str__(self) -> str:
        return text_of(self.sizes)


def text_of(sizes: Sequence[int]) -> str:
    return "+".join(map(str, sizes))


def parse_nodes(text: str | int) -> int | tuple[int, ...]:
    """`2` is two nodes of equal size; `3+1` (or `3,1`) gives their sizes.

    Raises  UsageError: anything else
    """
    words = str(text).replace(" ", "").replace(",", "+").split("+")
    if not all(word.isascii() and word.isdigit() for word in words):
        raise UsageError(f"--nodes {text}: write a number of nodes, 2, or their sizes, 3+1")
    numbers = tuple(int(word) for word in words)
    return numbers[0] if len(numbers) == 1 else numbers
