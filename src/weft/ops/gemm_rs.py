"""GEMM, then reduce-scatter, as one operator: out = own rows of sum over ranks (A[m, k] @ B[k, n]).

Every rank has all m rows of A and a part of k, and gets the sums of its shard of the rows, which
are split as torch.chunk splits them: shards may be ragged, or empty. Sums are in fp32; other ranks'
shares travel in the result's dtype, and are added in the order rank + 1, + 2, ...

Plan, `push`: one kernel on each rank, the GEMM template with these hooks (weft.tiles.weave)
    order     tiles of the other ranks' rows first; own ones between them, each some time after
              the others have come to it; own ones last
    emit      another rank's tile -> this rank's part of that one's `partials`; own -> out
    announce  tells that rank
    combine   an own tile: waits until every other rank's share of it has come, and adds them
So shares travel beneath the products of the tiles behind them, and the sum costs a rank nothing but
reading them in the last tiles' epilogue. No barrier, no second kernel.
Plan, `reduce_scatter` and `nccl`: cuBLAS, then weft's own or the library's; nothing is fused.

Signals (all are SET to the call's epoch e, read on the device)
    partials_ready[tile, part, src]   src's share of this own tile, or of this part of it, is here.
                                      By src; each is waited for in the call that sets it
    summed[2 * program + consumer]    local: sums for another program's tile are there       (sm90)
    slot_free, epoch, ticket          the slot's; the last program moves them
Tiles without rows are signalled too.

Limits  A is row-major and has the same m and k's dtype on all ranks; B is [k, n] or a transposed
        [n, k]; the template for Hopper needs all ranks on one node
Source  the design's section 4; FLUX for the order
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import weft.language as wl
from weft.base.card import Op, Trial, trials
from weft.base.dtypes import DTYPES
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.language import slots
from weft.ops import _baselines, _by_library, _lanes, _products
from weft.ops.reduce_scatter import reduce_scatter
from weft.tiles import gemm, gemm_sm90, weave

# Rows of a rank from which the kernel fills its tiles (2 x H200: at 256 rows of n 8192, k 2048 it
# takes 52 us, cuBLAS and a reduce-scatter 54).
FUSED_ROWS = 128


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32."""
    total = _products.total(inputs)
    return [total[slice(*problem.shard(rank))] for rank in range(problem.num_ranks)]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_products.Problem):
    """m rows over all ranks, n columns and k of each rank; a rank's result is its shard."""

    op = "gemm_rs"

    def result_rows(self, rank: int) -> tuple[int, int]:
        return self.shard(rank)


@dataclass(frozen=True)
class Config(_products.Config):
    """`transport` as the Plan says."""

    op = "gemm_rs"
    unfused = ("reduce_scatter",)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    unfused = Config(transport="reduce_scatter")
    is_small = problem.rows < FUSED_ROWS and target.backend != "emu"
    if is_small or len(problem.nodes) > 1:
        yield unfused
    yield from _products.fused(Config, problem, target)
    if not (is_small or len(problem.nodes) > 1):
        yield unfused
    if target.backend == "cuda" and problem.is_even:
        yield Config(transport=_products.LIBRARY)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The program


class Woven(NamedTuple):
    """Arguments of the hooks; also a weave.Move."""

    c: Any
    partials: Any
    partials_ready: Any
    e: Any
    rank: Any
    parts: Any
    world: Any


@triton.jit
def await_partials(at, part, args):
    """Until every other rank's share of this part of an own tile has come."""
    for hop in range(1, args.world.num_ranks):
        source = (args.rank + hop) % args.world.num_ranks
        word = weave.word_of(
            args.partials_ready, at, part, source, args.world.num_ranks, args.parts
        )
        wl.wait(word, args.e, world=args.world)  # pairs with announce_part


@triton.jit
def announce_part(at, part, args):
    """The owner learns that this part of its tile is there. args: Woven"""
    if at.owner != args.rank:
        ranks = args.world.num_ranks
        word = weave.word_of(args.partials_ready, at, part, args.rank, ranks, args.parts)
        wl.notify(args.world, word, args.e, to=at.owner, op=wl.SignalOp.SET)


