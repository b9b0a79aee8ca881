"""All-gather, then GEMM, as one operator: C[m, n] = all_gather(A over rows)[m, k] @ B[k, n].

m is global and its rows are split as torch.chunk splits them: ceil(m / num_ranks) to a rank, the
last ranks may have fewer, or none. n and k are per rank. Every rank ends with its own C.

Plan    the compiler's, of `program` below (`weft explain ag_gemm`): tiles of own rows come first,
        read in place; those of rank + 1, + 2, ... as their rows arrive. ce_push: copy engines
        store rows in peers' slots; sm_push: communication CTAs of the product do; relay: a kernel
        beside it, by which rows cross to each other node once; ll, for small m: LL packets bring
        the rows, tiles/gathered_gemm.py; all_gather, nccl: weft's or NCCL's, then cuBLAS
Signals the plan's: a word for each chunk of a rank's rows, SET to the call's epoch. Scales of fp8
        rows are stored in all slots before the rows, whose words announce them too
Limits  n and k are the same on all ranks; A is row-major, B is [k, n] or a transposed [n, k]
Source  the design's section 4; FLUX, TileLink and torch's async-TP for the idea
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

from weft.base.card import Op, Trial, trials
from weft.compiler import frontend, gather_schedules
from weft.compiler.gather_schedules import CE_PUSH, LL, RELAY, UNFUSED, Config, candidates, choose
from weft.ops import _baselines
from weft.plan import described, gathered, operations, scales
from weft.plan.call_cache import by_layout, find_call
from weft.plan.choices import given_or_chosen
from weft.plan.gathered import Problem, make_inputs, problem_of
from weft.plan.runner import is_as_recorded
from weft.runtime.world import World


def program(a: Any, b: Any, dtype: str, scaling: str) -> Any:
    return frontend.matmul(frontend.all_gather(a), b, dtype=dtype, scaling=scaling)


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32 on the CPU."""
    rows = torch.cat([scales.in_fp32(problem, one, "a") for one in inputs])
    return [rows @ scales.in_fp32(problem, one, "b") for one in inputs]


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
    # A call that is recorded is another one, where no configuration is given.
    rest = (m, config is None and is_as_recorded(world), config)
    tensors = (a, b, out, scale_a, scale_b)
    call = find_call(world, "ag_gemm", tensors, rest, _make_call, by_layout)
    return call(out, **scales.named(a, b, scale_a, scale_b))


def _make_call(
    world: World, a: Any, b: Any, out: Any, scale_a: Any, scale_b: Any, m: int | None,
    is_recorded: bool, config: Config | None,
) -> gathered.Call:  # fmt: skip
    problem = problem_of(world, a, b, m, out, scale_a, scale_b)
    chosen = given_or_chosen(world, problem, config, is_recorded)
    is_free = config is None and not is_recorded
    other = given_or_chosen(world, problem, None, True) if is_free else None
    tensors = scales.named(a, b, scale_a, scale_b)
    return gathered.Call(world, problem, chosen, tensors, program, other)


def run(world: World, problem: Problem, inputs: Mapping[str, Any], config: Config | None = None):
    given = scales.room_for(problem, problem.result, inputs)
    return ag_gemm(**inputs, **given, world=world, m=problem.m, config=config)


SHAPE = {"m": 56, "n": 24, "k": 16}
CHUNKS = {0: {"chunks": 2}, 2: {"chunks": 1}}  # by size
op = Op(
    name="ag_gemm",
    summary="C[m, n] = all_gather(A over rows)[m, k] @ B[k, n]",
    problem=Problem,
    config=Config,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    program=partial(gathered.traced, program),
    candidates=candidates,
    choose=choose,
    predict=gather_schedules.predict,
    # What torch's product needs is there when a call is first recorded.
    records_as=lambda eager, recorded: recorded in (eager, Config(transport=UNFUSED)),
    kernels=described.KernelsOf(run, make_inputs, candidates),
    default_shape={"m": 256, "n": 256, "k": 256},
    smallest={"m": 32, "n": 16, "k": 16},
    smallest_config={"pushers": 1},
    trials=(
        *trials(SHAPE),  # Tiles lie within a rank and across two.
        # Words of chunks without rows are the last ones that engines copy: they may come late, and
        # be those of another chunk where the next call has more.
        Trial((3,), SHAPE, CE_PUSH, calls=(2, 0) * 3, configs=CHUNKS),
        Trial((2, 1), SHAPE, RELAY, calls=(2, 0) * 3, configs=CHUNKS),
        # Tiles that programs share.
        Trial((2,), {"m": 8, "n": 24, "k": 48}, LL),
        # Inputs change as soon as a call is over; with edges of tiles to be copied, and without.
        Trial((3,), SHAPE, CE_PUSH, on_heap=True),
        Trial((2, 1), SHAPE | {"m": 48}, RELAY, on_heap=True, calls=(0, 0, 0, 1, 0, 1, 0)),
        Trial((2,), SHAPE | {"m": 64}, CE_PUSH, on_heap=True, calls=(0, 0, 0, 1, 0, 1, 0)),
    ),
    awkward_shapes=((4, {"m": 388, "n": 96, "k": 64}), (3, {"m": 291, "n": 70, "k": 50}),
                    *gathered.AWKWARD_SHAPES),
    dtypes=scales.SUPPORTED,
    baselines=_baselines.AG_GEMM,
    fake=gathered.fake,
    backward=("gemm_rs", "ag_wgrad"),
    takes_nodes=True,
    composed=(UNFUSED,),
)  # fmt: skip
