"""All-reduce, residual and RMS norm as one operator: total = sum(x over ranks) + residual.

    normed = total / sqrt(mean over columns of total^2 + eps) * weight

Every rank passes all m rows of x, and the same residual and weight, and gets all rows of both
results, the same bits everywhere: what stands between the two halves of a decoder layer.

Plan, `push`: one kernel on each rank, the rows template (weft.tiles.rows) with these hooks, which
are generated from the Core IR below
    order     tiles of the other ranks' rows first, own ones behind them (order.scattered)
    emit      another rank's rows of x -> this rank's part of the owner's `partials`
    combine   own rows: waits for the other ranks' shares; sums in fp32, own share first, then
              rank + 1, + 2, ...; + residual, rounded once
    emit      own rows of the total -> every other rank's `gathered`
    result    total and its norm -> the results; of the others' rows when they have come
Plan, `two_shot`, for few rows, and `one_shot`, for fewer: by packets, in the order of ranks; see
_all_reduce_rms_norm_few.py.
Plan, `all_reduce` and `nccl`: weft's all-reduce or the library's, then torch; nothing is fused.

Of the two results `total` alone travels. The norm of a row is made again where it is wanted, from
the same bits: it reads what has come anyway, and its way would be as long as total's.

Signals (all are SET to the call's epoch e, read on the device)
    partials_ready[tile, src]    src's share of this own tile is here. By src
    sums_ready[tile, owner]      the owner's total of this tile is in `gathered` here. By the owner
    slot_free, epoch, ticket     the slot's; the last program moves them

Limits  x and residual are contiguous [m, n]; a row is one tile: n up to 32768; packets need all
        ranks on one node
Source  the design's section 4; TensorRT-LLM's fused all-reduce
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from weft.base.card import Op, trials
from weft.base.dtypes import DTYPES
from weft.base.errors import ConfigError, ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.compiler import layouts
from weft.compiler.lower import source
from weft.ir import core
from weft.ops import _baselines, _by_library, _lanes, _measured, _operations, _records
from weft.ops._all_reduce_rms_norm_few import Rows, all_reduce_rms_norm_packets
from weft.ops.all_reduce import all_reduce
from weft.plan.row_launches import Cut
from weft.runtime.world import World
from weft.tiles import rows
from weft.tiles.hooks import partition

PUSH, UNFUSED, LIBRARY = "push", "all_reduce", _by_library.TRANSPORT
# By what all_reduce calls them, whose messages these are: sizes at which each is taken are its.
BY_PACKETS = {"one_shot_packets": "one_shot", "two_shot_packets": "two_shot"}
TRANSPORTS = (PUSH, *BY_PACKETS.values(), UNFUSED, LIBRARY)
EPS = 1e-6
MOST_COLUMNS = rows.MOST_COLUMNS


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All ranks at once: sums in fp32 in the order of ranks, rounded once."""
    total = inputs[0]["x"].float()
    for one in inputs[1:]:
        total = total + one["x"].float()
    total = (total + inputs[0]["residual"].float()).to(problem.torch_dtype)
    return [(_norm(total, inputs[0]["weight"], EPS), total) for _ in inputs]


def _norm(total: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    value = total.float()
    scale = torch.rsqrt(value.square().mean(1, keepdim=True) + eps)
    return (value * scale * weight.float()).to(total.dtype)


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_lanes.Rows):
    """m rows of n elements on every rank."""

    op = "all_reduce_rms_norm"

    @property
    def flops(self) -> int:
        """Of one rank."""
        return (self.num_ranks - 1) * self.rows * self.n + 4 * self.m * self.n


@dataclass(frozen=True)
class Config:
    """`transport` as the Plan says. Units  tile_m: rows that a program has at a time; packets go
    row by row"""

    transport: str = PUSH
    tile_m: int = 1
    num_warps: int = 8

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem"""
        op = problem.op
        if self.transport not in TRANSPORTS:
            told = f"transport={self.transport!r}; it is one of {', '.join(TRANSPORTS)}"
            raise ConfigError(f"{op}: {told}")
        columns = problem.n if self.is_fused else 0
        self.cut.check(op, columns, remedy=f": take transport={UNFUSED!r}")
        if self.by_packets and len(problem.nodes) > 1:
            told = f"transport={self.transport!r} reaches into peers' memory, but the world has "
            raise ConfigError(f"{op}: {told}{len(problem.nodes)} nodes; take {PUSH!r}")

    @property
    def by_packets(self) -> bool:
        return self.transport in BY_PACKETS.values()

    @property
    def is_fused(self) -> bool:
        return self.transport == PUSH or self.by_packets

    @property
    def cut(self) -> Cut:
        return Cut(self.by_packets, self.tile_m, self.num_warps)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    if problem.n <= MOST_COLUMNS:
        ways = [*_by_packets(problem), PUSH]
        if len(problem.nodes) > 1:
            ways = [PUSH]
        for transport in ways:
            yield cut_of(transport, problem, target)
    yield Config(transport=UNFUSED)
    if target.backend == "cuda":
        yield Config(transport=LIBRARY)


def _by_packets(problem: Problem) -> Iterator[str]:
    """Those that all_reduce takes for so many bytes, the best first."""
    for row in _measured.rows_for("all_reduce", problem.m * problem.row_bytes):
        if row.transport in BY_PACKETS:
            yield BY_PACKETS[row.transport]


def cut_of(transport: str, problem: Problem, target: Target) -> Config:
    """Rows and threads of a program; n up to MOST_COLUMNS."""
    cut = Cut.of(transport != PUSH, problem.m, problem.n, target)
    return Config(transport, cut.tile_m, cut.num_warps)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The program, by words

# Hooks of the rows template; its kernel is generated from this
# (docs/generated_kernels.md). A program of these tensors comes to the same.
KERNEL = core.require(
    core.parse("""\
