"""What is legal in Task IR, stage by stage: a table that is run before and after each pass."""

from __future__ import annotations

from collections.abc import Iterator

from weft.base.dtypes import DTYPES
from weft.base.place import Place
from weft.ir import text
from weft.ir.kinds import ATTRIBUTES, GATHERED, KINDS, PRODUCTS
from weft.ir.legality import Rule, Violation, legal, run
from weft.ir.shapes import ROUTERS, dtype_of, sizes_of
from weft.ir.task import (
    ENGINES,
    SCALINGS,
    STAGES,
    Program,
    Task,
    are_alike,
    arrives,
    cycle_of,
    is_staged,
    needs_of,
    placements_of,
    way_to,
)
from weft.ir.tensor import TABLE, Type


def _names(program: Program) -> Iterator[tuple[str, Place]]:
    known: set[str] = set()
    for task in program.tasks:
        if task.kind not in KINDS:
            yield f"{task.name} is of kind {task.kind!r}; there are {', '.join(KINDS)}", task.place
        elif len(task.operands) != KINDS[task.kind].num_operands:
            wanted = KINDS[task.kind].num_operands
            yield (
                f"{task.kind} takes {wanted} operands, {task.name} has {len(task.operands)}",
                (task.place),
            )
        for operand in task.operands:
            if operand not in known:
                message = f"{task.name} uses {operand}, which no task before it makes"
                path = _behind(program, task.name, operand)
                cycle = f": a cycle, {' needs '.join([*path, path[0]])}" if path else ""
                yield message + cycle, task.place
        if task.name in known:
            yield f"{task.name} is made twice; a value is made once", task.place
        known.add(task.name)
    if missing := [name for name in program.results if name not in known]:
        yield f"{program.name} returns {', '.join(missing)}, which no task makes", program.place


def _behind(program: Program, name: str, operand: str) -> list[str]:
    """From a task over `operand` to itself again, by what needs what; empty if it is no cycle."""
    needs = {task.name: {*task.operands} for task in program.tasks}
    needs |= {one: set() for task in program.tasks for one in task.operands if one not in needs}
    return [name, *way] if (way := way_to(needs, operand, name)) else []


def _attributes(program: Program) -> Iterator[tuple[str, Place]]:
    for task in program.tasks:
        if task.kind not in KINDS:
            continue
        for name, (is_right, message) in ATTRIBUTES.items():
            given, wanted = getattr(task, name), name in KINDS[task.kind].attributes
            if not is_right(given) if wanted else given is not None:
                message = message if wanted else "none"
                yield f"{task.kind} {task.name} has {name}={given}; it takes {message}", task.place
        is_rounded = task.dtype and task.kind not in GATHERED
        if task.scaling not in SCALINGS or is_rounded or (task.scaling and task.kind != "matmul"):
            message = f"has dtype={task.dtype!r}, scaling={task.scaling!r}; a matmul has them, "
            yield f"{task.kind} {task.name} {message}of {SCALINGS}", task.place


def _typed(program: Program) -> Iterator[tuple[str, Place]]:
    for task in program.tasks:
        if task.type is None or task.type.placement is None:
            yield f"{task.name} has no placement: the pass `place` gives each task one", task.place
        elif not _is_typed(task, task.type):
            given = task.type.as_text()
            yield f"{task.name} is {given}; it has two dimensions, and a dtype of torch", task.place
    for task in program.tasks:
        if task.name in program.results and task.type and task.type.dtype == TABLE:
            message = f"{program.name} returns {task.name}, which is {task.type.as_text()}"
            yield f"{message}: tables are for the tasks of the program alone", task.place


def _is_typed(task: Task, kind: Type) -> bool:
    """Two dimensions; experts' matrices, which are inputs, have three, and so have tables."""
    if task.kind in ROUTERS or (task.kind == "input" and kind.dtype == TABLE):
        return kind.dtype == TABLE and len(kind.sizes) == 3
    dims = (2, 3) if task.kind == "input" else (2,)
    return kind.dtype in DTYPES and len(kind.sizes) in dims


def _sized(program: Program) -> Iterator[tuple[str, Place]]:
    types = {task.name: task.type for task in program.tasks}
    for task in program.tasks:
        operands = [kind for name in task.operands if (kind := types.get(name))]
        if not operands or task.type is None:
            continue
        try:
            sizes = sizes_of(task, operands)
        except ValueError as error:
            yield f"{task.name}: {error}", task.place
            continue
        dtype = dtype_of(task, operands)
        if (task.type.dtype, task.type.sizes) != (dtype, sizes):
            wanted = Type(dtype, sizes).as_text()
            yield f"{task.name} is {task.type.as_text()}; {task.kind} gives {wanted}", task.place


