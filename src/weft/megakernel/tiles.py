"""Cut a tiled program into tasks, on all ranks, and say which need what others make.

    product = matmul(gathered, w1)    ->    product[0, 0]@0, product[0, 1]@0, ...

A stage is what one operation is made of that can be done at once: its tiles; of a sum over ranks
the tiles that are sent, then those that are summed. Stages are in the order of the program, so that
a task needs tasks of earlier stages alone. Regions are met by `compiler.passes.tile`, in global
coordinates; a task's accesses are in those of the rank whose memory it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from weft.base.errors import UnsupportedError, UsageError
from weft.base.parts import part_of
from weft.compiler.passes.tile import (
    Region,
    Tile,
    held_by,
    meeting,
    needed_of,
    region_within,
    tiles_within,
)
from weft.ir.kinds import KINDS
from weft.ir.task import Program, Task
from weft.ir.tensor import Type
from weft.megakernel.records import COPY, GATHER, REDUCE, REDUCE_ADD, SEND, Access, TileTask
from weft.megakernel.sequences import needed_by

# What a task of these kinds makes lies where its first operand lies.
IN_PLACE = ("kv_append",)
MAKERS = {"all_gather": GATHER, "reduce_scatter": REDUCE, "all_reduce": REDUCE,
          "all_reduce_add": REDUCE_ADD}  # fmt: skip
# Sums over ranks: whoever has a part of the summands sends it to the rank that sums it.
SUMMED = ("reduce_scatter", "all_reduce", "all_reduce_add")
# Which operand may be a product in parts along k: the task that reads it adds them up.
ADDS_PARTS = {"rope": 0, "rope_by_table": 0, "head_norm": 0, "kv_append": 1}
# The engine of a sum that every rank makes for itself, and of the product that it is of: its tiles
# go to all ranks as they are made. Else a part of the rows is summed by each rank, for all.
ONE_SHOT = "one_shot"


class Stage(NamedTuple):
    """Tasks `first` .. `end - 1`, by their number among those of all ranks."""

    op: str
    kind: str
    first: int
    end: int


class Dependency(NamedTuple):
    """Each of `after` needs each of `before`, tasks by number, of one stage each."""

    before: tuple[int, ...]
    after: tuple[int, ...]


class MadePart(NamedTuple):
    """What `rank` makes of a value, cut into tiles as one: `held`, of `owner`'s part of a sum."""

    rank: int
    owner: int
    held: Region


