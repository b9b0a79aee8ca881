"""Work on whole rows: activations, gates, norms, sums with other values and over ranks, one kernel
for all that follow each other.

    h = rms_norm(x + y, gain)     cores have every so many blocks of rows; x and y are got block by
                                  block, gain once; x + y never leaves the scratchpad

Blocks that lie side by side in one value are got as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from weft.base.errors import UnsupportedError
from weft.ir.shapes import ACTIVATIONS, GATED, ROWS
from weft.ir.task import Task
from weft.manycore.nest import Choices
from weft.manycore.record import Machine
from weft.manycore.scratchpad import Map, Request, allocate
from weft.manycore.signals import Ready
from weft.manycore.traffic import Pipeline, Traffic, block, fewest
from weft.manycore.values import Extent, Value, View

SUM_RANKS = "sum_ranks"
HALVES = tuple(f"{kind}_halves" for kind in GATED)
# What an element of a result takes, in flops.
FLOPS = {
    "silu": 12, "gelu": 24, "gelu_tanh": 20, "mul": 1, "add": 1, "mul_row": 1, "add_row": 1,
    "columns": 1, "rms_norm": 5, "head_norm": 5, SUM_RANKS: 1,
}  # fmt: skip
FLOPS |= {kind: FLOPS[kind.removesuffix("_mul")] + 1 for kind in GATED}
FLOPS |= {f"{kind}_halves": FLOPS[kind] for kind in GATED}
KINDS = (*ACTIVATIONS, *GATED, *HALVES, *ROWS, *ROWS.values(), "rms_norm", "head_norm", "columns",
         SUM_RANKS)  # fmt: skip
# What is done to each element by itself, with the same column of other operands.
POINTWISE = {*ACTIVATIONS, *ROWS, *ROWS.values(), SUM_RANKS}
# Whose second operand is one row for all.
WITH_ROW = (*ROWS.values(), "rms_norm", "head_norm")
TILES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Loaded:
    """Columns of a value that are got as one; `is_row`: one row for all, got once."""

    name: str
    view: View
    is_row: bool = False

    @property
    def bytes_most(self) -> int:
        return self.view.columns.most * self.view.value.itemsize


@dataclass(frozen=True)
class Step:
    """One task of the kernel: `operands` are names of loaded buffers with a first column, or of
    steps before it, with 0."""

    task: Task
    operands: tuple[tuple[str, int], ...]
    columns: Extent
    is_result: bool = False


@dataclass(frozen=True)
class Rows:
    name: str
    text: str
    rows: Extent
    loaded: tuple[Loaded, ...]
    steps: tuple[Step, ...]
    outs: tuple[Value, ...]
    machine: Machine
    choices: Choices
    tile: int = 1
    awaits: tuple[Ready, ...] = ()

    kind = "rows"

    @property
    def slots(self) -> int:
        return 2 if self.choices.double_buffer else 1

    @property
    def active(self) -> int:
        return max(min(-(-self.rows.most // self.tile), self.machine.cores), 1)

    @cached_property
    def map(self) -> Map | None:
        return allocate([*self._requests()], self.machine)

    def _requests(self) -> Iterator[Request]:
        for one in self.loaded:
            is_kept = one.is_row and self.choices.choose_order
            rows, copies = 1 if one.is_row else self.tile, 1 if is_kept else self.slots
            pitch = self.machine.lines(one.view.first_byte(), one.bytes_most)
            yield Request(f"{one.name}_tile", rows, pitch, copies)
        for step in self.steps:
            if self.has_row(step):
                yield Request(f"{step.task.name}_row", 1, step.columns.most * 4)
        for out in self.outs:
            pitch = self.machine.aligned(out.columns.most * out.itemsize)
            yield Request(f"{out.name}_tile", self.tile, pitch, self.slots)

    @cached_property
    def runs(self) -> tuple[tuple[Step, ...], ...]:
        """Steps that are one loop over columns: neighbours of one width, element by element."""
        found: list[list[Step]] = []
        for step in self.steps:
            last = found[-1][-1] if found else None
            both = {last.task.kind, step.task.kind} if last else {""}
            if last and last.columns == step.columns and both <= POINTWISE:
                found[-1].append(step)
            else:
                found.append([step])
        return tuple(map(tuple, found))

    def has_row(self, step: Step) -> bool:
        """Is it kept as floats for another loop? What is stored is read again as elements."""
        run = next(run for run in self.runs if step in run)
        used = {name for one in self.steps if one not in run for name, _ in one.operands}
        return not step.is_result and step.task.name in used

    def flops(self, rank: int) -> int:
        """Of a row."""
        return sum(
            max(len(one.operands) - 1, 1) * FLOPS[one.task.kind] * one.columns.on(rank)
            for one in self.steps
        )

    def pipeline(self, rank: int, core: int) -> Pipeline:
        num_rows, cores = self.rows.on(rank), self.machine.cores
        tiles = range(core, -(-num_rows // self.tile), cores)
        rows = [min(self.tile, num_rows - i * self.tile) for i in tiles]
        first, got, put = Traffic(), Traffic(), Traffic()
        for one in self.loaded:
            # Got once, or, as written, with every block of rows.
            is_once = one.is_row and self.choices.choose_order
            blocks = [1] * (1 if is_once else len(rows)) if one.is_row else rows
            width = one.view.columns.on(rank) * one.view.value.itemsize
            start = one.view.first_byte()
            pitches = one.view.value.pitch, self.map[f"{one.name}_tile"].pitch  # type: ignore
            moved = [block(self.machine, num, start, width, pitches, not self.choices.coalesce)
                     for num in (blocks if rows else ())]  # fmt: skip
            first, got = sum(moved[:1], first), sum(moved, got)
        for out in self.outs:
            width = out.columns.on(rank) * out.itemsize
            pitches = out.pitch, self.map[f"{out.name}_tile"].pitch  # type: ignore
            for num in rows:
                put += block(self.machine, num, 0, width, pitches, not self.choices.coalesce)
        computed = sum(rows) * self.flops(rank) / self.machine.gflops
        return Pipeline(len(rows), len(rows), len(rows), computed, first, got, put)

    def traffic(self, rank: int) -> Traffic:
        found = Traffic()
        for core in range(self.machine.cores):
            one = self.pipeline(rank, core)
            found += one.got + one.put
        return found

    def ns(self, rank: int = 0) -> float:
        machine = self.machine
        found = self.pipeline(rank, 0).ns(machine, self.active, self.choices.double_buffer)
        return found + max((one.all_ns for one in self.awaits), default=0.0) + machine.barrier_ns


def merged(views: Sequence[tuple[str, View]], coalesce: bool) -> Iterator[tuple[View, list[str]]]:
    """Views of one value whose columns lie side by side as one, with the names of all its users."""
    ahead: list[tuple[View, list[str]]] = []
    for name, view in sorted(views, key=lambda one: (one[1].name, one[1].first_row, one[1].first)):
        if ahead:
            last, names = ahead[-1]
            end = last.first + last.columns.most
            is_beside = (
                (last.name, last.first_row) == (view.name, view.first_row)
                and view.first <= end and last.columns.is_same and view.columns.is_same
            )  # fmt: skip
            if view == last or (is_beside and coalesce):
                width = max(end, view.first + view.columns.most) - last.first
                columns = last.columns if view == last else Extent(width)
                ahead[-1] = (replace(last, columns=columns), [*names, name])
                continue
        ahead.append((view, [name]))
    yield from ahead


def cut(kernel: Rows) -> Rows:
    """With the blocks of rows that are predicted to end first.

    Raises  UnsupportedError: not even one row fits the scratchpad
    """
    single = replace(kernel, choices=replace(kernel.choices, double_buffer=False))
    for one in (kernel, single):
        fitting = [found for tile in TILES if (found := replace(one, tile=tile)).map]
        if fitting:
            return fewest(fitting, lambda one: one.pipeline(0, 0).got.transfers)
    held = kernel.machine.scratchpad_bytes
    raise UnsupportedError(
        f"{kernel.name}: no row of {kernel.text} fits a scratchpad of {held} bytes, with its "
        "operands and its result; take a machine with a larger one, or split the columns over ranks"
    )
