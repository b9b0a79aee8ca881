"""All-reduce, residual and RMS norm as one operator: total = sum(x over ranks) + residual.

    normed = total / sqrt(mean over columns of total^2 + eps) * weight

Every rank passes all m rows of x, and the same residual and weight, and gets all rows of both
results, the same bits everywhere: what stands between the two halves of a decoder layer.

Plan: one kernel on each rank, rows tile by tile in the order and with the moves of weft.tiles.weave
    another rank's rows   of x -> this rank's part of the owner's `partials`
    own rows              wait until every other rank's share has come; sums in fp32, own share
                          first, then rank + 1, + 2, ...; + residual, rounded once -> total, and
                          every other rank's `gathered`; norm -> normed
    then                  the others' rows, as they come: gathered -> total, and their norm
So the residual is added once, and norms are made where they are wanted: they cost less than their
way. Plan, `all_reduce`: weft's all-reduce, then torch; nothing is fused.

Signals (all are SET to the call's epoch e, read on the device)
    partials_ready[tile, src]    src's share of this own tile is here. By src
    sums_ready[tile, owner]      the owner's total of this tile is in `gathered` here. By the owner
    slot_free, epoch, ticket     the slot's; the last program moves them

Limits  x and residual are contiguous [m, n]; a row is one tile: n up to 65536
Source  the design's section 4; TensorRT-LLM's fused all-reduce
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.card import Op, trials
from weft.base.dtypes import DTYPES
from weft.base.errors import ConfigError, ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.language import slots
from weft.language.world_arg import SlotArg, WorldArg, language_version
from weft.ops import _lanes
from weft.ops.all_reduce import all_reduce
from weft.ops.gemm_ar import announce_whole, await_sums
from weft.ops.gemm_rs import await_partials
from weft.tiles import weave
from weft.tiles.gemm import Tile

SUPPORTED = ("float16", "bfloat16", "float32")
PUSH, UNFUSED = "push", "all_reduce"
EPS = 1e-6
MOST_COLUMNS = 1 << 16
# Elements that a program has in registers at once.
TILE_ELEMENTS = 1 << 13


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All ranks at once: sums in fp32 in the order of ranks, rounded once."""
    total = inputs[0]["x"].float()
    for one in inputs[1:]:
        total = total + one["x"].float()
    total = (total + inputs[0]["residual"].float()).to(problem.torch_dtype)
    return [(_norm(total, inputs[0]["weight"], EPS), total) for _ in inputs]


def _norm(total: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    rows = total.float()
    scale = torch.rsqrt(rows.square().mean(1, keepdim=True) + eps)
    return (rows * scale * weight.float()).to(total.dtype)


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_lanes.Rows):
    """m rows of n elements on every rank."""

    op = "all_reduce_rms_norm"
    dtypes = SUPPORTED

    @property
    def flops(self) -> int:
        """Of one rank."""
        return (self.num_ranks - 1) * self.rows * self.n + 4 * self.m * self.n


