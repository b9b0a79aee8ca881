"""All-gather of tokens, then the product with each one's experts, as one operator.

    out[slot, :]  =  x of all ranks[token_of[slot], :] @ b[expert of slot]

m tokens are split as torch.chunk splits them. Every rank has n columns of every expert and ends
with its columns of all m * top_k slots, in the order of moe_route: sorted by expert. Which slots an
expert has is known on the device alone.

Plan, `push`: one kernel on each rank, the GEMM template with hooks (weft.tiles.grouped)
    feeders   the first `lanes` programs: store own tokens in every rank's slot, the own one first,
              then rank + 1's, + 2's, ..; then they multiply too, what is left of each round
    order     tiles by the table, in the turns of moe_route: those of own tokens first, then those
              whose last tokens come next
    ready     waits for the ranks whose tokens are in the tile, and for no other
    emit      slots -> out

Signals (SET to the call's epoch e, read on the device; waited for in the call that sets it)
    rows_ready[src * lanes + l]   what lane l of rank src stores of its tokens is in this rank's
                                  slot. By src
    slot_free, epoch, ticket      the slot's; the last program moves them
Ranks without tokens signal too, so that any range of ranks may be waited for.

Limits  x is contiguous, b is [experts, k, n] or a transposed [experts, n, k]; rows by index are
        loaded by pointers: no TMA, and no template for Hopper yet
Source  docs/decisions/009-hooks.md; Triton-distributed's AG-MoE for the idea
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.card import Op, Trial, trials
from weft.base.dtypes import DTYPES
from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.language import slots
from weft.language.world_arg import SlotArg, WorldArg, language_version
from weft.ops import _lanes
from weft.ops.moe_route import Problem as RouterProblem
from weft.ops.moe_route import Routing, Tables
from weft.ops.moe_route import op as router
from weft.tiles import blocking, gemm, grouped
from weft.tiles.blocking import Blocking

SUPPORTED = ("float16", "bfloat16", "float32")
# Elements that a feeder stores at a time.
BLOCK = 4096
TABLES = ("token_of", "tiles", "turns", "num_tiles")


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32."""
    tokens = torch.cat([one["x"] for one in inputs]).float()
    return [_product(problem, tokens, one) for one in inputs]


def _product(problem: Problem, tokens: torch.Tensor, one: Mapping[str, Any]) -> torch.Tensor:
    out = torch.zeros(problem.num_slots, problem.n)
    for expert, first, end, *_ in one["tiles"].t().tolist():
        rows = tokens[one["token_of"][first:end].long()]
        out[first:end] = rows @ one["b"][expert].float()
    return out


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_lanes.Rows):
    """m tokens of k elements over all ranks, top_k of `experts` for each; n columns of each rank.

    `tile_m`: slots of a tile of the tables, at most. `b_is_nk`: B lies as [experts, n, k].
    """

    k: int = 0
    experts: int = 1
    top_k: int = 1
    tile_m: int = 128
    b_is_nk: bool = False
    routing: RouterProblem = field(init=False, repr=False, compare=False)

    op = "ag_moe"
    dtypes = SUPPORTED

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 0:
            raise ShapeError(f"{self.op}: k={self.k} is negative")
        if self.tile_m < 16:
            raise ShapeError(f"{self.op}: tile_m={self.tile_m}; a product's tiles have 16 rows")
        # Checks the rest.
        object.__setattr__(self, "routing", self._routing())

    def _routing(self) -> RouterProblem:
        """That of the router that made the tables."""
        return RouterProblem(
            self.m, self.experts, self.num_ranks, "float32", self.nodes, top_k=self.top_k,
            tile_m=self.tile_m,
        )  # fmt: skip

    @property
    def num_slots(self) -> int:
        return self.m * self.top_k

    @property
    def is_empty(self) -> bool:
        return 0 in (self.m, self.n, self.k)

    @property
    def shard_elements(self) -> int:
        return self.rows * self.k

    @property
    def flops(self) -> int:
        """Of one rank."""
        return 2 * self.num_slots * self.n * self.k

    @property
    def memory_bytes(self) -> int:
        """What one rank must read and write at least, where every expert has tokens."""
        operands = self.m * self.k + self.experts * self.n * self.k
        return (operands + self.num_slots * self.n) * self.itemsize


