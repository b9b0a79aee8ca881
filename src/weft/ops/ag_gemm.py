"""All-gather, then GEMM, as one operator: C[m, n] = all_gather(A over rows)[m, k] @ B[k, n].

m is global and its rows are split as torch.chunk splits them: ceil(m / num_ranks) to a rank, the
last ranks may have fewer, or none. n and k are per rank. Every rank ends with its own C.

Plan, `put` (copy engines carry the data to where it is needed)
    main    _stage_edges      where tiles straddle ranks: copies own rows of such tiles to the slot
    copy    _open             returns when every rank's slot is free
            copies            per rank - 1, - 2, ... and chunk: own rows from `a` to that rank's
                              slot, and the word that says so
    main    _multiply         all programs multiply: tiles of own rows first, read in place from
                              `a`; then those of rank + 1, + 2, ...
Plan, `pull` (copy engines fetch the data)
    main    _stage            copies own rows to the slot, where peers cannot read them in place
    copy    _announce         tells every rank that own rows may be fetched; returns when all have
            copies            per source rank + 1, + 2, ... and chunk: its rows, and the word that
                              says so
            _close            rows read in place: says that they have been, returns when all have
    main    _multiply         as above
Plan, `push` (SMs carry the data)
    main    _multiply         feeders store own rows into every rank's slot; the last one of a
                              chunk signals it. All programs multiply as above
Feeders are the programs that have the fewest tiles, and those that are needed last.
Plan, `packets` (few rows): _ag_gemm_small.py.
Peers read `a` itself where it is symmetric and no tile straddles two ranks' rows: such a tile reads
the slot alone, own rows included. _multiply is the GEMM template (tiles/gemm.py); on Hopper its
twin with the same hooks (tiles/gemm_sm90.py), as _multiply_sm90.

Signals (all are SET to the call's epoch e; e is read on the device, so nothing is frozen)
    shard_ready[src]                rank src -> all: its rows may be fetched; put: here alone, for
                                    engines to copy
    rows_ready[src * chunks + c]    these rows of src are in this rank's slot. From a copy engine
                                    (pull, put), from rank src (push), always for own rows
    rows_taken[dst]                 rank dst -> all: it has the rows that it reads in place (pull)
    summed[2 * program + consumer]  local: sums for another program's tile are there        (sm90)
    slot_free, epoch, ticket        the slot's; the last program of _multiply moves them
    fed[rank * chunks + c]          local: how many pieces of a chunk have been stored for a rank
Chunks without rows are signalled too, so that any range of words may be waited for; where engines
copy the words, one program waits for all of them before the slot is given back.

fp8 operands have scales: those of A are stored in all slots by a launch before everything else,
push_scales (_ag_gemm_scales.py); words of rows tell of them too.

Limits  n and k are the same on all ranks; A is row-major, B is [k, n] or a transposed [n, k]
Source  the design's section 4; FLUX, TileLink and torch's async-TP for the idea
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

import torch
import triton
import triton.language as tl
from torch.autograd.graph import increment_version
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import weft.language as wl
from weft.base.card import Op, Trial, trials
from weft.base.dtypes import DTYPES, parse_dtype
from weft.base.errors import DtypeError, ShapeError
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.language import slots
from weft.language.world_arg import SlotArg, WorldArg, language_version
from weft.ops import _ag_gemm_scales, _ag_gemm_small, _autograd, _baselines, _lanes
from weft.ops._ag_gemm_call import STAGE_WARPS, Call, LibraryCall, Program, SlotCall
from weft.ops._ag_gemm_config import (
    ENGINES,
    LIBRARY,
    PACKETS,
    Config,
    Shards,
    can_use_tma,
    candidates,
    choose,
    chunk_of,
    shape_of,
    straddles,
    tile_of,
)
from weft.ops._ag_gemm_small import PacketCall
from weft.tiles import gemm, gemm_sm90, swizzle

RESULTS = ("float16", "bfloat16", "float32")
SUPPORTED = (*RESULTS, *_ag_gemm_scales.FP8)


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
# The problem; how it is done is in _ag_gemm_config.py


@dataclass(frozen=True)
class Problem:
    """m rows over all ranks, n columns and k of each rank; dtypes by torch's names.

    `b_is_nk`: B lies in memory as [n, k], as weights usually do. Sums are in fp32. `nodes` counts
    the ranks of each scale-up domain; () is one domain. `scaling`, of fp8 alone, says what has a
    scale: "rows" (and columns of B) or "blocks"; results are then bfloat16 unless told otherwise.
    """

    m: int
    n: int
    k: int
    num_ranks: int
    dtype: str = "bfloat16"
    out_dtype: str = ""
    b_is_nk: bool = False
    nodes: tuple[int, ...] = ()
    scaling: str = ""

    op: ClassVar[str] = "ag_gemm"

    def __post_init__(self) -> None:
        scaled = parse_dtype(self.dtype).name in _ag_gemm_scales.FP8
        usual = "bfloat16" if scaled else self.dtype
        for name, known in (("dtype", SUPPORTED), ("out_dtype", RESULTS)):
            dtype = parse_dtype(getattr(self, name) or usual).name
            if dtype not in known:
                raise DtypeError(f"{self.op}: {name} {dtype}; it takes {', '.join(known)}")
            object.__setattr__(self, name, dtype)
        if scaled and not self.scaling:
            object.__setattr__(self, "scaling", _ag_gemm_scales.ROWS)
        kinds = (_ag_gemm_scales.ROWS, _ag_gemm_scales.BLOCKS) if scaled else ("",)
        if self.scaling not in kinds:
            raise DtypeError(f"{self.op}: scaling={self.scaling!r} of {self.dtype} operands")
        for name in ("m", "n", "k"):
            if getattr(self, name) < 0:
                raise ShapeError(f"{self.op}: {name}={getattr(self, name)} is negative")
        if self.num_ranks < 1:
            raise ShapeError(f"{self.op}: num_ranks={self.num_ranks}; at least one is needed")

    @property
    def result(self) -> tuple[int, int]:
        """Rows and columns of what a rank ends with."""
        return self.m, self.n

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


# ---------------------------------------------------------------------------------------------
# The program


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
def _ready(at, segment, tile, args):
    """Own rows are read in place; others once all their chunks have arrived. args: Arrival"""
    first = at.i_m * tile.m
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
def _indices(block: tl.constexpr):
    return tl.arange(0, block)


@gluon.jit
def _indices_sm90(block: gl.constexpr):
    return gl.arange(0, block, gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))


@triton.jit
def _feed(world, gathered, a, first, own_first, size, piece, pieces, to, indices: tl.constexpr,
          block: tl.constexpr):  # fmt: skip
    """Store one of the pieces of `size` elements from `first` on, own rows, in rank `to`'s slot."""
    length = tl.cdiv(tl.cdiv(size, pieces), 16) * 16
    end = min((piece + 1) * length, size)
    for start in range(piece * length, end, block):
        i = start + indices(block)
        wl.put(world, gathered + first + i, a + (first - own_first) + i, to=to, mask=i < end)


