"""Numbers of rows that are done alike: one choice of how to do a call serves a bucket of them.

    bucket_of(1000, 4) == 1020      as 996, 1004, .. to 1020, which are those that 4 divides

A choice for the bucket is a choice for each of its m: it asks for no more rows than there are in
the largest. What changes with m from one to the next is whether ranks have rows alike, and whether
a tile lies across two of them; both are the same throughout a bucket.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, wraps
from typing import Any, TypeVar, cast

from weft.base.fields import copied
from weft.ir.task import Program, show

Problem = TypeVar("Problem", bound=Any)
Choose = TypeVar("Choose", bound=Callable[..., Any])
# Choices that are kept of each operator.
MOST_KEPT = 8192

# Small m are told apart one by one; above, so many buckets to each doubling.
EXACT, TO_A_DOUBLING = 64, 16
# The height of tiles by which ranks' rows are compared.
TILE_ROWS = 128


def bucket_of(m: int, num_ranks: int) -> int:
    """The largest number of rows that is done as `m` is."""
    if m <= EXACT or m % (TILE_ROWS * num_ranks) == 0:
        return m
    step = max(16, (1 << (m - 1).bit_length()) // (2 * TO_A_DOUBLING))
    end = -(-m // step) * step
    if m % num_ranks:
        return end if end % num_ranks else end - 1
    even = end // num_ranks * num_ranks
    return even - num_ranks if even % (TILE_ROWS * num_ranks) == 0 else even


def of_bucket(problem: Problem) -> Problem:
    """A problem of m rows with the most that are done as these are."""
    m = bucket_of(problem.m, problem.num_ranks)
    return problem if m == problem.m else copied(problem, m=m)


def buckets_of(sizes: Iterable[int], num_ranks: int) -> list[int]:
    """One number of rows for each bucket that `sizes` fall into."""
    return sorted({bucket_of(m, num_ranks) for m in sizes})


def program_key(program: Program, sizes: Mapping[str, int], num_ranks: int) -> str:
    """Of a call of a tensor program: its text, and buckets of the sizes that are open."""
    text = hashlib.sha256(show(program, places=False).encode()).hexdigest()[:16]
    named = [f"{name}={bucket_of(size, num_ranks)}" for name, size in sorted(sizes.items())]
    return " ".join([*named, f"program={text}"])


def key_of(problem: Any) -> str:
    """What of a problem a measured choice is made for: the bucket of m and all else that calls have
    alike on all ranks. How B lies is not: that may differ by rank, and a choice may not."""
    if hasattr(problem, "open_sizes"):
        return program_key(problem.traced, problem.open_sizes, problem.num_ranks)
    named = vars(of_bucket(problem))
    named = {**named, "nodes": problem.nodes if len(problem.nodes) > 1 else ()}
    left_out = ("b_is_nk", "num_ranks", *getattr(problem, "unsaid", ()))
    return " ".join(f"{name}={value}" for name, value in named.items() if name not in left_out)


def by_bucket(choose: Choose) -> Choose:
    """`choose(problem, ..)` made once for each bucket of m, and kept."""
    kept = lru_cache(MOST_KEPT)(choose)

    @wraps(choose)
    def chosen(problem: Any, *args: Any, **named: Any) -> Any:
        return kept(of_bucket(problem), *args, **named)

    return cast(Choose, chosen)
