"""A router's tables, and what libraries do by them: rows by index, grouped products, weighted sums.

    gather_rows(x, routing)[slot] = x[token of slot]
    grouped_matmul(rows, b, routing)[slot] = rows[slot] @ b[expert of slot]
    scatter_rows(y, routing)[token] = sum over its choices of  weight * y[slot of the choice]

Slots are all (token, choice) sorted by expert, as weft.ops.moe_route sorts them. Of rows by expert
a rank has the slots of its own experts: they begin at its first one, in room for all. The host does
not learn how many they are, but where the library has no grouped product for the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

# Rows of operands of the library's grouped product begin at so many bytes.
ALIGNMENT = 16


class Tables(NamedTuple):
    """What the router says. Slots are numbers among all m * top_k (token, k), sorted by expert.

    ids, weights: int32, fp32 [own tokens, top_k], the largest first. token_of: int32[slots] the
    token in a slot, weight_of: fp32[slots] its weight there; slot_of: int32[m, top_k]. counts:
    int32[num_ranks, experts] of each source. tiles: int32[5, tiles] expert, first, end, lo, hi:
    slots first .. end - 1, which tokens of ranks lo .. hi have; turns: int32[tiles] which is
    multiplied when, on this rank; num_tiles: int32[1], how many of them there are. Of those behind,
    first = end = 0.
    """

    ids: Any
    weights: Any
    token_of: Any
    weight_of: Any
    slot_of: Any
    counts: Any
    tiles: Any
    turns: Any
    num_tiles: Any

    @classmethod
    def shapes(cls, problem: Any, own: int) -> Tables:
        """Those of a rank with so many tokens: the router's, or a dispatch's of own experts."""
        chosen, room = (own, problem.top_k), problem.max_tiles
        return cls(
            chosen, chosen, (problem.capacity,), (problem.capacity,),
            (problem.num_tokens, problem.top_k), (problem.num_ranks, problem.own_experts),
            (5, room), (room,), (1,),
        )  # fmt: skip

    @classmethod
    def empty(cls, problem: Any, own: int, device: Any) -> Tables:
        """Without their values; of no tokens, with them."""
        made = cls(*[
            torch.empty(shape, dtype=dtype_of(name), device=device)
            for name, shape in cls.shapes(problem, own)._asdict().items()
        ])  # fmt: skip
        if not problem.m:
            for one in made:
                one.zero_()
            made.token_of.fill_(-1)
            torch.arange(problem.max_tiles, dtype=torch.int32, out=made.turns)
        return made


def dtype_of(table: str) -> torch.dtype:
    return torch.float32 if table.startswith("weight") else torch.int32


class Routing(NamedTuple):
    """What a call gives: its tables, and how many slots a tile of them has at most."""

    tables: Tables
    tile_m: int

    @classmethod
    def of(cls, inputs: Mapping[str, Any], tile_m: int) -> Routing:
        """The tables among a card's inputs."""
        return cls(Tables(**{name: inputs[name] for name in Tables._fields}), tile_m)


