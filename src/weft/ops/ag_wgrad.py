"""The gradient of weights, of which one operand is gathered: out[p, q] = sum_m x[m, p] y[m, q].

m is global. Of one of the two a rank has its own rows alone, as torch.chunk splits them; of the
other all m. Every rank ends with its own out: that of ag_gemm's weights has x gathered, the layer's
input; that of gemm_rs's weights y, the gradient of its result.

Plan    the compiler's, of `of_x` or `of_y` below (`weft explain ag_wgrad`). A tile sums over the
        rows of one rank's chunk after the other: own ones first, read in place, then those of rank
        + 1, + 2, .. as they arrive, by ce_push and sm_push as ag_gemm's. Where tiles are fewer than
        programs, `split_k` parts of the rows go over all tiles, one after the other; the last adds
        up what the others have left, in fp32. nccl: the library's, then cuBLAS
Signals the plan's: a word for each chunk of a rank's rows, SET to the call's epoch
Limits  both operands are row-major; the template for Hopper (gemm_sm90) sums over no rows
Source  docs/decisions/009-hooks.md; ag_gemm
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch

from weft.base import fields
from weft.base.card import Op, Trial, trials
from weft.base.dtypes import FLOATS
from weft.base.errors import DtypeError, ShapeError
from weft.base.target import Target
from weft.compiler import Shard, Tensor, frontend, gather_schedules, layouts
from weft.compiler.gather_schedules import CE_PUSH, LIBRARY, SM_PUSH, programs_on
from weft.ops import _baselines
from weft.plan import call_cache, described, gathered, operations, problems
from weft.plan.choices import given_or_chosen
from weft.runtime.world import World
from weft.tiles import blocking


def of_x(x: Any, y: Any, dtype: str) -> Any:
    return frontend.matmul_tn(frontend.all_gather(x), y, dtype=dtype)


def of_y(x: Any, y: Any, dtype: str) -> Any:
    return frontend.matmul_tn(x, frontend.all_gather(y), dtype=dtype)


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32 on the CPU."""
    rows, whole = problem.types()
    gathered = torch.cat([one[rows] for one in inputs]).float()
    rest = [one[whole].float() for one in inputs]
    return [x.t() @ gathered if problem.gathers_y else gathered.t() @ x for x in rest]


