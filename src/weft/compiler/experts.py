"""A router's tables, and what libraries do by them: rows by index, grouped products, weighted sums.

    gather_rows(x, routing)[slot] = x[token of slot]
    grouped_matmul(rows, b, routing)[slot] = rows[slot] @ b[expert of slot]
    scatter_rows(y, routing)[token] = sum over its choices of  weight * y[slot of the choice]

Slots are all (token, choice) sorted by expert, as weft.ops.moe_route sorts them. Of rows by expert
a rank has the slots of its own experts: they begin at its first one, in room for all. The host does
not learn how many they are, but where the library has no grouped product for the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    """What a call gives: its tables, and how many slots a tile of them has at most.

    `split_experts`: the tables are of this rank's experts alone. Then slots are numbered from the
    first of these on; a choice of another rank's has the slot -1, and behind the last slot token_of
    is -1.
    """

    tables: Tables
    tile_m: int
    split_experts: bool = False

    @classmethod
    def of(cls, inputs: Mapping[str, Any], tile_m: int, split_experts: bool = False) -> Routing:
        """The tables among a card's inputs."""
        found = {name: inputs[name] for name in Tables._fields}
        return cls(Tables(**found), tile_m, split_experts)


def route(logits: torch.Tensor, top_k: int) -> Routing:
    """What weft.ops.moe_route means, of all ranks' tokens: the top_k experts by softmax, weights
    over their sum; all (token, choice) sorted by expert, stable. counts: [1, experts]. No tiles."""
    chosen, share = choose(logits, top_k, Scoring())
    order = chosen.flatten().sort(stable=True).indices
    counts = chosen.flatten().bincount(minlength=logits.shape[1])[None]
    slot_of = order.argsort().view(chosen.shape)
    of_slots = (order // top_k, share.flatten()[order], slot_of, counts)
    return Routing(Tables(chosen, share, *of_slots, None, None, None), 0)


class Scoring(NamedTuple):
    """How a router rates experts, and weighs those that it chooses.

    scores = softmax(logits), or each one's sigmoid; chosen by score, and by a bias that is added
    for the choice alone; weights = scale * scores of the chosen, over their sum if `renormalise`.
    With `groups` of neighbouring experts only `top_groups` of them may be chosen from: those whose
    `group_best` best experts' ratings have the largest sum.

    Source  DeepSeek-V2 (2405.04434): softmax, groups by their best; DeepSeek-V3 (2412.19437):
            sigmoid, bias, groups by their best two
    """

    score: str = "softmax"
    renormalise: bool = True
    groups: int = 1
    top_groups: int = 1
    group_best: int = 2
    scale: float = 1.0


def choose(
    logits: torch.Tensor, top_k: int, scoring: Scoring, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Each token's top_k experts, and their weights in fp32; what is no number comes last."""
    value = logits.float().nan_to_num(-torch.inf, torch.inf)
    scores = value.sigmoid() if scoring.score == "sigmoid" else value.softmax(1)
    # By logits where scores are in their order: of softmax many are 0.
    rating = value if bias is None and scoring.groups == 1 else scores
    rating = rating if bias is None else rating + bias
    if scoring.groups > 1:
        of_groups = rating.unflatten(1, (scoring.groups, -1))
        of_group = _largest(of_groups, scoring.group_best).sum(2)
        taken = _order(of_group)[:, : scoring.top_groups]
        is_taken = torch.zeros_like(of_group, dtype=torch.bool).scatter(1, taken, True)
        rating = of_groups.masked_fill(~is_taken[..., None], -torch.inf).flatten(1)
    chosen = _order(rating)[:, :top_k]
    share = scores.gather(1, chosen)
    if scoring.renormalise:
        share = share / share.sum(1, keepdim=True)
    return chosen, scoring.scale * share


def _order(rating: torch.Tensor) -> torch.Tensor:
    """The largest first; of equal ones the lowest number."""
    return rating.sort(dim=1, descending=True, stable=True).indices


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    return values.topk(min(count, values.shape[2]), dim=2).values


def tables(problem: Any, rank: int, ids: torch.Tensor, weights: torch.Tensor) -> Tables:
    """One rank's tables for the experts and weights [num_tokens, top_k] of all tokens, where these
    lie: of the experts that are its own, from problem.first_expert(rank) on."""
    first, own, capacity = problem.first_expert(rank), problem.own_experts, problem.capacity
    is_own = (ids >= first) & (ids < first + own)
    key = torch.where(is_own, ids - first, own)
    order = key.flatten().sort(stable=True).indices
    place = torch.arange(len(order), device=ids.device)
    is_slot = place < is_own.sum()
    slot_of = torch.empty_like(place).scatter_(0, order, place.where(is_slot, -1))
    room = max(capacity - len(order), 0)
    pad = torch.nn.functional.pad
    token_of = pad((order // problem.top_k).where(is_slot, -1), (0, room), value=-1)[:capacity]
    weight_of = pad(weights.flatten().index_select(0, order).where(is_slot, 0), (0, room))[
        :capacity
    ]
    columns = (key[..., None] == torch.arange(own, device=ids.device)).sum(1)
    counts = torch.stack(
        [columns[slice(*problem.shard(one))].sum(0) for one in range(problem.num_ranks)]
    )
    mine = slice(*problem.shard(rank))
    cut = cut_tiles(problem, rank, counts.sum(0), token_of)
    whole = (token_of, weight_of, slot_of.view(ids.shape), counts, *cut)
    found = Tables(ids[mine], weights[mine], *whole)
    return Tables(*[one.to(dtype_of(name)) for name, one in found._asdict().items()])


def cut_tiles(
    problem: Any, rank: int, counts: torch.Tensor, token_of: torch.Tensor
) -> list[torch.Tensor]:
    """tiles, turns and num_tiles of one rank, whose experts have so many slots each."""
    ranks, tile = problem.num_ranks, torch.arange(problem.max_tiles, device=counts.device)
    ends, heights = counts.cumsum(0), -(-counts // problem.tile_m)
    behind = heights.cumsum(0)
    num_tiles = behind[-1:]
    is_tile = tile < num_tiles
    expert = torch.searchsorted(behind, tile, right=True).clamp(max=len(counts) - 1)
    begin, before, last_slot = (
        one.index_select(0, expert) for one in (ends - counts, behind - heights, ends)
    )
    first = begin + (tile - before) * problem.tile_m
    end = torch.minimum(first + problem.tile_m, last_slot)
    source = token_of // max(problem.rows, 1)
    last = max(len(source) - 1, 0)
    lo, hi = (
        source.index_select(0, place.clamp(0, last)) if len(source) else torch.zeros_like(place)
        for place in (first, end - 1)
    )
    # Of the ranks lo .. hi whose tokens a tile has, the one that comes last: rank + 1 comes first.
    late = torch.where(hi > rank, rank + ranks - lo.clamp(min=rank + 1), rank - lo)
    turns = late.where(is_tile, ranks).sort(stable=True).indices
    table = torch.stack([expert, first, end, lo, hi]) * is_tile
    return [table, turns, num_tiles]


def gather_rows(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """A row for each slot: its token's. Of own experts, zeros behind the last slot."""
    token_of = routing.tables.token_of
    if not routing.split_experts:
        return x.index_select(0, token_of)
    # Masked, so that what comes back for rows that nobody has goes nowhere.
    return x.index_select(0, token_of.clamp(min=0)).masked_fill(token_of[:, None] < 0, 0)


def scatter_rows(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """A row for each token: its choices times their weights, added up in fp32, in their order.
    Of own experts, those choices that are these."""
    slots, sums = routing.tables.slot_of, None
    for j in range(slots.shape[1]):
        slot = slots[:, j].clamp(min=0) if routing.split_experts else slots[:, j]
        weight = routing.tables.weight_of.index_select(0, slot)
        row = y.index_select(0, slot).float()
        if routing.split_experts:  # not times zero: what is not there may be no number
            row = row.masked_fill(slots[:, j, None] < 0, 0.0)
        share = row * weight[:, None]
        sums = share if sums is None else sums + share
    assert sums is not None
    return sums.to(y.dtype)


def ends_of(routing: Routing, experts: int, first: int = 0) -> torch.Tensor:
    """int32[experts] where the slots of each end, if those of expert `first` begin at 0."""
    counts = routing.tables.counts.sum(0, dtype=torch.int32)[first : first + experts]
    return counts.cumsum(0, dtype=torch.int32)


def grouped_matmul(
    rows: torch.Tensor, b: torch.Tensor, routing: Routing, *, first: int = 0,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Each row times the matrix of its expert; b has experts from `first` on, whose slots rows has.
    Rows behind the last of these are undefined. ends: of several products, what ends_of gives
    """
    experts = b.shape[0]
    ends = ends_of(routing, experts, first) if ends is None else ends
    is_empty = not rows.numel() or not b.numel()
    if not is_empty and (product := _product_of_groups(rows, b)) is not None:
        return product(rows, b, offs=ends)
    out = rows.new_zeros(rows.shape[0], b.shape[2])
    begin = 0
    # Of nothing too: gradients of both are then zeros.
    for expert, end in enumerate([0] * experts if is_empty else ends.tolist()):
        out[begin:end] = rows[begin:end] @ b[expert]
        begin = end
    return out


def _product_of_groups(rows: torch.Tensor, b: torch.Tensor) -> Any:
    """The library's product by offsets on the device, where it takes these tensors."""
    strides = [one.stride(i) * one.element_size() for one in (rows, b) for i in range(one.dim())
               if one.stride(i) != 1]  # fmt: skip
    # Of what it returns too, whose gradient it is given.
    strides.append(b.shape[2] * rows.element_size())
    # On GPUs it has kernels for bfloat16 alone.
    is_taken = not rows.is_cuda or rows.dtype == torch.bfloat16
    is_taken = is_taken and not any(stride % ALIGNMENT for stride in strides)
    return getattr(torch.nn.functional, "grouped_mm", None) if is_taken else None