program(all_reduce_rms_norm_rows)
x = param(operand)
residual = param(pointer)
weight = param(pointer)
normed = param(pointer)
total = param(pointer)
partials = param(pointer)
gathered = param(pointer)
eps = param(number)
partials_ready = param(signals, by=kernel, to=kernel, announces=(partials,))
sums_ready = param(signals, by=kernel, to=kernel, announces=(gathered,))
slot = param(slot, by=kernel, to=kernel)
world = param(world)
parts = mapping(static, (x,), cuts=part)
template(rows, (1, 4096), formula='total = all_reduce(x) + residual; normed = rms_norm(total)')
credit(begin, slot)
hook(order, scatter, (parts,))
hook(ready, read_owned, (x, parts))
wait(combine, partials_ready, others, parts)
hook(combine, add_partials, (partials, parts))
hook(combine, add_rows, (residual, parts))
hook(combine, rounded, (gathered,))
hook(emit, spread, (gathered, parts))
hook(emit, push, (partials, parts))
notify(announce, sums_ready, all, parts)
notify(announce, partials_ready, owner, parts)
wait(collect, sums_ready, tile, parts)
hook(collect, load_rows, (gathered, parts))
hook(result, store_rows, (total, parts))
hook(result, rms_norm, (weight, eps, parts))
hook(result, store_rows, (normed, parts))
finish(end, slot)
""")
)


# ---------------------------------------------------------------------------------------------
# The host


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    world: World,
    eps: float = EPS,
    config: Config | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(normed, total) of the sum of all ranks' x and the residual. Collective.

        total = x of rank 0 + x of rank 1 + ... + residual
        normed = total / sqrt(mean of total^2 over columns + eps) * weight

    Shapes  x, residual: [m, n], contiguous; weight: [n]; both results [m, n]
    Dtypes  all alike, float16, bfloat16 or float32; sums and norms in fp32; other ranks' shares
            are not rounded again, total is, once, and normed is that of what it was rounded to
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if _operations.is_asked(x, residual, weight):
        tensors = (x, residual, weight)
        return _operations.as_operation(Problem.op, world, tensors, eps, config=config)
    given = (x, residual, weight)
    call = _lanes.find_call(world, "all_reduce_rms_norm", given, (float(eps), config), _Call)
    normed, total = torch.empty_like(x), torch.empty_like(x)
    world.operator_call(call.name, call.tensors)
    if call.problem.is_empty:
        return normed, total
    if call.config.is_fused:
        call.launch(world, (x, residual, weight, normed, total), eps)
        return normed, total
    if call.config.transport == LIBRARY:
        _by_library.all_reduce(world, x, total)
    else:
        all_reduce(x, world=world, out=total)
    total += residual
    return _norm(total, weight, eps), total


class _Call:
    """What calls with tensors like these share on one rank."""

    def __init__(
        self, world: World, x: Any, residual: Any, weight: Any, eps: float, config: Any
    ) -> None:
        _check_tensors(world, x, residual, weight)
        m, n = x.shape
        nodes = _lanes.nodes_of(world)
        self.problem = problem = Problem(m, n, world.num_ranks, str(x.dtype), nodes)
        self.config = config = config or choose(problem, world.target)
        config.check(problem, world.target)
        self.name = f"{problem.op} m={m},n={n} {problem.dtype} eps={eps} {config}"
        self.grid = (config.cut.grid(problem, world.target), 1, 1)
        self.options = config.cut.options(problem, world.target)
        self.tile, self.constants = config.cut.tile(problem).as_constexpr(), ()
        if config.by_packets:
            self._make_boxes()
            return
        self.function = source.load(KERNEL).plain
        self.shape, self.num_slots = config.cut.parts(problem), {}
        tiles = self.shape.tiles_m * problem.num_ranks
        shape, dtype = (problem.num_ranks, problem.rows, n), problem.torch_dtype
        self.key = problem.op
        self.buffers = {"partials": (shape, dtype), "gathered": (shape, dtype)}
        self.signals = {"partials_ready": (tiles, torch.int64), "sums_ready": (tiles, torch.int64)}

    def _make_boxes(self) -> None:
        """Words that hold packets alone, ever; calls of about as many rows share them."""
        problem, capacity = self.problem, _lanes.power_of_two(self.problem.m)
        packets = self.tile.n.value * problem.itemsize // _lanes.PACKET_BYTES
        self.function = all_reduce_rms_norm_packets
        self.constants = (self.config.transport == "two_shot",)
        self.shape = Rows(problem.m, problem.n, capacity)
        self.key = f"{problem.op}.{self.config.transport}.{capacity}x{packets}"
        self.buffers, self.num_slots = {}, {"num_slots": 1}
        words = 2 * (problem.num_ranks + 1) * capacity * packets
        self.signals = {"words": (words, torch.int64)}

    def launch(self, world: World, tensors: Sequence[torch.Tensor], eps: float) -> None:
        slot = world.workspace(self.key, self.buffers, self.signals, **self.num_slots)
        buffers = [getattr(slot, name) for name in self.buffers]
        words = [getattr(slot, name) for name in self.signals]
        given = (*tensors, *buffers, eps, *words, slot.arg, self.shape, self.tile, world.arg)
        self.function[self.grid](*given, *self.constants, **self.options)


def _check_tensors(world: World, x: Any, residual: Any, weight: Any) -> None:
    """Raises  ShapeError: tensors that do not fit together, or the world"""
    op = Problem.op
    for name, tensor in (("x", x), ("residual", residual), ("weight", weight)):
        layouts.check_tensor(op, name, tensor, world)
    if x.dim() != 2:
        raise ShapeError(f"{op}: x has shape {tuple(x.shape)}; it must have two dimensions")
    for name, tensor, shape in (("residual", residual, x.shape), ("weight", weight, x.shape[1:])):
        if tensor.shape != shape or tensor.dtype != x.dtype:
            raise ShapeError(
                f"{op}: {name} is {tensor.dtype}{tuple(tensor.shape)}; with x of {x.dtype}"
                f"{tuple(x.shape)} it must be {x.dtype}{tuple(shape)}"
            )


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors on the CPU, the same for one seed on every machine; x differs by rank."""
    generator = torch.Generator().manual_seed(seed)
    residual = torch.randn(problem.m, problem.n, generator=generator).to(problem.torch_dtype)
    weight = torch.randn(problem.n, generator=generator).to(problem.torch_dtype)
    x = _lanes.random_rows(problem, rank, problem.m, seed)
    return {"x": x, "residual": residual, "weight": weight}


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    return all_reduce_rms_norm(
        inputs["x"], inputs["residual"], inputs["weight"], world=world, config=config
    )


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or choose(problem, target)
    config.check(problem, target)
    if not config.is_fused:
        return
    element = f"*{DTYPES[problem.dtype].triton}"
    if config.by_packets:
        fn, name, shape = all_reduce_rms_norm_packets, "shape", Rows
    else:
        fn, name, shape = source.load(KERNEL).plain, "parts", partition.Parts
    tensors = ("x", "residual", "weight", "normed", "total", "partials", "gathered")
    words = ("partials_ready", "sums_ready", "words")
    types = {**dict.fromkeys(tensors, element), **dict.fromkeys(words, "*i64"), "eps": "fp32"}
    constants = {"tile": config.cut.tile(problem)}
    if config.by_packets:
        constants["two_shot"] = config.transport == "two_shot"
    yield _records.record(
        fn, f"{problem.op}.{config.transport}", problem.num_ranks, types, tuples={name: shape},
        constants=constants, options=config.cut.options(problem, target),
        aligned=(f"{name}.n",) if problem.n % 16 == 0 else (),
    )  # fmt: skip


def fake(
    problem: Problem, inputs: Mapping[str, Any], rank: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results' shape and dtype, without their values."""
    one = torch.empty((problem.m, problem.n), dtype=problem.torch_dtype, device="meta")
    return one, one.clone()


op = Op(
    name="all_reduce_rms_norm",
    summary="normed, total of sum(x over ranks) + residual, on every rank",
    problem=Problem,
    config=Config,
    make_problem=partial(_lanes.make_problem, Problem),
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    default_shape={"m": 64, "n": 256},
    smallest={"m": 2, "n": 16},
    smallest_config={"tile_m": 1},
    trials=trials({"m": 14, "n": 24}),
    awkward_shapes=(
        (4, {"m": 97, "n": 96}),
        (3, {"m": 29, "n": 7}),
        (2, {"m": 1, "n": 1}),
        (1, {"m": 40, "n": 48}),
        (8, {"m": 9, "n": 5}),
        (4, {"m": 0, "n": 16}),
    ),
    baselines=_baselines.ALL_REDUCE_RMS_NORM,
    fake=fake,
    backward=(),
    takes_nodes=True,
    composed=(UNFUSED, LIBRARY),
)
