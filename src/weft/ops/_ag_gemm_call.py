"""What calls of ag_gemm with one problem and one configuration share: launches, copies, streams.

`Call` is what every way of doing it has; `SlotCall` does it by pull, put or push, `LibraryCall` by
NCCL and cuBLAS, and `_ag_gemm_small.PacketCall` by packets.

Not an operator: a part of ag_gemm.py, which see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weft.language import triton_api
from weft.ops import _ag_gemm_scales, _by_library, _lanes
from weft.ops._ag_gemm_config import (
    ENGINES,
    Config,
    Shards,
    can_use_tma,
    chunk_of,
    shape_of,
    shards_of,
    straddles,
    tile_of,
)
from weft.plan import launches
from weft.tiles import blocking, dealing, gemm_sm90

if TYPE_CHECKING:
    from weft.ops._ag_gemm_problem import Problem

STAGE_WARPS = 8
# How many symmetric inputs a call remembers the copies for.
MOST_PLANS = 64


class Program(NamedTuple):
    """The operator's kernels on slots."""

    stage: Any
    stage_edges: Any
    open: Any
    announce: Any
    close: Any
    multiply: Any
    multiply_sm90: Any
    push_scales: Any


class Call:
    """What calls with one problem and one configuration share on one rank: found once, kept."""

    def __init__(self, world: Any, problem: Problem, config: Config) -> None:
        self.problem, self.config = problem, config
        self.out_shape = (problem.m, problem.n)
        self.out_dtype = getattr(torch, problem.out_dtype)
        self.is_empty = 0 in (problem.m, problem.n, problem.k)
        self.may_read_in_place = False
        self._names: dict[int | None, str] = {}

    def run(self, world: Any, a: Any, b: Any, out: Any, offset: int | None) -> None:
        """Queue the call on the current stream; `offset` as `offset_of` says."""
        raise NotImplementedError

    def offset_of(self, world: Any, a: Any) -> int | None:
        """Where on the heap peers read `a` in place; None where they do not."""
        return None

    def name_with(self, offset: int | None) -> str:
        """What all ranks must call alike; `a` may be read in place, at `offset`."""
        name = self._names.get(offset)
        if name is None:
            if len(self._names) >= MOST_PLANS:
                self._names.clear()
            sizes = f"m={self.problem.m},n={self.problem.n},k={self.problem.k}"
            place = f"a {_lanes.place_at(offset)} " if self.may_read_in_place else ""
            name = f"{self.config.op} {sizes} {self.problem.dtype} {place}{self.config}"
            self._names[offset] = name
        return name


class LibraryCall(Call):
    """Nothing fused: NCCL, then cuBLAS."""

    def run(self, world: Any, a: Any, b: Any, out: Any, offset: int | None) -> None:
        whole = torch.empty((self.problem.m, self.problem.k), dtype=a.dtype, device=a.device)
        _by_library.all_gather(world, a, whole)
        self.multiply(whole, b, out)

    def multiply(self, gathered: Any, b: Any, out: Any) -> None:
        torch.mm(gathered, b, out=out)


