"""Distributed flash-decode: one query a sequence; all ranks have parts of its keys and values.

    out[b, h, :] = softmax over j of (q[b, h, :] . k[b, j, g, :] * scale) @ v[b, j, g, :]

over all keys of all ranks, with g = h // (heads / kv_heads). Every rank has, for each sequence,
lengths[b] keys and values of its own, of all heads, in any number; every rank passes the same
queries, and gets all of out, the same bits everywhere. Which keys a rank has does not matter:
softmax knows no order.

Plan: one kernel on each rank
    attend   own keys, in splits (weft.tiles.attention_decode) -> for each sequence and head of the
             cache the mean of the values and the log of the sum of weights, lse, both in fp32
    send     both -> every rank, this one too
    merge    what all ranks have sent, in the order of ranks: mean of means, weighted by exp(lse)
A rank without keys of a sequence sends zeros and an lse of -inf, which weighs nothing; where no
rank has any, out is zeros. Sums are in fp32, in a fixed order; out is rounded once.

    packets  data and flag in one word; no signal, no fence: for few heads
    push     puts to the other ranks' slots, then a word for each tile

Signals
    words[2, ..]         packets, flagged with the call's epoch e, in two halves that calls use in
                         turns. Every rank sends every tile to every rank: who has ended a call
                         knows that all ranks have begun it, and so ended the one before. No credit
    ready[tile, src]     push: the tile of src is here; SET to e. By src
    come                 local: counts the splits of a tile that are there  (attention_decode)
    slot_free, epoch, ticket   the slot's; the last program moves them

Limits  tensors are contiguous; d up to MOST_COLUMNS; packets need all ranks on one node
Source  flash-decode (Dao et al. 2023); its split over ranks: Triton-distributed (ByteDance 2025)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

import torch

from weft.base.card import Op, Trial
from weft.base.dtypes import DTYPES
from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.compiler import layouts
from weft.language.world_arg import SlotArg, WorldArg, language_version
from weft.ops import _baselines, _given, _lanes, _measured
from weft.ops._flash_decode_kernel import flash_decode_kernel
from weft.runtime.world import World
from weft.tiles import attention_decode

PACKETS, PUSH = "packets", "push"
TRANSPORTS = (PACKETS, PUSH)
FEWEST_KEYS = 256  # of a split: below, merging would cost what splitting saves
NEARLY = 1.05  # as fast: so much longer may splits take than the best number of them


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[Any]:
    """All ranks at once: one softmax over the keys of all, in fp32, rounded once."""
    q = inputs[0]["q"].float()
    out = torch.zeros_like(q)
    for b in range(problem.m):
        parts = [(one, int(one["lengths"][b])) for one in inputs]
        keys, values = (
            torch.cat([one[name][b, :length].float() for one, length in parts])
            for name in ("k_cache", "v_cache")
        )
        if len(keys):
            grouped = q[b].reshape(problem.kv_heads, problem.group, problem.k)
            scores = torch.einsum("ghd,jgd->ghj", grouped, keys) * problem.scale
            mean = torch.einsum("ghj,jgd->ghd", scores.softmax(-1), values)
            out[b] = mean.reshape(problem.heads, problem.k)
    out = out.to(problem.torch_dtype)
    return [out.clone() for _ in inputs]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem(_lanes.Rows):
    """m queries of `heads` heads of k elements; on every rank caches of n keys a sequence.

    `variable`: lengths are any numbers up to n, not all n: of inputs alone, which are made by it.
    `page` keys lie together, of a cache in pages; 0 is one without.
    """

    k: int = 64
    heads: int = 8
    kv_heads: int = 8
    variable: bool = True
    page: int = 0

    op = "flash_decode"

    def __post_init__(self) -> None:
        super().__post_init__()
        most = attention_decode.MOST_COLUMNS
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ShapeError(
                f"{self.op}: {self.heads} query heads over {self.kv_heads} heads of the cache; "
                "they must be a multiple"
            )
        if not 1 <= self.k <= most:
            raise ShapeError(f"{self.op}: heads of {self.k} elements; it takes 1 to {most}")

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def scale(self) -> float:
        return self.k**-0.5

    @property
    def row_of_head(self) -> int:
        """Bytes of a key's, or a query's, part in one head."""
        return self.k * self.itemsize

    @property
    def partial_bytes(self) -> int:
        """What a rank sends to each other one."""
        return self.m * self.heads * (self.k + 1) * 4

    @property
    def flops(self) -> int:
        """Of one rank with full caches."""
        return 4 * self.m * self.heads * self.n * self.k

    @property
    def cache_bytes(self) -> int:
        """Keys and values of one rank, when all are full."""
        return 2 * self.m * self.n * self.kv_heads * self.k * self.itemsize


@dataclass(frozen=True)
class Config:
    """`transport` as the Plan says. Units  tile_m: query heads at a time, of those that share a
    head of the cache; tile_n: keys at a time; splits: of each sequence's keys"""

    transport: str = PACKETS
    tile_m: int = 16
    tile_n: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem"""
        op = problem.op
        if self.transport not in TRANSPORTS:
            told = f"transport={self.transport!r}; it is one of {', '.join(TRANSPORTS)}"
            raise ConfigError(f"{op}: {told}")
        for name, least in (("tile_m", 16), ("tile_n", 16), ("num_warps", 1)):
            if (value := getattr(self, name)) < least or value & (value - 1):
                told = f"{name}={value}; it must be a power of two, {least} or more"
                raise ConfigError(f"{op}: {told}")
        for name in ("splits", "num_stages"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{op}: {name}={getattr(self, name)}; at least 1 is needed")
        if self.transport == PACKETS and len(problem.nodes) > 1:
            told = f"transport={PACKETS!r} reaches into peers' memory, but the world has "
            raise ConfigError(f"{op}: {told}{len(problem.nodes)} nodes; take {PUSH!r}")

    def tile(self, problem: Problem) -> attention_decode.Tile:
        columns = max(16, _lanes.power_of_two(problem.k))
        return attention_decode.Tile(self.tile_m, self.tile_n, columns)

    def tiles(self, problem: Problem) -> int:
        return problem.m * problem.kv_heads * ceil(problem.group / self.tile_m)

    def grid(self, problem: Problem, target: Target) -> int:
        """Programs, which wait for other ranks': all of them are resident."""
        most = 3 if target.backend == "emu" else target.num_sms
        return max(1, min(self.tiles(problem) * self.splits, most, target.num_sms))


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    # What a rank sends to each is then as long as the messages of one-shot packets.
    first = next(iter(_measured.rows_for("all_reduce", problem.partial_bytes)))
    few = first.transport == "one_shot_packets"
    ways = TRANSPORTS if few else TRANSPORTS[::-1]
    for transport in ways if len(problem.nodes) == 1 else (PUSH,):
        yield cut_of(transport, problem, target)