def route(logits: torch.Tensor, top_k: int) -> Routing:
    """What weft.ops.moe_route means, of all ranks' tokens: the top_k experts by softmax, weights
    over their sum; all (token, choice) sorted by expert, stable. counts: [1, experts]. No tiles."""
    chosen = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    share = logits.softmax(1).gather(1, chosen)
    order = chosen.flatten().sort(stable=True).indices
    shares = share / share.sum(1, keepdim=True)
    counts = chosen.flatten().bincount(minlength=logits.shape[1])[None]
    slot_of = order.argsort().view(chosen.shape)
    of_slots = (order // top_k, shares.flatten()[order], slot_of, counts)
    return Routing(Tables(chosen, shares, *of_slots, None, None, None), 0)


def tables(problem: Any, rank: int, ids: torch.Tensor, weights: torch.Tensor) -> Tables:
    """One rank's tables for the experts and weights [num_tokens, top_k] of all tokens, on the CPU:
    of the experts that are its own, from problem.first_expert(rank) on."""
    first, own = problem.first_expert(rank), problem.own_experts
    is_own = (ids >= first) & (ids < first + own)
    key = torch.where(is_own, ids - first, own).flatten()
    order = key.sort(stable=True).indices[: int(is_own.sum())]
    slot_of = torch.full((ids.numel(),), -1)
    slot_of[order] = torch.arange(len(order))
    token_of = torch.full((problem.capacity,), -1)
    token_of[: len(order)] = order // problem.top_k
    weight_of = torch.zeros(problem.capacity)
    weight_of[: len(order)] = weights.flatten()[order]
    parts = [key.view(ids.shape)[slice(*problem.shard(one))] for one in range(problem.num_ranks)]
    counts = torch.stack([one.flatten().bincount(minlength=own + 1)[:own] for one in parts])
    cut = cut_tiles(problem, rank, counts.sum(0).tolist(), token_of)
    mine = slice(*problem.shard(rank))
    whole = (token_of, weight_of, slot_of.view(ids.shape), counts, *cut)
    found = Tables(ids[mine], weights[mine], *whole)
    return Tables(*[one.to(dtype_of(name)) for name, one in found._asdict().items()])


def cut_tiles(problem: Any, rank: int, counts: Sequence[int], token_of: Any) -> list[torch.Tensor]:
    """tiles, turns and num_tiles of one rank, whose experts have so many slots each, on the CPU."""
    made = _tiles_of(problem, counts, token_of)
    late = [max((rank - s) % problem.num_ranks for s in range(lo, hi + 1)) for *_, lo, hi in made]
    turns = sorted(range(len(made)), key=late.__getitem__)
    spare = problem.max_tiles - len(made)
    table = torch.tensor([*made, *[(0,) * 5] * spare]).reshape(-1, 5).t().contiguous()
    turns = torch.tensor([*turns, *range(len(made), problem.max_tiles)])
    return [table, turns, torch.tensor([len(made)])]


def _tiles_of(problem: Any, counts: Sequence[int], token_of: Any) -> list[tuple[int, ...]]:
    """(expert, first, end, lo, hi) of every tile."""
    # At once: on a GPU each number that is asked for alone is waited for.
    sources = (token_of // problem.rows).tolist() if problem.rows else []
    found, begin = [], 0
    for expert, size in enumerate(counts):
        for first in range(begin, begin + size, problem.tile_m):
            end = min(first + problem.tile_m, begin + size)
            found.append((expert, first, end, sources[first], sources[end - 1]))
        begin += size
    return found


def gather_rows(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """A row for each slot: its token's."""
    return x.index_select(0, routing.tables.token_of)


def scatter_rows(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """A row for each token: its choices times their weights, added up in fp32, in their order."""
    slots, sums = routing.tables.slot_of, None
    for j in range(slots.shape[1]):
        weight = routing.tables.weight_of.index_select(0, slots[:, j])
        share = y.index_select(0, slots[:, j]).float() * weight[:, None]
        sums = share if sums is None else sums + share
    assert sums is not None
    return sums.to(y.dtype)


def grouped_matmul(
    rows: torch.Tensor, b: torch.Tensor, routing: Routing, *, first: int = 0
) -> torch.Tensor:
    """Each row times the matrix of its expert; b has experts from `first` on, whose slots rows has.

    Rows behind the last of these are undefined.
    """
    experts = b.shape[0]
    counts = routing.tables.counts.sum(0)[first : first + experts]
    if not rows.numel() or not b.numel():
        return rows.new_zeros(rows.shape[0], b.shape[2])
    if (product := _product_of_groups(rows, b)) is not None:
        return product(rows, b, offs=counts.cumsum(0, dtype=torch.int32))
    out = rows.new_zeros(rows.shape[0], b.shape[2])
    begin = 0
    for expert, size in enumerate(counts.tolist()):
        out[begin : begin + size] = rows[begin : begin + size] @ b[expert]
        begin += size
    return out


def _product_of_groups(rows: torch.Tensor, b: torch.Tensor) -> Any:
    """The library's product by offsets on the device, where it takes these tensors."""
    strides = [one.stride(i) * one.element_size() for one in (rows, b) for i in range(one.dim())
               if one.stride(i) != 1]  # fmt: skip
    # On GPUs it has kernels for bfloat16 alone.
    is_taken = not rows.is_cuda or rows.dtype == torch.bfloat16
    is_taken = is_taken and not any(stride % ALIGNMENT for stride in strides)
    return getattr(torch.nn.functional, "grouped_mm", None) if is_taken else None
