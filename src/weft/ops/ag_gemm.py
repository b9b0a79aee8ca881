"""All-gather, then GEMM, as one operator: C[m, n] = all_gather(A over rows)[m, k] @ B[k, n].

m is global and its rows are split as torch.chunk splits them: ceil(m / num_ranks) to a rank, the
last ranks may have fewer, or none. n and k are per rank. Every rank ends with its own C.

Plan, `ce_push` (copy engines carry the data to where it is needed)
    main    edges       where tiles straddle ranks: copies own rows of such tiles to the slot
    copy    take        returns when every rank's slot is free
            copies      per rank - 1, - 2, ... and chunk: own rows from `a` to that rank's slot,
                        and the word that says so
    main    multiply    all programs multiply: tiles of own rows first, read in place from `a`;
                        then those of rank + 1, + 2, ...
Plan, `sm_push` (SMs carry the data)
    main    multiply    feeders store own rows into every rank's slot; the last one of a chunk
                        signals it. All programs multiply as above
Plan, `ll` (few rows): _ag_gemm_small.py.
What moves rows is the executor's (plan/moving.py, plan/transfers.py); multiply is the GEMM template
with the hooks of tiles/gathered_gemm.py. A tile that straddles two ranks' rows reads the slot
alone, own rows included.

Signals (all are SET to the call's epoch e; e is read on the device, so nothing is frozen)
    rows_ready[src * chunks + c]    these rows of src are in this rank's slot. From a copy engine
                                    (ce_push), from rank src (sm_push), always for own rows
    summed[2 * program + half]      local: sums for another program's tile are there        (sm90)
    slot_free, epoch, ticket        the slot's; the last program of multiply moves them
    fed[rank * chunks + c]          local: how many pieces of a chunk have been stored for a rank
Chunks without rows are signalled too, so that any range of words may be waited for; where engines
copy the words, one program waits for all of them before the slot is given back.

fp8 operands have scales: those of A are stored in all slots by a launch before everything else,
push_scales (tiles/hooks/scales.py); words of rows tell of them too.

Limits  n and k are the same on all ranks; A is row-major, B is [k, n] or a transposed [n, k]
Source  the design's section 4; FLUX, TileLink and torch's async-TP for the idea
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import increment_version

from weft.base.card import Op, Trial, trials
from weft.base.errors import DtypeError, ShapeError
from weft.ops import _ag_gemm_scales, _baselines
from weft.ops._ag_gemm_call import Call, LibraryCall, SlotCall
from weft.ops._ag_gemm_config import (
    LIBRARY,
    LL,
    Config,
    candidates,
    choose,
)
from weft.ops._ag_gemm_problem import SUPPORTED, Problem
from weft.ops._ag_gemm_small import PacketCall
from weft.plan import call_cache, described, operations, problems
from weft.plan.runner import is_as_recorded
from weft.runtime.world import World


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32 on the CPU."""
    gathered = torch.cat([_in_fp32(problem, one, "a") for one in inputs])
    return [gathered @ _in_fp32(problem, one, "b") for one in inputs]


def _in_fp32(problem: Problem, inputs: Mapping[str, Any], name: str) -> torch.Tensor:
    """An operand as its scales have it."""
    operand = inputs[name].float()
    if problem.scaling:
        scale = inputs[f"scale_{name}"]
        operand *= _ag_gemm_scales.spread(scale, operand.shape, problem.scaling)
    return operand


# ---------------------------------------------------------------------------------------------
# The host