def _placed(program: Program) -> Iterator[tuple[str, Place]]:
    types = {task.name: task.type for task in program.tasks}
    for task in program.tasks:
        given = tuple(t.placement for t in map(types.get, task.operands) if t)
        rows = placements_of(task, given)
        if task.kind != "input" and task.type and (given, task.type.placement) not in rows:
            placed = ", ".join(map(text.value, given))
            result = text.value(task.type.placement)
            yield f"{task.kind} of {placed} does not give {task.name} @ {result}", task.place


def _tiled(program: Program) -> Iterator[tuple[str, Place]]:
    for task in program.tasks:
        if task.kind == "input":
            continue
        may = (2, 3) if task.kind in PRODUCTS else (2,)
        if len(task.tile) not in may or min(task.tile) < 1:
            yield f"{task.name} has tile={task.tile}; it is (rows, columns), 1 or more", task.place
        wanted = needs_of(task)
        if task.needs != wanted:
            message = f"{text.value(task.needs)}; {task.kind} reads {text.value(wanted)}"
            yield f"{task.name} needs {message}", task.place


def _kernels(program: Program) -> Iterator[tuple[str, Place]]:
    """Kernels run one after the other: none may need what another makes that needs the first."""
    path = cycle_of(program, {task.name: task.kernel for task in program.tasks})
    if path:
        first = next(task for task in program.tasks if path[0] in (task.kernel, task.name))
        message = " needs ".join([*path, path[0]])
        yield f"{message}: tasks of kernels that need each other cannot be fused", first.place


def _planned(program: Program) -> Iterator[tuple[str, Place]]:
    for task in program.tasks:
        known = ENGINES.get(task.kind, ("",)) if task.kernel else ("",)
        if task.engine not in known:
            message = f"{task.name} has engine={task.engine}; {task.kind} may have"
            yield f"{message} {' or '.join(known) or 'none'}", task.place
        if task.chunks != "tiles" if isinstance(task.chunks, str) else task.chunks < 0:
            message = f"{task.name} has chunks={task.chunks}; it is 1 or more, or tiles"
            yield message, task.place
        if is_staged(task):
            yield from _carried(program, task)
    for name in program.kernels:
        chief = program.chief(name)
        if not arrives(chief) and not (chief.order and chief.programs):
            message = f"{name} has order={chief.order}, programs={chief.programs}"
            yield f"{message}: passes swizzle and partition give both", chief.place


def _carried(program: Program, task: Task) -> Iterator[tuple[str, Place]]:
    """What lies in one piece for an engine: chunks of columns that are alike, of whole tiles."""
    chief = program.chief(task.kernel)
    if chief.kind != "matmul" or chief.order != "part_by_part":
        message = f"{task.name} is carried by engines behind {chief.kind} in order={chief.order}"
        yield f"{message}; they carry a matmul's tiles, in order=part_by_part", task.place
    columns, width = task.type.sizes[1] if task.type else 0, task.tile[1]
    if not isinstance(task.chunks, int) or task.chunks < 1:
        yield f"{task.name} has chunks={task.chunks}; engines carry 1 or more", task.place
    elif not are_alike(columns, task.chunks, width):
        message = (
            f"{task.name} has chunks={task.chunks} of {text.value(columns)} columns in tiles of"
        )
        yield f"{message} {width}; several chunks must be alike, of whole tiles", task.place


RULES = (
    Rule("names", "a value is made once, before it is used", _names, "traced"),
    Rule("attributes", "what a kind is run with is said, and no more", _attributes, "traced"),
    Rule("typed", "later passes read sizes and placements", _typed, "placed"),
    Rule("sizes", "what does not fit is found before anything runs", _sized, "placed"),
    Rule("placements", "each task works on what its rank has", _placed, "placed"),
    Rule("kernels", "what waits for itself never starts", _kernels, "fused"),
    Rule("tiled", "regions are the kind's own: dependencies follow from them", _tiled, "tiled"),
    Rule("planned", "the lowering asks nothing any more", _planned, "planned"),
)


def check(program: Program) -> list[Violation]:
    """Every breach of the rules that hold at the program's stage."""
    if program.stage not in STAGES:
        message = f"{program.name} is at stage {program.stage}; there are {', '.join(STAGES)}"
        return [Violation("stage", message, program.place)]
    return run(RULES, program, STAGES[: STAGES.index(program.stage) + 1])


def require(program: Program) -> Program:
    """The program itself. Raises  IllegalError: with all breaches, and the user's lines"""
    return legal(f"Task IR of {program.name}, {program.stage}", program, check(program))
