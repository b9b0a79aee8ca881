"""The gradient of weights, of which one operand is gathered: out[p, q] = sum_m x[m, p] y[m, q].

m is global. Of one of the two a rank has its own rows alone, as torch.chunk splits them; of the
other all m. Every rank ends with its own out: that of ag_gemm's weights has x gathered, the layer's
input; that of gemm_rs's weights y, the gradient of its result.

Plan, by `ce_push` and `push` as ag_gemm, with its kernels and copies: the rows travel alike,
and into slots alike. What is multiplied is another:
    main    ag_wgrad_multiply all programs multiply, by the GEMM template with these hooks
        segments  the parts in which rows come: own ones first, read in place, then those of rank
                  + 1, + 2, ..; of each rank chunk by chunk. A tile is their sum in this order
        ready     waits for the segment's word, outside the loop over its rows
        order     where tiles are fewer than programs: `split` turns over all tiles, in each of
                  which a tile has its share of the segments
        emit      the last turn -> out; the others, in fp32 -> `partials`
        announce  of another turn: says that its sums are there
        combine   the last turn: waits for the others' sums, and adds them up in order
Plan, `nccl`: the library's all-gather, then its product.
The order of sums is fixed, so results are the same bits in every run.

Signals  those of ag_gemm (SET to the call's epoch e, read on the device), and
    summed[turn * tiles + tile]   local: this turn's sums of the tile are in `partials`

Limits  both operands are row-major; the template for Hopper (gemm_sm90) has no segments
Source  docs/decisions/009-hooks.md; ag_gemm
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.card import Op, Trial, trials
from weft.base.errors import DtypeError, ShapeError
from weft.compiler import layouts
from weft.compiler.gather_schedules import CE_PUSH, pieces_of
from weft.language import mapping, slots, triton_api
from weft.ops import _baselines
from weft.plan import call_cache, described, gathered, moving, operations, problems, transfers
from weft.plan.launches import Start
from weft.plan.product_launches import block_of
from weft.plan.wgrad_schedules import (
    Config,
    Problem,
    can_use_tma,
    candidates,
    choose,
    shape_of,
    split_of,
    tile_of,
)
from weft.runtime.world import World
from weft.tiles import blocking, fragments, gemm, swizzle
from weft.tiles.hooks import feed


def reference(problem: Problem, inputs: Sequence[Mapping[str, Any]]) -> list[torch.Tensor]:
    """All ranks at once, in fp32 on the CPU."""
    whole, parts = ("x", "y") if problem.gathers_y else ("y", "x")
    gathered = torch.cat([one[parts] for one in inputs]).float()
    rest = [one[whole].float() for one in inputs]
    return [x.t() @ gathered if problem.gathers_y else gathered.t() @ x for x in rest]


# ---------------------------------------------------------------------------------------------
# The program


class Part(NamedTuple):
    """A tile, in one of the turns."""

    i_m: Any
    i_n: Any
    turn: Any


class Turns(NamedTuple):
    """Arguments of `_order`."""

    turns: Any
    group_m: Any


class Share(NamedTuple):
    """Arguments of `_segments`: how many there are of all ranks, and turns that share them."""

    count: Any
    turns: Any


class Arrival(NamedTuple):
    """Arguments of `_ready_x` and `_ready_y`; tuples last, no constant: Triton 3.6 would forget
    those behind it."""

    own: Any
    gathered: Any
    whole: Any
    rows_ready: Any
    e: Any
    rank: Any
    count: Any
    turns: Any
    split: Any
    world: World


class Segment(NamedTuple):
    """`rows` rows of all, from `first` on; the gathered ones from row `at` of `source`."""

    source: Any
    at: Any
    first: Any
    rows: Any


class Sums(NamedTuple):
    """Arguments of `_combine`, `_emit` and `_announce`: tiles and columns of tiles, what turns
    leave for the last one, and the result."""

    partials: Any
    summed: Any
    e: Any
    rank: Any
    turns: Any
    tiles: Any
    columns: Any
    c: Any
    shape: Any
    world: World


@triton.jit
def _order(i, num_m, num_n, args):
    """All tiles, in one turn after the other. args: Turns"""
    rows = num_m // args.turns
    turn = i // (rows * num_n)
    at = swizzle.grouped(i - turn * rows * num_n, rows, num_n, (args.group_m,))
    return Part(at.i_m, at.i_n, turn)


@triton.jit
def _segments(at, args):
    """args: Share"""
    return (at.turn + 1) * args.count // args.turns - at.turn * args.count // args.turns


@triton.jit
def _segment(at, segment, args):
    """The rows of the turn's `segment`-th segment, which may be read. args: Arrival"""
    index = at.turn * args.count // args.turns + segment
    chunks = args.split.chunks
    source_rank = (args.rank + index // chunks) % args.world.num_ranks
    word = source_rank * chunks + index % chunks
    shard_first, _ = mapping.rows_of_rank(source_rank, args.split)
    first, end = mapping.rows_of_channel(word, args.split)
    rows = end - first
    is_own = source_rank == args.rank
    if not is_own:
        # Pairs with the copy engine's word, or with push_rows.
        wl.wait(args.rows_ready + word, args.e, world=args.world)
    source = args.gathered
    at_row = first
    if is_own:
        source = args.own
        at_row = first - shard_first
    return Segment(source, at_row, first, rows)


@triton.jit
def _ready_x(at, segment, tile, args):
    """x is gathered. args: Arrival"""
    one = _segment(at, segment, args)
    return gemm.Contracted(one.source, args.whole, one.at, one.first, one.rows)


@triton.jit
def _ready_y(at, segment, tile, args):
    """y is gathered. args: Arrival"""
    one = _segment(at, segment, args)
    return gemm.Contracted(args.whole, one.source, one.first, one.at, one.rows)


@triton.jit
def _places(at, turn, value, args):
    """Where the turn's sums of a tile lie in `partials`."""
    rows: tl.constexpr = value.shape[0]
    columns: tl.constexpr = value.shape[1]
    index = (turn * args.tiles + at.i_m * args.columns + at.i_n).to(tl.int64)
    i, j = fragments.index(value, 0), fragments.index(value, 1)
    return args.partials + index * (rows * columns) + i[:, None] * columns + j[None, :]


@triton.jit
def _combine(at, cells, value, args):
    """The last turn's sums, behind those of the turns before. args: Sums"""
    if at.turn == args.turns - 1:
        total = tl.zeros_like(value)
        for turn in range(args.turns - 1):
            word = args.summed + turn * args.tiles + at.i_m * args.columns + at.i_n
            wl.wait(word, args.e, scope=wl.Scope.DEVICE, world=args.world)
            total += tl.load(_places(at, turn, value, args))
        value = total + value
    return value


@triton.jit
def _emit(at, cells, fragment, args):
    """args: Sums"""
    if at.turn == args.turns - 1:
        gemm.emit_store(at, cells, fragment, gemm.Stored(args.c, args.shape))
    else:
        tl.store(_places(at, at.turn, fragment, args), fragment)


@triton.jit
def _announce(at, part, args):
    """args: Sums"""
    if at.turn < args.turns - 1:
        word = args.summed + at.turn * args.tiles + at.i_m * args.columns + at.i_n
        # weft: equivalent-mutant incomplete of notify: these sums are stored by threads; only the
        # last turn's stores can be asynchronous, of which this tells nobody
        wl.notify(args.world, word, args.e, to=args.rank, op=wl.SignalOp.SET,
                  scope=wl.Scope.DEVICE)  # fmt: skip


class Done(NamedTuple):
    """Arguments of `_give_back` and `_await_open_and_give_back`: own words, of which it waits for
    the first."""

    words: Any
    e: Any
    program: Any
    num_programs: Any
    slot: Any
    world: World


@triton.jit
def _give_back(args):
    """This program has read all that it will. args: Done"""
    # weft: equivalent-mutant drop of complete_stores: only stores of c are asynchronous, which are
    # complete when the kernel has ended, and which no other rank reads
    # weft: equivalent-mutant incomplete of notify: only stores of c are asynchronous, as above
    slots.slot_finish(args.world, args.slot, args.e, args.num_programs)


@triton.jit
def _await_open_and_give_back(args):
    """One program first: what began the copies has read the epoch, which ends with this call.

    All words are segments': programs have waited for them before they are done. args: Done
    """
    if args.program == args.num_programs - 1:
        # weft: equivalent-mutant count+1 of wait: another word of this call is set as surely
        wl.wait(args.words, args.e, world=args.world)
    _give_back(args)


class Pushed(NamedTuple):
    """What `_pushed` is given."""

    words: Any
    e: Any
    rank: Any
    split: Any
    world: World


@triton.jit
def _pushed(to, chunk, given, launch):
    """A chunk of own rows is on rank `to`. given: Pushed"""
    word = given.words + given.rank * given.split.chunks + chunk
    # weft: equivalent-mutant swap, incomplete of notify: the counter before it is for this rank's
    # own next call, in stream order, and no store before it is asynchronous
    wl.notify(given.world, word, given.e, to=to, op=wl.SignalOp.SET)


@triton.jit
def ag_wgrad_multiply(a, own, gathered, gathered_rows, whole, c, partials, summed, rows_ready, fed,
                      slot, shape, split, columns, group_m, tile, world, pieces,
                      pushers: tl.constexpr, block: tl.constexpr, gathers_y: tl.constexpr,
                      num_turns: tl.constexpr):  # fmt: skip
    """Push rows where there are communication CTAs, then multiply with this operator's hooks.

    `own` and `gathered_rows` are what the gathered operand is read from: descriptors, or the
    pointers `a` and `gathered` once more; its rows have so many `columns`.
    """
    rank = wl.rank(world).to(tl.int32)
    e = slots.slot_epoch(slot)
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    if pushers > 0:
        if program < pushers:
            slots.slot_wait_free(world, slot, e)
            feed.push_rows(world, a, gathered, fed, rank, split, columns, 1, pieces, program,
                           pushers, _pushed, Pushed(rows_ready, e, rank, split, world), None,
                           block)  # fmt: skip
    num_m, num_n = tl.cdiv(shape.m, tile.m), tl.cdiv(shape.n, tile.n)
    # Numbers that Triton may take for constants, 1 say, as such that it does not.
    count = tl.cast(world.num_ranks, tl.int32) * split.chunks
    turns = tl.cast(num_turns, tl.int32)
    # The last programs have the fewest tiles: those push. Three times the same: assigned
    # to a name, a tuple's constants are values.
    gemm.gemm(
        None, shape, tile, num_m * num_turns, num_programs - 1 - program, num_programs,
        _order, Turns(turns, group_m),
        _ready_y if gathers_y else _ready_x,
        Arrival(own, gathered_rows, whole, rows_ready, e, rank, count, turns, split, world),
        _emit if num_turns > 1 else gemm.emit_store,
        Sums(partials, summed, e, rank, turns, num_m * num_n, num_n, c, shape, world)
        if num_turns > 1 else gemm.Stored(c, shape),
        combine=_combine if num_turns > 1 else None,
        combine_args=Sums(partials, summed, e, rank, turns, num_m * num_n, num_n, c, shape, world),
        announce=_announce if num_turns > 1 else None,
        announce_args=Sums(partials, summed, e, rank, turns, num_m * num_n, num_n, c, shape, world),
        done=_give_back if pushers > 0 else _await_open_and_give_back,
        done_args=Done(
            rows_ready + rank * split.chunks, e, program, num_programs, slot, world
        ),
        segments=_segments, segments_args=Share(count, turns),
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# The host


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
    return call(y, x, out) if gathered == "y" else call(x, y, out)


def _make_call(world: World, x: Any, y: Any, out: Any, gathered: str, config: Any) -> Call:
    problem = problem_of(world, x, y, gathered, out)
    return Call(world, problem, config or choose(problem, world.target), ())


class Call(gathered.Call):
    """As ag_gemm's; its one kernel is not the compiler's."""

    def _new_runner(self, config: Any, *tensors: Any) -> Fused:
        return Fused(self.world, self.problem, config)

    def _multiply(self, gathered: Any, b: Any, out: Any) -> None:
        left, right = (b, gathered) if self.problem.gathers_y else (gathered, b)
        torch.mm(left.t(), right, out=out)


class Fused:
    """On a slot of the workspace, which ranks fill for each other."""

    def __init__(self, world: World, problem: Any, config: Config) -> None:
        self.world, self.problem, self.config = world, problem, config
        self.by_engine = config.transport == CE_PUSH
        self.grid = (config.grid(problem, world.target), 1, 1)
        words = world.num_ranks * config.chunks
        self.buffers = {"gathered": ((problem.m, problem.k), getattr(torch, problem.dtype))}
        self.signals = {"rows_ready": (words, torch.int64), "fed": (words, torch.int32)}
        self.shape, self.split = shape_of(problem), split_of(problem, config)
        self.tma = can_use_tma(problem, config, world.target)
        self.tiles = [tile_of(problem, config, tma).as_constexpr() for tma in (False, True)]
        if config.split > 1:
            size = (config.split - 1) * config.num_tiles(problem)
            elements = size * config.tile_m * config.tile_n
            self.buffers["partials"] = ((elements,), torch.float32)
            self.signals["summed"] = (size, torch.int64)
        is_even = problem.k * problem.itemsize % blocking.TMA_BYTES == 0
        self.block = block_of(config.num_warps, problem.itemsize, is_even, world.target)
        self.replays = world.replays()
        self._loaded: set[tuple[int, ...]] = set()
        # What was launched with aligned addresses, to be launched again.
        self._kernels: dict[Any, Any] = {}

    def queue(self, tensors: Mapping[str, Any], results: Sequence[Any]) -> None:
        (rows, whole), (out,) = tensors.values(), results
        slot = self.world.workspace("ag_wgrad", self.buffers, self.signals)
        self.replays.run(
            (rows.data_ptr(), whole.data_ptr(), out.data_ptr(), slot.number),
            lambda: self.launch(slot, rows, whole, out),
        )

    def launch(self, slot: Any, rows: Any, whole: Any, out: Any) -> None:
        world = self.world
        alignment = tuple(one.data_ptr() % blocking.TMA_BYTES for one in (rows, whole, out))
        is_aligned = not any(alignment)
        product = self._product(world, slot, rows, whole, out, is_aligned)
        if not self.by_engine:
            self._start(product, is_aligned)
            return
        words = (slot.rows_ready, self.config.chunks, slot.arg, world.arg)
        take = Start(moving.take, (1, 1, 1), words, {"num_warps": 1})
        if alignment not in self._loaded:
            # They wait for each other, and no binary is loaded while a kernel runs.
            for one in (take, product):
                world.load(one.function, *one.arguments, **one.options)
            self._loaded.add(alignment)
        main, copier = world.current_stream(), world.stream("copy")
        copier.wait(main)
        with copier:
            self._start(take, True)
        self._start(product, is_aligned)
        with copier:
            transfers.push(world, rows, slot.gathered, slot.rows_ready, self.split)
        # weft: equivalent-mutant swap of record: whom a last word goes to waits for it
        main.wait(copier)

    def _start(self, one: Start, is_aligned: bool) -> None:
        kernel = self._kernels.get(one.function) if is_aligned else None
        if kernel is not None:
            triton_api.relaunch(kernel, one.grid, *one.arguments)
            return
        kernel = one.run()
        if is_aligned:
            self._kernels[one.function] = kernel

    def _product(self, world: Any, slot: Any, a: Any, b: Any, out: Any, aligned: bool) -> Start:
        """The launch that multiplies."""
        config, tma = self.config, self.tma and aligned
        own, gathered, whole, result = a, slot.gathered, b, out
        if tma:
            of_gathered, of_whole = config.tile_m, config.tile_n
            if self.problem.gathers_y:
                of_gathered, of_whole = of_whole, of_gathered
            own = blocking.descriptor(a, (config.tile_k, of_gathered))
            gathered = blocking.descriptor(slot.gathered, (config.tile_k, of_gathered))
            whole = blocking.descriptor(b, (config.tile_k, of_whole))
            result = blocking.descriptor(out, (config.tile_m, config.tile_n))
        sums = (slot.partials, slot.summed) if config.split > 1 else (None, None)
        arguments = (
            a, own, slot.gathered, gathered, whole, result, *sums, slot.rows_ready, slot.fed,
            slot.arg, self.shape, self.split, self.problem.k, config.group_m, self.tiles[tma],
            world.arg, pieces_of(self.problem, config), config.num_pushers, self.block,
            self.problem.gathers_y, config.split,
        )  # fmt: skip
        options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
        return Start(ag_wgrad_multiply, self.grid, arguments, options)


def problem_of(world: World, x: Any, y: Any, gathered: str = "x", out: Any = None) -> Problem:
    """The problem that this rank's tensors are a part of.

    Raises  ShapeError, DtypeError: tensors that do not fit together, or the world
    """
    op = Problem.op
    if gathered not in ("x", "y"):
        raise ShapeError(f"{op}: gathered={gathered!r}; it is 'x' or 'y'")
    for name, tensor in (("x", x), ("y", y)):
        if tensor.dim() != 2:
            shape = tuple(tensor.shape)
            raise ShapeError(f"{op}: {name} has shape {shape}; it must have two dimensions")
        layouts.check_tensor(op, name, tensor, world)
    if x.dtype != y.dtype:
        raise DtypeError(f"{op}: x is {x.dtype} but y is {y.dtype}; convert one of them")
    rows, whole = (y, x) if gathered == "y" else (x, y)
    m, out_dtype = whole.shape[0], call_cache.out_dtype_of(op, out)
    problem = Problem(
        m, whole.shape[1], rows.shape[1], world.num_ranks, str(x.dtype), out_dtype,
        gathered == "y", problems.nodes_of(world),
    )  # fmt: skip
    first, end = problem.shard(world.rank)
    if rows.shape[0] != end - first:
        raise ShapeError(
            f"{op}: rank {world.rank} of {world.num_ranks} passes {gathered} with {rows.shape[0]} "
            f"rows, but of m={m} it holds {end - first} (rows {first} to {end} of torch.chunk)"
        )
    if out is not None:
        call_cache.check_out(op, out, problem.result, out.dtype, world)
    return problem


# ---------------------------------------------------------------------------------------------
# The card


make_problem = partial(gathered.make_problem, kind=Problem)


def make_inputs(problem: Problem, rank: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """One rank's normal random tensors on the CPU: the same for one seed on every machine."""
    generator = torch.Generator().manual_seed(seed * problem.num_ranks + rank)
    first, end = problem.shard(rank)
    dtype = getattr(torch, problem.dtype)
    rows = torch.randn(end - first, problem.k, generator=generator).to(dtype)
    whole = torch.randn(problem.m, problem.n, generator=generator).to(dtype)
    return {"x": whole, "y": rows} if problem.gathers_y else {"x": rows, "y": whole}


def run(
    world: World, problem: Problem, inputs: Mapping[str, torch.Tensor], config: Config | None = None
) -> torch.Tensor:
    dtype, device = getattr(torch, problem.out_dtype), inputs["x"].device
    out = torch.empty(problem.result, dtype=dtype, device=device)
    gathered = "y" if problem.gathers_y else "x"
    return ag_wgrad(
        inputs["x"], inputs["y"], world=world, gathered=gathered, config=config, out=out
    )


TRIALS = (
    # Rows that nothing divides, several tiles, several turns.
    *trials({"m": 56, "n": 24, "k": 40}),
    # As ag_gemm: words of chunks without rows, inputs that change once a call is over.
    Trial((3,), {"m": 56, "n": 24, "k": 16}, "ce_push", calls=(2, 0, 2, 0, 2, 0)),
    # Every chunk has rows: what comes too early is read.
    Trial((2,), {"m": 128, "n": 24, "k": 16}, "ce_push", on_heap=True, calls=(0, 0, 0, 1, 0, 1, 0)),
)

op = Op(
    name="ag_wgrad",
    summary="out[k, n] = sum over m of all_gather(X over rows)[m, k] Y[m, n]",
    problem=Problem,
    config=Config,
    make_problem=make_problem,
    make_inputs=make_inputs,
    reference=reference,
    run=run,
    candidates=candidates,
    kernels=described.kernels_of(run, make_inputs, candidates),
    default_shape={"m": 256, "n": 256, "k": 256},
    smallest={"m": 16, "n": 16, "k": 16},
    smallest_config={"pushers": 1, "chunks": 1},
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
    baselines=_baselines.AG_WGRAD,
    fake=gathered.fake,
    backward=("gemm_rs", "ag_gemm"),
    takes_nodes=True,
)
