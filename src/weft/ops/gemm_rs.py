"""GEMM, then reduce-scatter, as one operator: out = own rows of sum over ranks (A[m, k] @ B[k, n]).

Every rank has all m rows of A and a part of k, and gets the sums of its shard of the rows, which
are split as torch.chunk splits them: shards may be ragged, or empty. Sums are in fp32; other ranks'
shares travel in the result's dtype, and are added in the order rank + 1, + 2, ...

Plan, `push`: one kernel on each rank, the GEMM template with these hooks (weft.tiles.hooks)
    order     tiles of the other ranks' rows first; own ones between them, each some time after
              the others have come to it; own ones last
    emit      another rank's tile -> this rank's part of that one's `partials`; own -> out
    announce  tells that rank
    combine   an own tile: waits until every other rank's share of it has come, and adds them
So shares travel beneath the products of the tiles behind them, and the sum costs a rank nothing but
reading them in the last tiles' epilogue. No barrier, no second kernel.
Plan, `put` (copy engines carry the shares; SMs store to no peer)
    main    _multiply   the GEMM template with these hooks
              order     chunk by chunk the parts of rank + 1, + 2, ..., own ones last
              emit      another rank's tile -> `kept`, here; own -> out
              announce  who stores the last tile of a chunk waits until the owner's slot is free,
                        and sets the chunk's token
              combine   an own tile: waits until its chunk of every other rank's share has come
    copy    per rank + 1, + 2, ... and chunk of columns: takes the chunk's token, puts the rows into
            that rank's `partials`, and the word that says so
Plan, `reduce_scatter` and `nccl`: cuBLAS, then weft's own or the library's; nothing is fused.

Signals (all are SET to the call's epoch e, read on the device)
    partials_ready[tile, part, src]   src's share of this own tile, or of this part of it, is here.
                                      By src; each is waited for in the call that sets it
    rows_ready[src * chunks + c]      put: src's engine has brought this chunk of its share
    told[dst * chunks + c]            put: here alone, what the engine copies as that word
    tokens[dst * chunks + c]          put, local: 0 -> 1 by the last tile's program, -> 0 by the
                                      engine's stream, which takes it
    stored[dst * chunks + c]          put, local: how many tiles of a chunk are stored
    summed[2 * program + half]        local: sums for another program's tile are there       (sm90)
    slot_free, epoch, ticket          the slot's; the last program moves them
Tiles and chunks without rows are signalled and waited for too: who has ended a call has all of its
words.

Limits  A is row-major and has the same m and k's dtype on all ranks; B is [k, n] or a transposed
        [n, k]; the template for Hopper needs all ranks on one node
Source  the design's section 4; FLUX for the order
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import increment_version

from weft.base.card import Op, Trial, trials
from weft.base.dtypes import DTYPES
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.ir import core
from weft.ops import _baselines, _by_library, _lanes, _operations, _products
from weft.ops._product_puts import PutCall
from weft.ops.reduce_scatter import reduce_scatter
from weft.runtime.world import World

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
    by_engines = (_products.PUT,)


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


def choose(problem: Problem, target: Target, is_recorded: bool = False) -> Config:
    """The configuration to take when nothing was measured: a pure function of these."""
    found = candidates(problem, target)
    return next(c for c in found if not (is_recorded and c.transport in Config.by_engines))


# ---------------------------------------------------------------------------------------------
# The program

# Hooks of the GEMM template; its kernels, plain and for Hopper, are composed of this
# (docs/composed_kernels.md).
KERNEL = core.parse("""\
program(gemm_rs_multiply)
a = param(operand)
b = param(operand)
c = param(operand, by='own rows of the result')
partials = param(pointer)
partials_ready = param(signals, by=kernel, to=kernel, announces=(partials,))
slot = param(slot, by=kernel, to=kernel)
world = param(world)
parts = mapping(static, (a,), cuts=part)
template(gemm, (128, 128, 64), formula='c = reduce_scatter(a @ b)')
credit(begin, slot)
hook(order, scatter, (parts,))
hook(ready, read_owned, (a, parts))
wait(combine, partials_ready, others, parts)
hook(combine, add_partials, (partials, parts))
hook(emit, store_own, (c, parts))
hook(emit, push, (partials, parts))
notify(announce, partials_ready, owner, parts)
finish(end, slot)
""")
PROGRAM = _products.Program(core.require(KERNEL), ("partials", "partials_ready"))

# The same where copy engines carry tiles.
PUT_KERNEL = core.parse("""\
program(gemm_rs_put_multiply)
a = param(operand)
kept = param(operand, by='tiles for the other ranks, which engines fetch')
b = param(operand)
c = param(operand, by='own rows of the result')
partials = param(pointer)
rows_ready = param(signals, by=engine, to=kernel, announces=(partials,))
stored = param(signals)
told = param(signals, by=kernel, to=engine)
tokens = param(signals, by=kernel, to=engine, announces=(kept,))
slot = param(slot, by=kernel, to=kernel)
world = param(world)
parts = mapping(static, (a,), cuts=part)
template(gemm, (128, 128, 64), formula='c = reduce_scatter(a @ b)')
hook(order, part_by_part, (parts,))
hook(ready, read_owned, (a, parts))
wait(combine, rows_ready, chunk, parts)
hook(combine, add_carried, (partials, parts))
hook(emit, store_own, (c, parts))
hook(emit, keep, (kept, parts))
hook(announce, count, (stored, parts))
credit(announce, slot)
notify(announce, told, here, parts, order=relaxed)
notify(announce, tokens, engine, parts)
finish(end, slot)
""")
PUT_ARRAYS = ("partials", "rows_ready", "stored", "told", "tokens")
PUT_PROGRAM = _products.Program(core.require(PUT_KERNEL), PUT_ARRAYS)


# ---------------------------------------------------------------------------------------------
# The host


def gemm_rs(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    world: World,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """This rank's rows of the sum of all ranks' products. Collective.

        out = (a of rank 0 @ b of rank 0 + a of rank 1 @ b of rank 1 + ...)[rows of this rank]

    Shapes  a: [m, k], contiguous; b: [k, n], contiguous or a transposed [n, k]; out: [rows of this
            rank, n], rows split as torch.chunk splits m
    Dtypes  all alike, float16, bfloat16 or float32; sums in fp32, other ranks' shares rounded once
    Sync    stream-ordered on the current stream; can be recorded, but not where the configuration
            says transport="put": a recorded call that names none takes another, and so do all
            where torch.use_deterministic_algorithms says so
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
            UsageError: a configuration that cannot be recorded
    """
    if _operations.is_asked(a, b):
        return _operations.as_operation("gemm_rs", world, (a, b), config=config, out=out)
    rest = (torch.are_deterministic_algorithms_enabled(), config)
    call = _lanes.find_call(world, "gemm_rs", (a, b, out), rest, _make_call)
    if out is None:
        out = torch.empty(call.out_shape, dtype=a.dtype, device=a.device)
    else:
        increment_version((out,))
    world.operator_call(call.name, call.tensors)
    if call.is_empty:
        return out.zero_()
    if call.is_fused:
        call.run(world, a, b, out)
    elif call.config.transport == _products.LIBRARY:
        _by_library.reduce_scatter(world, torch.mm(a, b), out)
    else:
        reduce_scatter(call.product(world, a, b), world=world, out=out)
    return out


def _make_call(
    world: World, a: Any, b: Any, out: Any, is_deterministic: bool, config: Any
) -> _products.Call:
    problem = _products.problem_of(Problem, world, a, b, out)
    chosen = config or choose(problem, world.target, is_recorded=is_deterministic)
    chosen.check(problem, world.target)
    if chosen.transport != _products.PUT:
        return _usual_call(world, problem, chosen)
    instead = None
    if config is None:
        instead = _usual_call(world, problem, choose(problem, world.target, is_recorded=True))
    return PutCall(world, problem, chosen, PUT_PROGRAM, instead)


def _usual_call(world: World, problem: Problem, config: Config) -> _products.Call:
    buffers = {"partials": ((problem.num_ranks, problem.rows, problem.n), problem.torch_dtype)}
    signals = {"partials_ready": (config.num_words(problem, world.target), torch.int64)}
    return _products.Call(world, problem, config, PROGRAM, buffers, signals)


# ---------------------------------------------------------------------------------------------
# The card


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    return gemm_rs(inputs["a"], inputs["b"], world=world, config=config)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or next(_products.fused(Config, problem, target))
    config.check(problem, target)
    if config.transport == _products.PUT:
        element = f"*{DTYPES[problem.dtype].triton}"
        arrays = dict.fromkeys(PUT_ARRAYS, "*i64") | {"partials": element}
        yield _products.record(problem, config, target, PUT_PROGRAM, arrays)
    elif config.is_fused:
        arrays = {"partials": f"*{DTYPES[problem.dtype].triton}", "partials_ready": "*i64"}
        yield _products.record(problem, config, target, PROGRAM, arrays)


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """A rank's result: its shape and dtype, without its values."""
    first, end = problem.shard(rank)
    return torch.empty((end - first, problem.n), dtype=problem.torch_dtype, device="meta")


op = Op(
    name="gemm_rs",
    summary="out = rows of this rank of sum(A[m, k] @ B[k, n] over ranks)",
    problem=Problem,
    config=Config,
    make_problem=partial(_products.make_problem, Problem),
    make_inputs=_products.make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    choose=choose,
    kernels=kernels,
    default_shape={"m": 256, "n": 256, "k": 256},
    smallest={"m": 32, "n": 16, "k": 16},
    trials=(
        *trials({"m": 56, "n": 24, "k": 16}),
        # More tiles than one to a rank, of which the last has no rows.
        Trial((2,), {"m": 70, "n": 40, "k": 16}, _products.PUSH),
        # Words may be those of another chunk where the next call has more.
        Trial(
            (3,),
            {"m": 56, "n": 32, "k": 16},
            _products.PUT,
            calls=(2, 0, 2, 0, 2, 0),
            configs={0: {"chunks": 2}, 2: {"chunks": 1}},
        ),
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
    baselines=_baselines.GEMM_RS,
    fake=fake,
    backward=("ag_gemm", "ag_wgrad"),
    takes_nodes=True,
    composed=Config.unfused,
)