@dataclass
class TiledProgram:
    """Tasks of all ranks by number, the stages, and what follows from values alone."""

    program: Program
    sizes: Mapping[str, int]
    num_ranks: int
    tasks: list[TileTask] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    needs: list[Dependency] = field(default_factory=list)
    results: tuple[str, ...] = ()
    _numbers: dict[tuple, int] = field(default_factory=dict)
    _counts: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._counts = [0] * self.num_ranks
        self._by_name = {task.name: task for task in self.program.tasks}
        self._known: dict[tuple[str, int, Region], tuple[int, ...]] = {}
        self._held: dict[tuple[str, int], Region] = {}

    def type_of(self, name: str) -> Type:
        kind = self._by_name[name].type
        assert kind is not None
        return kind

    def split_of(self, name: str) -> int:
        """How many parts along k a value is made in."""
        return self._by_name[name].split_k

    def held(self, name: str, rank: int) -> Region:
        """What a rank has of a value."""
        if (name, rank) not in self._held:
            kind = self.type_of(name)
            self._held[name, rank] = held_by(kind, rank, self.sizes, self.num_ranks)
        return self._held[name, rank]

    def home(self, name: str) -> str:
        """The buffer that holds a value."""
        task = self._by_name[name]
        return self.home(task.operands[0]) if task.kind in IN_PLACE else name

    def is_symmetric(self, task: Task) -> bool:
        """Do other ranks write what this rank has of it? Of a sum that all need each rank makes a
        part of the rows, for all."""
        is_for_all = task.kind in ("all_gather", "all_reduce", "all_reduce_add")
        return is_for_all and task.engine != ONE_SHOT

    def made_parts(self, task: Task, rank: int) -> Iterator[MadePart]:
        """The ranks that make parts of what `rank` has of a value."""
        if task.kind == "all_gather":
            for source in range(self.num_ranks):
                yield MadePart(source, -1, self.held(task.operands[0], source))
        elif self.is_symmetric(task):
            for owner in range(self.num_ranks):
                yield MadePart(owner, owner, self.part(task, owner))
        else:
            owner = rank if task.kind == "reduce_scatter" else -1
            # All ranks add in one order, as if the first one owned all rows.
            owner = 0 if task.engine == ONE_SHOT and task.kind in SUMMED else owner
            yield MadePart(rank, owner, self.held(task.name, rank))

    def part(self, task: Task, owner: int) -> Region:
        """The part of a sum that `owner` makes."""
        whole = self.held(task.name, owner)
        if not self.is_symmetric(task):
            return whole
        first, end = part_of(whole.end_row, owner, self.num_ranks)
        return whole._replace(first_row=first, end_row=end)

    def makers(self, name: str, rank: int, region: Region) -> tuple[int, ...]:
        """The tasks that make a region of what `rank` has of a value."""
        key = (name, rank, region)
        if key not in self._known:
            task = self._by_name[name]
            kind = MAKERS.get(task.kind, task.kind)
            self._known[key] = () if kind == "input" else tuple(
                self.number(name, kind, made.rank, made.owner, one.i_m, one.i_n, part)
                for made in self.made_parts(task, rank)
                for one in meeting(task, made.rank, region.within(made.held), made.held)
                for part in parts_of(task)
            )  # fmt: skip
        return self._known[key]

    def stage(self, op: str, kind: str, drafts: Iterator[Draft]) -> None:
        """One stage more: its tasks get numbers, and needs with equal makers are one."""
        first = len(self.tasks)
        needed: dict[tuple[int, ...], list[int]] = {}
        for draft in drafts:
            i, rank = len(self.tasks), draft.rank
            self._numbers[op, kind, rank, draft.owner, draft.i_m, draft.i_n, draft.part] = i
            self.tasks.append(
                TileTask(self._counts[rank], rank, kind, op, draft.i_m, draft.i_n, draft.reads,
                         draft.writes, draft.owner, draft.part)
            )  # fmt: skip
            self._counts[rank] += 1
            for before in draft.needs:
                if before:
                    needed.setdefault(before, []).append(i)
        if len(self.tasks) > first:
            self.stages.append(Stage(op, kind, first, len(self.tasks)))
        self.needs += [Dependency(before, tuple(after)) for before, after in needed.items()]

    def number(
        self, op: str, kind: str, rank: int, owner: int, i_m: int, i_n: int, part: int = -1
    ) -> int:
        """Of a task by what it is."""
        return self._numbers[op, kind, rank, owner, i_m, i_n, part]


class Draft(NamedTuple):
    """A task before it has a number; `needs` are the makers of each thing that it reads."""

    rank: int
    i_m: int
    i_n: int
    reads: tuple[Access, ...]
    writes: tuple[Access, ...]
    needs: tuple[tuple[int, ...], ...]
    owner: int = -1
    part: int = -1


def cut(program: Program, sizes: Mapping[str, int], num_ranks: int) -> TiledProgram:
    """Every task of every rank, without counters.

    Raises  UsageError: a program that is not tiled, or sizes that it calls otherwise;
            UnsupportedError: what there is no task for, at the user's line
    """
    refuse(program, sizes, num_ranks)
    made = TiledProgram(program, sizes, num_ranks)
    for task in program.tasks:
        if task.kind == "all_gather":
            made.stage(task.name, GATHER, _gathers(made, task))
        elif task.kind in SUMMED:
            if task.engine != ONE_SHOT:
                made.stage(task.name, SEND, _sends(made, task))
            made.stage(task.name, MAKERS[task.kind], _sums(made, task))
        elif task.kind != "input":
            made.stage(task.name, task.kind, _tiles(made, task))
    made.results = tuple(_result(made, name) for name in program.results)
    return made


def result_of(name: str) -> str:
    """The caller's buffer where the value itself lies in symmetric memory, which calls reuse."""
    return f"{name}_result"


def partials_of(name: str) -> str:
    """Other ranks' summands, one behind the other: rows source * rows of a full part + row."""
    return f"{name}_partials"


def slab_rows(made: TiledProgram, task: Task) -> int:
    """Of a sum over ranks the rows of a full part. So far one rank's summands are from the next
    one's, or, where the product is split along k, each part of a summand from the next."""
    return made.part(task, 0).extents[0]


def parts_of(task: Task) -> Sequence[int]:
    """The parts along k that a value is made in; the one part of a value that is whole is -1."""
    return range(task.split_k) if task.split_k > 1 else (-1,)


