"""What ag_moe and moe_rs share: problem, configuration, checks of tensors, the call, the cards.

Not an operator. Tables are moe_route's; how a product is launched is in weft.plan.table_launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
from torch.autograd.graph import increment_version

from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.target import Target
from weft.compiler import layouts
from weft.compiler.experts import Routing, Tables, dtype_of
from weft.ir import core
from weft.ops.moe_route import Problem as RouterProblem
from weft.ops.moe_route import op as router
from weft.plan import launches, operations, table_launches
from weft.plan.call_cache import check_out
from weft.plan.launches import Start
from weft.plan.problems import Rows, nodes_of
from weft.plan.table_launches import GroupedProduct, Schedule
from weft.tiles import blocking, gemm_sm90
from weft.tiles.blocking import Blocking

# Tiles of the template for Hopper, and how long a column of each takes, as read where n divides by
# all of them (docs/performance/experts_and_attention.md); rows of tiles that share columns.
SM90_COSTS = {
    gemm_sm90.WIDE: 1.0,
    Blocking(128, 192, 64, gemm_sm90.NUM_WARPS, 4): 1.07,
    gemm_sm90.TURNS: 1.13,
}
SM90_GROUP_M = 8


def _padded(n: int, cut: Blocking) -> float:
    """What n columns cost in such tiles, in columns of wide ones."""
    return -(-n // cut.tile_n) * cut.tile_n * SM90_COSTS[cut]


@dataclass(frozen=True)
class Problem(Rows):
    """m tokens over all ranks, top_k of `experts` for each; [k, n] of each expert on each rank.

    `tile_m`: slots of a tile of the tables, at most. `b_is_nk`: B lies as [experts, n, k].
    """

    k: int = 0
    experts: int = 1
    top_k: int = 1
    tile_m: int = 128
    b_is_nk: bool = False
    routing: RouterProblem = field(init=False, repr=False, compare=False)

    op: ClassVar[str]
    # The ways in which its tokens travel, and the templates that its kernels have forms for.
    transports: ClassVar[tuple[str, ...]] = ("sm_push",)
    templates: ClassVar[tuple[str, ...]] = ("plain",)
    # What x's rows are.
    rows_are: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 0:
            raise ShapeError(f"{self.op}: k={self.k} is negative")
        if self.tile_m < 16:
            raise ShapeError(f"{self.op}: tile_m={self.tile_m}; a product's tiles have 16 rows")
        # That of the router that made the tables; it checks the rest.
        sizes = (self.m, self.experts, self.num_ranks, "float32", self.nodes, self.top_k)
        object.__setattr__(self, "routing", RouterProblem(*sizes, tile_m=self.tile_m))

    def rows_of_x(self, rank: int) -> int:
        raise NotImplementedError

    def rows_of_out(self, rank: int) -> int:
        raise NotImplementedError

    def num_tokens(self, rank: int) -> int:
        first, end = self.shard(rank)
        return end - first

    @property
    def num_slots(self) -> int:
        return self.m * self.top_k

    @property
    def is_empty(self) -> bool:
        return 0 in (self.m, self.n, self.k)

    @property
    def flops(self) -> int:
        """Of one rank."""
        return 2 * self.num_slots * self.n * self.k

    @property
    def memory_bytes(self) -> int:
        """What one rank must read and write at least, where every expert has tokens."""
        operands = self.m * self.k + self.experts * self.n * self.k
        return (operands + self.num_slots * self.n) * self.itemsize

    def can_use_sm90(self, target: Target) -> bool:
        """Does the template for Hopper take this problem there?"""
        is_asked = launches.is_for_hopper(self.itemsize, self.nodes, target)
        # Rows are copied without masks.
        is_cut = self.tile_m == gemm_sm90.TILE_M.value and self.k % gemm_sm90.WIDE.tile_k == 0
        return is_asked and is_cut and launches.can_use_tma(self, self.itemsize, target)


@dataclass(frozen=True)
class Config(Schedule):
    """How a call is done; every field is the same on all ranks."""

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        op = problem.op
        if self.transport not in problem.transports:
            known = " or ".join(map(repr, problem.transports))
            raise ConfigError(f"{op}: transport={self.transport!r}; it must be {known}")
        if self.group_m < 1:
            raise ConfigError(f"{op}: group_m={self.group_m}; it must be 1 at least")
        if self.template not in problem.templates:
            known = ", ".join(problem.templates)
            raise ConfigError(f"{op}: template={self.template!r}; it must be one of {known}")
        cut = (problem.tile_m, self.tile_n, self.tile_k)
        if self.template == "plain":
            one = Blocking(*cut, self.num_warps, self.num_stages)
            one.check(op, problem.dtype, problem.dtype, False, target)
            return
        if not problem.can_use_sm90(target):
            raise ConfigError(
                f"{op}: template='sm90' with {problem.dtype}, k={problem.k} and tables of "
                f"tile_m={problem.tile_m} on {target}, ranks by nodes {problem.nodes}; it takes "
                f"16-bit operands with rows of a multiple of {blocking.TMA_BYTES} bytes, k of "
                f"{gemm_sm90.WIDE.tile_k} elements, tables of tile_m={gemm_sm90.TILE_M.value}, "
                "compute capability 9.0 and ranks of one node"
            )
        gemm_sm90.check(op, *cut, self.num_stages, target)


def candidates(config: type[Config], problem: Problem, target: Target) -> Iterator[Any]:
    """Configurations worth measuring by the first transport, the one to take unmeasured first."""
    if "sm90" in problem.templates and problem.can_use_sm90(target):
        for cut in sorted(SM90_COSTS, key=lambda cut: _padded(problem.n, cut)):
            yield config(template="sm90", group_m=SM90_GROUP_M, **_fields(cut))
    sizes = (problem.tile_m, problem.n, problem.k)
    for cut in blocking.candidates(*sizes, problem.dtype, target):
        one = config(**_fields(cut))
        try:
            one.check(problem, target)
        except ConfigError:  # cut for lower tiles than the tables have
            continue
        yield one
    small = (16, 16) if target.backend == "emu" else (64, 32)
    yield config(tile_n=small[0], tile_k=small[1], num_warps=4, num_stages=2)


def _fields(cut: Blocking) -> dict[str, int]:
    return {name: value for name, value in asdict(cut).items() if name != "tile_m"}


def check_tensors(op: str, world: Any, x: Any, b: Any, routing: Routing) -> None:
    """Raises  ShapeError, DtypeError: tensors that do not fit together, or the world; x's name is
    that of all rows by which B is multiplied"""
    for name, tensor, dims in (("x", x, 2), ("b", b, 3)):
        if tensor.dim() != dims:
            shape = tuple(tensor.shape)
            raise ShapeError(f"{op}: {name} has shape {shape}; it must have {dims} dimensions")
    layouts.check_tensor(op, "x", x, world)
    layouts.check_tensor(op, "b", b.transpose(1, 2) if layouts.is_nk(b) else b, world)
    for name, table in routing.tables._asdict().items():
        layouts.check_tensor(op, name, table, world)
    for name in ("slot_of", "counts"):
        if getattr(routing.tables, name).dim() != 2:
            shape = tuple(getattr(routing.tables, name).shape)
            raise ShapeError(f"{op}: the table {name} has shape {shape}; pass what moe_route gave")
    (_, k), (experts, k_b, _) = x.shape, b.shape
    if k != k_b:
        raise ShapeError(f"{op}: x has k={k} but b has k={k_b}; pass b as [experts, k, n]")
    if x.dtype != b.dtype:
        raise DtypeError(f"{op}: x is {x.dtype} but b is {b.dtype}; convert one of them")
    routed = routing.tables.counts.shape[1]
    if routed != experts:
        raise ShapeError(f"{op}: b has {experts} experts but tokens were routed to {routed}")


def problem_of(kind: Any, world: Any, x: Any, b: Any, routing: Routing, out: Any = None) -> Any:
    """The problem that this rank's tensors are a part of, as `kind` makes it.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    check_tensors(kind.op, world, x, b, routing)
    experts, k, n = b.shape
    m, top_k = routing.tables.slot_of.shape
    nodes = nodes_of(world)
    rest = (str(x.dtype), nodes, k, experts, top_k, routing.tile_m, layouts.is_nk(b))
    problem = kind(m, n, world.num_ranks, *rest)
    check_tables(problem, routing)
    if len(x) != (rows := problem.rows_of_x(world.rank)):
        raise ShapeError(
            f"{kind.op}: rank {world.rank} of {world.num_ranks} passes x with {len(x)} rows, but "
            f"m={m} tokens with top_k={top_k} were routed; it takes {rows} rows, {kind.rows_are}"
        )
    if out is not None:
        check_out(kind.op, out, (problem.rows_of_out(world.rank), n), x.dtype, world)
    return problem