@triton.jit
def _push(a, gathered, rows_ready, fed, e, rank, shape, shards, tile_m, world, program,
          num_programs, indices: tl.constexpr, block: tl.constexpr):  # fmt: skip
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
            if world.num_ranks == 1 or shards.rows % tile_m == 0:
                size = 0
        _feed(world, gathered, a, first.to(tl.int64) * shape.k, own_first.to(tl.int64) * shape.k,
              size, unit % shards.pieces, shards.pieces, to, indices, block)  # fmt: skip
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
def _stage(a, gathered, slot, shape, shards, world, block: tl.constexpr):
    """Copy own rows to the own slot, where peers fetch them and tiles that straddle ranks look."""
    rank = wl.rank(world).to(tl.int32)
    slots.slot_wait_free(world, slot, slots.slot_epoch(slot))
    own_first, own_end = _own_rows(rank, shards, shape.m)
    first = own_first.to(tl.int64) * shape.k
    size = (own_end - own_first) * shape.k
    _feed(world, gathered, a, first, first, size, tl.program_id(0), tl.num_programs(0), rank,
          _indices, block)  # fmt: skip


@triton.jit
def _stage_edges(a, gathered, slot, shape, shards, world, tile_m: tl.constexpr,
                 block: tl.constexpr):  # fmt: skip
    """Copy to the own slot those own rows alone that share a tile with other ranks' rows."""
    rank = wl.rank(world).to(tl.int32)
    slots.slot_wait_free(world, slot, slots.slot_epoch(slot))
    own_first, own_end = _own_rows(rank, shards, shape.m)
    head = min(tl.cdiv(own_first, tile_m) * tile_m, own_end)
    tail = max(own_end // tile_m * tile_m, head)
    own = own_first.to(tl.int64) * shape.k
    piece, pieces = tl.program_id(0), tl.num_programs(0)
    _feed(world, gathered, a, own, own, (head - own_first) * shape.k, piece, pieces, rank, _indices,
          block)  # fmt: skip
    _feed(world, gathered, a, tail.to(tl.int64) * shape.k, own, (own_end - tail) * shape.k, piece,
          pieces, rank, _indices, block)  # fmt: skip


@triton.jit
def _open(rows_ready, shard_ready, slot, chunks, world, is_staged: tl.constexpr):
    """One program, before the engines put: every rank's slot is free; here is what they copy as
    the word that says so. What was staged has waited already."""
    e = slots.slot_epoch(slot)
    if not is_staged:
        slots.slot_wait_free(world, slot, e)
    _announce_here(rows_ready, shard_ready, e, chunks, world)


@triton.jit
def _announce(rows_ready, shard_ready, slot, chunks, world):
    """One program: say that own rows may be fetched, and wait until every rank has.

    The copies come next on its stream; what staged the rows came before.
    """
    e = slots.slot_epoch(slot)
    # weft: equivalent-mutant relax of wait: after _stage it says what is known; where rows are in
    # place it guards words alone, which no engine can read before they are written
    slots.slot_wait_free(world, slot, e)
    # First the word here: peers copy it as soon as they know, and notify_all releases it to them.
    _announce_here(rows_ready, shard_ready, e, chunks, world)
    wl.notify_all(world, shard_ready + wl.rank(world), e, op=wl.SignalOp.SET)
    wl.wait(shard_ready, e, world.num_ranks, world=world)


@triton.jit
def _announce_here(rows_ready, shard_ready, e, chunks, world):
    rank = wl.rank(world)
    for chunk in range(chunks):
        # Own rows are there in stream order; but where nothing is copied, this alone says that the
        # slot's epoch has been read.
        wl.notify(world, rows_ready + rank * chunks + chunk, e, to=rank, op=wl.SignalOp.SET,
                  scope=wl.Scope.DEVICE)  # fmt: skip
    # weft: equivalent-mutant narrow of notify: it orders nothing itself
    wl.notify(world, shard_ready + rank, e, to=rank, op=wl.SignalOp.SET, order=wl.Order.RELAXED)


@triton.jit
def _close(shard_ready, rows_taken, world):
    """One program, behind the copies of rows that were read in place: theirs may change again.

    The call's epoch is that of its own announcement: the slot's has moved if _multiply is over.
    """
    rank = wl.rank(world)
    e = wl.load(shard_ready + rank)
    wl.notify_all(world, rows_taken + rank, e, op=wl.SignalOp.SET)
    wl.wait(rows_taken, e, world.num_ranks, world=world)


@triton.jit
def _multiply(a, own, gathered, gathered_rows, b, c, scaling, rows_ready, fed, slot, shape, shards,
              tile, world, feeders: tl.constexpr, block: tl.constexpr,
              per_block: tl.constexpr):  # fmt: skip
    """Feed where there are feeders, then the GEMM template with this operator's hooks.

    `own` and `gathered_rows` are what tiles are read from: descriptors, or the pointers `a` and
    `gathered` once more. `scaling` is a Scaling, or None.
    """
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if feeders > 0:
        if program < feeders:
            slots.slot_wait_free(world, slot, e)
            _push(a, gathered, rows_ready, fed, e, rank, shape, shards, tile.m, world, program,
                  feeders, _indices, block)  # fmt: skip
    start = _first_row(rank, shards, shape.m, tile.m)
    words = shards.chunks * _variable(world.num_ranks)
    if scaling is None:
        scales_args = None
    else:
        scales_args = _ag_gemm_scales.scaled_args(scaling, shape)
    # The last programs have the fewest tiles: those are the feeders.
    gemm.gemm(
        b, shape, tile, tl.cdiv(shape.m, tile.m), num_programs - 1 - program, num_programs,
        swizzle.rotated, (shards.group_m, start, shards.head),
        _ready, Arrival(own, gathered_rows, rows_ready, e, rank, _variable(shape.m), shards, world),
        gemm.emit_store, gemm.Stored(c, shape),
        done=_give_back if feeders > 0 else _await_copies_and_give_back,
        done_args=GivingBack(rows_ready, e, words, program, num_programs, slot, world),
        scales=None if scaling is None else gemm.scales_of, scales_args=scales_args,
        per_block=per_block,
    )  # fmt: skip


@triton.jit
def _first_row(rank, shards, m, tile_m):
    """The row of tiles to begin with."""
    own_first, own_end = _own_rows(rank, shards, m)
    return swizzle.first_to_gather(own_first, own_end, tile_m, tl.cdiv(m, tile_m))


@triton.jit
def _variable(number):
    """A number that Triton may take for a constant, 1 say, as one that it does not."""
    return tl.cast(number, tl.int32)


class GivingBack(NamedTuple):
    """What ends a program's part of a call, all words of rows, for which one program waits; in this
    order for the reason told at `Arrival`."""

    rows_ready: Any
    e: Any
    words: Any
    program: Any
    num_programs: Any
    slot: Any
    world: Any


@triton.jit
def _await_copies(args):
    """One program: no engine writes a word of this call any more. args: GivingBack"""
    if args.program == args.num_programs - 1:
        # Also chunks without rows: copied after the slot was given back, a word would be one of the
        # next call, and of another chunk if that has more of them. And what began the copies has
        # read the epoch, which ends with this call.
        wl.wait(args.rows_ready, args.e, args.words, world=args.world)


@triton.jit
def _give_back(args):
    """This program has read all that it will. args: GivingBack"""
    # weft: equivalent-mutant drop of complete_stores: only stores of c are asynchronous, which are
    # complete when the kernel has ended, and which no other rank reads
    # weft: equivalent-mutant incomplete of notify: only stores of c are asynchronous, as above
    slots.slot_finish(args.world, args.slot, args.e, args.num_programs)


@triton.jit
def _await_copies_and_give_back(args):
    """args: GivingBack"""
    _await_copies(args)
    _give_back(args)


@gluon.jit
def _multiply_sm90(a, own, gathered, gathered_rows, b, c, scaling, rows_ready, fed, partials,
                   summed, slot, shape, shards, world, feeders, by_engine: gl.constexpr,
                   block: gl.constexpr, tile_m: gl.constexpr,
                   tile_n: gl.constexpr, tile_k: gl.constexpr, stages: gl.constexpr,
                   b_is_nk: gl.constexpr, per_block: gl.constexpr):  # fmt: skip
    """The GEMM template for Hopper with the hooks of `_multiply`; operands are descriptors."""
    rank = wl.rank(world).to(gl.int32)
    e = slots.slot_epoch(slot)
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    if not by_engine:
        # The last programs have the fewest tiles, and those that are needed last.
        if num_programs - 1 - program < feeders:
            slots.slot_wait_free(world, slot, e)
            _push(a, gathered, rows_ready, fed, e, rank, shape, shards, tile_m, world,
                  num_programs - 1 - program, feeders, _indices_sm90, block)  # fmt: skip
    start = _first_row(rank, shards, shape.m, tile_m)
    order: gl.constexpr = swizzle.rotated
    ready: gl.constexpr = _ready
    scales: gl.constexpr = None if scaling is None else gemm.scales_of
    if scaling is None:
        scales_args = None
    else:
        scales_args = _ag_gemm_scales.scaled_args(scaling, shape)
    emit: gl.constexpr = gemm_sm90.emit_store
    done: gl.constexpr = _await_copies_and_give_back if by_engine else _give_back
    words = shards.chunks * _variable(world.num_ranks)
    gemm_sm90.gemm(
        own, b, c, shape, gl.cdiv(shape.m, tile_m), program, num_programs,
        gemm_sm90.Shared(partials, summed, e, world),
        tile_m, tile_n, tile_k, stages, gemm_sm90.CHUNK_N, b_is_nk,
        order, (shards.group_m, start, shards.head),
        ready, Arrival(own, gathered_rows, rows_ready, e, rank, _variable(shape.m), shards, world),
        emit, gemm_sm90.Stored(c),
        done=done, done_args=GivingBack(rows_ready, e, words, program, num_programs, slot, world),
        scales=scales, scales_args=scales_args, per_block=per_block,
    )  # fmt: skip


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
    if _autograd.is_asked(a, b):
        rows, dtype = (m, None) if out is None else (m or out.shape[0], out.dtype)
        rest = (rows, dtype, scale_a, scale_b)
        return _autograd.as_operation("ag_gemm", world, (a, b), *rest, config=config, out=out)
    scales = (scale_a, scale_b)
    call = _find_call(world, a, b, m, config, out, scales)
    if out is None:
        out = torch.empty(call.out_shape, dtype=call.out_dtype, device=a.device)
    else:
        increment_version((out,))
    # Ranks must agree on where peers read from. Also said where there is nothing to do: a rank
    # without rows that passes no m takes m for 0.
    offset = call.offset_of(world, a)
    world.operator_call(call.name_with(offset))
    if call.is_empty:
        return out.zero_() if out.numel() else out
    if scale_a is None:
        call.run(world, a, b, out, offset)
    else:
        call.run(world, a, b, out, offset, scales)
    return out


PROGRAM = Program(
    _stage, _stage_edges, _open, _announce, _close, _multiply, _multiply_sm90,
    _ag_gemm_scales.push_scales,
)  # fmt: skip

_calls: WeakKeyDictionary[Any, dict[tuple, Call]] = WeakKeyDictionary()


def _find_call(
    world: Any, a: Any, b: Any, m: int | None, config: Any, out: Any, scales: tuple[Any, Any]
) -> Call:
    """The `Call` for these arguments; checks them when they are new."""
    calls = _calls.setdefault(world, {})
    is_recorded = config is None and world.is_recording()
    key = (
        a.shape, a.stride(), a.dtype, a.device, b.shape, b.stride(), b.dtype, b.device, m, config,
        None if out is None else (out.shape, out.stride(), out.dtype, out.device), is_recorded,
        *(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in scales),
    )  # fmt: skip
    call = calls.get(key)
    if call is None:
        problem = problem_of(world, a, b, m, out, *scales)
        chosen = config or choose(problem, world.target, is_recorded)
        chosen.check(problem, world.target)
        call = calls[key] = _make_call(world, problem, chosen)
    return call


def _make_call(world: Any, problem: Problem, config: Config) -> Call:
    if config.transport == LIBRARY:
        return LibraryCall(world, problem, config)
    if config.transport == PACKETS:
        return PacketCall(world, problem, config)
    return SlotCall(world, problem, config, PROGRAM)


def problem_of(
    world: Any, a: Any, b: Any, m: int | None = None, out: Any = None, scale_a: Any = None,
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
    if m is None:
        m = out.shape[0] if out is not None and out.dim() == 2 else rows * world.num_ranks
    out_dtype = "" if out is None else str(out.dtype)
    problem = Problem(
        m, n, k, world.num_ranks, str(a.dtype), out_dtype, not b.is_contiguous(),
        _lanes.nodes_of(world), _ag_gemm_scales.kind_of(a, b, (scale_a, scale_b)),
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
    world: Any, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    out = torch.empty(
        (problem.m, problem.n), dtype=getattr(torch, problem.out_dtype), device=inputs["a"].device
    )
    scales = {name: inputs.get(name) for name in ("scale_a", "scale_b")}
    return ag_gemm(
        inputs["a"], inputs["b"], world=world, m=problem.m, config=config, out=out, **scales
    )


def kernels(
    problem: Problem, config: Config | None, target: Target
) -> Iterator[tuple[Any, KernelRecord]]:
    """The kernels that a call with this configuration launches, as records."""
    config = config or next(candidates(problem, target))
    config.check(problem, target)
    if config.transport == LIBRARY:
        return
    if config.transport == PACKETS:
        yield _ag_gemm_small.record(problem, config, target)
        return
    element = DTYPES[problem.dtype].triton
    out_element = DTYPES[problem.out_dtype].triton
    tma = config.tma and can_use_tma(problem, target)
    tile = tile_of(problem, config, tma)
    tile_m, tile_n, tile_k = config.tile_m, config.tile_n, config.tile_k
    b_block = (tile_n, tile_k) if problem.b_is_nk else (tile_k, tile_n)

    is_sm90 = config.template == "sm90"
    chunk = chunk_of(problem, config, is_sm90)

    def operand(word: str, block: tuple[int, int]) -> str:
        if not tma:
            return f"*{word}"
        layout = f",{gemm_sm90.block_layout(block, problem.itemsize)!r}" if is_sm90 else ""
        return f"tensordesc<{word}[{block[0]}, {block[1]}]{layout}>"

    words = {
        "a": f"*{element}",
        "own": operand(element, (tile_m, tile_k)),
        "gathered": f"*{element}",
        "gathered_rows": operand(element, (tile_m, tile_k)),
        "b": operand(element, b_block),
        "c": operand(out_element, chunk),
        "scale_a": "*fp32",
        "a_row": "i32",
        "a_k": "i32",
        "m": "i32",
        "rows_ready": "*i64",
        "shard_ready": "*i64",
        "rows_taken": "*i64",
        "fed": "*i32",
        "chunks": "i32",
        "partials": "*fp32",
        "summed": "*i64",
        "slot": ["*i64", "*i32", "*i64"],
        "shape": ["i32"] * len(gemm.Shape._fields),
        "shards": ["i32"] * len(Shards._fields),
        "tile": ["constexpr"] * len(tile),
        "world": ["*i64", "constexpr", "constexpr"],
    }
    if is_sm90:
        words["feeders"] = "i32"
    if problem.scaling:
        words["scaling"] = _ag_gemm_scales.SCALING_WORDS
    constants = {
        "slot": SlotArg(None, None, None),
        "shape": gemm.Shape(*[None] * len(gemm.Shape._fields)),
        "shards": Shards(*[None] * len(Shards._fields)),
        "tile": tile,
        "world": WorldArg(None, problem.num_ranks, language_version()),
        "feeders": config.feeders if config.transport == "push" else 0,
        "is_staged": straddles(problem, config),
        "by_engine": config.transport in ENGINES,
        "block": config.block,
        "scaling": _ag_gemm_scales.Scaling(*[None] * 6) if problem.scaling else None,
        "per_block": problem.scaling == _ag_gemm_scales.BLOCKS,
        "tile_m": tile_m,
        "tile_n": tile_n,
        "tile_k": tile_k,
        "stages": config.num_stages,
        "b_is_nk": problem.b_is_nk,
    }
    if is_sm90:
        del constants["feeders"]
    extents = shape_of(problem)._asdict()
    aligned = [f"shape.{name}" for name, extent in extents.items() if extent % 16 == 0]

    def record(fn: Any, name: str, num_warps: int, num_stages: int = 1) -> tuple[Any, KernelRecord]:
        names = fn.arg_names
        pointers = [x for x in names if isinstance(words.get(x), str) and words[x][0] == "*"]
        return fn, KernelRecord(
            name=f"ag_gemm.{name}",
            signature={x: words.get(x, "constexpr") for x in names},
            constants={x: constants[x] for x in names if x in constants},
            options={"num_warps": num_warps, "num_stages": num_stages},
            divisible_by_16=(*pointers, *(aligned if "shape" in names else ())),
        )

    if problem.scaling:
        fn, found = record(_ag_gemm_scales.push_scales, "push_scales", _ag_gemm_scales.NUM_WARPS)
        yield fn, replace(found, constants=found.constants | {"block": _ag_gemm_scales.BLOCK})
    if config.transport == "pull":
        yield record(_stage, "stage", STAGE_WARPS)
        yield record(_announce, "announce", 1)
        yield record(_close, "close", 1)
    elif config.transport == "put":
        yield record(_stage_edges, "stage_edges", STAGE_WARPS)
        yield record(_open, "open", 1)
    if is_sm90:
        yield record(_multiply_sm90, "multiply", config.num_warps)
    else:
        yield record(_multiply, "multiply", config.num_warps, config.num_stages)


def fake(problem: Problem, inputs: Mapping[str, Any], rank: int = 0) -> torch.Tensor:
    """The result's shape and dtype, without its values."""
    return torch.empty(
        (problem.m, problem.n), dtype=getattr(torch, problem.out_dtype), device="meta"
    )


TRIALS = (
    # Tiles lie within a rank and across two.
    *trials({"m": 56, "n": 24, "k": 16}),
    # Words of chunks without rows are the last ones that engines copy: they may come late.
    Trial((3,), {"m": 56, "n": 24, "k": 16}, "pull", calls=(2, 0, 2, 0, 2, 0)),
    Trial((3,), {"m": 56, "n": 24, "k": 16}, "put", calls=(2, 0, 2, 0, 2, 0)),
    # Tiles that programs share.
    Trial((2,), {"m": 8, "n": 24, "k": 48}, "packets"),
    # Inputs change as soon as a call is over; with edges of tiles to be staged, and without.
    Trial((3,), {"m": 56, "n": 24, "k": 16}, "put", on_heap=True),
    Trial((2,), {"m": 64, "n": 24, "k": 16}, "put", on_heap=True, calls=(0, 0, 0, 1, 0, 1, 0)),
    # Rows that divide by ranks and tiles: in place again and again, where inputs change, and
    # staged in turns; each must leave the slot as the other needs it.
    Trial((2,), {"m": 64, "n": 24, "k": 16}, "pull", on_heap=True, calls=(0, 0, 0, 1, 0, 1, 0)),
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
    dtypes=SUPPORTED,
    baselines=_baselines.AG_GEMM,
    fake=fake,
    backward=("gemm_rs", "ag_wgrad"),
    takes_nodes=True,
)
