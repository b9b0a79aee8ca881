"""Make kernels of what is done to rows and belongs to no other kernel: one pass over memory each.

    total = add(h, residual)            ->    add(h, residual, kernel=p_rows)
    normed = rms_norm(total, weight)          rms_norm(total, weight, kernel=p_rows)

A library does one after the other, and each stands between two lists of what a call queues. A
kernel is a chain: of what is there in registers, with whole operands or a row for all rows, come
the next values, of which any may be stored. Columns that nobody else takes are read where they lie.
Kernels have whole rows, from the first to the last: nothing is left to be chosen of them.

A program without other kernels stays with the libraries: its calls need no slot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.base.dtypes import FLOATS
from weft.compiler.passes.fuse import ROW_WISE, grown
from weft.ir.choice import Choice
from weft.ir.kinds import KINDS, PRODUCTS
from weft.ir.shapes import GATED, ROWS
from weft.ir.task import Program, Task, cycle_of
from weft.ir.tensor import ByExpert
from weft.tiles.rows import MOST_COLUMNS

# What a chain is made of; and what it may begin with: a gate takes more columns than it gives.
BEHIND = (*ROW_WISE, "head_norm", "rope", "rope_by_table")
FIRST = (*BEHIND, *GATED, *(f"{kind}_halves" for kind in GATED))
# Of a row as a whole, which is one tile.
WHOLE_ROWS = ("rms_norm",)
# What goes by one row for all rows, or by pairs of columns, goes by no heads.
BY_ROW = (*WHOLE_ROWS, *ROWS.values(), *GATED)
# Whose operands are alike, so that the value in registers may be either.
ALIKE = ("add", "mul")


def fuse_rows(program: Program) -> Program:
    """The program with kernels of rows, and why of each task that is a library's still."""
    if not program.kernels:
        return program
    kernels = {task.name: task.kernel for task in program.tasks if task.kernel}
    tiles: dict[str, tuple[int, ...]] = {}
    choices: list[Choice] = []
    number = 0
    for task in program.tasks:
        if task.name in kernels or task.kind not in FIRST or _refused(program, task):
            continue
        chain = _chain(program, task, kernels)
        names = [one.name for one in (*_views(program, chain), *chain)]
        name = f"{program.name}_rows" + (f"_{number + 1}" if number else "")
        kernels |= dict.fromkeys(names, name)
        assert task.type is not None and isinstance(task.type.sizes[1], int)
        tiles |= dict.fromkeys(names, (1, task.type.sizes[1]))
        why = "one pass over rows, among the plan's own launches"
        if len(chain) > 1:
            why = "one pass over rows, which stay in registers between"
        choices.append(Choice(", ".join(names), "kernel", name, why, task.place))
        number += 1
    tasks = tuple(
        replace(one, kernel=kernels[one.name], tile=tiles[one.name], order="rows", programs="tiles")
        if one.name in tiles else one
        for one in program.tasks
    )  # fmt: skip
    fused = replace(program, tasks=tasks)
    return replace(fused, choices=(*program.choices, *choices, *_left(fused)))


def _chain(program: Program, first: Task, kernels: dict[str, str]) -> list[Task]:
    """What is done to the rows of `first`, one behind the other."""

    def fits(one: Task, group: Sequence[Task]) -> bool:
        chain = (*group, one)
        there = [i for i, name in enumerate(one.operands) if name == group[-1].name]
        names = {each.name for each in group}
        others = [name for name in one.operands if name in names]
        is_next = len(there) == len(others) == 1 and (there == [0] or one.kind in ALIKE)
        units = {unit for each in chain if (unit := _unit(each)) is not None}
        is_next = is_next and len(units) < 2
        rows = {name for each in chain for name in _rows(each)}
        row = {name for each in chain for name in each.operands if name not in _rows(each)}
        is_next = is_next and not rows & row  # of which there may be one
        claimed = {**kernels, **{each.name: first.name for each in chain}}
        return is_next and not _refused(program, one) and not cycle_of(program, claimed)

    return grown(program, [first], BEHIND, kernels, fits=fits, ends=lambda group: True)


def _unit(task: Task) -> int | None:
    """Of how many columns one of its rows is, in a kernel: of a head, or 0, of all; None where that
    is all the same."""
    return 0 if task.kind in BY_ROW else task.head


def _rows(task: Task) -> tuple[str, ...]:
    """The operands of which each row of the result takes its own."""
    return task.operands if task.kind in ALIKE else task.operands[:1]


def _views(program: Program, chain: Sequence[Task]) -> list[Task]:
    """The columns that a chain alone takes."""
    names = {one.name for one in chain}
    whole = dict.fromkeys(name for one in chain for name in _rows(one) if name not in names)
    sources = [program.task(name) for name in whole]
    return [
        one for one in sources
        if one.kind == "columns" and one.name not in program.results
        and {user.name for user in program.users(one.name)} <= names
        and all(one.name in _rows(user) for user in program.users(one.name))
    ]  # fmt: skip


def _refused(program: Program, task: Task) -> str:
    """Why a task on rows is a library's; "" if it is not."""
    types = [program.task(name).type for name in (*task.operands, task.name)]
    kind = task.type
    assert kind is not None
    if not isinstance(kind.sizes[1], int):
        return "how many columns it has is known at the call alone"
    if any(one is None or one.placement == ByExpert() for one in types):
        return "how many rows it has is known on the device alone"
    if kind.dtype not in FLOATS:
        return f"kernels on rows are for {', '.join(FLOATS)}; it is of {kind.dtype}"
    if task.kind.startswith("rope") and task.head and task.head & (task.head - 1):
        return f"heads of {task.head} columns are no power of two, whose halves are one tile's"
    if {*_rows(task)} & {*task.operands[len(_rows(task)) :]}:
        return "its row is what it works on"
    if task.kind in WHOLE_ROWS and kind.sizes[1] > MOST_COLUMNS:
        message = f"a row of {kind.sizes[1]} columns"
        return f"{message} is no one tile: it has up to {MOST_COLUMNS}"
    return ""


def _left(program: Program) -> Iterator[Choice]:
    """What libraries do beside kernels, and why; of collectives it is said where they are fused."""
    for task in program.tasks:
        if task.kind != "input" and not task.kernel and not KINDS[task.kind].is_collective:
            yield Choice(task.name, "kernel", "library", _reason(program, task), task.place)


def _reason(program: Program, task: Task) -> str:
    if task.kind in PRODUCTS:
        return "a product alone is the library's: nothing is faster"
    if task.kind == "columns":
        return "a view: nothing is launched"
    return _refused(program, task) if task.kind in FIRST else f"no kernel is made for {task.kind}"