def cut_of(transport: str, problem: Problem, target: Target) -> Config:
    """Splits until SMs have alike. Tiles as large as registers hold, as compiled kernels say."""
    if target.backend == "emu":
        return Config(transport, 16, 16, 2, 4, 1)
    columns = max(16, _lanes.power_of_two(problem.k))
    # Products of fp32 have whole rows in registers; packets have flags beside what they carry.
    is_small = problem.itemsize == 4 or target.backend == "hip"
    most = 16 if is_small or columns > 128 else 32 if transport == PACKETS else 64
    tile_m = max(16, min(_lanes.power_of_two(problem.group), most))
    tile_n = 64 if columns * problem.itemsize <= 256 else 32
    if problem.row_of_head % _lanes.VECTOR_BYTES or problem.itemsize == 4:
        tile_n = 16
    warps = 8 if tile_m * columns > 16 * 128 else 4
    one = Config(transport, tile_m, tile_n, 1, warps, 2 if tile_m > 16 or tile_n < 64 else 3)
    most = max(1, ceil(problem.n / FEWEST_KEYS))
    return replace(one, splits=_splits(one.tiles(problem), target.num_sms, most))


def _splits(tiles: int, programs: int, most: int) -> int:
    """The fewest that are nearly as fast as any. A call takes as long as the program with the most
    units, each of which has one of so many parts of a tile's keys."""
    tiles = max(1, tiles)
    tried = range(1, min(most, 2 * ceil(programs / tiles) + 2) + 1)
    took = {splits: ceil(tiles * splits / programs) / splits for splits in tried}
    return next(splits for splits in tried if took[splits] <= NEARLY * min(took.values()))


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The host