def may_be_split(program: Program, task: Task) -> bool:
    """Can all tasks that read this product add up its parts along k?"""

    def adds(user: Task) -> bool:
        place = 0 if user.kind in SUMMED and user.engine == ONE_SHOT else ADDS_PARTS.get(user.kind)
        return [i for i, name in enumerate(user.operands) if name == task.name] == [place]

    return (
        task.kind == "matmul"
        and task.name not in program.results
        and all(map(adds, program.users(task.name)))
    )


def refuse(program: Program, sizes: Mapping[str, int], num_ranks: int) -> None:
    """Raises  as `cut`"""
    if program.stage != "tiled" or num_ranks < 1:
        message = f"{program.name} is at stage {program.stage}, for {num_ranks} ranks"
        remedy = "tasks are made of a tiled program, for 1 or more: the pass `tile` makes it one"
        raise UsageError(f"{message}; {remedy}", place=program.place)
    names = {task.name for task in program.tasks}
    for task in program.tasks:
        assert task.type is not None
        if taken := {partials_of(task.name), result_of(task.name)} & names:
            message = (
                f"{program.name}: {', '.join(taken)} is what a buffer of {task.name} is called"
            )
            raise UsageError(f"{message}; call it otherwise", place=task.place)
        for size in task.type.sizes:
            if isinstance(size, str) and sizes.get(size, -1) < 0:
                message = f"{task.name} has the size {size}, but given are {dict(sizes)}"
                raise UsageError(f"{program.name}: {message}", place=task.place)
        is_odd = task.kind == "reduce_scatter" and task.dim == 1
        if is_odd or KINDS[task.kind].is_collective and task.kind not in MAKERS:
            of = " over columns" if is_odd else ""
            message = f"{program.name}: {task.kind} {task.name}{of} is not made of tasks"
            raise UnsupportedError(f"{message}; use lowering='overlapped'", place=task.place)
        if task.split_k > 1 and not may_be_split(program, task):
            message = f"{program.name}: {task.name} has split_k={task.split_k}, but not all that "
            message += "read it add up parts"
            raise UnsupportedError(f"{message}; leave it at 1", place=task.place)
    _refuse_stale(program)


def _refuse_stale(program: Program) -> None:
    """What is written in place has one value at a time, the last."""
    latest: dict[str, str] = {}
    for task in program.tasks:
        for name in task.operands:
            if latest.get(name, name) != name:
                message = (
                    f"{program.name}: {task.name} reads {name}, into which {latest[name]} has "
                )
                raise UsageError(f"{message}been written: read that", place=task.place)
        if task.kind in IN_PLACE:
            if program.task(task.operands[0]).kind not in ("input", *IN_PLACE):
                message = f"{program.name}: {task.name} is written into {task.operands[0]}"
                raise UnsupportedError(f"{message}, which must be an input", place=task.place)
            latest[task.operands[0]] = task.name


def _result(made: TiledProgram, name: str) -> str:
    """The buffer that a result is in; a copy into it, where the value's own is reused."""
    task = made.program.task(name)
    if not made.is_symmetric(task):
        return made.home(name)
    if not any(stage.op == name and stage.kind == COPY for stage in made.stages):
        made.stage(name, COPY, _copies(made, task))
    return result_of(name)


def _local(region: Region, held: Region, row: int = 0) -> Region:
    """The same, counted from what is held, behind `row` rows."""
    return Region(
        region.first_row - held.first_row + row, region.end_row - held.first_row + row,
        region.first_column - held.first_column, region.end_column - held.first_column,
    )  # fmt: skip


def _read(made: TiledProgram, name: str, rank: int, region: Region) -> Access:
    return Access(made.home(name), rank, _local(region, made.held(name, rank)))


def _in_parts(made: TiledProgram, name: str, rank: int, region: Region) -> Iterator[Access]:
    """A region of a value, in each part that the value is made in."""
    rows = made.held(name, 0).extents[0]
    for part in range(made.split_of(name)):
        yield Access(made.home(name), rank, _local(region, made.held(name, rank), part * rows))


def _needed(made: TiledProgram, task: Task, region: Region) -> Iterator[Region]:
    """What a tile needs of each operand."""
    kinds = [made.type_of(name) for name in task.operands]
    less = needed_by(task, region, kinds, made.sizes)
    for i, (need, kind) in enumerate(zip(task.needs, kinds)):
        yield less[i] if i in less else needed_of(need, region, kind, made.sizes)


def _cells(
    made: TiledProgram, task: Task, held: Callable[[int], Region]
) -> Iterator[tuple[int, Tile, Region]]:
    """Every tile of every rank's part `held(rank)`."""
    for rank in range(made.num_ranks):
        whole = held(rank)
        for one in tiles_within(task, rank, whole):
            yield rank, one, region_within(task, one, whole)