def ag_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    world: World,
    m: int | None = None,
    config: Config | None = None,
    out: torch.Tensor | None = None,
    scale_a: torch.Tensor | None = None,
    scale_b: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply the rows that all ranks hold together by this rank's B. Collective.

        out[m, n] = cat(a of rank 0, a of rank 1, ...) @ b

    Shapes  a: [rows of this rank, k], contiguous; b: [k, n], contiguous or a transposed [n, k];
            m defaults to out's rows, else to num_ranks * a's rows: pass it where shards differ.
            Scales as torch._scaled_mm takes them: one number each; or scale_a [rows of this rank,
            1] and scale_b [1, n]; or of blocks of 128, scale_a [rows, k / 128] and scale_b
            [k / 128, n / 128], rounded up
    Dtypes  a and b alike, float16, bfloat16, float32, float8_e4m3fn or float8_e5m2; out the same
            unless given, bfloat16 of fp8; scales of fp8 operands, in float32; sums in fp32
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if operations.is_asked(a, b):
        rows = m if out is None else m or out.shape[0]
        rest = {"m": rows, "scale_a": scale_a, "scale_b": scale_b, "config": config, "out": out}
        return operations.as_operation("ag_gemm", world, (a, b), **rest)
    call = call_cache.find_call(
        world, "ag_gemm", (a, b, out, scale_a, scale_b), (m, config), _make_call, _told
    )
    if out is None:
        out = torch.empty(call.out_shape, dtype=call.out_dtype, device=a.device)
    else:
        increment_version((out,))
    # Also said where there is nothing to do: a rank without rows that passes no m takes m for 0.
    world.operator_call(call.name, call.tensors)
    if call.is_empty:
        return out.zero_() if out.numel() else out
    if scale_a is None:
        call.run(world, a, b, out)
    else:
        call.run(world, a, b, out, (scale_a, scale_b))
    return out


def _told(world: World, tensors: Sequence[torch.Tensor | None], rest: tuple) -> tuple:
    """What tells calls apart: `b` may be transposed; where tensors lie is no matter here.

    A call that is recorded is another one, where no configuration is given.
    """
    a, b, out, scale_a, scale_b = tensors
    key = (
        rest, rest[-1] is None and is_as_recorded(world), a.shape, a.stride(), a.dtype,
        a.get_device(), b.shape, b.stride(), b.dtype, b.get_device(),
    )  # fmt: skip
    if out is scale_a is scale_b is None:
        return key
    for one in (out, scale_a, scale_b):
        if one is None:
            key += (None,)
        else:
            key += (type(one), one.shape, one.stride(), one.dtype, one.get_device())
    return key


def _make_call(
    world: World, a: Any, b: Any, out: Any, scale_a: Any, scale_b: Any, m: int | None,
    config: Config | None,
) -> Call:  # fmt: skip
    problem = problem_of(world, a, b, m, out, scale_a, scale_b)
    config = config or choose(problem, world.target, is_as_recorded(world))
    config.check(problem, world.target)
    if config.transport == LIBRARY:
        return LibraryCall(world, problem, config)
    if config.transport == LL:
        return PacketCall(world, problem, config)
    return SlotCall(world, problem, config)


def problem_of(
    world: World, a: Any, b: Any, m: int | None = None, out: Any = None, scale_a: Any = None,
    scale_b: Any = None,
) -> Problem:  # fmt: skip
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != 2:
            raise ShapeError(
                f"ag_gemm: {name} has shape {tuple(tensor.shape)}; it must have two dimensions"
            )
    (rows, k), (k_b, n) = a.shape, b.shape
    if k != k_b:
        raise ShapeError(f"ag_gemm: a has k={k} but b has k={k_b}; pass b as [k, n], not [n, k]")
    if a.dtype != b.dtype:
        raise DtypeError(f"ag_gemm: a is {a.dtype} but b is {b.dtype}; convert one of them")
    if not a.is_contiguous():
        raise ShapeError(
            f"ag_gemm: a of shape {tuple(a.shape)} has strides {a.stride()}; it must be "
            "contiguous: pass a.contiguous()"
        )
    if not b.is_contiguous() and not b.t().is_contiguous():
        raise ShapeError(
            f"ag_gemm: b of shape {tuple(b.shape)} has strides {b.stride()}; it must be "
            "contiguous, or a transposed contiguous [n, k]: pass b.contiguous()"
        )
    sized_by = out if m is None and out is not None and out.dim() else None
    if m is None:
        m = rows * world.num_ranks if sized_by is None else sized_by.shape[0]
    out_dtype = call_cache.out_dtype_of("ag_gemm", out)
    problem = Problem(
        m, n, k, world.num_ranks, str(a.dtype), out_dtype, not b.is_contiguous(),
        problems.nodes_of(world), _ag_gemm_scales.kind_of(a, b, (scale_a, scale_b)),
    )  # fmt: skip
    call_cache.check_shard("ag_gemm", "a", rows, problem, world, sized_by)
    if out is not None:
        call_cache.check_out("ag_gemm", out, problem.result, out.dtype, world)
    for name, tensor in (("a", a), ("b", b)):
        if tensor.device != world.device:
            raise ShapeError(
                f"ag_gemm: {name} is on {tensor.device} but the world on {world.device}; "
                f"move it there with .to(world.device)"
            )
    return problem


