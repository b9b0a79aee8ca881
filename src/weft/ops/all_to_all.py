"""All-to-all: every rank sends some of its rows to each rank, and gets what was meant for it.

    even        out of rank d = rows of shard d of x of rank 0, of rank 1, ...      (torch.chunk)
    variable    splits[d] of x's rows go to rank d, one rank's after the other's; out begins with
                what has come, in the order of ranks, and zeros fill the rest

splits are read on the device: how many rows move need not be known to the host, nor change a
recording. Rows are moved as integers, so any dtype is, bit by bit.

Plan, in channels (weft.tiles.move): channel l moves piece l of what one rank sends another
    sm_push with splits: piece for each rank -> its slot, with how many rows there are; then
            slot -> out. Without: tile for each rank -> its box, tile by tile (weft.tiles.exchange)
    ll      without splits: the same, each 32 bits in a word with their flag, at twice the bytes
    sm_pull piece for each rank -> own slot, and where it lies and how many rows there are -> that
            rank's slot; then the slots of their ranks -> out
    nccl    torch.distributed's own: without splits, shards of one size
Own rows go from x to out.

Signals (SET to the call's epoch e; each is waited for in the call that sets it)
    rows_ready[src * channels + l]     piece l of src's rows for this rank may be read, and
                                    ranges[src * channels + l]: their first row and their number
    slot_free, epoch, ticket        the slot's; the last program moves them
Pieces without rows are signalled too. Without splits, sm_push and ll have the mailbox's signals
(weft.tiles.mailboxes).

Limits  x is contiguous and has as many rows on every rank; a rank whose splits are negative, or ask
        for more rows than x has, sends nothing, and all ranks raise; of splits that bring more than
        out holds, what is too much is left out; sm_pull needs all ranks on one node; a slot of
        sm_push holds all rows of all ranks if splits are variable
Source  the design's section 4; torch.distributed.all_to_all_single
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, overload

import torch

from weft.base.card import Trial, calling, trials
from weft.base.dtypes import DTYPES
from weft.base.errors import DtypeError, ShapeError
from weft.compiler import layouts
from weft.ops import _baselines
from weft.plan import exchanges, operations
from weft.plan.call_cache import find_call
from weft.plan.exchanges import Config, Transport, candidates
from weft.plan.problems import random_rows
from weft.runtime.world import World
from weft.tiles import exchange, fetch, move, packets
from weft.tiles.splits import (
    MOST,
    NEGATIVE,
    NUMBER_BITS,
    SOURCE_BITS,
    WHICH_BITS,
    Sizes,
    exchange_by_splits,
)

__all__ = ["Config", "Problem", "all_to_all", "candidates", "fake", "op"]

EXCHANGE = {"to_all": False, "sums": False}
# Up to so many bytes a rank, variable splits are pushed, though push's slots are larger.
PUSH_BYTES = 1 << 20


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All ranks at once."""
    sent = [one["x"].split(_rows_to(problem, one)) for one in inputs]
    outs = []
    for rank in range(problem.num_ranks):
        parts = [of_one[rank] for of_one in sent]
        if not problem.variable:
            outs.append(torch.cat(parts))
            continue
        out = torch.zeros(problem.capacity, problem.n, dtype=problem.torch_dtype)
        out[: sum(map(len, parts))] = torch.cat(parts)
        outs.append((out, torch.tensor([len(part) for part in parts])))
    return outs


def _rows_to(problem: Problem, one: Mapping[str, Any]) -> list[int]:
    """How many of a rank's rows go to each rank; what is left goes nowhere."""
    if problem.variable:
        counts = one["splits"].tolist()
    else:
        shards = (problem.shard(rank) for rank in range(problem.num_ranks))
        counts = [end - first for first, end in shards]
    return [*counts, problem.m - sum(counts)]


EVEN = {
    "sm_push": Transport((exchange.push,), True, EXCHANGE),
    "ll": Transport((packets.push_packets,), constants=EXCHANGE),
    "sm_pull": Transport((fetch.pull,), constants=EXCHANGE),
}