def _tiles(made: TiledProgram, task: Task) -> Iterator[Draft]:
    for rank, one, region in _cells(made, task, partial(made.held, task.name)):
        pairs = [
            (name, wanted.within(made.held(name, rank)))
            for name, wanted in zip(task.operands, _needed(made, task, region))
        ]
        reads = tuple(
            read for name, wanted in pairs for read in _in_parts(made, name, rank, wanted)
        )
        needs = tuple(made.makers(name, rank, wanted) for name, wanted in pairs)
        places = _in_parts(made, task.name, rank, region)
        for part, place in zip(parts_of(task), places, strict=True):
            writes = (place, *_summands(made, task, rank, region, part))
            yield Draft(rank, one.i_m, one.i_n, reads, writes, needs, part=part)


def _summands(
    made: TiledProgram, task: Task, rank: int, region: Region, part: int
) -> Iterator[Access]:
    """Where a tile goes beside its own place, of a product that every rank sums for itself."""
    if task.engine == ONE_SHOT and task.kind not in SUMMED:
        (user,) = made.program.users(task.name)
        slab = rank * task.split_k + max(part, 0)
        there = _local(region, made.held(task.name, rank), slab * slab_rows(made, user))
        for to in range(made.num_ranks):
            if to != rank:
                yield Access(partials_of(user.name), to, there)


def _gathers(made: TiledProgram, task: Task) -> Iterator[Draft]:
    (source,) = task.operands
    for rank, one, region in _cells(made, task, partial(made.held, source)):
        writes = tuple(Access(task.name, to, region) for to in range(made.num_ranks))
        needs = (made.makers(source, rank, region),)
        yield Draft(rank, one.i_m, one.i_n, (_read(made, source, rank, region),), writes, needs)


def _copies(made: TiledProgram, task: Task) -> Iterator[Draft]:
    for rank, one, region in _cells(made, task, partial(made.held, task.name)):
        names = (task.name, result_of(task.name))
        reads, writes = ((Access(name, rank, region),) for name in names)
        needs = (made.makers(task.name, rank, region),)
        yield Draft(rank, one.i_m, one.i_n, reads, writes, needs)


def _sends(made: TiledProgram, task: Task) -> Iterator[Draft]:
    source = task.operands[0]
    for rank in range(made.num_ranks):
        for hop in range(1, made.num_ranks):
            owner = (rank + hop) % made.num_ranks
            part = made.part(task, owner)
            for one in tiles_within(task, rank, part):
                region = region_within(task, one, part)
                there = _local(region, part, rank * slab_rows(made, task))
                writes = (Access(partials_of(task.name), owner, there),)
                needs = (made.makers(source, rank, region),)
                reads = (_read(made, source, rank, region),)
                yield Draft(rank, one.i_m, one.i_n, reads, writes, needs, owner)


def _sums(made: TiledProgram, task: Task) -> Iterator[Draft]:
    source, *others = task.operands
    is_for_all = made.is_symmetric(task)
    split = made.split_of(source)
    for rank, one, region in _cells(made, task, partial(made.part, task)):
        part, own = made.part(task, rank), tuple(_in_parts(made, source, rank, region))
        is_one_shot = task.engine == ONE_SHOT
        owner = 0 if is_one_shot else rank
        order = [(owner + hop) % made.num_ranks for hop in range(made.num_ranks)]
        reads: tuple[Access, ...] = ()
        for peer in order:
            slabs = range(peer * split, (peer + 1) * split)
            reads += own if peer == rank else tuple(
                Access(partials_of(task.name), rank,
                       _local(region, part, slab * slab_rows(made, task)))
                for slab in slabs
            )  # fmt: skip
        reads += tuple(_read(made, other, rank, region) for other in others)
        peers = [peer for peer in sorted(order) if peer != rank]
        sent = tuple(
            number
            for peer in peers
            for number in (
                made.makers(source, peer, region) if is_one_shot
                else (made.number(task.name, SEND, peer, rank, one.i_m, one.i_n),)
            )
        )  # fmt: skip
        writes = tuple(
            Access(task.name, to, _local(region, made.held(task.name, to)))
            for to in (range(made.num_ranks) if is_for_all else (rank,))
        )
        needs = (*(made.makers(name, rank, region) for name in (source, *others)), sent)
        yield Draft(rank, one.i_m, one.i_n, reads, writes, needs, owner)