# ---------------------------------------------------------------------------------------------
# The card


def make_problem(
    num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    return Problem(shape["m"], shape["n"], shape["k"], num_ranks, dtype, nodes=nodes)


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's normal random tensors on the CPU: the same for one seed on every machine."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    if problem.scaling:
        return _ag_gemm_scales.quantised(problem, rank, generator)
    first, end = problem.shard(rank)
    dtype = getattr(torch, problem.dtype)
    a = torch.randn(end - first, problem.k, generator=generator).to(dtype)
    if problem.b_is_nk:
        b = torch.randn(problem.n, problem.k, generator=generator).to(dtype).t()
    else:
        b = torch.randn(problem.k, problem.n, generator=generator).to(dtype)
    return {"a": a, "b": b}


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    out = torch.empty(
        (problem.m, problem.n), dtype=getattr(torch, problem.out_dtype), device=inputs["a"].device
    )
    scales = {name: inputs.get(name) for name in ("scale_a", "scale_b")}
    return ag_gemm(
        inputs["a"], inputs["b"], world=world, m=problem.m, config=config, out=out, **scales
    )


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """The result's shape and dtype, without its values."""
    return torch.empty(
        (problem.m, problem.n), dtype=getattr(torch, problem.out_dtype), device="meta"
    )


TRIALS = (
    # Tiles lie within a rank and across two.
    *trials({"m": 56, "n": 24, "k": 16}),
    # Words of chunks without rows are the last ones that engines copy: they may come late, and be
    # those of another chunk where the next call has more.
    Trial(
        (3,),
        {"m": 56, "n": 24, "k": 16},
        "ce_push",
        calls=(2, 0, 2, 0, 2, 0),
        configs={0: {"chunks": 2}, 2: {"chunks": 1}},
    ),
    # Tiles that programs share.
    Trial((2,), {"m": 8, "n": 24, "k": 48}, "ll"),
    # Inputs change as soon as a call is over; with edges of tiles to be staged, and without.
    Trial((3,), {"m": 56, "n": 24, "k": 16}, "ce_push", on_heap=True),
    Trial((2,), {"m": 64, "n": 24, "k": 16}, "ce_push", on_heap=True, calls=(0, 0, 0, 1, 0, 1, 0)),
)

op = Op(
    name="ag_gemm",
    summary="C[m, n] = all_gather(A over rows)[m, k] @ B[k, n]",
    problem=Problem,
    config=Config,
    make_problem=make_problem,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=described.kernels_of(run, make_inputs, candidates),
    default_shape={"m": 256, "n": 256, "k": 256},
    smallest={"m": 32, "n": 16, "k": 16},
    smallest_config={"feeders": 1, "pieces": 2},
    trials=TRIALS,
    awkward_shapes=(
        (4, {"m": 388, "n": 96, "k": 64}),
        (3, {"m": 291, "n": 70, "k": 50}),
        (2, {"m": 2, "n": 64, "k": 64}),
        (1, {"m": 40, "n": 48, "k": 32}),
        (4, {"m": 1, "n": 32, "k": 32}),
        (4, {"m": 9, "n": 16, "k": 16}),
        (4, {"m": 0, "n": 16, "k": 16}),
    ),
    choose=choose,
    dtypes=SUPPORTED,
    baselines=_baselines.AG_GEMM,
    fake=fake,
    backward=("gemm_rs", "ag_wgrad"),
    takes_nodes=True,
)
