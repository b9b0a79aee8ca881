"""All-gather, then GEMM, as one operator: C[m, n] = all_gather(A over rows)[m, k] @ B[k, n].

m is global and its rows are split as torch.chunk splits them: ceil(m / num_ranks) to a rank, the
last ranks may have fewer, or none. n and k are per rank. Every rank ends with its own C.

Plan, `pull` (copy engines carry the data)
    main    _multiply         feeders copy own rows into the slot, once its readers are done with
                              it; the last announces them. All programs multiply: tiles of own rows
                              first, read in place from `a`; then those of rank + 1, + 2, ...
    copy    _await_shards     one program waits for every rank's announcement; then, per source
                              rank + 1, + 2, ... and chunk: its rows, and the word that says so
Plan, `push` (SMs carry the data; one launch)
    main    _multiply         feeders store own rows into every rank's slot; the last one of a
                              chunk signals it. All programs multiply as above
Feeders are the programs that have the fewest tiles, and those that are needed last.
Where a tile's rows straddle two ranks it reads the slot alone, own rows included.

Signals (all are SET to the call's epoch e; e is read on the device, so nothing is frozen)
    shard_ready[src]                rank src -> all: its rows are in its slot               (pull)
    rows_ready[src * chunks + c]    these rows of src are in this rank's slot. From the copy
                                    engine (pull), from rank src (push), always for own rows
    slot_free, epoch, ticket        the slot's; the last program of _multiply moves them
    fed[rank * chunks + c]          local: how many pieces of a chunk have been stored for a rank
Chunks without rows are signalled too, so that any range of words may be waited for; where engines
copy the words, one program waits for all of them before the slot is given back.

Limits  n and k are the same on all ranks; A is row-major, B is [k, n] or a transposed [n, k]
Source  the design's section 4; FLUX, TileLink and torch's async-TP for the idea
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.card import Op
from weft.base.dtypes import DTYPES, parse_dtype
from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.language import slots, triton_api
from weft.language.world_arg import SlotArg, WorldArg, language_version
from weft.ops import _baselines, _lanes
from weft.tiles import blocking, gemm, swizzle
from weft.tiles.blocking import Blocking

SUPPORTED = ("float16", "bfloat16", "float32")
TRANSPORTS = ("pull", "push")

# Up to so many bytes of A per rank the SMs push; more where the product is too narrow to hide a
# copy engine's start behind it (4 x H200, m 512 to 4096: push ahead up to 4 MiB, at n 2560 to 8).
PUSH_BYTES, NARROW_PUSH_BYTES, NARROW_N = 4 << 20, 8 << 20, 4096
# From so many bytes on, a second flag per shard pays for its copy's start (there, at 32 MiB).
TWO_CHUNKS_BYTES = 24 << 20
# An SM that the persistent grid leaves free, so that _await_shards can always run beside it.
SPARE_SMS = 1
# Pushing programs: enough to fill the links, not so many that products wait for them.
MIN_PUSHERS, MAX_PUSHERS = 20, 64
# What a staging program copies: peers' copies begin when the last one has ended.
STAGE_BYTES = 128 << 10


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32 on the CPU."""
    gathered = torch.cat([one["a"] for one in inputs]).float()
    return [gathered @ one["b"].float() for one in inputs]


# ---------------------------------------------------------------------------------------------
# Problem and configuration


