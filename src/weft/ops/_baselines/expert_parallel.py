"""Tokens to the ranks of their experts and back by the vendor's collectives.

    nccl                 rows once for each rank by all_to_all_single, whose splits and indices the
                         host has beforehand: as fast as unfused can be. In a model it costs a copy
                         of counts to the host before every call, which is not charged here
    nccl_by_counts       the same with all of it: counts, the host's wait for them, indices, sorting
    nccl_whole           without the host: all ranks' tokens to all ranks, or a reduce-scatter of
                         sums of them all

Each function takes a benchmark's case and returns a Variant. The tables of a dispatch are given to
it; only rows are moved.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weft.ops._baselines.nccl import as_one_kernel
from weft.ops.ep_dispatch import TABLES
from weft.ops.moe_route import Tables
from weft.tune.case import Case
from weft.tune.variants import Variant

# A call that waits for its stream is never enqueued before a held one is let go: no time counts.
WAITS = ("eager",)


class Ways:
    """Which rows of one rank go where and come whence, for one set of inputs."""

    def __init__(self, case: Case, tables: Tables) -> None:
        problem, rank = case.problem, case.world.rank
        self.problem, self.rank, self.group = problem, rank, case.group
        self.ids, self.tables = tables.ids.long(), tables
        self.goes = self.to_ranks(self.ids)
        self.sent = self.goes.t().nonzero()[:, 1]
        self.out_splits = self.goes.sum(0).tolist()
        here = (tables.slot_of >= 0).any(1)
        self.came = here.nonzero()[:, 0]
        self.in_splits = here.view(problem.num_ranks, -1).sum(1).tolist()
        self.num_slots = int(tables.counts.sum())
        place = here.cumsum(0) - 1
        self.row_of_slot = place[tables.token_of[: self.num_slots].long()]

    def to_ranks(self, ids: torch.Tensor) -> torch.Tensor:
        """[tokens, ranks] does any of a token's experts lie there?"""
        owner = torch.where(ids >= 0, ids // self.problem.own_experts, -1)
        ranks = torch.arange(self.problem.num_ranks, device=ids.device)
        return (owner[:, :, None] == ranks).any(1)

    def exchange(self, rows: torch.Tensor, back: bool = False) -> torch.Tensor:
        """Rows by the rank that they go to -> by the rank that they come from; or back."""
        splits = (self.in_splits, self.out_splits)
        gets, gives = reversed(splits) if back else splits
        got = rows.new_empty(sum(gets), *rows.shape[1:])
        dist.all_to_all_single(got, rows, gets, gives, group=self.group)
        return got


# ---------------------------------------------------------------------------------------------
# There


def _dispatches(
    case: Case, name: str, make: Callable[[Any, Ways, Any], Callable[[], None]], **more: Any
) -> Variant:
    """`make(inputs, ways, out)` gives what fills `out`."""
    calls, kept = [], []
    for inputs, expected in zip(case.sets, case.expected, strict=True):
        tables = Tables(weights=None, **dict(zip(TABLES, expected[1:], strict=True)))
        answer = [one.clone() for one in expected]
        fill = make(inputs, Ways(case, tables), answer[0])
        calls.append(lambda fill=fill, answer=tuple(answer): (fill(), answer)[1])
        kept.append((answer, expected))

    def restore(index: int) -> None:
        """Zeros behind the last slot, and tables: an answer is checked as a whole."""
        answer, expected = kept[index]
        answer[0].zero_()
        for one, wanted in zip(answer[1:], expected[1:], strict=True):
            one.copy_(wanted)

    return Variant(name, calls, before=restore, **more)


def dispatch(case: Case) -> Variant:
    def make(inputs: Any, ways: Ways, out: Any) -> Callable[[], None]:
        def fill() -> None:
            got = ways.exchange(inputs["x"].index_select(0, ways.sent))
            torch.index_select(got, 0, ways.row_of_slot, out=out[: ways.num_slots])

        return fill

    return _dispatches(case, "nccl", make)


def dispatch_by_counts(case: Case) -> Variant:
    def make(inputs: Any, ways: Ways, out: Any) -> Callable[[], None]:
        problem, x = case.problem, inputs["x"]

        def fill() -> None:
            ids = inputs["ids"].long()
            goes = ways.to_ranks(ids)
            counts = goes.sum(0)
            come = torch.empty_like(counts)
            dist.all_to_all_single(come, counts, group=ways.group)
            ways.out_splits, ways.in_splits = torch.stack([counts, come]).tolist()
            sent = goes.t().nonzero()[:, 1]
            chosen = ways.exchange(ids[sent]) - ways.rank * problem.own_experts
            got = ways.exchange(x.index_select(0, sent))
            is_own = (chosen >= 0) & (chosen < problem.own_experts)
            key = torch.where(is_own, chosen, problem.own_experts).flatten()
            order = key.sort(stable=True).indices[: int(is_own.sum())]
            torch.index_select(got, 0, order // problem.top_k, out=out[: len(order)])

        return fill

    return _dispatches(case, "nccl_by_counts", make, modes=WAITS)


def dispatch_whole(case: Case) -> Variant:
    """Slots that no token has get some token's row, and zeros then."""

    def make(inputs: Any, ways: Ways, out: Any) -> Callable[[], None]:
        problem, rows = case.problem, case.problem.rows
        x = inputs["x"].new_zeros(rows, problem.n)
        x[: len(inputs["x"])] = inputs["x"]
        whole = x.new_empty(problem.num_tokens, problem.n)
        token_of = ways.tables.token_of.clamp(min=0)
        is_free = (ways.tables.token_of < 0)[:, None]

        def fill() -> None:
            dist.all_gather_into_tensor(whole, x, group=ways.group)
            torch.index_select(whole, 0, token_of, out=out)
            out.masked_fill_(is_free, 0)

        return fill

    return _dispatches(case, "nccl_whole", make)


# ---------------------------------------------------------------------------------------------
# Back


def _shares(problem: Any, tables: Tables, tokens: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """y -> for these of all ranks' tokens the weighted sums of their own slots."""
    slots = tables.slot_of[tokens].long()
    has, slots = slots >= 0, slots.clamp(min=0)
    weight = tables.weight_of[slots]

    def sums(y: torch.Tensor) -> torch.Tensor:
        total = y.new_zeros(len(slots), problem.n, dtype=torch.float32)
        for k in range(problem.top_k):
            share = y.index_select(0, slots[:, k]).float() * weight[:, k, None]
            # Not times zero: what is not there may be no number.
            total += torch.where(has[:, k, None], share, 0.0)
        return total.to(y.dtype)

    return as_one_kernel(sums, slots)


def _combines(case: Case, name: str, make: Callable[[Any, Ways], Callable[[], Any]]) -> Variant:
    calls = []
    for inputs in case.sets:
        tables = Tables(**{field: inputs[field] for field in Tables._fields})
        calls.append(make(inputs, Ways(case, tables)))
    return Variant(name, calls)


def combine(case: Case) -> Variant:
    def make(inputs: Any, ways: Ways) -> Callable[[], Any]:
        sums = _shares(case.problem, ways.tables, ways.came)
        # A token's rows among those that come back; zeros behind them.
        place = torch.full(ways.goes.t().shape, len(ways.sent), device=ways.sent.device)
        place[ways.goes.t()] = torch.arange(len(ways.sent), device=ways.sent.device)

        def back() -> torch.Tensor:
            got = ways.exchange(sums(inputs["y"]), back=True)
            got = torch.cat([got, got.new_zeros(1, got.shape[1])])
            total = got.index_select(0, place[0]).float()
            for source in range(1, len(place)):
                total += got.index_select(0, place[source])
            return total.to(got.dtype)

        return back

    return _combines(case, "nccl", make)


def combine_whole(case: Case) -> Variant:
    def make(inputs: Any, ways: Ways) -> Callable[[], Any]:
        problem = case.problem
        everyone = torch.arange(problem.num_tokens, device=ways.sent.device)
        sums = _shares(problem, ways.tables, everyone)
        out = inputs["y"].new_empty(problem.rows, problem.n)

        def back() -> torch.Tensor:
            dist.reduce_scatter_tensor(out, sums(inputs["y"]), group=ways.group)
            return out[: len(ways.ids)]

        return back

    return _combines(case, "nccl_whole", make)
