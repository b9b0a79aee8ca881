"""All-to-all: every rank sends some of its rows to each rank, and gets what was meant for it.

    even        out of rank d = rows of shard d of x of rank 0, of rank 1, ...      (torch.chunk)
    variable    splits[d] of x's rows go to rank d, one rank's after the other's; out begins with
                what has come, in the order of ranks, and zeros fill the rest

splits are read on the device: how many rows move need not be known to the host, nor change a
recording. Rows are moved as integers, so any dtype is, bit by bit.

Plan, in lanes (weft.tiles.move): lane l moves piece l of what one rank sends another
    push    with splits: piece for each rank -> its slot, with how many rows there are; then
            slot -> out. Without: tile for each rank -> its box, tile by tile (weft.tiles.exchange)
    packets without splits: the same, each 32 bits in a word with their flag, at twice the bytes
    pull    piece for each rank -> own slot, and where it lies and how many rows there are -> that
            rank's slot; then the slots of their ranks -> out
    nccl    torch.distributed's own: without splits, shards of one size
Own rows go from x to out.

Signals (SET to the call's epoch e; each is waited for in the call that sets it)
    rows_ready[src * lanes + l]     piece l of src's rows for this rank may be read, and
                                    ranges[src * lanes + l]: their first row and their number
    slot_free, epoch, ticket        the slot's; the last program moves them
Pieces without rows are signalled too. Without splits, push and packets have the mailbox's signals
(weft.tiles.postbox).

Limits  x is contiguous and has as many rows on every rank; a rank whose splits are negative, or ask
        for more rows than x has, sends nothing, and all ranks raise; of splits that bring more than
        out holds, what is too much is left out; pull needs all ranks on one node; a slot of push
        holds all rows of all ranks if splits are variable
Source  the design's section 4; torch.distributed.all_to_all_single
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch.autograd.graph import increment_version

from weft.base.card import Op, Trial, trials
from weft.base.dtypes import DTYPES
from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.compiler import layouts
from weft.ops import _baselines, _lanes, _operations
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
)  # fmt: skip

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


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_lanes.Rows):
    """m rows of n elements on every rank, to be spread over the ranks.

    `variable`: by splits; out then has `capacity` rows, by default as many as can come.
    """

    variable: bool = False
    capacity: int = -1

    op = "all_to_all"
    dtypes = tuple(DTYPES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.capacity < 0:
            object.__setattr__(self, "capacity", self.num_ranks * self.m)

    @property
    def is_even(self) -> bool:
        return super().is_even and not self.variable

    @property
    def moved_bytes(self) -> int:
        """What one rank sends when all shards are full."""
        return (self.m - min(self.rows, self.m)) * self.row_bytes


@dataclass(frozen=True)
class Config(_lanes.Lanes):
    """How the rows are moved; `transport` as the Plan says."""

    transport: str = "push"
    reaches_far = {"push": True, "packets": False, "pull": False}

    def can(self, problem: Problem, target: Target) -> bool:
        return super().can(problem, target) and not (problem.variable and self.by_packets)

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        super().check(problem, target)
        if problem.variable and self.by_packets:
            raise ConfigError(
                "all_to_all: transport='packets' with splits; packets move shards of one size: "
                "take push or pull"
            )


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    word_bytes = _lanes.word_bytes(problem)
    found = list(_lanes.candidates(Config, problem, target, problem.shard_bytes, word_bytes))
    if problem.variable and problem.m * problem.row_bytes > PUSH_BYTES:
        found.sort(key=lambda one: one.transport != "pull")
    yield from found


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The host

EVEN = {"push": exchange.push, "packets": packets.push_packets, "pull": fetch.pull}
EXCHANGE = {"to_all": False, "sums": False}


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
    if _operations.is_asked(x):
        return _traced(x, world, splits, capacity, config, out)
    call = _lanes.find_call(world, "all_to_all", (x, splits, out), (capacity, config), _Call)
    if out is None:
        out = torch.empty(call.out_shape, dtype=x.dtype, device=x.device)
    else:
        increment_version((out,))
    if splits is None:
        if not call.is_empty:
            call.launch(world, x, None, None, out)
        return out
    received = torch.empty(world.num_ranks, dtype=torch.int64, device=x.device)
    call.launch(world, x, splits, received, out)
    return out, received


def _traced(x: Any, world: World, splits: Any, capacity: Any, config: Any, out: Any) -> Any:
    """The call as an operation of torch's; its name says whether there are splits."""
    if splits is None:
        return _operations.as_operation("all_to_all", world, (x,), config=config, out=out)
    if capacity is None and out is not None and out.dim():
        capacity = out.shape[0]
    return _operations.as_operation(
        "all_to_all_splits", world, (x, splits), capacity, config=config, out=out
    )