@dataclass(frozen=True)
class Problem:
    """m rows over all ranks, n columns and k of each rank; dtypes by torch's names.

    `b_is_nk`: B lies in memory as [n, k], as weights usually do. Sums are in fp32. `nodes` counts
    the ranks of each scale-up domain; () is one domain.
    """

    m: int
    n: int
    k: int
    num_ranks: int
    dtype: str = "bfloat16"
    out_dtype: str = ""
    b_is_nk: bool = False
    nodes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("dtype", "out_dtype"):
            dtype = parse_dtype(getattr(self, name) or self.dtype).name
            if dtype not in SUPPORTED:
                raise DtypeError(f"ag_gemm: {name} {dtype}; it takes {', '.join(SUPPORTED)}")
            object.__setattr__(self, name, dtype)
        for name in ("m", "n", "k"):
            if getattr(self, name) < 0:
                raise ShapeError(f"ag_gemm: {name}={getattr(self, name)} is negative")
        if self.num_ranks < 1:
            raise ShapeError(f"ag_gemm: num_ranks={self.num_ranks}; at least one is needed")

    @property
    def rows(self) -> int:
        """Rows of a full shard."""
        return ceil(self.m / self.num_ranks)

    def shard(self, rank: int) -> tuple[int, int]:
        """The rows first .. end - 1 that `rank` holds."""
        return min(rank * self.rows, self.m), min((rank + 1) * self.rows, self.m)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def out_itemsize(self) -> int:
        return DTYPES[self.out_dtype].itemsize

    @property
    def shard_bytes(self) -> int:
        return self.rows * self.k * self.itemsize

    @property
    def flops(self) -> int:
        """Of one rank."""
        return 2 * self.m * self.n * self.k

    @property
    def gathered_bytes(self) -> int:
        """What one rank receives when all shards are full."""
        return (self.m - min(self.rows, self.m)) * self.k * self.itemsize

    @property
    def memory_bytes(self) -> int:
        """What one rank's GEMM must read and write at least."""
        operands = (self.m + self.n) * self.k * self.itemsize
        return operands + self.m * self.n * self.out_itemsize


@dataclass(frozen=True)
class Config:
    """How a call is done; every field is the same on all ranks.

    Units   chunks: signals per shard; pieces: programs that share one chunk's way to one rank;
            feeders: programs that feed before they multiply; block: elements they move at a time;
            group_m: rows of tiles that share columns in L2
    """

    transport: str = "pull"
    chunks: int = 2
    tile_m: int = 128
    tile_n: int = 256
    tile_k: int = 64
    group_m: int = 8
    num_warps: int = 8
    num_stages: int = 3
    feeders: int = 16
    pieces: int = 16
    block: int = 16384
    tma: bool = True

    def check(self, problem: Problem, target: Target) -> None:
        """Raises  ConfigError: a field that does not fit the problem or the target"""
        if self.transport not in TRANSPORTS:
            raise ConfigError(
                f"ag_gemm: transport={self.transport!r}; it must be one of {', '.join(TRANSPORTS)}"
            )
        if self.transport == "pull" and len(problem.nodes) > 1:
            raise ConfigError(
                f"ag_gemm: transport='pull' on {len(problem.nodes)} nodes; a copy engine reaches "
                "the ranks of its own node only: take transport='push'"
            )
        for name in ("chunks", "pieces", "feeders", "group_m"):
            if not 1 <= getattr(self, name) <= 1024:
                value = getattr(self, name)
                raise ConfigError(f"ag_gemm: {name}={value}; it must be between 1 and 1024")
        if self.block < 16 or self.block & (self.block - 1):
            raise ConfigError(f"ag_gemm: block={self.block}; it must be a power of two from 16 on")
        if self.feeders > _programs(target):
            raise ConfigError(
                f"ag_gemm: feeders={self.feeders}; {target} has {target.num_sms} SMs, of which "
                f"{SPARE_SMS} is kept free: take at most {_programs(target)}"
            )
        tma = self.tma and can_use_tma(problem, target)
        self.blocking.check("ag_gemm", problem.dtype, problem.out_dtype, tma, target)

    @property
    def blocking(self) -> Blocking:
        return Blocking(self.tile_m, self.tile_n, self.tile_k, self.num_warps, self.num_stages)

    def grid(self, problem: Problem, target: Target) -> int:
        """Programs of _multiply: feeders and one for each tile, as far as all are resident."""
        tiles = self.blocking.num_tiles(problem.m, problem.n)
        return min(tiles + self.feeders, _programs(target))


def _programs(target: Target) -> int:
    """How many programs of _multiply may run at once."""
    return max(1, target.num_sms - SPARE_SMS)


def can_use_tma(problem: Problem, target: Target) -> bool:
    """Do the rows of A, B and C begin where TMA can read them?"""
    b_row = problem.k if problem.b_is_nk else problem.n
    rows = [problem.k * problem.itemsize, b_row * problem.itemsize]
    return blocking.can_use_tma(target, [*rows, problem.n * problem.out_itemsize])


