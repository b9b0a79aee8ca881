"""Run a program as one persistent kernel on this rank: memory, tables, the launch.

    y = mlp.options(lowering="persistent")(x, w1, w2, world=world)

What peers write into and all counters are one workspace's slot; what this rank alone sees stays
with the runner; results are fresh at each call. Tables are made when a program is first called with
sizes, and lie on the device from then on: a call is one launch, and can be recorded.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from triton import next_power_of_2

from weft.base.errors import UsageError
from weft.compiler import layouts
from weft.ir.task import Program
from weft.megakernel import codegen
from weft.megakernel.bodies import Body, bodies
from weft.megakernel.check import require
from weft.megakernel.extents import chosen
from weft.megakernel.graph import build
from weft.megakernel.operands import Operands
from weft.megakernel.records import SCHEDULES
from weft.megakernel.schedule import schedule
from weft.megakernel.tables import tables
from weft.megakernel.tasks.scoreboard import Board
from weft.tiles import attention_decode, gemm, rows

# Queries of a tile, and elements of a head, that tensor cores take at least; keys at a time.
LEAST, KEYS = 16, 64


@dataclass(frozen=True)
class Persistent:
    """How programs run as one kernel; `lowering=` takes it where its defaults do not serve.

    `schedule` is one of records.SCHEDULES: static queues or one by ticket; `sums` how all ranks get
    a sum: "two_shot" has the bits of the kernels that overlap, "one_shot" one hop less; workers
    as many as the device has SMs, or fewer.
    """

    schedule: str = "balanced"
    sums: str = "two_shot"
    num_workers: int = 0
    num_warps: int = 8
    num_stages: int = 3

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES or self.num_workers < 0:
            message = f"schedule={self.schedule!r} with num_workers={self.num_workers}"
            raise UsageError(f"{message}; it is {', '.join(SCHEDULES)}, with 0 (all) or more")

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
            workers = self.num_workers or world.target.num_sms
            tiled = chosen(program, sizes, world.num_ranks, workers, settled)
            runner = Runner(world, tiled, tensors, sizes, self)
            found = world.calls[key] = (program, runner)
        return found[1].run(tensors)


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
        self.world, self.program, self.options = world, program, options
        places = {one.name: one.place for one in program.tasks}
        reads = _reads(program)
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
        # Never empty, so that there is an address.
        self._tables = [
            torch.tensor([*table, 0], dtype=torch.int32).to(world.device)
            for table in tables(self.graph, world.rank, self.bodies)
        ]
        self._num_counters = max(1, *(len(one.counters) for one in self.graph.ranks))
        shown = [f"{name}={size}" for name, size in sorted(sizes.items())]
        self._name = f"program {program.name} as one kernel with {', '.join(shown)}"

    def run(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Queue the call; its results."""
        self.world.operator_call(self._name)
        signals = {
            "counters": (self._num_counters, torch.int64),
            "bases": (self._num_counters, torch.int64),
            "tickets": (1, torch.int32),
        }
        memory = {"memory": ((max(1, self.graph.symmetric_bytes),), torch.uint8)}
        slot = self.world.workspace(f"persistent {self.program.name}", memory, signals)
        copies = {name: tensors[name].contiguous() for name in self._copied}
        bound = self._bind({**tensors, **copies}, slot)
        self._launch(bound, slot)
        return tuple(bound[name] for name in self.graph.results)

    def _bind(self, tensors: Mapping[str, torch.Tensor], slot: Any) -> dict[str, torch.Tensor]:
        """Every buffer as a tensor."""
        found = dict(tensors)
        size = max(1, self.graph.local_bytes)
        local = self.world.scratch(f"persistent {self.program.name}", size)
        for one in self.mine.buffers:
            dtype, shape = getattr(torch, one.dtype), (one.rows, one.columns)
            if one.role == "result":
                found[one.name] = torch.empty(shape, dtype=dtype, device=self.world.device)
            elif one.role != "input":
                arena = slot.memory if one.role == "symmetric" else local
                end = one.offset + one.rows * one.columns * dtype.itemsize
                found[one.name] = arena[one.offset : end].view(dtype).view(shape)
        return found

    def _launch(self, bound: Mapping[str, torch.Tensor], slot: Any) -> None:
        tasks, waits, bumps, firsts, totals, counts = self._tables
        board = Board(
            tasks, waits, bumps, firsts, totals, slot.counters, slot.bases, slot.tickets, counts
        )
        is_dynamic = self.options.schedule == "dynamic"
        values = self._generated.values(*(bound[name] for name in self._names))
        self._generated.kernel[(self.graph.num_workers,)](
            values, self._sizes, *self._tiles, board, slot.arg, self.world.arg, is_dynamic,
            num_warps=self.options.num_warps, num_stages=self.options.num_stages,
            launch_cooperative_grid=True,
        )  # fmt: skip


def _graph(program: Program, sizes: Mapping[str, int], world: Any, options: Persistent) -> Any:
    graph = build(program, sizes, world.num_ranks, sums=options.sums)
    most = options.num_workers or world.target.num_sms
    longest = max(len(one.tasks) for one in graph.ranks)
    return require(schedule(graph, options.schedule, max(1, min(most, longest))))


def _reads(program: Program) -> layouts.Reads:
    """How the kernel reads the inputs of a program."""
    right = {one.operands[1] for one in program.tasks if one.kind == "matmul"}
    rows = {name for one in program.tasks for i, name in enumerate(one.operands)
            if i != 1 or one.kind != "matmul"}  # fmt: skip
    written = {one.operands[0] for one in program.tasks if one.kind == "kv_append"}
    return layouts.Reads(rows, right - rows, written)


def tile_of(body: Body) -> gemm.Tile | rows.Tile | attention_decode.Tile:
    """What a body takes of its tiles."""
    if body.kind == "matmul":
        given = dict(body.attributes)
        m, n, k = body.tile
        return gemm.Tile(m, n, k, given["b_is_nk"], False, given["is_k_even"])
    if body.kind == "decode_attention":
        head = dict(body.attributes)["head"]
        group = body.tile[1] // head
        return attention_decode.Tile(
            max(LEAST, next_power_of_2(group)), KEYS, max(LEAST, next_power_of_2(head))
        )
    return rows.Tile(body.tile[0], body.tile[1])