class _Call:
    """What calls with tensors like these share on one rank."""

    def __init__(self, world: World, x: Any, splits: Any, out: Any, capacity: Any, config: Any):
        layouts.check_tensor("all_to_all", "x", x, world)
        if splits is not None:
            _check_splits(splits, world)
        if capacity is None:
            capacity = out.shape[0] if out is not None and out.dim() else -1
        n = math.prod(x.shape[1:])
        self.problem = problem = Problem(
            x.shape[0], n, world.num_ranks, str(x.dtype), _lanes.nodes_of(world),
            splits is not None, capacity,
            in_place=splits is None and _lanes.is_on_heap(world, x),
        )  # fmt: skip
        self.config = config = config or choose(problem, world.target)
        config.check(problem, world.target)
        if problem.variable:
            rows_out = problem.capacity
        else:
            first, end = problem.shard(world.rank)
            rows_out = world.num_ranks * (end - first)
        self.out_shape = (rows_out, *x.shape[1:])
        if out is not None:
            _lanes.check_out("all_to_all", out, self.out_shape, x.dtype, world)
        kind = "variable" if problem.variable else "even"
        tensors = (x,) if problem.in_place else ()
        self.name = f"{kind} {_lanes.name_of(world, problem, config, *tensors)}"
        self.is_empty = problem.is_empty
        self._start: Any = None
        self.rows_out, self.stride = rows_out, problem.m if problem.variable else problem.rows
        slot_rows = problem.m if config.transport == "pull" else world.num_ranks * self.stride
        words = world.num_ranks * config.lanes
        self.buffers = {
            "received": ((slot_rows * problem.row_bytes,), torch.uint8),
            "ranges": ((2 * words,), torch.int64),
        }
        self.signals = {"rows_ready": (words, torch.int64)}

    def launch(self, world: World, x: Any, splits: Any, num_received: Any, out: Any) -> None:
        world.operator_call(self.name, self.tensors)
        if splits is not None:
            self._by_slot(world, x, splits, num_received, out)
            return
        if self._start is None:  # behind operator_call: it takes memory, which is collective
            if self.config.by_library:
                self._start = _lanes.by_library("all_to_all", world)
            else:
                self._start = self._exchange(world).launches(world, self.config)
        self._start(x, out)

    def _exchange(self, world: World) -> _lanes.Exchange:
        problem, is_pull = self.problem, self.config.transport == "pull"
        out_bytes, x_bytes = self.rows_out * problem.row_bytes, problem.m * problem.row_bytes
        return _lanes.Exchange(
            fn=EVEN[self.config.transport],
            part_bytes=problem.shard_bytes,
            align_bytes=problem.row_bytes,
            word_bytes=_lanes.word_bytes(problem),
            shards=(
                (x_bytes, problem.shard_bytes),
                (out_bytes, out_bytes // world.num_ranks),
            ),
            memory=(0 if problem.in_place else x_bytes) if is_pull else None,
            constants=(*((problem.in_place,) if is_pull else ()), *EXCHANGE.values()),
        )

    def _by_slot(self, world: World, x: Any, splits: Any, num_received: Any, out: Any) -> None:
        problem, config = self.problem, self.config
        # Each transport has a slot of its own shape.
        slot = world.workspace(f"all_to_all.{config.transport}", self.buffers, self.signals)
        width = _lanes.width_of(problem.row_bytes, x, out)
        x, out, received = _lanes.as_words(width, x, out, slot.received)
        row = problem.row_bytes // min(width, 8)
        sizes = Sizes(problem.m, self.rows_out, self.stride, row)
        exchange_by_splits[(config.lanes,)](
            x, out, received, splits, num_received, _error_word(world), slot.ranges,
            slot.rows_ready, slot.arg, sizes, world.arg, block=config.block,
            vec=_lanes.words_in_vector(width), is_pull=config.transport == "pull",
            **config.options(world.target),
        )  # fmt: skip


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


# ---------------------------------------------------------------------------------------------
# The card


def make_problem(
    num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    variable = bool(shape.get("variable", 0))
    return Problem(shape["m"], shape["n"], num_ranks, dtype, nodes, variable)


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random tensors on the CPU: the same for one seed on every machine."""
    inputs = {"x": _lanes.random_rows(problem, rank, problem.m, seed)}
    if problem.variable:
        # Cuts at random: some ranks get nothing, and some rows go nowhere.
        generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank + 1)
        size = (problem.num_ranks,)
        cuts = torch.randint(0, problem.m + 1, size, generator=generator).sort().values
        inputs["splits"] = torch.diff(cuts, prepend=torch.zeros(1, dtype=torch.int64))
    return inputs


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> Any:
    return all_to_all(inputs["x"], world=world, splits=inputs.get("splits"), config=config)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or choose(problem, target)
    config.check(problem, target)
    width = _lanes.width_of(problem.row_bytes)
    word = f"*i{8 * min(width, 8)}"
    if config.by_library:
        return
    fn = exchange_by_splits if problem.variable else EVEN[config.transport]
    if config.by_packets:
        word = f"*i{8 * min(width, _lanes.PACKET_BYTES)}"
    words = {"x": word, "out": word, "received": word, "boxes": word, "staged": word,
             "splits": "*i64", "num_received": "*i64", "errors": "*i64", "ranges": "*i64",
             "rows_ready": "*i64"}  # fmt: skip
    yield _lanes.record(
        "all_to_all", fn, words, problem, config, target,
        sizes=Sizes(*[None] * len(Sizes._fields)), incoming=move.Shards(None, None),
        vec=_lanes.words_in_vector(width), width=min(_lanes.PACKET_BYTES, width),
        is_pull=config.transport == "pull", in_place=problem.in_place, **EXCHANGE,
    )  # fmt: skip


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> Any:
    """A rank's result: its shape and dtype, without its values."""
    first, end = problem.shard(rank)
    rows = problem.capacity if problem.variable else problem.num_ranks * (end - first)
    out = torch.empty((rows, problem.n), dtype=problem.torch_dtype, device="meta")
    received = torch.empty(problem.num_ranks, dtype=torch.int64, device="meta")
    return (out, received) if problem.variable else out


op = Op(
    name="all_to_all",
    summary="out = rows for this rank of x of every rank",
    problem=Problem,
    config=Config,
    make_problem=make_problem,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    default_shape={"m": 256, "n": 256, "variable": 0},
    smallest={"m": 4, "n": 64},
    trials=(
        *trials({"m": 8, "n": 40, "variable": 0}, {"m": 8, "n": 40, "variable": 1}),
        Trial((3,), {"m": 6, "n": 40, "variable": 0}, "pull", on_heap=True),
    ),
    smallest_config={"block": 16},
    awkward_shapes=(
        (4, {"m": 388, "n": 96, "variable": 0}),
        (4, {"m": 97, "n": 24, "variable": 1}),
        (3, {"m": 291, "n": 7, "variable": 0}),
        (2, {"m": 2, "n": 64, "variable": 1}),
        (1, {"m": 40, "n": 48, "variable": 1}),
        (8, {"m": 9, "n": 5, "variable": 1}),
        (4, {"m": 0, "n": 16, "variable": 1}),
    ),
    dtypes=Problem.dtypes,
    baselines=_baselines.ALL_TO_ALL,
    fake=fake,
    backward=("all_to_all",),
    takes_nodes=True,
)