def flash_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    lengths: torch.Tensor,
    *,
    world: World,
    scale: float | None = None,
    block_table: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    config: Config | None = None,
) -> torch.Tensor:
    """Attention of one query a sequence over the keys that all ranks have of it. Collective.

        out[b, h, :] = softmax over all keys of all ranks (q[b, h, :] . k * scale) @ v

    Shapes  q, out: [batch, heads, d], q the same on all ranks; k_cache, v_cache: [batch, max_kv,
            kv_heads, d], or [pages, page, kv_heads, d] with block_table: [batch, width], of which
            the first entries are each sequence's pages. lengths: [batch], keys that this rank has,
            0 up to max_kv, or page * width; more than that are not there. All contiguous
    Dtypes  float16, bfloat16 or float32, all alike; lengths and block_table int32. Sums in fp32
    Units   scale: of scores, 1 / sqrt(d) when None
    Sync    stream-ordered on the current stream; can be recorded; lengths are read on the device
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    if _given.is_autocast():
        q, k_cache, v_cache = _given.cast((q, k_cache, v_cache))
    scale = None if scale is None else float(scale)
    tensors = (q, k_cache, v_cache, lengths, block_table)
    call = _lanes.find_call(world, "flash_decode", tensors, (scale, config), _Call)
    if out is None:
        out = torch.empty_like(q)
    else:
        _lanes.check_out("flash_decode", out, q.shape, q.dtype, world)
    world.operator_call(call.name, call.tensors)
    if not call.is_empty:
        call.launch(world, (*tensors, out))
    return out


class _Call:
    """What calls with tensors like these share on one rank."""

    def __init__(
        self, world: World, q: Any, k_cache: Any, v_cache: Any, lengths: Any, block_table: Any,
        scale: float | None, config: Any,
    ) -> None:  # fmt: skip
        self.problem = problem = problem_of(world, q, k_cache, v_cache, lengths, block_table)
        self.scale = problem.scale if scale is None else scale
        self.config = config = config or choose(problem, world.target)
        config.check(problem, world.target)
        # Caches may be of any size on each rank; who cuts them how, is one's own.
        sizes = f"m={problem.m},heads={problem.heads}/{problem.kv_heads},k={problem.k}"
        self.name = f"{problem.op} {sizes} {problem.dtype} scale={self.scale} {config.transport}"
        tile = config.tile(problem)
        self.is_empty = problem.m == 0
        self.tile, self.shape = tile.as_constexpr(), _shape_of(problem)
        self.grid = (config.grid(problem, world.target), 1, 1)
        self.options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        self.capacity = _lanes.power_of_two(config.tiles(problem))
        # Calls that share boxes agree on who writes each.
        box = tile.rows * (tile.d + 1)
        self.key = f"{problem.op}.{config.transport}.{self.capacity}x{box}"
        boxes = problem.num_ranks * self.capacity * box
        if config.transport == PACKETS:
            self.buffers: dict = {}
            self.signals: dict = {"boxes": (2 * boxes, torch.int64)}
            self.num_slots = {"num_slots": 1}
        else:
            self.buffers = {"boxes": ((boxes,), torch.float32)}
            self.signals = {"ready": (problem.num_ranks * self.capacity, torch.int64)}
            self.num_slots = {}
        self._make_partials(world, tile)
        self.replays = world.replays()

    def _make_partials(self, world: World, tile: attention_decode.Tile) -> None:
        """Memory of this rank alone: calls come one after the other."""
        tiles = self.config.tiles(self.problem)
        sizes = attention_decode.partial_elements(tiles * self.config.splits, tile.rows, tile.d)
        parts = [torch.empty(size, device=world.device) for size in sizes]
        come = torch.zeros(tiles, dtype=torch.int32, device=world.device)
        self.partials = attention_decode.Partials(*parts, come)

    def launch(self, world: World, tensors: Sequence[Any]) -> None:
        slot = world.workspace(self.key, self.buffers, self.signals, **self.num_slots)
        addresses = [0 if one is None else one.data_ptr() for one in tensors]
        self.replays.run((*addresses, slot.number), lambda: self._queue(world, slot, tensors))

    def _queue(self, world: World, slot: Any, tensors: Sequence[Any]) -> None:
        q, k_cache, v_cache, lengths, table, out = tensors
        by_packets = self.config.transport == PACKETS
        flash_decode_kernel[self.grid](
            q, _cache_of(k_cache, v_cache, table), lengths, out, slot.boxes,
            None if by_packets else slot.ready, self.partials, slot.arg, self.shape, self.scale,
            self.config.splits, self.capacity, self.tile, world.arg, by_packets, **self.options,
        )  # fmt: skip


def _cache_of(k_cache: Any, v_cache: Any, table: Any) -> Any:
    if table is None:
        return attention_decode.Contiguous(k_cache, v_cache)
    return attention_decode.Paged(k_cache, v_cache, table, k_cache.shape[1], table.shape[1])


def _shape_of(problem: Problem) -> attention_decode.Shape:
    return attention_decode.Shape(problem.m, problem.kv_heads, problem.group, problem.k, problem.n)


def problem_of(
    world: World, q: Any, k_cache: Any, v_cache: Any, lengths: Any, table: Any = None
) -> Problem:
    """The problem that these tensors are.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    op = Problem.op
    named = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths}
    if table is not None:
        named["block_table"] = table
    for name, tensor in named.items():
        layouts.check_tensor(op, name, tensor, world)
        dims = {"q": 3, "k_cache": 4, "v_cache": 4, "lengths": 1, "block_table": 2}[name]
        if tensor.dim() != dims:
            shape = tuple(tensor.shape)
            raise ShapeError(f"{op}: {name} has shape {shape}; it must have {dims} dimensions")
        wanted = torch.int32 if name in ("lengths", "block_table") else q.dtype
        if tensor.dtype != wanted:
            told = f"{op}: {name} is {tensor.dtype}; with q of {q.dtype} it must be {wanted}"
            raise DtypeError(told)
    batch, heads, d = q.shape
    first, page, kv_heads, _ = k_cache.shape
    rows = first if table is not None else batch
    for name, shape in (
        ("k_cache", (rows, page, kv_heads, d)), ("v_cache", (rows, page, kv_heads, d)),
        ("lengths", (batch,)), ("block_table", (batch, *named.get("block_table", q).shape[1:2])),
    ):  # fmt: skip
        if name in named and tuple(named[name].shape) != shape:
            raise ShapeError(
                f"{op}: {name} has shape {tuple(named[name].shape)}; with q of {tuple(q.shape)} "
                f"and k_cache of {tuple(k_cache.shape)} it must be {shape}"
            )
    keys = page * table.shape[1] if table is not None else page
    return Problem(
        batch, keys, world.num_ranks, str(q.dtype), _lanes.nodes_of(world), d, heads, kv_heads,
        page=page if table is not None else 0,
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The card


def make_problem(
    num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Problem:
    return Problem(
        shape["m"], shape["n"], num_ranks, dtype, nodes, shape["k"], shape["heads"],
        shape["kv_heads"], bool(shape["variable"]),
    )  # fmt: skip


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's random tensors: the same for one seed on every machine. q is all ranks'."""
    shared = torch.Generator().manual_seed(seed)
    own = torch.Generator().manual_seed((seed + 1) * problem.num_ranks + rank)
    heads = (problem.m, problem.heads, problem.k)
    cache = (problem.m, problem.n, problem.kv_heads, problem.k)
    q = torch.randn(heads, generator=shared).to(problem.torch_dtype)
    k_cache = torch.randn(cache, generator=own).to(problem.torch_dtype)
    v_cache = torch.randn(cache, generator=own).to(problem.torch_dtype)
    if problem.variable:
        lengths = torch.randint(0, problem.n + 1, (problem.m,), generator=own)
    else:
        lengths = torch.full((problem.m,), problem.n, device=q.device)
    return {
        "q": q, "k_cache": k_cache, "v_cache": v_cache, "lengths": lengths.to(torch.int32)
    }  # fmt: skip


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    return flash_decode(
        inputs["q"], inputs["k_cache"], inputs["v_cache"], inputs["lengths"], world=world,
        block_table=inputs.get("block_table"), config=config,
    )  # fmt: skip


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernel that a call with this configuration launches, as a record."""
    config = config or choose(problem, target)
    config.check(problem, target)
    element, by_packets = f"*{DTYPES[problem.dtype].triton}", config.transport == PACKETS
    kind = attention_decode.Paged if problem.page else attention_decode.Contiguous
    types = {
        "q": element, "out": element, "lengths": "*i32", "scale": "fp32",
        "cache": [element, element, *(["*i32", "i32", "i32"] if problem.page else [])],
        "boxes": "*i64" if by_packets else "*fp32",
        "ready": "constexpr" if by_packets else "*i64",
        "partials": ["*fp32", "*fp32", "*i32"], "slot": ["*i64", "*i32", "*i64"],
        "shape": ["i32"] * len(attention_decode.Shape._fields), "splits": "i32", "capacity": "i32",
        "tile": ["constexpr"] * 3, "world": ["*i64", "constexpr", "constexpr"],
        "by_packets": "constexpr",
    }  # fmt: skip
    constants = {
        "cache": kind(*[None] * len(kind._fields)),
        "partials": attention_decode.Partials(None, None, None),
        "slot": SlotArg(None, None, None),
        "shape": attention_decode.Shape(*[None] * len(attention_decode.Shape._fields)),
        "tile": config.tile(problem),
        "world": WorldArg(None, problem.num_ranks, language_version()),
        "by_packets": by_packets,
        **({"ready": None} if by_packets else {}),
    }
    even = [f"shape.{name}" for name, size in _shape_of(problem)._asdict().items() if not size % 16]
    yield (
        flash_decode_kernel,
        KernelRecord(
            name=f"{problem.op}.{config.transport}",
            signature=types,
            constants=constants,
            options={"num_warps": config.num_warps, "num_stages": config.num_stages},
            divisible_by_16=("q", "out", "boxes", "cache.k", "cache.v", "partials.out", *even),
        ),
    )


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """The result's shape and dtype, without its values."""
    shape = (problem.m, problem.heads, problem.k)
    return torch.empty(shape, dtype=problem.torch_dtype, device="meta")


op = Op(
    name="flash_decode",
    summary="attention of one query a sequence over keys that all ranks have parts of",
    problem=Problem,
    config=Config,
    make_problem=make_problem,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=kernels,
    default_shape={"m": 4, "n": 64, "k": 32, "heads": 8, "kv_heads": 2, "variable": 1},
    smallest={"m": 1, "n": 20, "k": 16, "heads": 2, "kv_heads": 1},
    smallest_config={"splits": 1},
    trials=(
        *(
            Trial(nodes, {"m": 3, "n": 40, "k": 16, "heads": 2, "kv_heads": 1, "variable": 1})
            for nodes in ((3,), (2, 1))
        ),
        # Programs merge many tiles each: a rank that is a call ahead finds them at it.
        Trial(
            (2,),
            {"m": 12, "n": 4, "k": 16, "heads": 2, "kv_heads": 1, "variable": 1},
            PUSH,
            calls=(0, 0, 0),
        ),
    ),
    awkward_shapes=(
        (4, {"m": 5, "n": 37, "k": 24, "heads": 6, "kv_heads": 2, "variable": 1}),
        (3, {"m": 1, "n": 1, "k": 1, "heads": 1, "kv_heads": 1, "variable": 0}),
        (2, {"m": 3, "n": 0, "k": 16, "heads": 4, "kv_heads": 4, "variable": 1}),
        (1, {"m": 2, "n": 90, "k": 64, "heads": 20, "kv_heads": 1, "variable": 1}),
        (8, {"m": 2, "n": 9, "k": 32, "heads": 8, "kv_heads": 8, "variable": 1}),
        (4, {"m": 0, "n": 16, "k": 16, "heads": 2, "kv_heads": 2, "variable": 1}),
    ),
    baselines=_baselines.FLASH_DECODE,
    fake=fake,
    takes_nodes=True,
)
