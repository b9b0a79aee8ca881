"""Which part of a size each rank has: ceil(size / num_ranks) to a rank, as torch.chunk cuts it.

The last ranks may have fewer, or none. On the device the same is `weft.language.mapping.part_of`.
"""

from __future__ import annotations


def full_part(size: int, num_ranks: int) -> int:
    """How many the first rank has, and every other at most."""
    return -(-size // num_ranks)


def part_of(size: int, rank: int, num_ranks: int) -> tuple[int, int]:
    """The indices first .. end - 1 of a rank."""
    each = full_part(size, num_ranks)
    return min(rank * each, size), min((rank + 1) * each, size)
