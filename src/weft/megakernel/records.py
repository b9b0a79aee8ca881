"""A program as tasks of tiles: what the graph makes and the kernel runs.

Plain frozen records of plain integers, one of everything for each rank. Tasks know of each other by
counters alone: int64 words on the symmetric heap, of which each rank has its own. A task begins
when its counters are full and bumps others, here and on other ranks, when it is stored.

What a kind does, with `reads` and `writes` in this order:

    matmul, add, ...  a kind of Task IR: writes[0] from its operands, all on this rank
    gather            reads[0], an own tile -> its place in `op`'s buffer on each rank
    send              reads[0], a tile of the own summand -> this rank's rows of `<op>_partials`, on
                      the rank that sums it
    reduce            the sum of reads, in fp32 and in their order -> `op`'s buffer, here or on all
                      ranks; one of them is the own summand, the others are rows of `<op>_partials`
    reduce_add        the same, rounded, and with the last of reads added, which all ranks have
    copy              reads[0] -> writes[0], the caller's

A counter is full when all of its bumps of this call have come. So every wait asks for all of them,
above a base that is stored on the device and moves when the call ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from weft.compiler.passes.tile import Region
from weft.ir.task import Program

# Beside the kinds of Task IR.
GATHER, SEND, REDUCE, COPY = "gather", "send", "reduce", "copy"
REDUCE_ADD = "reduce_add"
REDUCES = (REDUCE, REDUCE_ADD)

# What is the caller's; `local` is seen by this rank alone, peers write into `symmetric`.
GIVEN = ("input", "result")
ROLES = (*GIVEN, "local", "symmetric")


class Wait(NamedTuple):
    """Of this rank's counter: value - base >= at_least."""

    counter: int
    at_least: int


class Bump(NamedTuple):
    """counter@rank  <-  counter@rank + amount, behind the task's stores."""

    counter: int
    rank: int
    amount: int = 1


class Access(NamedTuple):
    """Rows and columns of what `rank` has of a buffer, counted from that rank's own first ones."""

    buffer: str
    rank: int
    region: Region


@dataclass(frozen=True)
class Buffer:
    """What one rank has of it: `columns` elements lie between rows. `offset` is in bytes, within
    all that is local, or all that is symmetric; a symmetric one is the same on all ranks."""

    name: str
    role: str
    dtype: str
    rows: int
    columns: int
    offset: int = 0


@dataclass(frozen=True)
class TileTask:
    """Tile (i_m, i_n) of an operation: `id` is its index in its rank's tasks.

    `writes[0].region` is what it makes. `owner`, of send and reduce: with whose summand the sum
    begins; those of owner + 1, ... follow, as in the kernels that overlap. `part`, of a product
    that is split along k: which of its parts.
    """

    id: int
    rank: int
    kind: str
    op: str
    i_m: int
    i_n: int
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    owner: int = -1
    part: int = -1
    waits: tuple[Wait, ...] = ()
    bumps: tuple[Bump, ...] = ()

    def __str__(self) -> str:
        sort = "" if self.kind not in (GATHER, SEND, *REDUCES, COPY) else f" {self.kind}"
        of = f" of {self.owner}" if self.kind == SEND else ""
        of += f" part {self.part}" if self.part >= 0 else ""
        return f"{self.op}{sort}[{self.i_m}, {self.i_n}]{of}@{self.rank}"


@dataclass(frozen=True)
class RankTasks:
    """One rank's. `counters[c]` is how much counter c is bumped in a call, by all ranks."""

    rank: int
    buffers: tuple[Buffer, ...]
    tasks: tuple[TileTask, ...]
    counters: tuple[int, ...] = ()

    def buffer(self, name: str) -> Buffer:
        return next(one for one in self.buffers if one.name == name)


@dataclass(frozen=True)
class TaskGraph:
    """A program of these sizes, all ranks. Local and symmetric memory is equal on all of them.

    `results` are the buffers that hold the program's results: those of role `result`, or inputs.
    Of each rank worker w does tasks w, w + num_workers, w + 2 num_workers, ...
    """

    program: Program
    sizes: dict[str, int]
    num_ranks: int
    ranks: tuple[RankTasks, ...]
    results: tuple[str, ...]
    local_bytes: int = 0
    symmetric_bytes: int = 0
    num_workers: int = 1

    @cached_property
    def tasks(self) -> tuple[TileTask, ...]:
        """Of all ranks."""
        return tuple(task for rank in self.ranks for task in rank.tasks)
