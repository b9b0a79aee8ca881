"""What operators share that multiply and then sum over ranks: problem, configuration, launches.

Not an operator. Every rank has all m rows of A and of the product, but a part of k; what becomes of
the product's rows, which are split as torch.chunk splits them, is the operator's matter. Operands
are told to kernels as weft.tiles.hooks.partition cuts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, ClassVar, NamedTuple

import torch

from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.hardware import hardware_of
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.compiler import layouts
from weft.compiler.cost import products
from weft.compiler.lower import compose, kernels, signature, source
from weft.ir import core
from weft.ir.task import are_alike
from weft.language import triton_api
from weft.ops import _by_library, _lanes, _records
from weft.plan import launches
from weft.plan.launches import Start, shape_of
from weft.tiles import blocking, dealing, gemm, gemm_sm90
from weft.tiles.blocking import Blocking
from weft.tiles.hooks import partition, scatter

PUSH, PUT, LIBRARY = "push", "put", _by_library.TRANSPORT
TEMPLATES = ("plain", "sm90")
MOST_ENGINES = 4
# Of the symmetric heap, for a product that another operator sums.
MOST_SHARED_BYTES = 32 << 20


@dataclass(frozen=True)
class Problem(_lanes.Rows):
    """[m, k] @ [k, n] on every rank, to be summed over ranks; sums in fp32.

    `b_is_nk`: B lies in memory as [n, k], as weights usually do.
    """

    k: int = 0
    b_is_nk: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.k < 0:
            raise ShapeError(f"{self.op}: k={self.k} is negative")

    @property
    def is_empty(self) -> bool:
        return 0 in (self.m, self.n, self.k)

    @property
    def flops(self) -> int:
        """Of one rank's product."""
        return 2 * self.m * self.n * self.k

    @property
    def memory_bytes(self) -> int:
        """What one rank's product must read and write at least."""
        return ((self.m + self.n) * self.k + self.m * self.n) * self.itemsize

    @property
    def scattered_bytes(self) -> int:
        """What one rank sends so that each gets all shares of its rows."""
        return (self.m - min(self.rows, self.m)) * self.row_bytes

    def can_use_tma(self, target: Target) -> bool:
        return launches.can_use_tma(self, self.itemsize, target)

    def can_use_sm90(self, target: Target) -> bool:
        """Does the template for Hopper take this problem there?"""
        is_asked = launches.is_for_hopper(self.itemsize, self.nodes, target)
        return is_asked and self.can_use_tma(target)