def check_tables(problem: Problem, routing: Routing) -> None:
    """Raises  ShapeError, DtypeError: tables that no router made for this problem, as far as the
    host can see: what they hold is on the device"""
    # ids and weights are own tokens', for the router's gradient alone.
    _, _, *names = Tables._fields
    for name in names:
        shape = getattr(Tables.shapes(problem.routing, 0), name)
        table, dtype = getattr(routing.tables, name), dtype_of(name)
        if table.shape != shape:
            raise ShapeError(
                f"{problem.op}: the table {name} has shape {tuple(table.shape)}; of m={problem.m} "
                f"tokens with top_k={problem.top_k}, {problem.experts} experts, "
                f"{problem.num_ranks} ranks and tile_m={problem.tile_m} it is {shape}: pass what "
                "moe_route gave"
            )
        if table.dtype != dtype:
            raise DtypeError(f"{problem.op}: the table {name} is {table.dtype}, not {dtype}")


# ---------------------------------------------------------------------------------------------
# Calls


class Call:
    """What calls of one problem and one configuration share on one rank: found once, kept.

    `buffers` and `signals` are those of the operator's slot, by the kernel's names of them.
    """

    def __init__(
        self, world: Any, problem: Problem, config: Config, kernel: core.Kernel,
        buffers: Mapping[str, Any], signals: Mapping[str, Any], channels: int = 0,
    ) -> None:  # fmt: skip
        self.world, self.problem = world, problem
        self.product = GroupedProduct(world, kernel, problem, config, channels=channels)
        self.arrays, self.words = list(buffers), list(signals)
        self.buffers = {**buffers, **self.product.buffers}
        self.signals = {**signals, **self.product.signals}
        self.replays = world.replays()

    def run(self, x: Any, b: Any, out: Any, routing: Routing) -> None:
        slot = self.world.workspace(self.problem.op, self.buffers, self.signals)
        addresses = (one.data_ptr() for one in (x, b, out, *table_launches.Tables.of(routing)))
        self.replays.run(
            (*addresses, slot.number), lambda: self.launch(slot, x, b, out, routing)
        )  # fmt: skip

    def launch(self, slot: Any, x: Any, b: Any, out: Any, routing: Routing) -> None:
        self.multiplying(slot, x, b, out, routing).run()

    def multiplying(self, slot: Any, x: Any, b: Any, out: Any, routing: Routing) -> Start:
        """The launch of the product."""
        bound = {name: getattr(slot, name) for name in self.arrays}
        bound |= {"x": x, "b": b, "out": out, "routing": routing}
        return self.product.start(bound, {name: getattr(slot, name) for name in self.words}, slot)