@dataclass(frozen=True)
class Problem(gathered.Problem):
    """m rows over all ranks; k columns of what is gathered, n of the other, on each rank.

    The result is [k, n], with x gathered; or [n, k] where `b_is_nk`, with y gathered: as weights
    lie whose gradient it is. Sums are in fp32.
    """

    op: ClassVar[str] = "ag_wgrad"
    transports: ClassVar[tuple[str, ...]] = (CE_PUSH, SM_PUSH, LIBRARY)
    templates: ClassVar[tuple[str, ...]] = ("plain",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in FLOATS:
            raise DtypeError(f"{self.op}: dtype {self.dtype}; it takes {', '.join(FLOATS)}")

    @property
    def gathers_y(self) -> bool:
        return self.b_is_nk

    @property
    def result(self) -> tuple[int, int]:
        return (self.n, self.k) if self.gathers_y else (self.k, self.n)

    @property
    def memory_bytes(self) -> int:
        """What one rank must read and write at least."""
        return self.m * (self.n + self.k) * self.itemsize + self.n * self.k * self.out_itemsize

    def types(self) -> dict[str, Tensor]:
        """Of the program's parameters, the gathered one first, with m open."""
        rows = Tensor(self.dtype, ("m", self.k), Shard(0))
        whole = Tensor(self.dtype, ("m", self.n * self.num_ranks), Shard(1))
        return {"y": rows, "x": whole} if self.gathers_y else {"x": rows, "y": whole}

    @property
    def options(self) -> dict[str, str]:
        """What the traced function takes beside its tensors."""
        return {"dtype": self.out_dtype}


@dataclass(frozen=True)
class Config(gather_schedules.Config):
    """As ag_gemm's; tile_k are rows that are multiplied at a time."""

    transport: str = SM_PUSH

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        fields.check_ranges(problem.op, self, split_k=(1, gather_schedules.MOST_SPLITS))
        super().check(problem, target)


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    p, q = problem.result
    rows = problem.m if target.backend == "emu" else p
    for transport in gather_schedules.transports(problem, target):
        for cut in blocking.candidates(p, q, rows, problem.dtype, target):
            config = Config(transport=transport, **asdict(cut))
            config = gather_schedules.with_transport(config, problem, target)
            splits = gather_schedules.splits_of(
                cut.num_tiles(p, q), problem.num_ranks * config.chunks,
                programs_on(target) - config.num_pushers,
            )  # fmt: skip
            yield replace(config, group_m=8, split_k=splits)
    if problem.can_use_library(target):
        yield Config(transport=LIBRARY)


def ag_wgrad(
    x: torch.Tensor,
    y: torch.Tensor,
    *,
    world: World,
    gathered: str = "x",
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """All rows of x, transposed, times those of y; one of the two comes from all ranks. Collective.

        gathered="x":  out[p, q] = cat(x of rank 0, x of rank 1, ...)^T @ y
        gathered="y":  out[p, q] = x^T @ cat(y of rank 0, y of rank 1, ...)

    Shapes  x: [m, p] and y: [m, q], contiguous; of the gathered one the rows of this rank, as
            torch.chunk splits m; p and q are the same on all ranks
    Dtypes  x and y alike, float16, bfloat16 or float32; out the same unless given, sums in fp32
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if operations.is_asked(x, y):
        rest = {"gathered": gathered, "config": config, "out": out}
        return operations.as_operation("ag_wgrad", world, (x, y), **rest)
    call = call_cache.find_call(world, "ag_wgrad", (x, y, out), (gathered, config), _make_call)
    return call(out, x=x, y=y)


def _make_call(world: World, x: Any, y: Any, out: Any, gathered: str, config: Any) -> Call:
    problem = problem_of(world, x, y, gathered, out)
    config = given_or_chosen(world, problem, config)
    program = of_y if problem.gathers_y else of_x
    return Call(world, problem, config, {"x": x, "y": y}, program)


class Call(gathered.Call):
    """As ag_gemm's, of another product."""

    def _multiply(self, gathered: Any, b: Any, out: Any) -> None:
        left, right = (b, gathered) if self.problem.gathers_y else (gathered, b)
        torch.mm(left.t(), right, out=out)


def problem_of(world: World, x: Any, y: Any, gathered: str = "x", out: Any = None) -> Problem:
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    op = Problem.op
    if gathered not in ("x", "y"):
        raise ShapeError(f"{op}: gathered={gathered!r}; it is 'x' or 'y'")
    forms = {"x": "rows_of_x p", "y": "rows_of_y q"}
    sizes = layouts.bind_sizes(op, world, {"x": x, "y": y}, forms)
    whole = "x" if gathered == "y" else "y"
    m, n = sizes[f"rows_of_{whole}"], sizes["p" if whole == "x" else "q"]
    problem = Problem(
        m, n, sizes["q" if whole == "x" else "p"], world.num_ranks, str(x.dtype),
        call_cache.out_dtype_of(op, out), gathered == "y", problems.nodes_of(world),
    )  # fmt: skip
    call_cache.check_shard(
        op, gathered, sizes[f"rows_of_{gathered}"], problem, world, remedy="pass these"
    )
    if out is not None:
        call_cache.check_out(op, out, problem.result, out.dtype, world)
    return problem


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's normal random tensors on the CPU: the same for one seed on every machine."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    first, end = problem.shard(rank)
    shapes, dtype = ((end - first, problem.k), (problem.m, problem.n)), problem.dtype
    drawn = {
        name: torch.randn(shape, generator=generator).to(getattr(torch, dtype))
        for name, shape in zip(problem.types(), shapes, strict=True)
    }
    return {name: drawn[name] for name in ("x", "y")}


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    out = None
    if problem.out_dtype != problem.dtype:
        dtype = getattr(torch, problem.out_dtype)
        out = torch.empty(problem.result, dtype=dtype, device=inputs["x"].device)
    rows, _ = problem.types()
    return ag_wgrad(**inputs, world=world, gathered=rows, config=config, out=out)


def traced(problem: Problem) -> Any:
    return gathered.traced(of_y if problem.gathers_y else of_x, problem)


SHAPE = {"m": 56, "n": 24, "k": 16}
op = Op(
    name="ag_wgrad",
    summary="out[k, n] = sum over m of all_gather(X over rows)[m, k] Y[m, n]",
    problem=Problem,
    config=Config,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    program=traced,
    candidates=candidates,
    kernels=described.KernelsOf(run, make_inputs, candidates),
    default_shape={"m": 256, "n": 256, "k": 256},
    smallest={"m": 16, "n": 16, "k": 16},
    smallest_config={"pushers": 1, "chunks": 1},
    trials=(
        # Rows that nothing divides, several tiles, several splits.
        *trials(SHAPE | {"k": 40}),
        # As ag_gemm: words of chunks without rows, inputs that change once a call is over.
        Trial((3,), SHAPE, CE_PUSH, calls=(2, 0) * 3, configs={0: {"chunks": 2}, 2: {"chunks": 1}}),
        # Every chunk has rows: what comes too early is read.
        Trial((2,), SHAPE | {"m": 128}, CE_PUSH, on_heap=True, calls=(0, 0, 0, 1, 0, 1, 0)),
    ),
    awkward_shapes=((4, {"m": 388, "n": 96, "k": 64}), (3, {"m": 291, "n": 70, "k": 50}),
                    *gathered.AWKWARD_SHAPES),
    baselines=_baselines.AG_WGRAD,
    fake=gathered.fake,
    backward=("gemm_rs", "ag_gemm"),
    takes_nodes=True,
)  # fmt: skip