@triton.jit
def combine(at, value, tile, args):
    """args: Woven"""
    if at.owner == args.rank:
        for part in range(args.parts.words):
            await_partials(at, part, args)
        value = weave.add_partials(at, value, tile, args)
    return value


@triton.jit
def _emit(at, value, tile, args):
    """args: Woven"""
    if at.owner == args.rank:
        weave.store_owned(args.c, at, value, tile, args.parts)
    else:
        weave.push(at, value, tile, args)


@triton.jit
def announce_whole(at, part, args):
    """A tile is stored in one here, but its owner may wait for it in parts. args: Woven"""
    for each in range(args.parts.words):
        announce_part(at, each, args)


@triton.jit
def gemm_rs_multiply(a, b, c, partials, partials_ready, slot, shape, parts, tile, world):
    """The GEMM template with this operator's hooks."""
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    gemm.gemm(
        b, shape, tile, parts.tiles_m * world.num_ranks, tl.program_id(0), tl.num_programs(0),
        weave.scattered, weave.Scatter(rank, parts), weave.read_owned, weave.Operand(a, parts),
        # Written out each time: a variable would make numbers of the world's constants.
        _emit, Woven(c, partials, partials_ready, e, rank, parts, world),
        combine, Woven(c, partials, partials_ready, e, rank, parts, world),
        announce_whole, Woven(c, partials, partials_ready, e, rank, parts, world),
    )  # fmt: skip
    slots.slot_finish(world, slot, e, tl.num_programs(0))


