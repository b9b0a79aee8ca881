"""All-reduce, residual and RMS norm as one operator: total = sum(x over ranks) + residual.

    normed = total / sqrt(mean over columns of total^2 + eps) * weight

Every rank passes all m rows of x, and the same residual and weight, and gets all rows of both
results, the same bits everywhere: what stands between the two halves of a decoder layer.

Plan: a tensor program, `program_of`, which the compiler makes one kernel of.
    sm_push       the template for whole rows (weft.tiles.rows): another rank's rows of x go to
                  their owner, who sums them, own share first, adds the residual, rounds once, and
                  sends the total to all
    two_shot_ll   the same by LL packets (weft.tiles.row_packets), for small m; sums in rank order
    one_shot_ll   LL packets too: every rank gets all rows of x and sums them. One hop
    all_reduce    weft's all-reduce, then torch; nothing is fused
Of the two results `total` alone travels. Each rank makes the norm of a row from the same bits.

Signals: those of the generated kernel; `weft explain all_reduce_rms_norm --emit core` shows them.

Limits  x and residual are contiguous [m, n]; a row is one tile: n up to 32768; packets need all
        ranks on one node
Source  the design's section 4; TensorRT-LLM's fused all-reduce
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from weft.base import fields
from weft.base.card import Op, calling, trials
from weft.base.errors import ConfigError
from weft.base.target import Target
from weft.compiler import Partial, Replicate, Tensor, frontend, layouts
from weft.compiler.facts import Facts, Settings
from weft.compiler.passes.place import place
from weft.compiler.pipeline import Stages, overlap
from weft.ir.task import LL, Program
from weft.ops import _baselines
from weft.plan import described, operations, tuning_table
from weft.plan.call_cache import find_call
from weft.plan.choices import given_or_chosen
from weft.plan.problems import Rows, nodes_of, random_rows, sum_over_ranks
from weft.plan.runner import PlanRunner
from weft.runtime.world import World
from weft.tiles import rows

SM_PUSH, UNFUSED = "sm_push", "all_reduce"
TRANSPORTS = (SM_PUSH, *LL, UNFUSED)
FORMS = {"x": "m n", "residual": "m n", "weight": "n"}
EPS = 1e-6


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All ranks at once: sums in fp32 in the order of ranks, rounded once."""
    total = (sum_over_ranks(inputs) + inputs[0]["residual"].float()).to(problem.torch_dtype)
    scale = torch.rsqrt(total.float().square().mean(1, keepdim=True) + EPS)
    normed = total.float() * scale * inputs[0]["weight"].float()
    return [(normed.to(problem.torch_dtype), total) for _ in inputs]


@dataclass(frozen=True)
class Problem(Rows):
    """m rows of n elements on every rank."""

    op = "all_reduce_rms_norm"

    @property
    def flops(self) -> int:
        """Of one rank."""
        return (self.num_ranks - 1) * self.rows * self.n + 4 * self.m * self.n


