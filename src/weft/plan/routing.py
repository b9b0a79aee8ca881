"""Work by a router's tables: how large tables are, random choices of experts, tables of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch

from weft.base.errors import ShapeError
from weft.compiler.experts import Tables, dtype_of, tables
from weft.plan.memory import like
from weft.plan.problems import Rows
from weft.plan.vectors import power_of_two
from weft.tiles import route

# Of choices (token, k) that a program looks at together, each is compared to all the others.
MOST_CHOSEN, MOST_TOGETHER = 64, 64


class ByTables(Rows):
    """m tokens, top_k of `experts` for each, in tiles of up to tile_m slots: every rank's tables
    are of all slots and all experts, unless a property says otherwise."""

    usual: ClassVar[Mapping[str, int]] = {"tile_m": 16}
    # Fields of the problem.
    top_k: int
    tile_m: int
    experts: int

    @property
    def num_slots(self) -> int:
        return self.m * self.top_k

    @property
    def capacity(self) -> int:
        return self.num_slots

    @property
    def num_tokens(self) -> int:
        """Places of tokens."""
        return self.m

    def own_tokens(self, rank: int) -> int:
        first, end = self.shard(rank)
        return end - first

    @property
    def own_experts(self) -> int:
        """Of a rank's tables."""
        return self.experts

    def first_expert(self, rank: int) -> int:
        return 0

    @property
    def max_tiles(self) -> int:
        return route.most_tiles(self.capacity, self.own_experts, self.tile_m)

    def check_sizes(self, slots: int) -> None:
        """Raises  ShapeError: too many choices, or slots; tiles of odd heights"""
        op, top_k, tile_m = self.op, self.top_k, self.tile_m
        most = min(self.experts, MOST_CHOSEN)
        if not 1 <= top_k <= most:
            text = f"{op}: top_k={top_k} of {self.experts} experts; it must be between 1 and {most}"
            raise ShapeError(text)
        if tile_m < 1 or tile_m & (tile_m - 1):
            raise ShapeError(f"{op}: tile_m={tile_m}; it must be a power of two")
        if slots + self.experts * tile_m >= (1 << 31) - 1:
            raise ShapeError(f"{op}: m={self.m} with top_k={top_k}: slots are int32")


def tokens_together(top_k: int) -> int:
    """A power of two: of tokens with so many choices, at most."""
    return max(1, MOST_TOGETHER // max(2, power_of_two(top_k)))


def random_choices(problem: Any, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Experts and weights of one rank's tokens, the same for one seed on every machine."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank + 1)
    share = torch.rand(problem.own_tokens(rank), problem.experts, generator=generator)
    weights, ids = share.topk(problem.top_k)
    return {"ids": ids.int(), "weights": weights / weights.sum(1, keepdim=True)}


def tables_of(problem: Any, rank: int, everyone: Sequence[Mapping[str, Any]]) -> Tables:
    """One rank's tables, on the CPU; `everyone` has ids and weights of each rank's tokens."""
    chosen = torch.full((problem.num_tokens, problem.top_k), -1)
    shares = torch.zeros(problem.num_tokens, problem.top_k)
    for other, one in enumerate(everyone):
        mine = slice(other * problem.rows, other * problem.rows + len(one["ids"]))
        chosen[mine], shares[mine] = one["ids"].long(), one["weights"]
    own = everyone[rank]
    return tables(problem, rank, chosen, shares)._replace(ids=own["ids"], weights=own["weights"])


def random_tables(problem: Any, rank: int, seed: int = 0) -> Tables:
    """One rank's tables of random choices: no call before it keeps ranks together."""
    everyone = [random_choices(problem, other, seed) for other in range(problem.num_ranks)]
    return tables_of(problem, rank, everyone)


def tables_like(problem: Any, own: int, device: Any) -> Tables:
    """What `torch.empty_like` makes the tables of a rank with so many tokens of."""
    shapes = Tables.shapes(problem, own)._asdict().items()
    return Tables(*[like(shape, dtype_of(name), device) for name, shape in shapes])