@gluon.jit
def combine_chunk(at, row, column, value, args):
    """As `combine`: waits before the first chunk of a consumer's part. args: Woven"""
    if at.owner == args.rank:
        if column == at.i_n * args.parts.tile_n:
            await_partials(at, (row - at.i_m * args.parts.tile_m) // value.shape[0], args)
        value = weave.add_partial_chunks(at, row, column, value, args)
    return value


class Described(NamedTuple):
    """Arguments of what emits chunks: as Woven, where c and the peers are descriptors."""

    c: Any
    partials: Any
    rank: Any
    peers: Any
    parts: Any
    world: Any


@gluon.jit
def _store_own(at, row, column, chunk, args):
    if at.row < at.end:
        own_row = at.row + row - at.i_m * args.parts.tile_m
        gemm_sm90.store_tile(args.c, [own_row, column], chunk)


@gluon.jit
def _emit_chunk(at, row, column, chunk, args):
    """args: Described"""
    if at.owner == args.rank:
        _store_own(at, row, column, chunk, args)
    else:
        weave.push_chunk(at, row, column, chunk, args)


@gluon.jit
def _emit_by_tma(at, row, column, chunk, args):
    """args: Described"""
    if at.owner == args.rank:
        _store_own(at, row, column, chunk, args)
    else:
        weave.send_chunk(at, row, column, chunk, args.peers, args)


@gluon.jit
def gemm_rs_multiply_sm90(a, b, c, peer_1, peer_2, peer_3, peer_4, peer_5, peer_6, peer_7, partials,
                          partials_ready, sums, summed, slot, shape, parts, world,
                          tile_m: gl.constexpr, tile_n: gl.constexpr, tile_k: gl.constexpr,
                          stages: gl.constexpr, b_is_nk: gl.constexpr,
                          by_tma: gl.constexpr):  # fmt: skip
    """The same with the template for Hopper; operands and peers are descriptors."""
    rank = wl.rank(world).to(gl.int32)
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    order: gl.constexpr = weave.scattered
    ready: gl.constexpr = weave.read_owned
    emit: gl.constexpr = _emit_by_tma if by_tma else _emit_chunk
    add: gl.constexpr = combine_chunk
    announce: gl.constexpr = announce_part
    peers = (peer_1, peer_2, peer_3, peer_4, peer_5, peer_6, peer_7)
    gemm_sm90.gemm(
        a, b, c, shape, parts.tiles_m * world.num_ranks, gl.program_id(0), gl.num_programs(0),
        gemm_sm90.Shared(sums, summed, e, world),
        tile_m, tile_n, tile_k, stages, gemm_sm90.CHUNK_N, b_is_nk,
        order, weave.Scatter(rank, parts), ready, weave.Operand(a, parts),
        emit, Described(c, partials, rank, peers, parts, world),
        add, Woven(c, partials, partials_ready, e, rank, parts, world),
        announce, Woven(c, partials, partials_ready, e, rank, parts, world), late=by_tma,
    )  # fmt: skip
    slots.slot_finish(world, slot, e, gl.num_programs(0))


PROGRAM = _products.Program(
    gemm_rs_multiply, gemm_rs_multiply_sm90, ("partials", "partials_ready"), peers=("partials",)
)


# ---------------------------------------------------------------------------------------------
# The host


def gemm_rs(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    world: Any,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' products. Collective.

        out = (a of rank 0 @ b of rank 0 + a of rank 1 @ b of rank 1 + ...)[rows of this rank]

    Shapes  a: [m, k], contiguous; b: [k, n], contiguous or a transposed [n, k]; out: [rows of this
            rank, n], rows split as torch.chunk splits m
    Dtypes  all alike, float16, bfloat16 or float32; sums in fp32, other ranks' shares rounded once
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    call = _lanes.find_call(
        world, "gemm_rs", (a, b, out), (config,), lambda: _make_call(world, a, b, config, out)
    )
    if out is None:
        out = torch.empty(call.out_shape, dtype=a.dtype, device=a.device)
    world.operator_call(call.name)
    if call.is_empty:
        return out.zero_()
    if call.is_fused:
        call.run(world, a, b, out)
    elif call.config.transport == _products.LIBRARY:
        _by_library.reduce_scatter(world, call.product(world, a, b), out)
    else:
        reduce_scatter(call.product(world, a, b), world=world, out=out)
    return out


def _make_call(world: Any, a: Any, b: Any, config: Any, out: Any) -> _products.Call:
    problem = _products.problem_of(Problem, world, a, b, out)
    config = config or choose(problem, world.target)
    config.check(problem, world.target)
    buffers = {"partials": ((problem.num_ranks, problem.rows, problem.n), problem.torch_dtype)}
    signals = {"partials_ready": (config.num_words(problem, world.target), torch.int64)}
    return _products.Call(world, problem, config, PROGRAM, buffers, signals)


# ---------------------------------------------------------------------------------------------
# The card


def make_problem(
    num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    return Problem(shape["m"], shape["n"], num_ranks, dtype, nodes, shape["k"])


def run(
    world: Any, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    return gemm_rs(inputs["a"], inputs["b"], world=world, config=config)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or next(_products.fused(Config, problem, target))
    config.check(problem, target)
    if config.is_fused:
        arrays = {"partials": f"*{DTYPES[problem.dtype].triton}", "partials_ready": "*i64"}
        yield _products.record(problem, config, target, PROGRAM, arrays)


def fake(problem: Problem, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The first rank's result: its shape and dtype, without its values."""
    return torch.empty((problem.rows, problem.n), dtype=problem.torch_dtype, device="meta")


op = Op(
    name="gemm_rs",
    summary="out = rows of this rank of sum(A[m, k] @ B[k, n] over ranks)",
    problem=Problem,
    config=Config,
    make_problem=make_problem,
    make_inputs=_products.make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    default_shape={"m": 256, "n": 256, "k": 256},
    smallest={"m": 32, "n": 16, "k": 16},
    trials=(
        *trials({"m": 56, "n": 24, "k": 16}),
        # More tiles than one to a rank, of which the last has no rows.
        Trial((2,), {"m": 70, "n": 40, "k": 16}, _products.PUSH),
    ),
    awkward_shapes=(
        (4, {"m": 388, "n": 96, "k": 64}),
        (3, {"m": 291, "n": 70, "k": 50}),
        (2, {"m": 2, "n": 64, "k": 64}),
        (1, {"m": 40, "n": 48, "k": 32}),
        (4, {"m": 1, "n": 32, "k": 32}),
        (4, {"m": 9, "n": 16, "k": 16}),
        (4, {"m": 0, "n": 16, "k": 16}),
    ),
    dtypes=_products.SUPPORTED,
    baselines=_baselines.GEMM_RS,
    fake=fake,
    takes_nodes=True,
)