@dataclass(frozen=True)
class Config:
    """`transport` as the Plan says; tiles follow from the sizes (weft.plan.row_launches)."""

    transport: str = SM_PUSH

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a transport that does not fit the problem"""
        op, one, nodes = problem.op, f"transport={self.transport!r}", len(problem.nodes)
        fields.check_one_of(op, self, "transport", TRANSPORTS)
        if self.transport != UNFUSED and problem.n > rows.MOST_COLUMNS:
            raise ConfigError(
                f"{op}: n={problem.n}; a row is one tile, of up to {rows.MOST_COLUMNS} columns: "
                f"take transport={UNFUSED!r}"
            )
        if self.transport in LL and nodes > 1:
            raise ConfigError(
                f"{op}: {one} reaches into peers' memory, but the world has {nodes} nodes; take "
                f"{SM_PUSH!r}"
            )


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    if problem.n <= rows.MOST_COLUMNS:
        if len(problem.nodes) == 1 and problem.num_ranks > 1:
            # Messages are as large as all_reduce's, which has other ways of two ranks.
            num_bytes = problem.m * problem.row_bytes
            for row in tuning_table.MEASURED["all_reduce"]:
                if num_bytes <= row.up_to and row.transport in LL:
                    yield Config(row.transport)
        yield Config(SM_PUSH)
    yield Config(UNFUSED)


def program_of(problem: Any, eps: float = EPS) -> Program:
    """The operator as a tensor program; m is open."""

    def all_reduce_rms_norm(x, residual, weight):
        total = frontend.all_reduce(x) + residual
        return frontend.rms_norm(total, weight, eps=eps), total

    rows, dtype = ("m", problem.n), problem.dtype
    types = {
        "x": Tensor(dtype, rows, Partial()),
        "residual": Tensor(dtype, rows, Replicate()),
        "weight": Tensor(dtype, (1, problem.n), Replicate()),
    }
    return frontend.trace(all_reduce_rms_norm, "tp", types)


@lru_cache(maxsize=256)
def _stages(problem: Problem, target: Target, eps: float, transport: str) -> Stages:
    """The program's plan by a transport; of `problem` all but m."""
    placed = place(program_of(problem, eps))
    (summed,) = (one.name for one in placed.tasks if one.kind == "all_reduce")
    facts = Facts({"m": problem.num_ranks}, problem.num_ranks, target, problem.nodes)
    engine = "library" if transport == UNFUSED else transport
    if transport != UNFUSED and (len(problem.nodes) > 1 or problem.num_ranks == 1):
        engine = "sm_put" if problem.num_ranks > 1 else "sm_push"
    return overlap(placed, facts, Settings(engines={summed: engine}))


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
    given = (x, residual, weight)
    if operations.is_asked(*given):
        return operations.as_operation(Problem.op, world, given, eps=eps, config=config)
    call = find_call(world, Problem.op, given, (float(eps), config), _Call)
    world.operator_call(call.name, call.tensors)
    if call.runner is None:
        return torch.empty_like(x), torch.empty_like(x)
    given = {"x": x, "residual": residual, "weight": weight.view(1, -1)}
    return call.runner.queue(given, call.runner.memory.results())


class _Call:
    """What calls with tensors like these share on one rank."""

    def __init__(
        self, world: World, x: Any, residual: Any, weight: Any, eps: float, config: Any
    ) -> None:
        tensors = {"x": x, "residual": residual, "weight": weight}
        layouts.bind_sizes(Problem.op, world, tensors, FORMS, {})
        (m, n), target, nodes = x.shape, world.target, nodes_of(world)
        problem = Problem(m, n, world.num_ranks, str(x.dtype), nodes)
        config = given_or_chosen(world, problem, config)
        self.name = f"{problem.op} m={m},n={n} {problem.dtype} eps={eps} {config}"
        self.runner = None
        if not problem.is_empty:
            stages = _stages(replace(problem, m=0), target, eps, config.transport)
            tensors = {**tensors, "weight": weight.view(1, -1)}
            self.runner = PlanRunner(world, stages, tensors, {"m": m})


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random tensors: the same for one seed on every machine; x differs by rank."""
    generator = torch.Generator().manual_seed(seed)
    residual = torch.randn(problem.m, problem.n, generator=generator).to(problem.torch_dtype)
    weight = torch.randn(problem.n, generator=generator).to(problem.torch_dtype)
    x = random_rows(problem, rank, problem.m, seed)
    return {"x": x, "residual": residual, "weight": weight}


run = calling(all_reduce_rms_norm)


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
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=described.KernelsOf(run, make_inputs, candidates),
    default_shape={"m": 64, "n": 256},
    # Rows of one length, so one kernel. What lies in a slot has other places in calls of other
    # sizes, so credits show; and packets of a call without its end are stale in the next.
    trials=tuple(replace(one, calls=(0, 0, 2, 2, 0, 2, 0)) for one in trials({"m": 14, "n": 24})),
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
    composed=(UNFUSED,),
    program=program_of,
)