class SlotCall(Call):
    """On a slot of the workspace, which ranks fill for each other."""

    def __init__(self, world: Any, problem: Problem, config: Config, program: Program) -> None:
        super().__init__(world, problem, config)
        self.program = program
        self.grid = (config.grid(problem, world.target), 1, 1)
        self.tma = config.tma and can_use_tma(problem, world.target)
        self.has_rows = problem.shard(world.rank)[0] < problem.shard(world.rank)[1]
        self.is_pull = config.transport == "pull"
        self.by_engine = config.transport in ENGINES
        # Tiles that straddle ranks read own rows from the slot.
        self.straddles = straddles(problem, config)
        self.may_read_in_place = self.is_pull and not self.straddles
        words = world.num_ranks * config.chunks
        dtype = getattr(torch, problem.dtype)
        self.buffers = {"gathered": ((problem.m, problem.k), dtype)}
        self.signals = {
            "rows_ready": (words, torch.int64),
            "shard_ready": (world.num_ranks, torch.int64),
            "rows_taken": (world.num_ranks, torch.int64),
            "fed": (words, torch.int32),
        }
        if problem.scaling:
            shape = (problem.m, _ag_gemm_scales.blocks_of(problem))
            self.buffers["scales"] = (shape, torch.float32)
        if config.template == "sm90":
            shares = (self.grid[0], config.early_parts)
            elements = dealing.partial_elements(config.tile_m, config.tile_n, *shares)
            self.buffers["partials"] = ((elements,), torch.float32)
            self.signals["summed"] = (dealing.partial_words(*shares), torch.int64)
        self.shape = shape_of(problem)
        self.shards = shards_of(problem, config)
        # By whether TMA is used.
        self.tiles = [tile_of(problem, config, tma).as_constexpr() for tma in (False, True)]
        self.replays = world.replays()
        self._copies: dict[Any, tuple] = {}
        self._loaded: set[tuple[int, ...]] = set()
        # What was launched with aligned addresses, to be launched again.
        self._kernels: dict[Any, Any] = {}

    def run(
        self, world: Any, a: Any, b: Any, out: Any, offset: int | None,
        scales: tuple[Any, Any] = (None, None),
    ) -> None:  # fmt: skip
        """As Call.run; `scales` of a and b, where those are fp8."""
        slot = world.workspace(self.config.op, self.buffers, self.signals)
        addresses = (None if x is None else x.data_ptr() for x in scales)
        self.replays.run(
            (a.data_ptr(), b.data_ptr(), out.data_ptr(), *addresses, slot.number),
            lambda: self.launch(world, slot, a, b, out, offset, scales),
        )

    def offset_of(self, world: Any, a: Any) -> int | None:
        return world.offset(a) if self.may_read_in_place and world.num_ranks > 1 else None

    def launch(
        self, world: Any, slot: Any, a: Any, b: Any, out: Any, offset: int | None = None,
        scales: tuple[Any, Any] = (None, None),
    ) -> None:  # fmt: skip
        # TMA asks this of addresses, and Triton specialises kernels by it: scales' too.
        given = (a, b, out) if scales[1] is None else (a, b, out, scales[1])
        alignment = tuple(tensor.data_ptr() % blocking.TMA_BYTES for tensor in given)
        aligned = not any(alignment[:3])
        multiply, arguments, options = self._multiply_with(
            world, slot, a, b, out, aligned, self._scaling(slot, scales[1])
        )

        def start_multiply() -> None:
            self._start(multiply, self.grid, arguments, options, not any(alignment))

        if not self.by_engine:
            self._push_scales(world, slot, *scales)
            start_multiply()
            return
        if alignment not in self._loaded:
            # They wait for each other, and no binary is loaded while a kernel runs.
            world.load(multiply, *arguments, **options)
            for fn, its_arguments in self._beside(world, slot, offset):
                world.load(fn, *its_arguments, num_warps=1)
            self._loaded.add(alignment)
        self._push_scales(world, slot, *scales)
        if self.is_pull:
            self._pull(world, slot, a, offset, aligned, start_multiply)
        else:
            self._put(world, slot, a, aligned, start_multiply)

    def _scaling(self, slot: Any, scale_b: Any) -> Any:
        """What kernels are told of scales: a Scaling, or None."""
        if not self.problem.scaling:
            return None
        return _ag_gemm_scales.scaling_of(slot, self.problem, scale_b)

    def _push_scales(self, world: Any, slot: Any, scale_a: Any, scale_b: Any) -> None:
        if scale_a is None:
            return
        pieces = _ag_gemm_scales.pieces_of(self.problem)
        arguments = (
            scale_a, *_ag_gemm_scales.steps_of(scale_a), self._scaling(slot, scale_b), slot.arg,
            self.problem.m, self.shards, world.arg, _ag_gemm_scales.BLOCK,
        )  # fmt: skip
        # Not kept to be launched again: scales lie at any address.
        grid = (world.num_ranks * pieces, 1, 1)
        self.program.push_scales[grid](*arguments, num_warps=_ag_gemm_scales.NUM_WARPS)

    def _beside(self, world: Any, slot: Any, offset: int | None) -> list[tuple[Any, tuple]]:
        """Kernels of one program that run beside the product, with their arguments."""
        begun = (slot.rows_ready, slot.shard_ready, slot.arg, self.config.chunks, world.arg)
        if not self.is_pull:
            return [(self.program.open, (*begun, self.straddles))]
        beside = [(self.program.announce, begun)]
        if offset is not None:
            beside.append((self.program.close, (slot.shard_ready, slot.rows_taken, world.arg)))
        return beside

    def _put(self, world: Any, slot: Any, a: Any, aligned: bool, start_multiply: Any) -> None:
        if self.straddles:
            self._stage(self.program.stage_edges, world, slot, a, aligned, self.config.tile_m)
        ((fn, arguments),) = self._beside(world, slot, None)
        copier = put_beside(
            world, slot, a, self.problem, self.shards, start_multiply,
            lambda: self._start(fn, (1, 1, 1), arguments, {"num_warps": 1}, True),
        )  # fmt: skip
        # weft: equivalent-mutant swap of record: whom a last word goes to waits for it
        world.current_stream().wait(copier)

    def _pull(
        self, world: Any, slot: Any, a: Any, offset: int | None, aligned: bool, start_multiply: Any
    ) -> None:
        main, copier = world.current_stream(), world.stream("copy")
        if offset is None:
            # Beside the product, which fills the device, it would get no SM.
            self._stage(self.program.stage, world, slot, a, aligned)
        copier.wait(main)
        begin, *close = self._beside(world, slot, offset)
        with copier:
            self._start(begin[0], (1, 1, 1), begin[1], {"num_warps": 1}, True)
        start_multiply()
        with copier:
            for is_word, dst, src in self._copies_for(world, slot, a, offset):
                (world.copy_word if is_word else world.copy)(dst, src)
            for fn, arguments in close:
                self._start(fn, (1, 1, 1), arguments, {"num_warps": 1}, True)
        main.wait(copier)

    def _stage(self, fn: Any, world: Any, slot: Any, a: Any, aligned: bool, *tile: int) -> None:
        """Copy own rows to the own slot."""
        arguments = (
            a, slot.gathered, slot.arg, self.shape, self.shards, world.arg, *tile,
            self.config.block,
        )  # fmt: skip
        grid = (self.config.feeders, 1, 1)
        self._start(fn, grid, arguments, {"num_warps": STAGE_WARPS}, aligned)

    def _start(self, fn: Any, grid: tuple, arguments: tuple, options: dict, aligned: bool) -> None:
        kernel = self._kernels.get(fn) if aligned else None
        if kernel is not None:
            triton_api.relaunch(kernel, grid, *arguments)
            return
        kernel = fn[grid](*arguments, **options)
        if aligned:
            self._kernels[fn] = kernel

    def _multiply_with(
        self, world: Any, slot: Any, a: Any, b: Any, out: Any, aligned: bool, scaling: Any
    ) -> tuple[Any, tuple, dict]:
        """The kernel that multiplies, its arguments and its options."""
        config, tma = self.config, self.tma and aligned
        feeders = 0 if self.by_engine else config.feeders
        # Addresses that TMA does not take: the plain template does the same, in the same tiles.
        is_sm90 = config.template == "sm90" and aligned
        own, gathered, right, result = a, slot.gathered, b, out
        if tma:
            describe = gemm_sm90.descriptor if is_sm90 else blocking.descriptor
            chunk = chunk_of(self.problem, config, is_sm90)
            gathered = describe(gathered, (config.tile_m, config.tile_k))
            # An empty shard has no address to describe; no tile is read from it.
            own = describe(a, (config.tile_m, config.tile_k)) if self.has_rows else gathered
            lies = (config.tile_n, config.tile_k, self.problem.b_is_nk)
            right = launches.describe_b(b, *lies, is_sm90)
            result = describe(out, chunk)
        per_block = self.problem.scaling == _ag_gemm_scales.BLOCKS
        if is_sm90:
            arguments = (
                a, own, slot.gathered, gathered, right, result, scaling, slot.rows_ready, slot.fed,
                slot.partials, slot.summed, slot.arg, self.shape, self.shards, world.arg,
                feeders, config.early_parts, self.by_engine, config.block, config.tile_m,
                config.tile_n, config.tile_k, config.num_stages, self.problem.b_is_nk, per_block,
            )  # fmt: skip
            return self.program.multiply_sm90, arguments, {"num_warps": config.num_warps}
        arguments = (
            a, own, slot.gathered, gathered, right, result, scaling, slot.rows_ready, slot.fed,
            slot.arg, self.shape, self.shards, self.tiles[tma], world.arg,
            feeders, config.block, per_block,
        )  # fmt: skip
        num_stages = config.num_stages if config.template == "plain" else 3
        return (
            self.program.multiply,
            arguments,
            {"num_warps": config.num_warps, "num_stages": num_stages},
        )

    def _copies_for(self, world: Any, slot: Any, a: Any, offset: int | None) -> tuple:
        """What the copy engine does for a call on `slot` whose rows lie at `offset`."""
        copies = self._copies.get((slot.number, offset))
        if copies is None:
            if len(self._copies) >= MOST_PLANS:
                self._copies.clear()
            rows = slot.gathered if offset is None else a
            copies = tuple(plan_copies(world, slot, rows, self.problem, self.shards))
            self._copies[slot.number, offset] = copies
        return copies