class _CallBySplits(exchanges.Call):
    """A call whose start takes splits, and where to say how many rows have come."""

    def with_splits(self, x: Any, out: Any, splits: Any, received: Any) -> Any:
        self._start = partial(self._launch, splits=splits, num_received=received)
        return self(x, out)

    def _launch(self, x: Any, out: Any, **more: Any) -> None:
        errors = _error_word(self.world)
        self.launch(exchange_by_splits, self.config, self.acquire_slot(), x, out, errors=errors,
                    **more)  # fmt: skip


BY_SPLITS = {
    name: Transport((exchange_by_splits,), name == "sm_push", {"is_pull": name == "sm_pull"})
    for name in ("sm_push", "sm_pull")
}  # fmt: skip


@dataclass(frozen=True)
class Problem(exchanges.Problem):
    """m rows of n elements on every rank, to be spread over the ranks.

    `variable`: by splits; out then has `capacity` rows, by default as many as can come.
    """

    variable: bool = False
    capacity: int = -1

    op = "all_to_all"
    dtypes = tuple(DTYPES)
    transports = EVEN

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity < 0:
            object.__setattr__(self, "capacity", self.num_ranks * self.m)
        if self.variable:
            object.__setattr__(self, "transports", BY_SPLITS)

    def out_rows(self, rank: int) -> int:
        first, end = self.shard(rank)
        return self.capacity if self.variable else self.num_ranks * (end - first)

    @property
    def is_even(self) -> bool:
        return super().is_even and not self.variable

    @property
    def is_empty(self) -> bool:
        return super().is_empty and not self.variable

    def extents(self, rank: int, word: int) -> dict[str, Any]:
        out_bytes, row = self.out_rows(rank) * self.row_bytes, self.row_bytes // word
        stride = self.m if self.variable else self.rows
        return {
            **super().extents(rank, word),
            "incoming": move.Shards(out_bytes // word, out_bytes // self.num_ranks // word),
            "sizes": Sizes(self.m, self.out_rows(rank), stride, row),
        }

    def workspace(self, config: Config) -> tuple[dict[str, Any], dict[str, Any]]:
        rows = self.m if config.transport == "sm_pull" else self.num_ranks * self.m
        words = self.num_ranks * config.channels
        return (
            {
                "received": ((rows * self.row_bytes,), torch.uint8),
                "ranges": ((2 * words,), torch.int64),
            },
            {"rows_ready": (words, torch.int64)},
        )

    def comes_last(self, transport: str) -> bool:
        return self.variable and self.total_bytes > PUSH_BYTES and transport != "sm_pull"


@overload
def all_to_all(
    x: torch.Tensor,
    *,
    world: World,
    splits: None = None,
    capacity: int | None = None,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor: ...


@overload
def all_to_all(
    x: torch.Tensor,
    *,
    world: World,
    splits: torch.Tensor,
    capacity: int | None = None,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]: ...


def all_to_all(
    x: torch.Tensor,
    *,
    world: World,
    splits: torch.Tensor | None = None,
    capacity: int | None = None,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> Any:
    """Send rows of x to every rank, and get what they send. Collective.

        without splits:  out = rows of shard `rank` of x of rank 0, of rank 1, ...
        with splits:     (out, received): received[s] rows of rank s, s = 0, 1, ..., then zeros

    Shapes  x: [m, ...], contiguous, the same on all ranks; splits: [num_ranks], its sum at most m;
            out: without splits [num_ranks * rows of this rank's shard, ...]; with splits
            [capacity, ...], where capacity defaults to out's rows, else to num_ranks * m
    Dtypes  x: any, moved bit by bit; splits and received: int64
    Sync    stream-ordered on the current stream; can be recorded. splits are read on the device
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
            by a later call, world.check() or world.close(): ShapeError: splits of a rank that are
            negative, or ask for more rows than x has. All ranks raise it
    """
    if operations.is_asked(x):
        if splits is not None and capacity is None and out is not None and out.dim():
            capacity = out.shape[0]
        made = operations.as_operation(
            "all_to_all", world, (x, splits), capacity=capacity, config=config, out=out
        )
        return made[0] if splits is None else made
    call = find_call(world, "all_to_all", (x, splits, out), (capacity, config), _make_call)
    if splits is None:
        return call(x, out)
    received = torch.empty(world.num_ranks, dtype=torch.int64, device=x.device)
    return call.with_splits(x, out, splits, received), received


def _make_call(
    world: World, x: Any, splits: Any, out: Any, capacity: Any, config: Any
) -> exchanges.Call:
    if splits is not None and capacity is None and out is not None and out.dim():
        capacity = out.shape[0]
    kind = exchanges.Call if splits is None else _CallBySplits
    return kind(world, problem_of(world, x, splits, capacity), config, x, out)


def problem_of(world: World, x: Any, splits: Any = None, capacity: int | None = None) -> Problem:
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    if splits is None:
        return exchanges.problem_of(Problem, world, x)
    _check_splits(splits, world)
    room = -1 if capacity is None else capacity
    return exchanges.problem_of(Problem, world, x, True, room, in_place=False)


def _error_word(world: World) -> torch.Tensor:
    """Where the kernel says what is wrong with splits; one for all calls."""
    key = ("all_to_all.errors",)
    word = world.calls.get(key)
    if word is None:
        word = world.calls[key] = world.error_word(explain)
    return word


def explain(word: int) -> ShapeError:
    """The error that the kernel has said in a word."""
    kind = word & ((1 << WHICH_BITS.value) - 1)
    to = (word & ((1 << SOURCE_BITS.value) - 1)) >> WHICH_BITS.value
    source = (word & ((1 << NUMBER_BITS.value) - 1)) >> SOURCE_BITS.value
    number = word >> NUMBER_BITS.value
    most = " or more" if number == MOST.value - 1 else ""
    if kind == NEGATIVE.value:
        what = f"splits[{to}] of rank {source} is -{number}{most and ' or less'}"
    else:
        what = f"splits of rank {source} ask for {number}{most} rows, more than x has"
    return ShapeError(
        f"all_to_all: {what}; nothing was sent by that rank, so results are wrong. splits[d] says "
        "how many rows go to rank d: 0 or more, together at most x's"
    )


def _check_splits(splits: torch.Tensor, world: World) -> None:
    layouts.check_tensor("all_to_all", "splits", splits, world)
    if tuple(splits.shape) != (world.num_ranks,):
        raise ShapeError(
            f"all_to_all: splits has shape {tuple(splits.shape)}; it must be ({world.num_ranks},):"
            " how many rows go to each rank"
        )
    if splits.dtype != torch.int64:
        raise DtypeError(f"all_to_all: splits are {splits.dtype}; pass splits.to(torch.int64)")


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random tensors on the CPU: the same for one seed on every machine."""
    inputs = {"x": random_rows(problem, rank, problem.m, seed)}
    if problem.variable:
        # Cuts at random: some ranks get nothing, and some rows go nowhere.
        generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank + 1)
        size = (problem.num_ranks,)
        cuts = torch.randint(0, problem.m + 1, size, generator=generator).sort().values
        inputs["splits"] = torch.diff(cuts, prepend=torch.zeros(1, dtype=torch.int64))
    return inputs


run = calling(all_to_all)


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> Any:
    """A rank's result: its shape and dtype, without its values."""
    out = exchanges.fake(problem, inputs, rank)
    received = torch.empty(problem.num_ranks, dtype=torch.int64, device="meta")
    return (out, received) if problem.variable else out


op = exchanges.card(
    Problem,
    reference,
    run,
    fake=fake,
    make_inputs=make_inputs,
    summary="out = rows for this rank of x of every rank",
    default_shape={"m": 256, "n": 256, "variable": 0},
    smallest={"m": 4, "n": 64},
    trials=(
        *trials({"m": 8, "n": 40, "variable": 0}, {"m": 8, "n": 40, "variable": 1}),
        Trial((3,), {"m": 6, "n": 40, "variable": 0}, "sm_pull", on_heap=True),
    ),
    awkward_shapes=(
        (4, {"m": 388, "n": 96, "variable": 0}),
        (4, {"m": 97, "n": 24, "variable": 1}),
        (3, {"m": 291, "n": 7, "variable": 0}),
        (2, {"m": 2, "n": 64, "variable": 1}),
        (1, {"m": 40, "n": 48, "variable": 1}),
        (8, {"m": 9, "n": 5, "variable": 1}),
        (4, {"m": 0, "n": 16, "variable": 1}),
    ),
    baselines=_baselines.ALL_TO_ALL,
    backward=("all_to_all",),
)