@dataclass(frozen=True)
class Config:
    """How a call is done; every field is the same on all ranks.

    `by_tma`: on Hopper tiles leave by TMA, and are announced behind the next ones' products; not by
    stores of threads, announced at once. Those that engines carry are stored by TMA either way.

    Units   last: of the order's end, own tiles alone, in turns of all programs (order.order_of);
            group_m: rows of tiles that share columns in L2; chunks: of a part's columns, each of
            which an engine carries as one; engines: streams that take turns with them, so that one
            takes its token while another copies
    """

    transport: str = PUSH
    template: str = "plain"
    last: int = 3
    tile_m: int = 128
    tile_n: int = 128
    tile_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    tma: bool = True
    by_tma: bool = False
    chunks: int = 1
    engines: int = 1

    op: ClassVar[str]
    # The ways in which nothing is fused, by the operator that follows the product; those of few
    # rows, by packets; and those in which copy engines carry tiles.
    unfused: ClassVar[tuple[str, ...]]
    by_packets: ClassVar[tuple[str, ...]] = ()
    by_engines: ClassVar[tuple[str, ...]] = ()

    def check(self, problem: Any, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        if self.transport == LIBRARY:
            if target.backend != "cuda" or not problem.is_even:
                raise ConfigError(
                    f"{self.op}: transport={LIBRARY!r} for m={problem.m} on {problem.num_ranks} "
                    f"ranks, on {target}; it takes NVIDIA GPUs, and shards of one size"
                )
            return
        if self.transport in self.unfused:
            return
        if self.transport in self.by_packets:
            if len(problem.nodes) > 1:
                raise ConfigError(
                    f"{self.op}: transport={self.transport!r} on {len(problem.nodes)} nodes; "
                    f"packets reach the ranks of one node only: take transport={PUSH!r}"
                )
            self.blocking.check(self.op, problem.dtype, problem.dtype, False, target)
            return
        if self.transport in self.by_engines:
            self._check_engines(problem)
        elif self.transport != PUSH:
            ways = (PUSH, *self.by_engines, *self.by_packets, *self.unfused, LIBRARY)
            known = ", ".join(ways)
            raise ConfigError(f"{self.op}: transport={self.transport!r}; it is one of {known}")
        for name in ("last", "group_m"):
            if not 1 <= getattr(self, name) <= 1024:
                value = getattr(self, name)
                raise ConfigError(f"{self.op}: {name}={value}; it must be between 1 and 1024")
        if self.by_tma and self.sends and problem.num_ranks > scatter.MOST_PEERS + 1:
            raise ConfigError(
                f"{self.op}: by_tma with {problem.num_ranks} ranks; a kernel takes descriptors of "
                f"{scatter.MOST_PEERS} peers: take by_tma=False"
            )
        self._check_template(problem, target)

    def _check_engines(self, problem: Any) -> None:
        if len(problem.nodes) > 1:
            raise ConfigError(
                f"{self.op}: transport={self.transport!r} on {len(problem.nodes)} nodes; copy "
                f"engines reach the ranks of one node only: take transport={PUSH!r}"
            )
        if not 1 <= self.engines <= MOST_ENGINES:
            raise ConfigError(
                f"{self.op}: engines={self.engines}; it must be between 1 and {MOST_ENGINES}"
            )
        if self.chunks < 1 or not are_alike(problem.n, self.chunks, self.tile_n):
            raise ConfigError(
                f"{self.op}: chunks={self.chunks} of n={problem.n} columns in tiles of "
                f"{self.tile_n}; several chunks must be alike, of whole tiles: take 1, or such "
                "that chunks * tile_n divides n"
            )

    def _check_template(self, problem: Any, target: Target) -> None:
        if self.template not in TEMPLATES:
            told = f"template={self.template!r}; it must be one of {', '.join(TEMPLATES)}"
            raise ConfigError(f"{self.op}: {told}")
        if self.template == "plain":
            tma = self.tma and problem.can_use_tma(target)
            # C does not leave by TMA, so it takes no shared memory.
            self.blocking.check(self.op, problem.dtype, problem.dtype, False, target)
            if tma and max(self.tile_m, self.tile_n) > blocking.TMA_EXTENT:
                raise ConfigError(f"{self.op}: TMA moves tiles up to {blocking.TMA_EXTENT}")
            return
        if not problem.can_use_sm90(target):
            raise ConfigError(
                f"{self.op}: template='sm90' with {problem.dtype} on {target}, ranks by nodes "
                f"{problem.nodes}; it takes 16-bit operands with rows of a multiple of "
                f"{blocking.TMA_BYTES} bytes, compute capability 9.0 and ranks of one node"
            )
        gemm_sm90.check(self.op, self.tile_m, self.tile_n, self.tile_k, self.num_stages, target)

    @property
    def is_fused(self) -> bool:
        return self.transport in (PUSH, *self.by_packets, *self.by_engines)

    @property
    def sends(self) -> bool:
        """Do SMs carry tiles to their owners?"""
        return self.transport == PUSH

    @property
    def blocking(self) -> Blocking:
        return Blocking(self.tile_m, self.tile_n, self.tile_k, self.num_warps, self.num_stages)

    def parts(self, problem: Any, target: Target) -> partition.Parts:
        """How the product is cut."""
        return launches.parts_of(
            problem, problem.rows, problem.num_ranks, (self.tile_m, self.tile_n),
            self.template == "sm90", self.grid(problem, target), self.last, self.group_m,
            self.chunks,
        )  # fmt: skip

    def num_tiles(self, problem: Any) -> int:
        tiles_m = ceil(problem.rows / self.tile_m)
        return problem.num_ranks * tiles_m * ceil(problem.n / self.tile_n)

    def num_words(self, problem: Any, target: Target) -> int:
        """Signals of a rank's own tiles, or of as many of each other rank."""
        return self.num_tiles(problem) * self.parts(problem, target).words

    def grid(self, problem: Any, target: Target) -> int:
        """Programs that multiply: all of them are resident."""
        if self.template == "sm90":
            return target.num_sms
        return max(1, min(self.num_tiles(problem), target.num_sms))


def fused(config: type[Config], problem: Any, target: Target) -> Iterator[Any]:
    """Configurations in which one kernel does all, the one that is predicted to end first first."""
    if problem.can_use_sm90(target) and not problem.is_empty:
        ways = (False, True) if problem.num_ranks <= scatter.MOST_PEERS + 1 else (False,)
        # WIDER is predicted to be first at no size of the layers that are read.
        cuts = (gemm_sm90.TURNS, gemm_sm90.WIDE, gemm_sm90.MIDDLE)
        found = [
            config(template="sm90", by_tma=by_tma, **_cut(cut, problem))
            for by_tma in ways
            for cut in cuts
        ]
        for cut in cuts:
            found += _by_engines(config(template="sm90", **_cut(cut, problem)), problem)
        # To the nanosecond: of ways that end together the one in fewer chunks comes first.
        yield from sorted(found, key=lambda one: round(_predicted_us(one, problem, target), 3))
    for cut in blocking.candidates(problem.m, problem.n, problem.k, problem.dtype, target):
        low = replace(cut, tile_m=min(cut.tile_m, max(16, _lanes.power_of_two(problem.rows))))
        yield (one := config(**_cut(low, problem)))
        yield from _by_engines(one, problem)


def _by_engines(one: Any, problem: Any) -> Iterator[Any]:
    """The same where copy engines carry tiles, in few chunks or in several."""
    if one.by_engines and len(problem.nodes) <= 1 and problem.num_ranks > 1:
        # Programs of one turn are in one part's tiles.
        group_m = launches.group_m(1, ceil(problem.rows / one.tile_m))
        for chunks in products.CARRIED_CHUNKS:
            if are_alike(problem.n, chunks, one.tile_n):
                yield replace(one, transport=PUT, chunks=chunks, group_m=group_m)


def _predicted_us(config: Config, problem: Any, target: Target) -> float:
    """When all rows are summed, which takes every operator here alike."""
    tile = (config.tile_m, config.tile_n, config.tile_k)
    one = products.Product(
        problem.m, problem.n, problem.k, problem.num_ranks, tile, problem.itemsize
    )
    machine = hardware_of(target)
    assert machine is not None, f"{target} has the template for Hopper, but no record"
    if config.transport in config.by_engines:
        return products.carried_us(one, machine, config.chunks)
    return products.scattered_us(one, machine, by_tma=config.by_tma)


def _cut(cut: Blocking, problem: Any) -> dict[str, int]:
    tiles_m = ceil(problem.rows / cut.tile_m)
    return {**asdict(cut), "group_m": launches.group_m(problem.num_ranks, tiles_m)}


# ---------------------------------------------------------------------------------------------
# Tensors


def problem_of(kind: Callable[..., Any], world: Any, a: Any, b: Any, out: Any = None) -> Any:
    """The problem that this rank's tensors are a part of, as `kind` makes it.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    op = kind.op
    for name, tensor in (("a", a), ("b", b)):
        if tensor.dim() != 2:
            shape = tuple(tensor.shape)
            raise ShapeError(f"{op}: {name} has shape {shape}; it must have two dimensions")
    (m, k), (k_b, n) = a.shape, b.shape
    if k != k_b:
        raise ShapeError(f"{op}: a has k={k} but b has k={k_b}; pass b as [k, n], not [n, k]")
    if a.dtype != b.dtype:
        raise DtypeError(f"{op}: a is {a.dtype} but b is {b.dtype}; convert one of them")
    layouts.check_tensor(op, "a", a, world)
    if b.is_contiguous() or not b.t().is_contiguous():
        layouts.check_tensor(op, "b", b, world)
    else:
        layouts.check_tensor(op, "b.t()", b.t(), world)
    problem = kind(
        m, n, world.num_ranks, str(a.dtype), _lanes.nodes_of(world), k, not b.is_contiguous()
    )
    if out is not None:
        first, end = problem.result_rows(world.rank)
        _lanes.check_out(op, out, (end - first, n), a.dtype, world)
    return problem


def make_problem(
    kind: Any, num_ranks: int, shape: Mapping[str, int], dtype: str, nodes: tuple[int, ...] = ()
) -> Any:
    return kind(shape["m"], shape["n"], num_ranks, dtype, nodes, shape["k"])


def make_inputs(problem: Any, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's normal random tensors on the CPU: the same for one seed on every machine."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    n, k = problem.n, problem.k
    a = torch.randn(problem.m, k, generator=generator).to(problem.torch_dtype)
    b = torch.randn((n, k) if problem.b_is_nk else (k, n), generator=generator)
    b = b.to(problem.torch_dtype)
    return {"a": a, "b": b.t() if problem.b_is_nk else b}


def total(inputs: Sequence[Mapping[str, Any]]) -> torch.Tensor:
    """The sum of all ranks' products, in fp32."""
    sums = inputs[0]["a"].float() @ inputs[0]["b"].float()
    for one in inputs[1:]:
        sums += one["a"].float() @ one["b"].float()
    return sums


# ---------------------------------------------------------------------------------------------
# Launches


class Program(NamedTuple):
    """An operator's kernel as Core IR, from which both of its forms are generated. They take the
    operands a, b and c, own rows of the result; all of it where it `takes_out`; the slot's `arrays`
    by name; then what both need.

    On Hopper by TMA, before the arrays: descriptors of this rank's part of each of those that tiles
    are sent to, on every peer, by hop; their first extent is the ranks'.
    """

    kernel: core.Kernel
    arrays: tuple[str, ...]
    takes_out: bool = False

    def load(self, by_tma: bool = False) -> source.Twins:
        return source.load(kernels.sending(self.kernel) if by_tma else self.kernel)

    @property
    def peers(self) -> list[str]:
        return compose.peers_of(kernels.sending(self.kernel))


class Call:
    """What calls with one problem and one configuration share on one rank: found once, kept.

    `buffers` and `signals` are those of the operator's slot, by the names of program.arrays.
    """

    def __init__(
        self,
        world: Any,
        problem: Any,
        config: Any,
        program: Program | None,
        buffers: dict,
        signals: dict,
    ) -> None:
        self.problem, self.config, self.program = problem, config, program
        self.twins = program.load(config.by_tma) if program and config.is_fused else None
        self.buffers, self.signals = dict(buffers), dict(signals)
        self.out_shape = (_size(problem.result_rows(world.rank)), problem.n)
        self.name = (
            f"{problem.op} m={problem.m},n={problem.n},k={problem.k} {problem.dtype} {config}"
        )
        self.own_rows = slice(*problem.shard(world.rank))
        self.is_empty = problem.is_empty
        self.is_fused = config.is_fused
        self.replays = world.replays()
        self._kernels: dict[Any, Any] = {}
        self._described: dict[Any, list[Any]] = {}
        if not self.is_fused or self.is_empty:
            return
        self.grid = (config.grid(problem, world.target), 1, 1)
        self.tma = config.tma and problem.can_use_tma(world.target)
        self.shape, self.parts = shape_of(problem), config.parts(problem, world.target)
        # By whether TMA is used.
        self.tiles = [tile_of(problem, config, tma).as_constexpr() for tma in (False, True)]
        if config.template == "sm90":
            elements = dealing.partial_elements(config.tile_m, config.tile_n, self.grid[0])
            self.buffers["sums"] = ((elements,), torch.float32)
            self.signals["summed"] = (dealing.partial_words(self.grid[0]), torch.int64)

    def product(self, world: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        """The library's product: where peers read it in place, if that is not much, in memory that
        products of all sizes share. Collective."""
        if self.problem.m * self.problem.row_bytes > MOST_SHARED_BYTES:
            return torch.mm(a, b)
        request = {"product": ((self.problem.m, self.problem.n), a.dtype)}
        slot = world.workspace(f"{self.problem.op}.product", request, num_slots=1)
        return torch.mm(a, b, out=slot.product)

    def run(self, world: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        """The fused way. Ranks signal tiles to each other, so the plain twin has to have the same
        ones: where it cannot, since it takes a power of two of columns, tensors are copied to where
        the template for Hopper reads them."""
        has_plain_twin = self.config.tile_n == gemm_sm90.wide_columns(self.config.tile_n)
        if has_plain_twin or blocking.are_aligned(a, b, out):
            self.run_on_slot(world, a, b, out)
            return
        copy = torch.empty_like(out)
        self.run_on_slot(world, a.clone(), b.clone(), copy)
        out.copy_(copy)

    def run_on_slot(self, world: Any, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
        slot = world.workspace(self.problem.op, self.buffers, self.signals)
        self.replays.run(
            (a.data_ptr(), b.data_ptr(), out.data_ptr(), slot.number),
            lambda: self.launch(world, slot, a, b, out),
        )

    def launch(self, world: Any, slot: Any, a: Any, b: Any, out: Any) -> None:
        self.start(*self.multiplying(world, slot, a, b, out))

    def prepare(self, world: Any, a: Any, b: Any, out: Any) -> None:
        """Have the slot's memory, and the kernel that these tensors ask for, before it is launched.
        Collective for the first tensors of a problem."""
        slot = world.reserve(self.problem.op, self.buffers, self.signals)
        one, _ = self.multiplying(world, slot, a, b, out)
        world.load(one.function, *one.arguments, **one.options)

    def multiplying(self, world: Any, slot: Any, a: Any, b: Any, out: Any) -> tuple[Start, bool]:
        """The launch of the product, and whether addresses are aligned: TMA asks this of them, and
        Triton specialises kernels by it."""
        aligned = blocking.are_aligned(a, b, out)
        is_sm90, tma = self.config.template == "sm90" and aligned, self.tma and aligned
        arrays = [getattr(slot, name) for name in self.program.arrays]
        own = out[self.own_rows] if self.program.takes_out else out
        operands = self._operands(slot, a, b, own, is_sm90, tma)
        peers = self._peers(world, slot) if self.config.by_tma and self.config.sends else ()
        if self.program.takes_out:
            arrays = [out, *arrays]
        fn = self.twins.sm90 if is_sm90 else self.twins.plain
        given = (*operands, *arrays)
        first = self.twins.arranged(given, peers if is_sm90 else None)
        arguments = (*first, *self._rest(world, slot, is_sm90, tma))
        return Start(fn, self.grid, arguments, options_of(self.config, is_sm90)), aligned

    def start(self, one: Start, aligned: bool) -> None:
        """Launch it; by a kernel that is kept, where addresses are `aligned`."""
        kernel = self._kernels.get(one.function) if aligned else None
        if kernel is not None:
            triton_api.relaunch(kernel, one.grid, *one.arguments)
            return
        kernel = one.function[one.grid](*one.arguments, **one.options)
        if aligned:
            self._kernels[one.function] = kernel

    def _operands(
        self, slot: Any, a: Any, b: Any, out: Any, is_sm90: bool, tma: bool
    ) -> tuple[Any, ...]:
        """What the kernel takes as a, b and c: descriptors where TMA reads them."""
        config = self.config
        if not tma:
            return a, b, out
        describe = gemm_sm90.descriptor if is_sm90 else blocking.descriptor
        left = describe(a, (config.tile_m, config.tile_k))
        lies = (config.tile_n, config.tile_k, self.problem.b_is_nk)
        right = launches.describe_b(b, *lies, is_sm90)
        if is_sm90:
            # Without rows there is no address to describe, and no tile is stored.
            spare = getattr(slot, self.program.arrays[0])
            rows = out if out.numel() else spare.view(-1, self.problem.n)
            out = describe(rows, chunk_of(config))
        return left, right, out

    def _peers(self, world: Any, slot: Any) -> list[Any]:
        """What tiles leave by; kept for each slot."""
        found = self._described.get(slot.number)
        if found is None:
            chunk = chunk_of(self.config)
            arrays = [getattr(slot, name) for name in self.program.peers]
            described = [launches.describe_peers(world, x, self.parts, chunk) for x in arrays]
            found = self._described[slot.number] = [one for rows in described for one in rows]
        return found

    def _rest(self, world: Any, slot: Any, is_sm90: bool, tma: bool) -> tuple:
        config = self.config
        if not is_sm90:
            return (slot.arg, self.shape, self.parts, None, self.tiles[tma], world.arg)
        extents = (config.tile_m, config.tile_n, config.tile_k, config.num_stages)
        sums = (slot.sums, slot.summed)
        shapes = (self.shape, self.parts)
        return (*sums, slot.arg, *shapes, None, world.arg, *extents, self.problem.b_is_nk)


def _size(rows: tuple[int, int]) -> int:
    return rows[1] - rows[0]


def chunk_of(config: Config) -> tuple[int, int]:
    return launches.chunk_of(config.tile_m, config.tile_n)


def tile_of(problem: Any, config: Config, tma: bool) -> gemm.Tile:
    extents = (config.tile_m, config.tile_n, config.tile_k)
    return gemm.Tile.of(*extents, size_k=problem.k, b_is_nk=problem.b_is_nk, tma=tma)


def options_of(config: Config, is_sm90: bool) -> dict[str, int]:
    if is_sm90:
        return {"num_warps": config.num_warps}
    # The plain twin of a configuration for Hopper, where addresses are not TMA's.
    stages = config.num_stages if config.template == "plain" else 3
    return {"num_warps": config.num_warps, "num_stages": stages}


def record(
    problem: Any, config: Config, target: Target, program: Program, arrays: Mapping[str, str]
) -> tuple[Any, KernelRecord]:
    """The kernel that a call with this configuration launches, for `compile`.

    `arrays` are the types of the slot's arrays.
    """
    is_sm90 = config.template == "sm90"
    tma = config.tma and problem.can_use_tma(target)
    twins = program.load(config.by_tma)
    fn = twins.sm90 if is_sm90 else twins.plain
    dtype, tile_m, tile_n, tile_k = problem.dtype, config.tile_m, config.tile_n, config.tile_k
    b_block = launches.block_of_b(tile_n, tile_k, problem.b_is_nk, is_sm90)
    types = {
        "a": _records.operand(dtype, (tile_m, tile_k), tma, is_sm90),
        "b": _records.operand(dtype, b_block, tma, is_sm90),
        "c": _records.operand(dtype, chunk_of(config), is_sm90, True),
        "out": _records.operand(dtype, (), False),
        "kept": _records.operand(dtype, chunk_of(config), is_sm90, True),
        **arrays,
    }
    kernel = kernels.sending(program.kernel) if config.by_tma else program.kernel
    words = [types[one.name] for one in compose.params_of(kernel)]
    chunk = _records.operand(dtype, chunk_of(config), tma, is_sm90)
    signature_, fixed, aligned = signature.arranged(kernel, config.template, words, chunk)
    constants = {
        "tile": tile_of(problem, config, tma),
        "tile_m": tile_m,
        "tile_n": tile_n,
        "tile_k": tile_k,
        "stages": config.num_stages,
        "b_is_nk": problem.b_is_nk,
        **fixed,
    }
    return _records.record(
        fn, f"{problem.op}.multiply", problem.num_ranks,
        {**signature_, "sums": "*fp32", "summed": "*i64"},
        tuples={"shape": gemm.Shape, "mapping": partition.Parts}, constants=constants,
        options=options_of(config, is_sm90),
        aligned=(*aligned, *_records.aligned_sizes("shape", shape_of(problem))),
    )  # fmt: skip