def put_beside(
    world: Any, slot: Any, a: torch.Tensor, problem: Any, shards: Shards,
    start_multiply: Callable[[], None], start_open: Callable[[], None] | None = None,
) -> Any:  # fmt: skip
    """Engines put own rows in peers' slots while they are multiplied; on the stream that is given
    back, for which the call has to wait.

    `start_open` launches what says that slots are free beside the product, which must leave it
    registers; where it leaves none, that comes before.
    """
    main, copier = world.current_stream(), world.stream("copy")
    copier.wait(main)
    if start_open is not None:
        with copier:
            start_open()
    start_multiply()
    with copier:
        # Not kept: that would keep `a`.
        for is_word, dst, src in plan_puts(world, slot, a, problem, shards):
            (world.copy_word if is_word else world.copy)(dst, src)
    return copier


def plan_copies(
    world: Any, slot: Any, rows: torch.Tensor, problem: Problem, shards: Shards
) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor]]:
    """(is_word, dst, src) in order; `rows` is what peers read: this rank's `a`, or its slot.

    Source by source in the order in which tiles ask for them; each chunk, then its word. The word
    is the source's own announcement, which holds e until this rank's credit lets the source go on.
    Never a word of this device: such a copy is a kernel, for which a running grid need not make
    room, and each change between kernel and copy engine costs time.
    """
    for hop in range(1, world.num_ranks):
        source = (world.rank + hop) % world.num_ranks
        shard_first, shard_end = problem.shard(source)
        theirs = world.peer(rows, source)
        if rows is slot.gathered:
            theirs = theirs[shard_first:shard_end]
        announced = world.peer(slot.shard_ready, source)[source : source + 1]
        for chunk in range(shards.chunks):
            first = min(shard_first + chunk * shards.chunk_rows, shard_end)
            end = min(first + shards.chunk_rows, shard_end)
            if end > first:
                mine = slot.gathered[first:end]
                yield False, mine, theirs[first - shard_first : end - shard_first]
            word = source * shards.chunks + chunk
            yield True, slot.rows_ready[word : word + 1], announced


def plan_puts(
    world: Any, slot: Any, a: torch.Tensor, problem: Any, shards: Shards
) -> Iterator[tuple[bool, torch.Tensor, torch.Tensor]]:
    """As `plan_copies`, where engines put own rows in peers' slots: first in that of the rank
    behind, which needs them first. The word is this rank's own announcement."""
    shard_first, shard_end = problem.shard(world.rank)
    announced = slot.shard_ready[world.rank : world.rank + 1]
    for hop in range(1, world.num_ranks):
        to = (world.rank - hop) % world.num_ranks
        theirs, words = world.peer(slot.gathered, to), world.peer(slot.rows_ready, to)
        for chunk in range(shards.chunks):
            first = min(shard_first + chunk * shards.chunk_rows, shard_end)
            end = min(first + shards.chunk_rows, shard_end)
            if end > first:
                yield False, theirs[first:end], a[first - shard_first : end - shard_first]
            word = world.rank * shards.chunks + chunk
            yield True, words[word : word + 1], announced
