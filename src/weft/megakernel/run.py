"""Run a program as one persistent kernel on this rank: memory, tables, the launch.

    y = mlp.options(lowering="persistent")(x, w1, w2, world=world)

What peers write into and all counters are one workspace's slot; what this rank alone sees stays
with the runner; results are fresh at each call. Tables are made when a program is first called with
sizes, and lie on the device from then on: a call is one launch, and can be recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from weft.base.errors import UsageError
from weft.base.target import Target
from weft.base.whole_numbers import whole_number
from weft.compiler import layouts
from weft.ir import text
from weft.ir.kinds import GATED_PRODUCTS, WEIGHTED
from weft.ir.task import Program
from weft.megakernel import codegen
from weft.megakernel.bodies import Body, bodies
from weft.megakernel.check import require
from weft.megakernel.extents import chosen
from weft.megakernel.folding import fold
from weft.megakernel.graph import build
from weft.megakernel.operands import Operands
from weft.megakernel.ordering import by_depth
from weft.megakernel.sequences import KEYS, OF_KEYS, split_keys
from weft.megakernel.tables import tables
from weft.megakernel.tasks.scoreboard import Board
from weft.plan.kept_launches import KeptLaunches
from weft.plan.launches import Start
from weft.plan.memory import like
from weft.tiles import attention, gemm, rows

# Of an SM, and of a thread.
REGISTERS_OF_SM, MOST_REGISTERS = 1 << 16, 255
HIP_STAGES = 2
# Elements of the largest tile of a product that four warps sum up.
OF_FEW_WARPS = 16 * 128


@dataclass(frozen=True)
class Persistent:
    """How programs run as one kernel; `lowering=` takes it where its defaults do not serve.

    Units   num_workers: as many as the device has SMs (0), or fewer; splits: of each sequence's
            keys, which as many tasks read, or as many as keep the workers busy (0); split_k: parts
            along k of each product whose readers add parts up, or as many as are predicted to be
            done first (0); num_warps: of a worker, or what its tiles take (0)
    """

    num_workers: int = 0
    splits: int = 0
    num_warps: int = 0
    num_stages: int = 5
    split_k: int = 0

    def __post_init__(self) -> None:
        whole_number("Persistent: num_workers", self.num_workers, 0, UsageError)
        whole_number("Persistent: splits", self.splits, 0, UsageError)
        whole_number("Persistent: split_k", self.split_k, 0, UsageError)

    def compiled_with(self, target: Target, bodies: Sequence[Body]) -> dict[str, int]:
        """What Triton is told. One worker has an SM: nothing is spilled for a second one's sake."""
        # Of a tile of few rows each warp reads the whole left operand: more of them wait for shared
        # memory. The sums of a large one are too many for few threads.
        is_large = any(tile.m * tile.n > OF_FEW_WARPS for tile in map(tile_of, bodies)
                       if isinstance(tile, gemm.Tile))  # fmt: skip
        warps = self.num_warps or (8 if is_large or target.backend == "hip" else 4)
        if target.backend == "hip":  # with a third of the shared memory
            return {"num_warps": warps, "num_stages": min(self.num_stages, HIP_STAGES)}
        found = {"num_warps": warps, "num_stages": self.num_stages}
        if target.backend == "cuda":
            found["maxnreg"] = min(MOST_REGISTERS, REGISTERS_OF_SM // (warps * 32))
        return found

    def run_persistent(
        self, program: Program, tensors: Mapping[str, Any], sizes: Mapping[str, int], *, world: Any,
        settled: Collection[str] = (),
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """One rank's results of a tiled program. Collective.

        Tiles are chosen for these sizes (extents.py), but for those of the tasks `settled`.

        Sync    stream-ordered on the current stream; can be recorded after a first call
        Raises  UnsupportedError, ConfigError: what no task does, at the user's line; UsageError
        """
        layouts = tuple((one.shape, one.stride(), one.dtype) for one in tensors.values())
        key = ("persistent", self, id(program), tuple(sorted(sizes.items())), layouts)
        found = world.calls.get(key)
        if found is None:
            # The program is kept: its number is then its alone.
            tiled = self._tiled(program, sizes, world, settled)
            runner = Runner(world, tiled, tensors, sizes, self)
            found = world.calls[key] = (program, runner)
        return found[1].run(tensors)

    def task_names(
        self, program: Program, sizes: Mapping[str, int], *, world: Any,
        settled: Collection[str] = (),
    ) -> list[str]:  # fmt: skip
        """What a record of `World.trace` is of, by its number: this rank's tasks in order. A task
        begins to wait, has waited, is done, and has signalled."""
        graph = _graph(self._tiled(program, sizes, world, settled), sizes, world, self)
        return [str(one) for one in graph.ranks[world.rank].tasks]

    def _tiled(
        self, program: Program, sizes: Mapping[str, int], world: Any, settled: Collection[str]
    ) -> Program:
        """The program as it is run: folded, split, in tiles for these sizes, in order."""
        workers = self.num_workers or world.target.num_sms
        folded = fold(program, sizes, world.num_ranks, settled)
        split = split_keys(folded, sizes, world.num_ranks, workers, self.splits)
        tiled = chosen(split, sizes, world.num_ranks, workers, settled, split_k=self.split_k)
        return by_depth(tiled) if any(one.split_k > 1 for one in tiled.tasks) else tiled


class Runner:
    """A program at given sizes on one rank: found once, launched at each call."""

    def __init__(
        self, world: Any, program: Program, tensors: Mapping[str, torch.Tensor],
        sizes: Mapping[str, int], options: Persistent,
    ) -> None:  # fmt: skip
        if world.is_recording():
            raise UsageError(
                f"{program.name}: its tables must be put on the device, but a recording is under "
                "way; call the program once with these sizes before recording"
            )
        self.world, self.program = world, program
        places = {one.name: one.place for one in program.tasks}
        reads = reads_of(program)
        self._copied = layouts.to_copy(program.name, tensors, reads, places)
        transposed = frozenset(
            name for name in reads.weights
            if name in tensors and not tensors[name].is_contiguous()
        )  # fmt: skip
        self.graph = _graph(program, sizes, world, options)
        self.bodies = bodies(self.graph, transposed)
        self.mine = self.graph.ranks[world.rank]
        self._generated = codegen.load(self.graph, transposed)
        operands = Operands(self.graph, self.bodies, transposed)
        self._names = operands.buffers
        self._sizes = self._generated.sizes(
            *(operands.size(world.rank, name) for name in operands.sizes)
        )
        self._tiles = tuple(tile_of(body).as_constexpr() for body in self.bodies)
        self._compiled_with = options.compiled_with(world.target, self.bodies)
        # Never empty, so that there is an address.
        self._tables = [
            torch.tensor([*table, 0], dtype=torch.int32).to(world.device)
            for table in tables(self.graph, world.rank, self.bodies)
        ]
        self._local_bytes = max(1, self.graph.local_bytes)
        self._likes = {
            one.name: like((one.rows, one.columns), getattr(torch, one.dtype), world.device)
            for one in self.mine.buffers if one.role == "result"
        }  # fmt: skip
        num_counters = max(1, *(len(one.counters) for one in self.graph.ranks))
        signals = dict.fromkeys(("counters", "bases"), (num_counters, torch.int64))
        memory = {"memory": ((max(1, self.graph.symmetric_bytes),), torch.uint8)}
        slots = world.asked(f"persistent {program.name}", {}, signals, shared=memory)
        self._kept = KeptLaunches(world, slots)
        shown = [f"{name}={size}" for name, size in sorted(sizes.items())]
        tasks = text.digest(program.tasks)
        self._name = f"program {program.name} (tasks {tasks}) as one kernel with {', '.join(shown)}"

    def run(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Queue the call; its results."""
        self.world.operator_call(self._name)
        if self._copied:
            tensors = {**tensors, **{name: tensors[name].contiguous() for name in self._copied}}
        bound = {**tensors, **{name: torch.empty_like(one) for name, one in self._likes.items()}}
        local = self.world.scratch(f"persistent {self.program.name}", self._local_bytes)
        start = lambda slot: (self._start(self._bind(bound, slot, local), slot),)  # noqa: E731
        self._kept.run([*bound.values()], start, local)
        return tuple(bound[name] for name in self.graph.results)

    def _bind(
        self, bound: Mapping[str, torch.Tensor], slot: Any, local: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        """Every buffer as a tensor."""
        found = dict(bound)
        for one in self.mine.buffers:
            if one.role not in ("input", "result"):
                dtype = getattr(torch, one.dtype)
                arena = slot.memory if one.role == "symmetric" else local
                end = one.offset + one.rows * one.columns * dtype.itemsize
                part = arena[one.offset : end].view(dtype)
                found[one.name] = part.view(one.rows, one.columns)
        return found

    def _start(self, bound: Mapping[str, torch.Tensor], slot: Any) -> Start:
        tasks, waits, bumps, totals, counts = self._tables
        board = Board(tasks, waits, bumps, totals, slot.counters, slot.bases, counts)
        values = self._generated.values(*(bound[name] for name in self._names))
        given = (values, self._sizes, *self._tiles, board, slot.arg, self.world.arg)
        options = {**self._compiled_with, "launch_cooperative_grid": True}
        return Start(self._generated.kernel, (self.graph.num_workers, 1, 1), given, options)


def _graph(program: Program, sizes: Mapping[str, int], world: Any, options: Persistent) -> Any:
    graph = build(program, sizes, world.num_ranks)
    most = options.num_workers or world.target.num_sms
    longest = max(len(one.tasks) for one in graph.ranks)
    return require(replace(graph, num_workers=max(1, min(most, longest))))


def reads_of(program: Program) -> layouts.Reads:
    """How the kernel reads the inputs of a program."""
    right = {one.operands[1] for one in program.tasks if one.kind in WEIGHTED}
    rows = {name for one in program.tasks for i, name in enumerate(one.operands)
            if i != 1 or one.kind not in WEIGHTED}  # fmt: skip
    written = {one.operands[0] for one in program.tasks if one.kind == "kv_append"}
    return layouts.Reads(rows, right - rows, written)


def tile_of(body: Body) -> gemm.Tile | rows.Tile | attention.Tile:
    """What a body takes of its tiles."""
    if body.kind in WEIGHTED:
        given = dict(body.attributes)
        m, n, k = body.tile
        n *= 2 if body.kind in GATED_PRODUCTS else 1
        return gemm.Tile(m, n, k, given["b_is_nk"], False, given["is_k_even"])
    if body.kind in OF_KEYS:
        given = dict(body.attributes)
        head = given["head"]
        group = body.tile[1] // (2 * head if "splits" in given else head)
        return attention.Tile.of(attention.padded_head(group), KEYS, d=head, pack=group, tokens=1)
    return rows.Tile(body.tile[0], body.tile[1])