def candidates(problem: Problem, target: Target) -> Iterator[Config]:
    """Configurations worth measuring, the one to take unmeasured first."""
    limit = NARROW_PUSH_BYTES if problem.n <= NARROW_N else PUSH_BYTES
    push_first = problem.shard_bytes <= limit or problem.num_ranks == 1
    order = ("push", "pull") if push_first else ("pull", "push")
    if len(problem.nodes) > 1 or target.num_sms <= SPARE_SMS:
        order = ("push",)
    for transport in order:
        for cut in blocking.candidates(problem.m, problem.n, problem.k, problem.dtype, target):
            config = Config(transport=transport, block=_block(problem, cut, target), **asdict(cut))
            yield _with_transport(config, problem, target)


def _block(problem: Problem, cut: Blocking, target: Target) -> int:
    """As many loads under way as registers hold: 128 bytes of a thread, or 16 elements alone."""
    if target.backend == "emu":
        return 1024  # so that several programs share the work, as on a GPU
    is_aligned = problem.k * problem.itemsize % blocking.TMA_BYTES == 0
    return 32 * cut.num_warps * (128 // problem.itemsize if is_aligned else 16)


def _with_transport(config: Config, problem: Problem, target: Target) -> Config:
    """`config` with what follows from its transport, the sizes and the target."""
    # A group that reached into the next rank's rows would wait while own tiles are left.
    config = replace(config, group_m=max(1, min(8, problem.rows // config.tile_m)))
    tiles, programs = config.blocking.num_tiles(problem.m, problem.n), _programs(target)
    if config.transport == "pull":
        feeders = max(1, ceil(problem.shard_bytes / STAGE_BYTES))
        is_fine = problem.shard_bytes >= TWO_CHUNKS_BYTES or target.backend == "emu"
        chunks = min(2 if is_fine else 1, problem.rows)
    else:
        # Programs without a tile in the last round have the time.
        feeders = min(max(-tiles % programs, MIN_PUSHERS), MAX_PUSHERS)
        chunks = min(max(1, problem.rows // config.tile_m), 8)
    feeders = min(3 if target.backend == "emu" else feeders, programs)
    shares = 1 if config.transport == "pull" else max(1, problem.num_ranks - 1) * chunks
    return replace(config, feeders=feeders, chunks=max(1, chunks), pieces=ceil(feeders / shares))


def choose(problem: Problem, target: Target) -> Config:
    """The configuration to take when nothing was measured: a pure function of both."""
    return next(candidates(problem, target))


# ---------------------------------------------------------------------------------------------
# The program


class Shards(NamedTuple):
    """How rows are split: `rows` to a rank, `chunk_rows` to each of its `chunks` signals, each
    stored by `pieces` programs."""

    rows: Any
    chunks: Any
    chunk_rows: Any
    pieces: Any
    group_m: Any


class Arrival(NamedTuple):
    """Arguments of `_ready`.

    Tuples come last, and no field is a constant: Triton 3.6 recomputes the type of a tuple when
    it fills in a field, and then forgets the constants of the tuples that follow.
    """

    own: Any
    gathered: Any
    rows_ready: Any
    e: Any
    rank: Any
    m: Any
    shards: Any
    world: Any


@triton.jit
def _word_of(row, shards):
    """The index in rows_ready of the chunk that holds `row`."""
    source = row // shards.rows
    return source * shards.chunks + (row - source * shards.rows) // shards.chunk_rows


@triton.jit
def _ready(i_m, i_n, tile, args):
    """Own rows are read in place; others once all their chunks have arrived. args: Arrival"""
    first = i_m * tile.m
    end = min(first + tile.m, args.m)
    own_first = args.rank * args.shards.rows
    own_end = min(own_first + args.shards.rows, args.m)
    is_own = (first >= own_first) & (end <= own_end)
    if not is_own:
        word = _word_of(first, args.shards)
        count = _word_of(end - 1, args.shards) - word + 1
        # Pairs with the copy engine's words, or with _push; a tile may straddle several chunks.
        wl.wait(args.rows_ready + word, args.e, count, world=args.world)
    source = args.gathered
    row = first
    if is_own:
        source = args.own
        row = first - own_first
    return gemm.Rows(source=source, first=row, end=row + end - first)


@triton.jit
def _own_rows(rank, shards, m):
    first = min(rank * shards.rows, m)
    return first, min(first + shards.rows, m)


@triton.jit
def _feed(world, gathered, a, first, own_first, size, piece, pieces, to, block: tl.constexpr):
    """Store one of the pieces of `size` elements from `first` on, own rows, in rank `to`'s slot."""
    length = tl.cdiv(tl.cdiv(size, pieces), 16) * 16
    end = min((piece + 1) * length, size)
    for start in range(piece * length, end, block):
        i = start + tl.arange(0, block)
        wl.put(world, gathered + first + i, a + (first - own_first) + i, to=to, mask=i < end)


@triton.jit
def _push(a, gathered, rows_ready, fed, e, rank, shape, shards, tile, world, program, num_programs,
          block: tl.constexpr):  # fmt: skip
    """Store own rows in every slot, chunk by chunk; first for the rank behind, which needs them
    first, last in the own slot, where only tiles that straddle ranks read them."""
    own_first, own_end = _own_rows(rank, shards, shape.m)
    pieces_of_rank = shards.chunks * shards.pieces
    for unit in range(program, world.num_ranks * pieces_of_rank, num_programs):
        to = (rank + world.num_ranks - 1 - unit // pieces_of_rank) % world.num_ranks
        chunk = unit % pieces_of_rank // shards.pieces
        first = min(own_first + chunk * shards.chunk_rows, own_end)
        size = (min(first + shards.chunk_rows, own_end) - first) * shape.k
        if to == rank:
            if world.num_ranks == 1 or shards.rows % tile.m == 0:
                size = 0
        _feed(world, gathered, a, first.to(tl.int64) * shape.k, own_first.to(tl.int64) * shape.k,
              size, unit % shards.pieces, shards.pieces, to, block)  # fmt: skip
        counter = fed + to * shards.chunks + chunk
        # weft: equivalent-mutant drop of complete_stores: no store of this kernel before it is
        # asynchronous; those of c come later
        done = wl.atomic_add(counter, 1, order=wl.Order.ACQ_REL, scope=wl.Scope.DEVICE) + 1
        if done == shards.pieces:
            tl.store(counter, 0)
            word = rows_ready + rank * shards.chunks + chunk
            # weft: equivalent-mutant swap, incomplete of notify: the counter is for this rank's
            # own next call, in stream order, and no store before it is asynchronous
            wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)


@triton.jit
def _stage(a, gathered, rows_ready, shard_ready, fed, e, rank, shape, shards, world, program,
           num_programs, block: tl.constexpr):  # fmt: skip
    """Copy own rows into the own slot, where peers fetch them; the last program announces them."""
    own_first, own_end = _own_rows(rank, shards, shape.m)
    first = own_first.to(tl.int64) * shape.k
    size = (own_end - own_first) * shape.k
    _feed(world, gathered, a, first, first, size, program, num_programs, rank, block)
    # weft: equivalent-mutant drop of complete_stores: no store of this kernel before it is
    # asynchronous; those of c come later
    done = wl.atomic_add(fed, 1, order=wl.Order.ACQ_REL, scope=wl.Scope.DEVICE) + 1
    if done == num_programs:
        tl.store(fed, 0)
        for chunk in range(shards.chunks):
            word = rows_ready + rank * shards.chunks + chunk
            # Orders nothing: a tile with own rows in the slot waits for another rank's too, and
            # those are fetched by a stream that has waited for shard_ready.
            # weft: equivalent-mutant value+1 of notify: the next call would not wait for this
            # word, but for the other rank's, which comes later
            wl.notify(world, word, e, to=rank, op=wl.SignalOp.SET, order=wl.Order.RELAXED,
                      scope=wl.Scope.DEVICE)  # fmt: skip
        # First the word here: peers copy it as soon as they know.
        # weft: equivalent-mutant narrow of notify: who acquires this one is the stream of copies
        # here; peers copy the word, and notify_all has released it to them
        # weft: equivalent-mutant swap, incomplete of notify: the counter before it is for this
        # rank's own next call, in stream order, and no store before it is asynchronous
        wl.notify(world, shard_ready + rank, e, to=rank, op=wl.SignalOp.SET)
        # weft: equivalent-mutant incomplete of notify: no store before it is asynchronous
        wl.notify_all(world, shard_ready + rank, e, op=wl.SignalOp.SET)


@triton.jit
def _await_shards(shard_ready, slot, world):
    """One program, upstream of the copies: returns when every rank's rows may be fetched."""
    wl.wait(shard_ready, slots.slot_epoch(slot), world.num_ranks, world=world)


@triton.jit
def _multiply(a, own, gathered, gathered_rows, b, c, rows_ready, shard_ready, fed, slot, shape,
              shards, tile, world, is_pull: tl.constexpr, feeders: tl.constexpr,
              block: tl.constexpr):  # fmt: skip
    """Feed, then the GEMM template with this operator's hooks.

    `own` and `gathered_rows` are what tiles are read from: descriptors, or the pointers `a` and
    `gathered` once more.
    """
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if program < feeders:
        slots.slot_wait_free(world, slot, e)
        if is_pull:
            _stage(a, gathered, rows_ready, shard_ready, fed, e, rank, shape, shards, world,
                   program, feeders, block)  # fmt: skip
        else:
            _push(a, gathered, rows_ready, fed, e, rank, shape, shards, tile, world, program,
                  feeders, block)  # fmt: skip
    own_first, own_end = _own_rows(rank, shards, shape.m)
    start = swizzle.first_to_gather(own_first, own_end, tile.m, tl.cdiv(shape.m, tile.m))
    m = tl.cast(shape.m, tl.int32)
    # The last programs have the fewest tiles: those are the feeders.
    gemm.gemm(
        b, shape, tile, num_programs - 1 - program, num_programs,
        swizzle.rotated, (shards.group_m, start),
        _ready, Arrival(own, gathered_rows, rows_ready, e, rank, m, shards, world),
        gemm.emit_store, gemm.Stored(c, shape),
    )  # fmt: skip
    if is_pull:
        if program == num_programs - 1:
            # Also chunks without rows: copied after the slot was given back, a word would be
            # the next call's. And _await_shards has read the epoch, which ends with this call.
            wl.wait(rows_ready, e, shards.chunks * world.num_ranks, world=world)
    # weft: equivalent-mutant drop of complete_stores: only stores of c are asynchronous, which
    # are complete when the kernel has ended, and which no other rank reads
    # weft: equivalent-mutant incomplete of notify: only stores of c are asynchronous, as above
    slots.slot_finish(world, slot, e, num_programs)


# ---------------------------------------------------------------------------------------------
# The host


def ag_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    world: Any,
    m: int | None = None,
    config: Config | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply the rows that all ranks hold together by this rank's B. Collective.

        out[m, n] = cat(a of rank 0, a of rank 1, ...) @ b

    Shapes  a: [rows of this rank, k], contiguous; b: [k, n], contiguous or a transposed [n, k];
            m defaults to out's rows, else to num_ranks * a's rows: pass it where shards differ
    Dtypes  a and b alike, float16, bfloat16 or float32; out the same unless given; sums in fp32
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    call = _find_call(world, a, b, m, config, out)
    if out is None:
        out = torch.empty(call.out_shape, dtype=call.out_dtype, device=a.device)
    # Also where there is nothing to do: a rank without rows that passes no m takes m for 0.
    world.operator_call(call.name)
    if call.is_empty:
        return out.zero_() if out.numel() else out
    slot = world.workspace("ag_gemm", call.buffers, call.signals)
    call.launch(world, slot, a, b, out)
    return out


class _Call:
    """What calls with one problem and one configuration share on one rank: found once, kept."""

    def __init__(self, world: Any, problem: Problem, config: Config) -> None:
        self.problem, self.config = problem, config
        self.grid = (config.grid(problem, world.target), 1, 1)
        self.tma = config.tma and can_use_tma(problem, world.target)
        self.name = f"ag_gemm m={problem.m},n={problem.n},k={problem.k} {problem.dtype} {config}"
        self.out_shape = (problem.m, problem.n)
        self.out_dtype = getattr(torch, problem.out_dtype)
        self.has_rows = problem.shard(world.rank)[0] < problem.shard(world.rank)[1]
        self.is_empty = 0 in (problem.m, problem.n, problem.k)
        words = world.num_ranks * config.chunks
        dtype = getattr(torch, problem.dtype)
        self.buffers = {"gathered": ((problem.m, problem.k), dtype)}
        self.signals = {
            "rows_ready": (words, torch.int64),
            "shard_ready": (world.num_ranks, torch.int64),
            "fed": (words, torch.int32),
        }
        self.shape = _shape(problem)
        self.shards = _shards(problem, config)
        # By whether TMA is used.
        self.tiles = [_tile(problem, config, tma).as_constexpr() for tma in (False, True)]
        self.constants = (config.transport == "pull", config.feeders, config.block)
        self.options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        self._plans: dict[Any, _SlotPlan] = {}
        self._loaded: set[tuple[int, ...]] = set()
        # What was launched with aligned addresses, to be launched again.
        self._kernels: dict[Any, Any] = {}

    def launch(self, world: Any, slot: Any, a: Any, b: Any, out: Any) -> None:
        plan = self._plans.get(slot) or self._plan(world, slot)
        # TMA asks this of addresses, and Triton specialises kernels by it.
        aligned = not (a.data_ptr() | b.data_ptr() | out.data_ptr()) % blocking.TMA_BYTES
        arguments = self._arguments(world, slot, plan, a, b, out, self.tma and aligned)
        if not plan.copies:
            self._start(_multiply, self.grid, arguments, self.options, aligned)
            return
        awaited = (slot.shard_ready, slot.arg, world.arg)
        alignment = tuple(tensor.data_ptr() % blocking.TMA_BYTES for tensor in (a, b, out))
        if alignment not in self._loaded:
            # They wait for each other, and no binary is loaded while a kernel runs.
            world.load(_multiply, *arguments, **self.options)
            world.load(_await_shards, *awaited, num_warps=1)
            self._loaded.add(alignment)
        main, copier = world.current_stream(), world.stream("copy")
        # Before _multiply, which feeds the copies of other ranks while this stream waits for it.
        copier.wait(main)
        self._start(_multiply, self.grid, arguments, self.options, aligned)
        with copier:
            self._start(_await_shards, (1, 1, 1), awaited, {"num_warps": 1}, True)
            for is_word, dst, src in plan.copies:
                (world.copy_word if is_word else world.copy)(dst, src)
        # weft: equivalent-mutant drop of wait: _multiply has waited for every word that is copied;
        # but a recording must end on the stream that it began on
        main.wait(copier)

    def _start(self, fn: Any, grid: tuple, arguments: tuple, options: dict, aligned: bool) -> None:
        kernel = self._kernels.get(fn) if aligned else None
        if kernel is not None:
            triton_api.relaunch(kernel, grid, *arguments)
            return
        kernel = fn[grid](*arguments, **options)
        if aligned:
            self._kernels[fn] = kernel

    def _arguments(
        self, world: Any, slot: Any, plan: _SlotPlan, a: Any, b: Any, out: Any, tma: bool
    ) -> tuple:
        """Of a launch of `_multiply`."""
        config = self.config
        own, gathered, right, result = a, slot.gathered, b, out
        if tma:
            gathered = plan.gathered
            # An empty shard has no address to describe; no tile is read from it.
            if self.has_rows:
                own = blocking.descriptor(a, (config.tile_m, config.tile_k))
            else:
                own = gathered
            if self.problem.b_is_nk:
                right = blocking.descriptor(b.t(), (config.tile_n, config.tile_k))
            else:
                right = blocking.descriptor(b, (config.tile_k, config.tile_n))
            result = blocking.descriptor(out, (config.tile_m, config.tile_n))
        return (
            a, own, slot.gathered, gathered, right, result, slot.rows_ready, slot.shard_ready,
            slot.fed, slot.arg, self.shape, self.shards, self.tiles[tma], world.arg,
            *self.constants,
        )  # fmt: skip

    def _plan(self, world: Any, slot: Any) -> _SlotPlan:
        gathered, copies = slot.gathered, ()
        if self.tma:
            gathered = blocking.descriptor(gathered, (self.config.tile_m, self.config.tile_k))
        if self.config.transport == "pull":
            copies = tuple(_plan_copies(world, slot, self.problem, self.shards))
        plan = self._plans[slot] = _SlotPlan(gathered, copies)
        return plan


class _SlotPlan(NamedTuple):
    """What calls that share one slot have in common; `copies` are (is_word, dst, src) in order."""

    gathered: Any
    copies: tuple[tuple[bool, torch.Tensor, torch.Tensor], ...]


def _plan_copies(world: Any, slot: Any, problem: Problem, shards: Shards) -> Iterator[tuple]:
    """Source by source in the order in which tiles ask for them; each chunk, then its word.

    The word is the source's own announcement, which holds e until this rank's credit lets the
    source go on. Never a word of this device: such a copy is a kernel, for which a running grid
    need not make room, and each change between kernel and copy engine costs time.
    """
    for hop in range(1, world.num_ranks):
        source = (world.rank + hop) % world.num_ranks
        theirs = world.peer(slot.gathered, source)
        announced = world.peer(slot.shard_ready, source)[source : source + 1]
        shard_first, shard_end = problem.shard(source)
        for chunk in range(shards.chunks):
            first = min(shard_first + chunk * shards.chunk_rows, shard_end)
            end = min(first + shards.chunk_rows, shard_end)
            if end > first:
                yield False, slot.gathered[first:end], theirs[first:end]
            word = source * shards.chunks + chunk
            yield True, slot.rows_ready[word : word + 1], announced


def _shape(problem: Problem) -> gemm.Shape:
    stride_b = problem.k if problem.b_is_nk else problem.n
    return gemm.Shape(problem.m, problem.n, problem.k, problem.k, stride_b, problem.n)


def _shards(problem: Problem, config: Config) -> Shards:
    chunk_rows = max(1, ceil(problem.rows / config.chunks))
    return Shards(problem.rows, config.chunks, chunk_rows, config.pieces, config.group_m)


def _tile(problem: Problem, config: Config, tma: bool) -> gemm.Tile:
    extents = (config.tile_m, config.tile_n, config.tile_k)
    return gemm.Tile.of(*extents, size_k=problem.k, b_is_nk=problem.b_is_nk, tma=tma)


_calls: WeakKeyDictionary[Any, dict[tuple, _Call]] = WeakKeyDictionary()


def _find_call(world: Any, a: Any, b: Any, m: int | None, config: Any, out: Any) -> _Call:
    """The `_Call` for these arguments; checks them when they are new."""
    calls = _calls.setdefault(world, {})
    key = (
        a.shape, a.stride(), a.dtype, a.device, b.shape, b.stride(), b.dtype, b.device, m, config,
        None if out is None else (out.shape, out.stride(), out.dtype, out.device),
    )  # fmt: skip
    call = calls.get(key)
    if call is None:
        problem = problem_of(world, a, b, m, out)
        chosen = config or choose(problem, world.target)
        chosen.check(problem, world.target)
        call = calls[key] = _Call(world, problem, chosen)
    return call


def problem_of(world: Any, a: Any, b: Any, m: int | None = None, out: Any = None) -> Problem:
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
    if m is None:
        m = out.shape[0] if out is not None and out.dim() == 2 else rows * world.num_ranks
    out_dtype = a.dtype if out is None else out.dtype
    problem = Problem(
        m, n, k, world.num_ranks, str(a.dtype), str(out_dtype), not b.is_contiguous(),
        _lanes.nodes_of(world),
    )  # fmt: skip
    first, end = problem.shard(world.rank)
    if rows != end - first:
        raise ShapeError(
            f"ag_gemm: rank {world.rank} of {world.num_ranks} passes a with {rows} rows, but of "
            f"m={m} it holds {end - first} (rows {first} to {end} of torch.chunk); pass m= where "
            "shards differ"
        )
    if out is not None and (tuple(out.shape) != (m, n) or not out.is_contiguous()):
        raise ShapeError(
            f"ag_gemm: out has shape {tuple(out.shape)} and strides {out.stride()}; it must be "
            f"contiguous of shape {(m, n)}"
        )
    for name, tensor in (("a", a), ("b", b), ("out", a if out is None else out)):
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
    first, end = problem.shard(rank)
    dtype = getattr(torch, problem.dtype)
    a = torch.randn(end - first, problem.k, generator=generator).to(dtype)
    if problem.b_is_nk:
        b = torch.randn(problem.n, problem.k, generator=generator).to(dtype).t()
    else:
        b = torch.randn(problem.k, problem.n, generator=generator).to(dtype)
    return {"a": a, "b": b}


def run(
    world: Any, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    out = torch.empty(
        (problem.m, problem.n), dtype=getattr(torch, problem.out_dtype), device=inputs["a"].device
    )
    return ag_gemm(inputs["a"], inputs["b"], world=world, m=problem.m, config=config, out=out)


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernels that a call with this configuration launches, as records."""
    config = config or choose(problem, target)
    config.check(problem, target)
    element = DTYPES[problem.dtype].triton
    out_element = DTYPES[problem.out_dtype].triton
    tma = config.tma and can_use_tma(problem, target)
    tile = _tile(problem, config, tma)
    tile_m, tile_n, tile_k = config.tile_m, config.tile_n, config.tile_k
    b_block = (tile_n, tile_k) if problem.b_is_nk else (tile_k, tile_n)

    def operand(word: str, block: tuple[int, int]) -> str:
        return f"tensordesc<{word}[{block[0]}, {block[1]}]>" if tma else f"*{word}"

    words = {
        "a": f"*{element}",
        "own": operand(element, (tile_m, tile_k)),
        "gathered": f"*{element}",
        "gathered_rows": operand(element, (tile_m, tile_k)),
        "b": operand(element, b_block),
        "c": operand(out_element, (tile_m, tile_n)),
        "rows_ready": "*i64",
        "shard_ready": "*i64",
        "fed": "*i32",
        "slot": ["*i64", "*i32", "*i64"],
        "shape": ["i32"] * len(gemm.Shape._fields),
        "shards": ["i32"] * len(Shards._fields),
        "tile": ["constexpr"] * len(tile),
        "world": ["*i64", "constexpr", "constexpr"],
    }
    constants = {
        "slot": SlotArg(None, None, None),
        "shape": gemm.Shape(*[None] * len(gemm.Shape._fields)),
        "shards": Shards(*[None] * len(Shards._fields)),
        "tile": tile,
        "world": WorldArg(None, problem.num_ranks, language_version()),
        "is_pull": config.transport == "pull",
        "feeders": config.feeders,
        "block": config.block,
    }
    extents = _shape(problem)._asdict()
    aligned = [f"shape.{name}" for name, extent in extents.items() if extent % 16 == 0]

    def record(fn: Any, name: str, num_warps: int, num_stages: int) -> tuple[Any, KernelRecord]:
        names = fn.arg_names
        pointers = [x for x in names if isinstance(words.get(x), str) and words[x][0] == "*"]
        return fn, KernelRecord(
            name=f"ag_gemm.{name}",
            signature={x: words.get(x, "constexpr") for x in names},
            constants={x: constants[x] for x in names if x in constants},
            options={"num_warps": num_warps, "num_stages": num_stages},
            divisible_by_16=(*pointers, *(aligned if "shape" in names else ())),
        )

    if config.transport == "pull":
        yield record(_await_shards, "await_shards", 1, 1)
    yield record(_multiply, "multiply", config.num_warps, config.num_stages)


def fake(problem: Problem, inputs: Mapping[str, Any]) -> torch.Tensor:
    """The result's shape and dtype, without its values."""
    return torch.empty(
        (problem.m, problem.n), dtype=getattr(torch, problem.out_dtype), device="meta"
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
    kernels=kernels,
    default_shape={"m": 256, "n": 256, "k": 256},
    awkward_shapes=(
        (4, {"m": 388, "n": 96, "k": 64}),
        (3, {"m": 291, "n": 70, "k": 50}),
        (2, {"m": 2, "n": 64, "k": 64}),
        (1, {"m": 40, "n": 48, "k": 32}),
        (4, {"m": 1, "n": 32, "k": 32}),
        (4, {"m": 9, "n": 16, "k": 16}),
        (4, {"m": 0, "n": 16, "k": 16}),
    ),
    dtypes=SUPPORTED,
    baselines=_baselines.AG_GEMM,
    fake=fake,
    takes_nodes=True,
)