@dataclass(frozen=True)
class Config:
    """`transport` as the Plan says. Units  tile_m: rows that a program has at a time"""

    transport: str = PUSH
    tile_m: int = 1
    num_warps: int = 8

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem"""
        if self.transport not in (PUSH, UNFUSED):
            told = f"transport={self.transport!r}; it is {PUSH} or {UNFUSED}"
            raise ConfigError(f"all_reduce_rms_norm: {told}")
        if self.tile_m < 1 or self.tile_m & (self.tile_m - 1):
            told = f"tile_m={self.tile_m}; it must be a power of two"
            raise ConfigError(f"all_reduce_rms_norm: {told}")
        if self.transport == PUSH and problem.n > MOST_COLUMNS:
            told = f"n={problem.n}; a row is one tile, of up to {MOST_COLUMNS} columns"
            raise ConfigError(f"all_reduce_rms_norm: {told}: take transport={UNFUSED!r}")

    def parts(self, problem: Problem, target: Target) -> weave.Parts:
        """How rows are cut: other ranks' tiles first, own ones behind them."""
        tiles_m = ceil(problem.rows / self.tile_m)
        block = _lanes.power_of_two(problem.n)
        others = (problem.num_ranks - 1) * tiles_m
        sizes = (problem.m, problem.n, problem.rows, self.tile_m, block, tiles_m)
        return weave.Parts(*sizes, 1, 1, others, tiles_m, tiles_m)

    def tile(self, problem: Problem) -> Tile:
        return Tile(self.tile_m, _lanes.power_of_two(problem.n), 1, False, False, True)

    def grid(self, problem: Problem, target: Target) -> int:
        """Programs: all of them are resident."""
        tiles = problem.num_ranks * ceil(problem.rows / self.tile_m)
        return max(1, min(tiles, target.num_sms, 3 if target.backend == "emu" else tiles))


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    if problem.n <= MOST_COLUMNS:
        fits = max(1, TILE_ELEMENTS // _lanes.power_of_two(problem.n))
        # Rows enough for all SMs come before larger messages.
        wanted = _lanes.power_of_two(max(1, problem.m // target.num_sms))
        yield Config(tile_m=2 if target.backend == "emu" else min(fits, wanted))
    yield Config(transport=UNFUSED)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The program


class Woven(NamedTuple):
    """What gemm_ar's hooks take, and a weave.Move."""

    partials: Any
    gathered: Any
    partials_ready: Any
    sums_ready: Any
    e: Any
    rank: Any
    parts: Any
    world: Any


@triton.jit
def _store_norm(normed, total, weight, eps, offset, mask, n, tile):
    """The norm of a tile's rows, of the total as it was rounded."""
    rows = total.to(normed.dtype.element_ty).to(tl.float32)
    scale = tl.rsqrt(tl.sum(rows * rows, axis=1) / n + eps)
    j = tl.arange(0, tile.n)
    gain = tl.load(weight + j, mask=j < n, other=0.0).to(tl.float32)
    value = rows * scale[:, None] * gain[None, :]
    tl.store(normed + offset, value.to(normed.dtype.element_ty), mask=mask)


@triton.jit
def all_reduce_rms_norm_rows(x, residual, weight, normed, total, partials, gathered, partials_ready,
                             sums_ready, slot, parts, eps, tile, world):  # fmt: skip
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    # weft: equivalent-mutant drop, relax-acquire, value-1, count-1 of wait: as gemm_ar says, whose
    # signals these are
    slots.slot_wait_free(world, slot, e)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    num_m = parts.tiles_m * world.num_ranks
    for i in range(program, num_m, num_programs):
        at = weave.scattered(i, num_m, 1, weave.Scatter(rank, parts))
        offset, mask = weave.cells(at, tile, parts)
        offset += weave.place_of(at.owner, at, parts)
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        if at.owner == rank:
            # Written out each time: a variable would make numbers of the world's constants.
            await_partials(
                at, 0, Woven(partials, gathered, partials_ready, sums_ready, e, rank, parts, world)
            )
            value = weave.add_partials(at, value, tile, weave.Move(partials, rank, parts, world))
            value += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
            weave.spread(gathered, at, value, tile, weave.Move(partials, rank, parts, world))
            tl.store(total + offset, value.to(total.dtype.element_ty), mask=mask)
            _store_norm(normed, value, weight, eps, offset, mask, parts.n, tile)
        else:
            weave.push(at, value, tile, weave.Move(partials, rank, parts, world))
        announce_whole(
            at, 0, Woven(partials, gathered, partials_ready, sums_ready, e, rank, parts, world)
        )
    for i in range(program, num_m, num_programs):
        at = weave.scattered(i, num_m, 1, weave.Scatter(rank, parts))
        if at.owner != rank:
            await_sums(
                at, Woven(partials, gathered, partials_ready, sums_ready, e, rank, parts, world)
            )
            offset, mask = weave.cells(at, tile, parts)
            offset += weave.place_of(at.owner, at, parts)
            value = tl.load(gathered + offset, mask=mask, other=0.0)
            tl.store(total + offset, value, mask=mask)
            _store_norm(normed, value, weight, eps, offset, mask, parts.n, tile)
    # weft: equivalent-mutant swap of atomic: credits are implied, as said above
    # weft: equivalent-mutant relax-release, value+1 of notify: as said above
    slots.slot_finish(world, slot, e, num_programs)


# ---------------------------------------------------------------------------------------------
# The host


def all_reduce_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    *,
    world: Any,
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
    call = _lanes.find_call(
        world, "all_reduce_rms_norm", (x, residual, weight), (config,),
        lambda: _Call(world, x, residual, weight, config),
    )  # fmt: skip
    normed, total = torch.empty_like(x), torch.empty_like(x)
    world.operator_call(call.name)
    if call.problem.is_empty:
        return normed, total
    if call.config.transport == UNFUSED:
        all_reduce(x, world=world, out=total)
        total += residual
        return _norm(total, weight, eps), total
    call.launch(world, (x, residual, weight, normed, total), eps)
    return normed, total


class _Call:
    """What calls with tensors like these share on one rank."""

    def __init__(self, world: Any, x: Any, residual: Any, weight: Any, config: Any) -> None:
        op = "all_reduce_rms_norm"
        for name, tensor in (("x", x), ("residual", residual), ("weight", weight)):
            _lanes.check_tensor(op, name, tensor, world)
        if x.dim() != 2:
            raise ShapeError(f"{op}: x has shape {tuple(x.shape)}; it must have two dimensions")
        for name, tensor, shape in (
            ("residual", residual, x.shape),
            ("weight", weight, x.shape[1:]),
        ):
            if tensor.shape != shape or tensor.dtype != x.dtype:
                raise ShapeError(
                    f"{op}: {name} is {tensor.dtype}{tuple(tensor.shape)}; with x of {x.dtype}"
                    f"{tuple(x.shape)} it must be {x.dtype}{tuple(shape)}"
                )
        m, n = x.shape
        nodes = _lanes.nodes_of(world)
        self.problem = problem = Problem(m, n, world.num_ranks, str(x.dtype), nodes)
        self.config = config = config or choose(problem, world.target)
        config.check(problem, world.target)
        self.name = f"{op} m={m},n={n} {problem.dtype} {config}"
        self.parts = config.parts(problem, world.target)
        self.grid = (config.grid(problem, world.target), 1, 1)
        self.tile = config.tile(problem).as_constexpr()
        rows = self.parts.tiles_m * problem.num_ranks
        shape, dtype = (problem.num_ranks, problem.rows, n), problem.torch_dtype
        self.buffers = {"partials": (shape, dtype), "gathered": (shape, dtype)}
        self.signals = {"partials_ready": (rows, torch.int64), "sums_ready": (rows, torch.int64)}

    def launch(self, world: Any, tensors: Sequence[torch.Tensor], eps: float) -> None:
        slot = world.workspace("all_reduce_rms_norm", self.buffers, self.signals)
        arrays = [getattr(slot, name) for name in (*self.buffers, *self.signals)]
        all_reduce_rms_norm_rows[self.grid](
            *tensors, *arrays, slot.arg, self.parts, eps, self.tile, world.arg,
            num_warps=self.config.num_warps,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The card


def make_problem(
    num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    return Problem(shape["m"], shape["n"], num_ranks, dtype, nodes)


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors on the CPU, the same for one seed on every machine; x differs by rank."""
    generator = torch.Generator().manual_seed(seed)
    residual = torch.randn(problem.m, problem.n, generator=generator).to(problem.torch_dtype)
    weight = torch.randn(problem.n, generator=generator).to(problem.torch_dtype)
    x = _lanes.random_rows(problem, rank, problem.m, seed)
    return {"x": x, "residual": residual, "weight": weight}


def run(
    world: Any, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
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
    if config.transport == UNFUSED:
        return
    element = f"*{DTYPES[problem.dtype].triton}"
    fn, fields = all_reduce_rms_norm_rows, weave.Parts._fields
    tensors = ("x", "residual", "weight", "normed", "total", "partials", "gathered")
    types = {
        **dict.fromkeys(tensors, element),
        "partials_ready": "*i64",
        "sums_ready": "*i64",
        "slot": ["*i64", "*i32", "*i64"],
        "parts": ["i32"] * len(fields),
        "eps": "fp32",
        "tile": ["constexpr"] * len(Tile._fields),
        "world": ["*i64", "constexpr", "constexpr"],
    }
    constants = {
        "slot": SlotArg(None, None, None),
        "parts": weave.Parts(*[None] * len(fields)),
        "tile": config.tile(problem),
        "world": WorldArg(None, problem.num_ranks, language_version()),
    }
    even = ("parts.n",) if problem.n % 16 == 0 else ()
    yield (
        fn,
        KernelRecord(
            name="all_reduce_rms_norm.rows",
            signature={name: types.get(name, "constexpr") for name in fn.arg_names},
            constants=constants,
            options={"num_warps": config.num_warps},
            divisible_by_16=(*tensors, "partials_ready", "sums_ready", *even),
        ),
    )


def fake(problem: Problem, inputs: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """The results' shape and dtype, without their values."""
    one = torch.empty((problem.m, problem.n), dtype=problem.torch_dtype, device="meta")
    return one, one.clone()


op = Op(
    name="all_reduce_rms_norm",
    summary="normed, total of sum(x over ranks) + residual, on every rank",
    problem=Problem,
    config=Config,
    make_problem=make_problem,
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
    dtypes=SUPPORTED,
    fake=fake,
    takes_nodes=True,
)
