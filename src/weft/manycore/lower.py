"""Task IR, placed, at the sizes of a call: the kernels of a rank, one after the other.

Tasks on whole rows that follow each other are one kernel; some columns of a value are a view. A
gather is sent before its product begins, and awaited by it shard by shard; a product whose sums
are scattered sends each tile to its owner. An all_reduce is a scatter, sums, and a gather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from weft.base.dtypes import DTYPES
from weft.base.errors import UnsupportedError, UsageError
from weft.base.parts import full_part
from weft.compiler.binding import check_pairs
from weft.ir.task import Program, Task
from weft.ir.tensor import Times, pieces_of
from weft.manycore import exchanges, products, rows, vendor
from weft.manycore.attention import Attention
from weft.manycore.exchanges import Exchange
from weft.manycore.nest import Choices
from weft.manycore.products import Product
from weft.manycore.record import Machine
from weft.manycore.rows import Loaded, Rows, Step
from weft.manycore.signals import Ready, Summands
from weft.manycore.values import Extent, Value, View, extents_of, split, view_of, whole

DTYPES_HERE = ("float32", "bfloat16")
Kernel = Product | Exchange | Rows | Attention | vendor.Vendor


@dataclass(frozen=True)
class Plan:
    """`awaited`: what no kernel has awaited that a result needs. Memory is of one rank."""

    name: str
    machine: Machine
    choices: Choices
    num_ranks: int
    dtype: str
    inputs: Mapping[str, Value]
    results: Mapping[str, View]
    values: tuple[Value, ...]
    kernels: tuple[Kernel, ...]
    num_signals: int
    awaited: tuple[Ready, ...]
    memory_bytes: int

    def ns(self) -> float:
        """The predicted time of a run."""
        waited = max((one.all_ns for one in self.awaited), default=0.0)
        ranks = range(self.num_ranks)
        return sum(max(map(one.ns, ranks)) for one in self.kernels) + waited


def lower(
    program: Program, sizes: Mapping[str, int], num_ranks: int, machine: Machine,
    choices: Choices = Choices(), like: Plan | None = None,
) -> Plan:  # fmt: skip
    """`like`: a plan of the same program, whose tiles and grids are taken.

    Raises  UnsupportedError: a task that this target has nothing for, at the user's line;
            ShapeError: pairs of columns or heads that ranks would cut apart; UsageError: a size
            that is not given
    """
    named = {size.size if isinstance(size, Times) else size for task in program.tasks
             if task.type for size in task.type.sizes}  # fmt: skip
    if missing := sorted(one for one in named if isinstance(one, str) and one not in sizes):
        message = f"{program.name} is compiled for given sizes; {', '.join(missing)} is missing"
        raise UsageError(message, place=program.place)
    check_pairs(program, sizes, num_ranks)
    tiles = {one.name: one for one in like.kernels} if like else {}
    return _Lowering(program, sizes, num_ranks, machine, choices, tiles).plan()


class _Lowering:
    def __init__(
        self, program: Program, sizes: Mapping[str, int], num_ranks: int, machine: Machine,
        choices: Choices, like: Mapping[str, Kernel],
    ) -> None:  # fmt: skip
        self.program, self.sizes, self.num_ranks = program, sizes, num_ranks
        self.machine, self.choices, self.like = machine, choices, like
        self.dtype = self._one_dtype()
        self.views: dict[str, View] = {}
        self.ready: dict[str, tuple[Ready, int]] = {}  # by value, with the dim it was gathered by
        self.summed: dict[str, tuple[Value, Ready]] = {}  # by product
        self.values: list[Value] = []
        self.kernels: list[Kernel] = []
        self.open: list[Task] = []  # tasks on rows that will be one kernel
        self.num_signals = self.memory_bytes = 0

    def _one_dtype(self) -> str:
        for task in self.program.tasks:
            assert task.type is not None
            if task.type.dtype not in DTYPES_HERE or len(task.type.sizes) != 2:
                remedy = "run the program with --target emu, or leave it outside"
                raise UnsupportedError(
                    f"{task.kind} {task.name}: {task.type.as_text()}; the many-core target takes "
                    f"matrices of {' or '.join(DTYPES_HERE)}: {remedy}", place=task.place,
                )  # fmt: skip
        found = {task.type.dtype for task in self.program.tasks if task.type}
        if len(found) > 1:
            message = f"{self.program.name} has {', '.join(sorted(found))}"
            raise UnsupportedError(f"{message}; the many-core target takes programs of one dtype")
        return found.pop()

    def plan(self) -> Plan:
        for task in self.program.tasks:
            self._lower(task)
        self._close()
        results = {name: self.views[name] for name in self.program.results}
        names = dict.fromkeys(one.name for one in results.values())
        awaited = tuple(self.ready[name][0] for name in names if name in self.ready)
        inputs = {one.name: self.views[one.name].value
                  for one in self.program.tasks if one.kind == "input"}  # fmt: skip
        return Plan(
            self.program.name, self.machine, self.choices, self.num_ranks, self.dtype, inputs,
            results, tuple(self.values), tuple(self.kernels), self.num_signals, awaited,
            self.memory_bytes,
        )  # fmt: skip

    def _lower(self, task: Task) -> None:
        if task.kind == "input":
            self.views[task.name] = view_of(self._value_of(task))
            return
        is_alone = self.num_ranks == 1 and task.kind in COLLECTIVES
        if is_alone or (task.kind == "columns" and task.operands[0] not in self._open_names()):
            source = self._view(task.operands[0])
            self.views[task.name] = source if is_alone else self._columns(task, source)
        elif task.kind in rows.KINDS:
            if self.open and not self._is_as_long(task):
                self._close()
            self.open.append(task)
        else:
            self._close()
            LOWERED.get(task.kind, _Lowering._vendor)(self, task)

    # ---------------------------------------------------------------------------------------------
    # Values

    def _value(self, name: str, num_rows: Extent, columns: Extent) -> Value:
        size = DTYPES[self.dtype].itemsize
        pitch = self.machine.aligned(max(columns.most, 1) * size)
        found = Value(name, num_rows, columns, size, pitch, self.memory_bytes)
        self.memory_bytes += -(-found.num_bytes // 128) * 128
        self.values.append(found)
        return found

    def _value_of(self, task: Task) -> Value:
        return self._value(task.name, *self._extents(task))

    def _extents(self, task: Task) -> tuple[Extent, Extent]:
        assert task.type is not None
        return extents_of(task.type, self.sizes, self.num_ranks)

    def _view(self, name: str) -> View:
        if name in self._open_names():
            self._close()
        return self.views[name]

    def _open_names(self) -> set[str]:
        return {task.name for task in self.open}

    def _columns(self, task: Task, source: View) -> View:
        """Some columns of a value, or its piece of Pieces(1, ..), where they lie."""
        assert task.between is not None
        first, end = task.between
        placement = self.program.task(task.operands[0]).type.placement  # type: ignore
        pieces = pieces_of(placement, 1, end)
        if pieces:
            starts = [sum(pieces[:i]) for i in range(len(pieces))]
            before = starts.index(first)
            first = Extent(first, self.num_ranks, pieces[:before]).most
        return replace(source, first=source.first + first, columns=self._extents(task)[1])

    def _awaits(self, views: Sequence[View]) -> tuple[Ready, ...]:
        names = dict.fromkeys(one.name for one in views)
        return tuple(self.ready[name][0] for name in names if name in self.ready)

    def _ready(
        self, name: str, count: str, after_ns: tuple[float, float, float] = (0.0, 0.0, 0.0)
    ) -> Ready:
        found = Ready(name, self.num_signals, self.num_ranks, count, after_ns)
        self.num_signals += self.num_ranks
        return found

    # ---------------------------------------------------------------------------------------------
    # Kernels

    def matmul(self, task: Task) -> None:
        x, w = (self._view(name) for name in task.operands)
        text = f"{task.name} = {task.operands[0]} @ {task.operands[1]}"
        gathered = None
        if x.name in self.ready and self.ready[x.name][1] == 0:
            gathered = self.ready[x.name][0]
        awaits = tuple(one for one in self._awaits([x, w]) if one is not gathered)
        first = Product(
            task.name, text, x, w, None, self.machine, self.choices, (1, 1, 1), (1, 1), "mnk",
            awaits, gathered,
        )  # fmt: skip
        if self._is_scattered(task):
            parts, ready = self._slabs(task.name, *self._extents(task), 0)
            chosen = self._placed(replace(first, sums=Summands(parts, ready, first.m.size)))
            tile_m, tile_n, _ = chosen.tile
            tiles = f"mc_tiles({chosen.n.text}, {tile_n})"
            count = f"mc_tiles_of(core, {first.m.size}, core->rank, {tile_m}) * {tiles}"
            ready = replace(ready, count=count)
            chosen = replace(chosen, sums=Summands(parts, ready, first.m.size))
            self.summed[task.name] = parts, ready
        else:
            out = self._value_of(task)
            chosen = self._placed(replace(first, out=out))
            self.views[task.name] = view_of(out)
        self.kernels.append(chosen)

    def _placed(self, first: Product) -> Product:
        like = self.like.get(first.name)
        if not isinstance(like, Product):
            return products.placed(first)
        order = like.order if self.choices.choose_order else first.order
        return replace(first, tile=like.tile, grid=like.grid, order=order)

    def _is_scattered(self, task: Task) -> bool:
        """Are its sums sent, tile by tile, and not kept?"""
        users = self.program.users(task.name)
        if self.num_ranks == 1 or len(users) != 1 or task.name in self.program.results:
            return False
        return users[0].kind == "all_reduce" or (users[0].kind, users[0].dim) == (
            "reduce_scatter", 0,
        )  # fmt: skip

    def _slabs(
        self, name: str, num_rows: Extent, columns: Extent, dim: int
    ) -> tuple[Value, Ready]:  # fmt: skip
        """Room for every rank's summand of what this rank owns, and the signals of them."""
        mine = split((num_rows, columns)[dim].size, self.num_ranks)
        shape = (mine, columns) if dim == 0 else (num_rows, mine)
        room = whole(shape[0].most * self.num_ranks)
        return self._value(f"{name}_parts", room, shape[1]), self._ready(f"{name}_sums", "")

    def all_gather(self, task: Task) -> None:
        self._gather(task, self._view(task.operands[0]), task.dim or 0)

    def _gather(self, task: Task, source: View, dim: int) -> None:
        into = self._value_of(task)
        size = (into.rows, into.columns)[dim].size
        sent = f"mc_part({size}, source, core->ranks)" if dim == 0 else source.num_rows.text
        rows_most = source.num_rows.most
        row_bytes = source.columns.most * into.itemsize
        after = exchanges.after_ns(self.machine, rows_most, row_bytes)
        ready = self._ready(task.name, f"mc_senders(core, {sent})", after)
        text = f"{task.name} = {task.kind}({task.operands[0]})"
        self.kernels.append(
            Exchange(
                task.name, text, source, into, dim, True, size, ready, self.machine,
                self._awaits([source]),
            )
        )  # fmt: skip
        self.views[task.name], self.ready[task.name] = view_of(into), (ready, dim)

    def _scatter(self, task: Task, dim: int) -> tuple[Value, Ready]:
        """The summands of what this rank owns: sent by the product, or from memory."""
        if task.operands[0] in self.summed:
            return self.summed[task.operands[0]]
        source = self._view(task.operands[0])
        parts, ready = self._slabs(task.name, source.num_rows, source.columns, dim)
        size = (source.num_rows, source.columns)[dim].size
        sent = f"mc_part({size}, core->rank, core->ranks)" if dim == 0 else source.num_rows.text
        share = (
            full_part(source.num_rows.most, self.num_ranks) if dim == 0 else source.num_rows.most
        )
        after = exchanges.after_ns(self.machine, share, parts.columns.most * parts.itemsize)
        ready = replace(ready, count=f"mc_senders(core, {sent})", after_ns=after)
        text = f"{task.name}: the summands of {task.operands[0]} to their owners"
        self.kernels.append(
            Exchange(
                f"{task.name}_parts", text, source, parts, dim, False, size, ready, self.machine,
                self._awaits([source]),
            )
        )  # fmt: skip
        return parts, ready

    def reduce_scatter(self, task: Task) -> None:
        self._sum(task, task.name, task.dim or 0)

    def _sum(self, task: Task, name: str, dim: int) -> None:
        """Opens a kernel on rows, which may go on with what follows."""
        parts, ready = self._scatter(task, dim)
        mine = split(self._extents(self.program.task(task.operands[0]))[dim].size, self.num_ranks)
        num_rows = mine if dim == 0 else parts.rows
        each = parts.rows.most // self.num_ranks
        if dim == 1:
            num_rows = whole(each)
        slabs = []
        for source in range(self.num_ranks):
            slabs.append(f"{parts.name}_{source}")
            self.views[slabs[-1]] = View(parts, parts.columns, 0, source * each, num_rows)
        self.ready[parts.name] = ready, dim
        self.open.append(replace(task, name=name, kind=rows.SUM_RANKS, operands=tuple(slabs)))

    def all_reduce(self, task: Task) -> None:
        part = f"{task.name}_part"
        self._sum(task, part, 0)
        self._close(kept=(part,))
        self._gather(task, self.views[part], 0)

    def attention(self, task: Task) -> None:
        q, k, v = (self._view(name) for name in task.operands)
        out = self._value_of(task)
        assert task.head is not None
        made = Attention(
            task.name, f"{task.name} = attention({', '.join(task.operands)}), heads of {task.head}",
            q, k, v, out, task.head, bool(task.causal), bool(q.num_rows.pieces), self.machine,
            self.choices, self._awaits([q, k, v]),
        )  # fmt: skip
        if made.map is None or not q.columns.is_same:
            raise UnsupportedError(
                f"{task.name}: heads of {task.head} columns, {q.columns.size} in all, on "
                f"{self.num_ranks} ranks; the many-core target takes whole heads on each, of which "
                f"blocks fit {self.machine.scratchpad_bytes} bytes", place=task.place,
            )  # fmt: skip
        self.kernels.append(made)
        self.views[task.name] = view_of(out)

    def _vendor(self, task: Task) -> None:
        vendor.require(task)
        operands = tuple(self._view(name) for name in task.operands)
        out = self._value_of(task)
        text = f"{task.name} = {task.kind}({', '.join(task.operands)}), by the vendor's routine"
        self.kernels.append(
            vendor.Vendor(
                task.name, text, task, operands, out, self.machine, self._awaits(operands)
            )
        )
        self.views[task.name] = view_of(out)

    # ---------------------------------------------------------------------------------------------
    # Rows

    def _is_as_long(self, task: Task) -> bool:
        """Has it the rows of the kernel that is open?"""
        return self._rows(task) == self._rows(self.open[0])

    def _rows(self, task: Task) -> Extent:
        if task.kind != rows.SUM_RANKS:
            return self._extents(task)[0]
        return self.views[task.operands[0]].num_rows

    def _close(self, kept: tuple[str, ...] = ()) -> None:
        """The open tasks become a kernel, or, where the scratchpad is too small for it, several."""
        tasks, self.open = self.open, []
        try:
            self._close_as([tasks] if tasks else [], kept)
        except UnsupportedError:
            if len(tasks) < 2:
                raise
            self._close_as([[one] for one in tasks], kept)

    def _close_as(self, groups: list[list[Task]], kept: tuple[str, ...]) -> None:
        for tasks in groups:
            names = {one.name for one in tasks}
            outside = {name for one in self.program.tasks if one.name not in names
                       for name in one.operands}  # fmt: skip
            results = [one for one in tasks
                       if one.name in outside | {*self.program.results, *kept}]  # fmt: skip
            kernel = self._kernel_of_rows(tasks, {one.name for one in results})
            like = self.like.get(kernel.name)
            same = replace(kernel, tile=like.tile) if isinstance(like, Rows) else kernel
            kernel = same if same is not kernel and same.map else rows.cut(kernel)
            outs = tuple(self._value(*self._shape_of(one, kernel)) for one in results)
            kernel = replace(kernel, outs=outs)
            self.kernels.append(kernel)
            self.views |= {one.name: view_of(one) for one in outs}

    def _shape_of(self, task: Task, kernel: Rows) -> tuple[str, Extent, Extent]:
        step = next(one for one in kernel.steps if one.task.name == task.name)
        return task.name, kernel.rows, step.columns

    def _kernel_of_rows(self, tasks: list[Task], results: set[str]) -> Rows:
        names = {one.name for one in tasks}
        of_rows, of_one = {}, {}
        for task in tasks:
            for i, name in enumerate(task.operands):
                if name not in names:
                    is_row = i == 1 and task.kind in rows.WITH_ROW
                    (of_one if is_row else of_rows)[name] = self.views[name]
        loaded, found = [], {}
        for views, is_row in ((of_rows, False), (of_one, True)):
            for view, users in rows.merged([*views.items()], self.choices.coalesce):
                number = sum(one.view.name == view.name for one in loaded)
                name = view.name + (f"_{number}" if number else "")
                loaded.append(Loaded(name, view, is_row))
                found |= {user: (name, views[user].first - view.first) for user in users}
        steps = [
            Step(
                one, tuple(found.get(name, (name, 0)) for name in one.operands),
                self._columns_of(one), one.name in results,
            )
            for one in tasks
        ]  # fmt: skip
        num_rows = self._rows(tasks[0])
        size = DTYPES[self.dtype].itemsize
        outs = tuple(
            Value(one.task.name, num_rows, one.columns, size,
                  self.machine.aligned(max(one.columns.most, 1) * size))
            for one in steps if one.is_result
        )  # fmt: skip
        text = "; ".join(_text(one) for one in tasks)
        views = [one.view for one in loaded]
        return Rows(
            tasks[-1].name, text, num_rows, tuple(loaded), tuple(steps), outs, self.machine,
            self.choices, awaits=self._awaits(views),
        )  # fmt: skip

    def _columns_of(self, task: Task) -> Extent:
        if task.kind == rows.SUM_RANKS:
            return self.views[task.operands[0]].columns
        return self._extents(task)[1]


def _text(task: Task) -> str:
    if task.kind == rows.SUM_RANKS:
        return f"{task.name} = the sum over ranks"
    return f"{task.name} = {task.kind}({', '.join(task.operands)})"


COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce")
LOWERED = {
    "matmul": _Lowering.matmul,
    "all_gather": _Lowering.all_gather,
    "reduce_scatter": _Lowering.reduce_scatter,
    "all_reduce": _Lowering.all_reduce,
    "attention": _Lowering.attention,
}