@dataclass(frozen=True)
class Config:
    """How a call is done; every field is the same on all ranks.

    Units   lanes: programs that store own tokens before they multiply; group_m: tiles that share
            columns in L2
    """

    transport: str = "push"
    lanes: int = 8
    tile_n: int = 128
    tile_k: int = 64
    group_m: int = 4
    num_warps: int = 8
    num_stages: int = 3

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        if self.transport != "push":
            raise ConfigError(f"ag_moe: transport={self.transport!r}; it must be 'push'")
        if not 1 <= self.lanes <= target.num_sms:
            raise ConfigError(
                f"ag_moe: lanes={self.lanes}; {target} runs 1 to {target.num_sms} programs together"
            )
        if self.group_m < 1:
            raise ConfigError(f"ag_moe: group_m={self.group_m}; it must be 1 at least")
        cut = (problem.tile_m, self.tile_n, self.tile_k, self.num_warps, self.num_stages)
        Blocking(*cut).check("ag_moe", problem.dtype, problem.dtype, False, target)

    def grid(self, problem: Problem, target: Target) -> int:
        """Programs: all of them are resident."""
        tiles = problem.routing.max_tiles * -(-problem.n // self.tile_n)
        return min(self.lanes + tiles, target.num_sms)

    def tile(self, problem: Problem) -> gemm.Tile:
        return gemm.Tile.of(
            problem.tile_m, self.tile_n, self.tile_k, size_k=problem.k, b_is_nk=problem.b_is_nk
        )


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    sizes = (problem.tile_m, problem.n, problem.k)
    for cut in blocking.candidates(*sizes, problem.dtype, target):
        rest = {name: value for name, value in asdict(cut).items() if name != "tile_m"}
        config = Config(lanes=2 if target.backend == "emu" else 8, **rest)
        try:
            config.check(problem, target)
        except ConfigError:  # cut for lower tiles than the tables have
            continue
        yield config
    smallest = 16 if target.backend == "emu" else 64
    yield Config(tile_n=smallest, tile_k=32 if smallest == 64 else 16, num_warps=4, num_stages=2)


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The program


class Feed(NamedTuple):
    """`rows` tokens of a rank, m in all; so many lanes store them."""

    m: Any
    rows: Any
    lanes: Any


class Arrival(NamedTuple):
    """Arguments of `_ready`."""

    gathered: Any
    token_of: Any
    rows_ready: Any
    e: Any
    lanes: Any
    world: Any


@triton.jit
def _ready(at, segment, tile, args):
    """A tile's tokens, once all lanes of their ranks have stored them. args: Arrival"""
    word = args.rows_ready + at.lo * args.lanes
    wl.wait(word, args.e, (at.hi - at.lo + 1) * args.lanes, world=args.world)  # pairs with _push
    return grouped.rows_by_token(at, args.gathered, args.token_of)


@triton.jit
def _push(world, x, gathered, rows_ready, e, rank, lane, k, feed, block: tl.constexpr):
    """Every lanes-th block of own tokens -> every rank's slot, own first; and this lane's word."""
    own = tl.minimum(tl.maximum(feed.m - rank * feed.rows, 0), feed.rows)
    size = own.to(tl.int64) * k
    there = gathered + (rank * feed.rows).to(tl.int64) * k
    for hop in range(world.num_ranks):
        to = (rank + hop) % world.num_ranks
        for start in range(lane * block, size, feed.lanes * block):
            i = start + tl.arange(0, block)
            wl.put(world, there + i, x + i, to=to, mask=i < size)
        wl.notify(world, rows_ready + rank * feed.lanes + lane, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def ag_moe_multiply(x, b, out, token_of, tiles, turns, num_tiles, gathered, rows_ready, slot, shape,
                    feed, room, tile, world, group_m: tl.constexpr,
                    block: tl.constexpr):  # fmt: skip
    """The GEMM template with the hooks above, for as many tiles as `num_tiles` says."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    slots.slot_wait_free(world, slot, e)
    if program < feed.lanes:
        _push(world, x, gathered, rows_ready, e, rank, program, shape.k, feed, block)
    # Feeders come last in every round.
    first = (program + num_programs - feed.lanes) % num_programs
    gemm.gemm(
        b, shape, tile, tl.load(num_tiles), first, num_programs,
        grouped.in_turn, grouped.Turns(tiles, turns, room, group_m),
        _ready, Arrival(gathered, token_of, rows_ready, e, feed.lanes, world),
        grouped.emit_slots, gemm.Stored(out, shape),
    )  # fmt: skip
    slots.slot_finish(world, slot, e, num_programs)


# ---------------------------------------------------------------------------------------------
# The host


def ag_moe(
    x: torch.Tensor,
    b: torch.Tensor,
    routing: Routing,
    *,
    world: Any,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Every token of all ranks times its experts' b, in the order of routing's slots. Collective.

        out[slot] = all_gather(x)[token_of[slot]] @ b[expert of slot]

    Shapes  x: [own tokens, k], contiguous; b: [experts, k, n], contiguous or the transpose of a
            contiguous [experts, n, k]; out: [m * top_k, n]
    Dtypes  all alike, float16, bfloat16 or float32; sums in fp32
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    problem = problem_of(world, x, b, routing, out)
    config = config or choose(problem, world.target)
    config.check(problem, world.target)
    world.operator_call(
        f"ag_moe m={problem.m},n={problem.n},k={problem.k} {problem.dtype} "
        f"experts={problem.experts} top_k={problem.top_k} tile_m={problem.tile_m} {config}"
    )
    if out is None:
        out = torch.empty((problem.num_slots, problem.n), dtype=x.dtype, device=x.device)
    if problem.is_empty:
        return out.zero_()
    buffers = {"gathered": ((problem.m, problem.k), x.dtype)}
    signals = {"rows_ready": (problem.num_ranks * config.lanes, torch.int64)}
    slot = world.workspace("ag_moe", buffers, signals)
    tables = [getattr(routing.tables, name) for name in TABLES]
    ag_moe_multiply[(config.grid(problem, world.target),)](
        x, b, out, *tables, slot.gathered, slot.rows_ready, slot.arg, _shape(problem),
        Feed(problem.m, problem.rows, config.lanes), problem.routing.max_tiles,
        config.tile(problem).as_constexpr(), world.arg, config.group_m, BLOCK,
        num_warps=config.num_warps, num_stages=config.num_stages,
    )  # fmt: skip
    return out


def _shape(problem: Problem) -> gemm.Shape:
    n, k = problem.n, problem.k
    return gemm.Shape(problem.num_slots, n, k, k, k if problem.b_is_nk else n, n)


def problem_of(world: Any, x: Any, b: Any, routing: Routing, out: Any = None) -> Problem:
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    for name, tensor, dims in (("x", x, 2), ("b", b, 3)):
        if tensor.dim() != dims:
            shape = tuple(tensor.shape)
            raise ShapeError(f"ag_moe: {name} has shape {shape}; it must have {dims} dimensions")
    _lanes.check_tensor("ag_moe", "x", x, world)
    b_is_nk = not b.is_contiguous() and b.transpose(1, 2).is_contiguous()
    _lanes.check_tensor("ag_moe", "b", b.transpose(1, 2) if b_is_nk else b, world)
    for name in TABLES:
        _lanes.check_tensor("ag_moe", name, getattr(routing.tables, name), world)
    (own, k), (experts, k_b, n) = x.shape, b.shape
    if k != k_b:
        raise ShapeError(f"ag_moe: x has k={k} but b has k={k_b}; pass b as [experts, k, n]")
    if x.dtype != b.dtype:
        raise DtypeError(f"ag_moe: x is {x.dtype} but b is {b.dtype}; convert one of them")
    m, top_k = routing.tables.slot_of.shape
    if routing.tables.counts.shape[1] != experts:
        routed = routing.tables.counts.shape[1]
        raise ShapeError(f"ag_moe: b has {experts} experts but tokens were routed to {routed}")
    problem = Problem(
        m, n, world.num_ranks, str(x.dtype), _lanes.nodes_of(world), k, experts, top_k,
        routing.tile_m, b_is_nk,
    )  # fmt: skip
    first, end = problem.shard(world.rank)
    if own != end - first:
        raise ShapeError(
            f"ag_moe: rank {world.rank} of {world.num_ranks} passes x with {own} tokens, but of "
            f"the m={m} that were routed it holds {end - first} (torch.chunk)"
        )
    if out is not None:
        _lanes.check_out("ag_moe", out, (problem.num_slots, n), x.dtype, world)
    return problem


# ---------------------------------------------------------------------------------------------
# The card


def make_problem(
    num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    rest = (shape["k"], shape["experts"], shape["top_k"], shape.get("tile_m", 16))
    return Problem(shape["m"], shape["n"], num_ranks, dtype, nodes, *rest)


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random tensors on the CPU, with the tables of random tokens: a call has nothing
    before it that would keep ranks together."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    first, end = problem.shard(rank)
    x = torch.randn(end - first, problem.k, generator=generator).to(problem.torch_dtype)
    n, k = problem.n, problem.k
    lies = (problem.experts, n, k) if problem.b_is_nk else (problem.experts, k, n)
    b = torch.randn(lies, generator=generator).to(problem.torch_dtype)
    routed = problem.routing
    everyone = range(problem.num_ranks)
    logits = [router.make_inputs(routed, other, seed) for other in everyone]
    tables = router.reference(routed, logits)[rank]
    inputs = {"x": x, "b": b.transpose(1, 2) if problem.b_is_nk else b}
    return {**inputs, **tables._asdict()}


def run(
    world: Any, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    tables = Tables(**{name: inputs[name] for name in Tables._fields})
    routing = Routing(tables, problem.tile_m)
    return ag_moe(inputs["x"], inputs["b"], routing, world=world, config=config)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or choose(problem, target)
    config.check(problem, target)
    element = f"*{DTYPES[problem.dtype].triton}"
    operands = ("x", "b", "out", "gathered")
    shape, tile = _shape(problem), config.tile(problem)
    types = {
        **dict.fromkeys(operands, element),
        **dict.fromkeys(TABLES, "*i32"),
        "rows_ready": "*i64",
        "slot": ["*i64", "*i32", "*i64"],
        "shape": ["i32"] * len(shape),
        "feed": ["i32"] * len(Feed._fields),
        "room": "i32",
        "tile": ["constexpr"] * len(tile),
        "world": ["*i64", "constexpr", "constexpr"],
    }
    constants = {
        "slot": SlotArg(None, None, None),
        "shape": gemm.Shape(*[None] * len(shape)),
        "feed": Feed(None, None, None),
        "tile": tile,
        "world": WorldArg(None, problem.num_ranks, language_version()),
        "group_m": config.group_m,
        "block": BLOCK,
    }
    aligned = [f"shape.{name}" for name, size in shape._asdict().items() if size % 16 == 0]
    names = ag_moe_multiply.arg_names
    yield (
        ag_moe_multiply,
        KernelRecord(
            name="ag_moe.multiply",
            signature={name: types.get(name, "constexpr") for name in names},
            constants=constants,
            options={"num_warps": config.num_warps, "num_stages": config.num_stages},
            divisible_by_16=(*operands, *TABLES, "rows_ready", *aligned),
        ),
    )


def fake(problem: Problem, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The first rank's result: its shape and dtype, without its values."""
    shape = (problem.num_slots, problem.n)
    return torch.empty(shape, dtype=problem.torch_dtype, device="meta")


op = Op(
    name="ag_moe",
    summary="out[slot, n] = all_gather(x)[token of slot, k] @ b[expert of slot]",
    problem=Problem,
    config=Config,
    make_problem=make_problem,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    default_shape={"m": 64, "n": 64, "k": 64, "experts": 8, "top_k": 2},
    smallest={"m": 4, "n": 16, "k": 16, "experts": 2, "top_k": 1},
    smallest_config={"lanes": 1},
    trials=(
        *trials({"m": 20, "n": 24, "k": 16, "experts": 4, "top_k": 2}),
        # More than a block for each lane.
        Trial((2,), {"m": 36, "n": 16, "k": 600, "experts": 2, "top_k": 1}),
    ),
    awkward_shapes=(
        (4, {"m": 97, "n": 40, "k": 24, "experts": 8, "top_k": 3}),
        (3, {"m": 29, "n": 7, "k": 50, "experts": 40, "top_k": 2}),
        (2, {"m": 1, "n": 16, "k": 16, "experts": 1, "top_k": 1}),
        (1, {"m": 40, "n": 48, "k": 32, "experts": 4, "top_k": 4}),
        (4, {"m": 9, "n": 16, "k": 16, "experts": 5, "top_k": 2}),
        (4, {"m": 0, "n": 16, "k": 16, "experts": 4, "top_k": 2}),
    ),
    dtypes=SUPPORTED,
    fake=fake,
    takes_nodes=True,
)