def run(
    make: Callable[..., Call], world: Any, problem: Problem, config: Any, x: Any, b: Any,
    routing: Routing, out: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """A call of the operator; `make` finds what calls of its kind share."""
    config.check(problem, world.target)
    world.operator_call(
        f"{problem.op} m={problem.m},n={problem.n},k={problem.k} {problem.dtype} "
        f"experts={problem.experts} top_k={problem.top_k} tile_m={problem.tile_m} {config}"
    )
    if out is None:
        shape = (problem.rows_of_out(world.rank), problem.n)
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        increment_version((out,))
    if problem.is_empty:
        return out.zero_()
    key = (problem.op, problem, config)
    if (found := world.calls.get(key)) is None:
        found = world.calls[key] = make(world, problem, config)
    found.run(x, b, out, routing)
    return out


def as_operation(
    op: str, world: Any, x: Any, b: Any, routing: Routing, config: Any, out: Any
) -> torch.Tensor:
    """The call as an operation of torch's."""
    tensors = (x, b, routing.tables.weight_of, list(routing.tables))
    rest = {"tile_m": routing.tile_m, "config": config, "out": out}
    return operations.as_operation(op, world, tensors, **rest)


# ---------------------------------------------------------------------------------------------
# The card


# What the cards have alike.
CARD: Mapping[str, Any] = {
    "default_shape": {"m": 64, "n": 64, "k": 64, "experts": 8, "top_k": 2},
    "smallest": {"m": 4, "n": 16, "k": 16, "experts": 2, "top_k": 1},
    "awkward_shapes": (
        (4, {"m": 97, "n": 40, "k": 24, "experts": 8, "top_k": 3}),
        (3, {"m": 29, "n": 7, "k": 50, "experts": 40, "top_k": 2}),
        (2, {"m": 1, "n": 16, "k": 16, "experts": 1, "top_k": 1}),
        (1, {"m": 40, "n": 48, "k": 32, "experts": 4, "top_k": 4}),
        (4, {"m": 9, "n": 16, "k": 16, "experts": 5, "top_k": 2}),
        (4, {"m": 0, "n": 16, "k": 16, "experts": 4, "top_k": 2}),
    ),
    "takes_nodes": True,
}


def make_problem(
    kind: Any, num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Any:
    rest = (shape["k"], shape["experts"], shape["top_k"], shape.get("tile_m", 16))
    return kind(shape["m"], shape["n"], num_ranks, dtype, nodes, *rest)


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random tensors on the CPU, and the tables of random tokens: a call has nothing
    before it that would keep ranks together."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    rows = problem.rows_of_x(rank)
    x = torch.randn(rows, problem.k, generator=generator).to(problem.torch_dtype)
    n, k = problem.n, problem.k
    lies = (problem.experts, n, k) if problem.b_is_nk else (problem.experts, k, n)
    b = torch.randn(lies, generator=generator).to(problem.torch_dtype)
    everyone = range(problem.num_ranks)
    logits = [router.make_inputs(problem.routing, other, seed) for other in everyone]
    tables = router.reference(problem.routing, logits)[rank]
    inputs = {"x": x, "b": b.transpose(1, 2) if problem.b_is_nk else b}
    return {**inputs, **tables._asdict()}


def shaped_inputs(problem: Problem, rank: int) -> dict[str, torch.Tensor]:
    """As make_inputs, without values."""
    n, k, dtype = problem.n, problem.k, problem.torch_dtype
    b = torch.empty((problem.experts, n, k) if problem.b_is_nk else (problem.experts, k, n))
    b = (b.mT if problem.b_is_nk else b).to(dtype)
    x = torch.empty((problem.rows_of_x(rank), k), dtype=dtype)
    made = Tables.empty(problem.routing, problem.num_tokens(rank), x.device)
    return {"x": x, "b": b, **made._asdict()}


def routing_of(problem: Problem, inputs: Mapping[str, torch.Tensor]) -> Routing:
    """The tables among a card's inputs."""
    tables = Tables(**{name: inputs[name] for name in Tables._fields})
    return Routing(tables, problem.tile_m)


def product(problem: Problem, rows: Any, inputs: Mapping[str, Any]) -> torch.Tensor:
    """Row i of `rows`, which are as many as slots, times slot i's expert; in fp32."""
    out = torch.zeros(problem.num_slots, problem.n)
    for expert, first, end, *_ in inputs["tiles"].t().tolist():
        out[first:end] = rows[first:end].float() @ inputs["b"][expert].float()
    return out


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """A rank's result: its shape and dtype, without its values."""
    shape = (problem.rows_of_out(rank), problem.n)
    return torch.empty(shape, dtype=problem.torch_dtype, device="meta")
