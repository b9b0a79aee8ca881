"""Products of tokens with their experts, by a router's tables: ag_moe's and moe_rs's problem,
configurations, inputs, calls and cards.

Each is a traced program of one product and one collective; its launch is `table_launches.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, ClassVar

import torch

from weft.base.errors import ConfigError, ShapeError
from weft.base.target import Target
from weft.compiler import ByExpert, Replicate, Tensor, layouts, pipeline
from weft.compiler.cost.choose import sums_of_rows
from weft.compiler.experts import Routing, Tables, dtype_of
from weft.compiler.lower import unfused
from weft.compiler.schedules import SM_PUSH, Config
from weft.ir.device import Plan
from weft.ir.task import LL, Program
from weft.plan import described, operations, summed
from weft.plan.call_cache import by_layout, check_out, find_call
from weft.plan.calls import run_calls
from weft.plan.choices import config_of
from weft.plan.problems import nodes_of
from weft.plan.routing import ByTables, random_tables
from weft.plan.table_launches import GROUP_M, staged
from weft.tiles import blocking, gemm_sm90
from weft.tiles.blocking import Blocking

# Tiles of the template for Hopper, and how long a column of each takes, as read where n divides by
# all of them (docs/performance/experts_and_attention.md); rows of tiles that share columns.
SM90_COSTS = {
    gemm_sm90.WIDE: 1.0,
    Blocking(128, 192, 64, gemm_sm90.NUM_WARPS, 4): 1.07,
    gemm_sm90.TURNS: 1.13,
}
# Of so few k a tile's stores take as long as its products, and in turns they are behind the other
# consumer's: wide tiles took 1.13 times as long there (2 x H100, k 192, n 2048).
SHORT_K, STORED_LATE = 512, 1.28
SM90_GROUP_M = 8
MOST_CANDIDATES = 8
# Of the tables, by the names of sizes.
FORMS = {
    "ids": "tokens top_k", "weights": "tokens top_k", "token_of": "slots", "weight_of": "slots",
    "slot_of": "m top_k", "counts": "ranks experts", "tiles": "fields room", "turns": "room",
    "num_tiles": "one",
}  # fmt: skip


@dataclass(frozen=True)
class Problem(ByTables, summed.Product):
    """m tokens over all ranks, top_k of `experts` for each; [k, n] of each expert on each rank.

    `tile_m`: slots of a tile of the tables, at most. `b_is_nk`: B lies as [experts, n, k].
    `split_experts`: a rank has its part of the experts, whole ones, and tables of these; else of
    every expert a part.
    """

    experts: int = 1
    top_k: int = 1
    tile_m: int = 128
    split_experts: bool = False

    sizes = ("m", "n", "k", "experts", "top_k", "tile_m", "split_experts")
    # The templates that its kernels have forms for; whether its result has a row for each slot, or
    # x; what x's rows are.
    templates: ClassVar[tuple[str, ...]] = ("plain",)
    gives_slots: ClassVar[bool] = False
    rows_are: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tile_m < 16:
            raise ShapeError(f"{self.op}: tile_m={self.tile_m}; a product's tiles have 16 rows")
        self.check_sizes(self.num_slots)
        if self.split_experts and self.experts % self.num_ranks:
            raise ShapeError(
                f"{self.op}: {self.experts} experts on {self.num_ranks} ranks; each rank must have "
                "as many: add experts that no token chooses"
            )

    def rows_of_x(self, rank: int) -> int:
        raise NotImplementedError

    @property
    def own_experts(self) -> int:
        return self.experts // self.num_ranks if self.split_experts else self.experts

    def first_expert(self, rank: int) -> int:
        return rank * self.own_experts if self.split_experts else 0

    @property
    def own_slots(self) -> int:
        """How many slots a rank's products are of, on average where experts are split."""
        return self.num_slots // (self.num_ranks if self.split_experts else 1)

    @property
    def table(self) -> Tensor:
        """The program's type of a router's tables."""
        where = ByExpert() if self.split_experts else Replicate()
        return Tensor("table", ("m", self.top_k, self.experts), where)

    @property
    def flops(self) -> int:
        """Of one rank."""
        return 2 * self.own_slots * self.n * self.k

    @property
    def memory_bytes(self) -> int:
        """What one rank must read and write at least, where every expert has tokens."""
        operands = self.m * self.k + self.own_experts * self.n * self.k
        return (operands + self.own_slots * self.n) * self.itemsize

    @property
    def of_sm90(self) -> tuple[str, str]:  # type: ignore[override]
        has = f", k={self.k} and tables of tile_m={self.tile_m}"
        return has, (
            f"16-bit operands, tables of tile_m={gemm_sm90.TILE_M.value} and k in multiples of "
            f"{gemm_sm90.WIDE.tile_k},"
        )

    def can_use_sm90(self, target: Target) -> bool:
        """Does the template for Hopper take this problem there?"""
        # Rows are copied without masks.
        is_cut = self.tile_m == gemm_sm90.TILE_M.value and self.k % gemm_sm90.WIDE.tile_k == 0
        return is_cut and super().can_use_sm90(target)


@lru_cache(maxsize=256)
def _library_calls(program: Program) -> Plan:
    return unfused.lower(pipeline.compile_program(program).tasks["place"])


def candidates(config: type[Config], problem: Problem, target: Target) -> Iterator[Any]:
    """Configurations worth measuring by the first transport, the one to take unmeasured first."""
    return islice(_candidates(config, problem, target), MOST_CANDIDATES)


def _candidates(config: type[Config], problem: Problem, target: Target) -> Iterator[Any]:
    # Where experts have a tile or less, reading their matrices is what takes time: several programs
    # on an SM wait for more of them at once than one that is made of warps for each role.
    plain = _plain(config, problem, target)
    if problem.num_slots <= problem.experts * problem.tile_m:
        yield next(plain)
    yield from _for_hopper(config, problem, target)
    yield from plain


def _for_hopper(config: type[Config], problem: Problem, target: Target) -> Iterator[Any]:
    """The cheapest tile first."""

    def cost(cut: Blocking) -> float:
        """Of n columns in such tiles, in columns of wide ones."""
        each = SM90_COSTS[cut]
        if problem.k <= SHORT_K and cut != gemm_sm90.TURNS:
            each *= STORED_LATE
        return -(-problem.n // cut.tile_n) * cut.tile_n * each

    if "sm90" in problem.templates and problem.can_use_sm90(target):
        for cut in sorted(SM90_COSTS, key=cost):
            yield config(template="sm90", group_m=SM90_GROUP_M, **asdict(cut))


def _plain(config: type[Config], problem: Problem, target: Target) -> Iterator[Any]:
    tile_m = problem.tile_m
    for cut in blocking.candidates(tile_m, problem.n, problem.k, problem.dtype, target):
        cut = staged(replace(cut, tile_m=tile_m), problem.k, problem.itemsize, target)
        one = config(group_m=GROUP_M, **asdict(cut))
        try:
            one.check(problem, target)
        except ConfigError:  # cut for lower tiles than the tables have
            continue
        yield one
    columns, depth = (16, 16) if target.backend == "emu" else (64, 32)
    cut = Blocking(tile_m, columns, depth, 4, 2)
    yield config(group_m=GROUP_M, **asdict(cut))


def summing(kind: str, problem: Problem, target: Target) -> Iterator[Config]:
    """The same of products whose tokens' rows are summed over ranks by `kind`, a collective, in the
    way that is predicted to end first."""
    found = list(candidates(Config, problem, target))
    sizes = problem.m, problem.n, problem.itemsize, problem.own_slots
    ways = sums_of_rows(kind, *sizes, problem.num_ranks, problem.nodes, target)
    first, *others = (SM_PUSH if way.engine == "sm_put" else way.engine for way in ways)
    plain = next(one for one in found if one.template == "plain")
    if first not in LL:
        found = [replace(one, transport=first) for one in found]
    elif found[0] is plain:  # of few tokens, for which packets are
        found = [replace(one, transport=first) if one.template == "plain" else one for one in found]
    yield from found
    for way in (first, *others):
        best = plain if way in LL else found[0]
        if (one := replace(best, transport=way)) not in found:
            yield one


# ---------------------------------------------------------------------------------------------
# Calls


def problem_of(kind: Any, world: Any, x: Any, b: Any, routing: Routing, out: Any = None) -> Any:
    """The problem that this rank's tensors are a part of, as `kind` makes it.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world; tables that no
            router made for them, as far as the host can see: what they hold is on the device
    """
    op, tables = kind.op, routing.tables._asdict()
    is_nk = layouts.is_nk(b)
    forms = {"x": "rows k", "b": "experts n k" if is_nk else "experts k n", **FORMS}
    dtypes = {name: dtype_of(name) for name in tables}
    given = {"x": x, "b": b.mT if is_nk else b, **tables}
    sizes = layouts.bind_sizes(op, world, given, forms, dtypes)
    m, top_k = sizes["m"], sizes["top_k"]
    experts = sizes["experts"] * (world.num_ranks if routing.split_experts else 1)
    problem = kind(
        m, sizes["n"], world.num_ranks, str(x.dtype), nodes_of(world), sizes["k"], is_nk,
        experts, top_k, routing.tile_m, routing.split_experts,
    )  # fmt: skip
    for name, shape in Tables.shapes(problem, sizes["tokens"])._asdict().items():
        if tables[name].shape != shape:
            raise ShapeError(
                f"{op}: the table {name} has shape {tuple(tables[name].shape)}; of m={m} tokens "
                f"with top_k={top_k}, {problem.experts} experts, {problem.num_ranks} ranks and "
                f"tile_m={problem.tile_m} it is {shape}: pass what moe_route gave"
            )
    if len(x) != (rows := problem.rows_of_x(world.rank)):
        raise ShapeError(
            f"{op}: rank {world.rank} of {world.num_ranks} passes x with {len(x)} rows, but m={m} "
            f"tokens with top_k={top_k} were routed; it takes {rows} rows, {kind.rows_are}"
        )
    if out is not None:
        check_out(op, out, problem.result_of(world.rank), x.dtype, world)
    return problem


def as_operation(
    op: str, world: Any, x: Any, b: Any, routing: Routing, config: Any, out: Any
) -> torch.Tensor:
    """The call as an operation of torch's."""
    tensors = (x, b, routing.tables.weight_of, list(routing.tables))
    rest = {"tile_m": routing.tile_m, "split_experts": routing.split_experts}
    rest |= {"config": config, "out": out}
    return operations.as_operation(op, world, tensors, **rest)


class Call(summed.Call):
    """Of a product with experts."""

    def _run_unfused(self, out: torch.Tensor, **tensors: Any) -> None:
        """The plan of library calls, one after the other."""
        calls = _library_calls(self.problem.traced())
        (made,) = run_calls(calls, tensors, {"m": self.problem.m}, world=self.world)
        out.copy_(made)
        if self.problem.split_experts and self.problem.gives_slots:
            out.masked_fill_(tensors["routing"].tables.token_of[:, None] < 0, 0)


def run(
    kind: Any, world: Any, x: Any, b: Any, routing: Routing,
    config: Config | None, out: Any,
) -> torch.Tensor:  # fmt: skip
    """A call of the operator, whose Problem is `kind`."""

    def make(world: Any, x: Any, b: Any, out: Any, routing: Routing, config: Any) -> Call:
        problem = problem_of(kind, world, x, b, routing, out)
        config = replace(config or config_of(world, problem), tile_m=problem.tile_m)
        config.check(problem, world.target)
        return Call(world, problem, config, {"x": x, "b": b, "routing": routing})

    call = find_call(world, kind.op, (x, b, out), (routing, config), make, _key)
    return call(out, x=x, b=b, routing=routing)


def _key(world: Any, tensors: Sequence[Any], rest: tuple) -> tuple:
    routing, config = rest
    return by_layout(world, (*tensors, *routing.tables), (config, *routing[1:]))


# ---------------------------------------------------------------------------------------------
# The card


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random tensors on the CPU, and the tables of random choices."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    x = torch.randn(problem.rows_of_x(rank), problem.k, generator=generator)
    n, k = problem.n, problem.k
    own = problem.own_experts
    lies = (own, n, k) if problem.b_is_nk else (own, k, n)
    b = torch.randn(lies, generator=generator).to(problem.torch_dtype)
    b = b.mT if problem.b_is_nk else b
    tables = random_tables(problem, rank, seed)
    if not problem.gives_slots:  # behind the last there may be anything
        x[tables.token_of < 0] = torch.nan
    return {"x": x.to(problem.torch_dtype), "b": b, **tables._asdict()}


def shaped_inputs(problem: Problem, rank: int) -> dict[str, torch.Tensor]:
    """As make_inputs, without values."""
    n, k, dtype = problem.n, problem.k, problem.torch_dtype
    b = torch.empty((problem.own_experts, *((n, k) if problem.b_is_nk else (k, n))))
    x = torch.empty((problem.rows_of_x(rank), k), dtype=dtype)
    made = Tables.empty(problem, problem.own_tokens(rank), x.device)
    return {"x": x, "b": (b.mT if problem.b_is_nk else b).to(dtype), **made._asdict()}


def product(problem: Problem, rows: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Row i of `rows`, which are as many as slots, times slot i's expert; in fp32."""
    out = torch.zeros(problem.num_slots, problem.n)
    for expert, first, end, *_ in inputs["tiles"].t().tolist():
        out[first:end] = rows[first:end].float() @ inputs["b"][expert].float()
    return out


def card(kind: type[Problem], call: Callable[..., Any], found: Callable[..., Any]) -> dict:
    """What the cards of such operators have alike; `found` are their candidates."""

    def run(world: Any, problem: Problem, inputs: Mapping[str, Any], config: Any = None) -> Any:
        # By its name: what stands in the operator's place is called.
        operator = getattr(importlib.import_module(call.__module__), kind.op)
        routing = Routing.of(inputs, problem.tile_m, problem.split_experts)
        return operator(inputs["x"], inputs["b"], routing, world=world, config=config)

    run.__module__ = call.__module__
    return {
        "problem": kind,
        "make_inputs": make_inputs,
        "run": run,
        "candidates": found,
        "kernels": described.KernelsOf(run, shaped_inputs, found),
        "program": kind.traced,
        "fake": summed.fake,
        "takes_nodes": True,
        "default_shape": {
            "m": 64,
            "n": 64,
            "k": 64,
            "experts": 8,
            "top_k": 2,
            "split_experts": 0,
        },
        "smallest": {"m": 4, "n": 16, "k": 16, "experts": 2, "top_k": 1},
        "awkward_shapes": (
            (4, {"m": 97, "n": 40, "k": 24, "experts": 8, "top_k": 3}),
            (3, {"m": 29, "n": 7, "k": 50, "experts": 40, "top_k": 2}),
            (2, {"m": 1, "n": 16, "k": 16, "experts": 1, "top_k": 1}),
            (1, {"m": 40, "n": 48, "k": 32, "experts": 4, "top_k": 4}),
            (4, {"m": 9, "n": 16, "k": 16, "experts": 5, "top_k": 2}),
            (4, {"m": 0, "n": 16, "k": 16, "experts": 4, "top_k": 2}),
        ),
    }
