"""Task IR: what is computed, on global tensors with placements; then its tiles and their needs.

    program(mlp, mesh=tp, stage=placed, results=(y,))
    x: bfloat16[m, 64] @ Shard(0) = input()
    g: bfloat16[m, 64] @ Replicate() = all_gather(x, dim=0)

Sizes are global; a name stands for one that is known only when the program is called. Placements
are torch DTensor's: Shard(dim) splits as torch.chunk does, Replicate() has all of it on each rank,
Partial() is to be summed over the ranks. A program passes five stages: traced (kinds, operands),
placed (types), fused (which tasks are one kernel), tiled (extents of tiles, and which region of
each operand a tile needs), planned (how each kernel is run, and what carries its data).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from weft.base.dtypes import DTYPES
from weft.base.place import UNKNOWN, Place
from weft.ir import text
from weft.ir.choice import Choice
from weft.ir.legality import Rule, Violation, illegal, run
from weft.ir.shapes import dtype_of, sizes_of
from weft.ir.tensor import (
    TABLE,
    ByExpert,
    Halves,
    Partial,
    Placement,
    Replicate,
    Shard,
    Size,
    Times,
    Type,
)

STAGES = ("traced", "placed", "fused", "tiled", "planned")
# What carries a collective that is part of a kernel. ce_pull: pulls by copies on a stream of their
# own; ce_push: pushes by such copies, of sums from the staging buffer that tiles are stored in;
# sm_push: stores of SMs; sm_put: wl.put with signals, which reaches other nodes; one_shot_ll: LL
# packets, stores of which each carries its flag, to all ranks; two_shot_ll: to the ranks that own
# the rows, and back; feed: puts of the product's own first programs, before they multiply. SMs do
# not pull: pushes were never slower.
ENGINES = {
    "all_gather": ("ce_pull", "ce_push", "sm_push", "sm_put", "feed", "pushers", "one_shot_ll"),
    "reduce_scatter": ("sm_push", "sm_put", "ce_push"),
    "all_reduce": ("sm_push", "sm_put", "one_shot_ll", "two_shot_ll"),
}
LL = ("one_shot_ll", "two_shot_ll")
# What brings gathered rows within the product's own launch: communication CTAs, of rows that tables
# say or of all; or packets.
INSIDE = ("feed", "pushers", "one_shot_ll")
SCALINGS = ("", "rows", "blocks")


@dataclass(frozen=True)
class Along:
    """A tile needs, of this dimension, what lies along its own dimension `dim`, `times` as wide."""

    dim: int
    times: int = 1


@dataclass(frozen=True)
class All:
    """A tile needs all of this dimension."""


@dataclass(frozen=True)
class ByTable:
    """A tile needs what the table says that the task is given: known on the device alone."""


@dataclass(frozen=True)
class Need:
    """The region of `operand` that a tile needs, dimension by dimension."""

    operand: str
    region: tuple[Along | All | ByTable, ...]


@dataclass(frozen=True)
class Task:
    """One operation. `dim` is a collective's, `eps` a norm's, `top_k` a router's; `head` counts the
    columns of a head, `base` is that of their angles; `causal`: no token sees a later one. Of a
    matmul `dtype` is the result's where it is not the operands', and `scaling`, of SCALINGS, says
    that they have fp8 scales: one for each row and column, or one for each block.

    `kernel` is there from `fused` on: tasks of one kernel run as one; a task without is a call of a
    library. A product's tile is (rows, columns) or (rows, columns, k). From `planned` on: of a
    collective its `engine` and `chunks`; of a kernel's first task `order`, `programs`, `spare` (SMs
    left free), `split_k`.
    """

    name: str
    kind: str
    operands: tuple[str, ...] = field(default=(), metadata={"spread": True})
    type: Type | None = None
    dim: int | None = None
    eps: float | None = None
    top_k: int | None = None
    head: int | None = None
    base: float | None = None
    causal: bool | None = None
    dtype: str = ""
    scaling: str = ""
    tile: tuple[int, ...] = ()
    needs: tuple[Need, ...] = ()
    kernel: str = ""
    engine: str = ""
    chunks: int | str = 0
    order: str = ""
    programs: str = ""
    spare: int = 0
    split_k: int = 1
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Program:
    """Tasks in order; each uses those before it. `choices` say why passes did what they did."""

    name: str
    mesh: str
    tasks: tuple[Task, ...]
    results: tuple[str, ...]
    stage: str = "traced"
    place: Place = UNKNOWN
    choices: tuple[Choice, ...] = ()

    def of_kernel(self, name: str) -> tuple[Task, ...]:
        """The tasks of a kernel, in order."""
        return tuple(task for task in self.tasks if task.kernel == name)

    @property
    def kernels(self) -> tuple[str, ...]:
        """In the order in which they can run: each where its last task stands."""
        last = {task.kernel: i for i, task in enumerate(self.tasks) if task.kernel}
        return tuple(sorted(last, key=lambda name: last[name]))

    def chief(self, name: str) -> Task:
        """The task whose tiles are the kernel's: its product, or its first."""
        tasks = self.of_kernel(name)
        return next((one for one in tasks if one.kind in PRODUCTS), tasks[0])

    def users(self, name: str) -> tuple[Task, ...]:
        """The tasks that read a value."""
        return tuple(task for task in self.tasks if name in task.operands)

    def task(self, name: str) -> Task:
        return next(task for task in self.tasks if task.name == name)


@dataclass(frozen=True)
class Kind:
    """An operation's row: operands, the dimensions that they need, placements in -> out.

    `region[i]` is what a tile of the result needs of operand i. `attributes` are the fields of a
    task that this kind is run with, of ATTRIBUTES.
    """

    num_operands: int
    region: tuple[tuple[Along | All | ByTable, ...], ...]
    placements: tuple[tuple[tuple[Placement, ...], Placement], ...] = ()
    is_collective: bool = False
    attributes: tuple[str, ...] = ()


# What a field of a task may be where its kind has it, and how that is told.
ATTRIBUTES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "dim": (lambda dim: dim in (0, 1), "0 or 1"),
    "eps": (lambda eps: isinstance(eps, float), "a number"),
    "top_k": (lambda top_k: isinstance(top_k, int) and top_k >= 1, "1 or more"),
    "head": (lambda head: isinstance(head, int) and head >= 2 and head % 2 == 0, "an even number"),
    "base": (lambda base: isinstance(base, float) and base > 0, "a number above 0"),
    "causal": (lambda causal: isinstance(causal, bool), "True or False"),
}

ROW, COLUMN, WHOLE = Along(0), Along(1), Replicate()
_SAME = (ROW, COLUMN)


def _kept_alone(*placements: Placement) -> tuple[tuple[tuple[Placement, ...], Placement], ...]:
    """Placements of one operand, which its result has too."""
    return tuple(((one,), one) for one in placements)


_ALIKE = _kept_alone(WHOLE, Shard(0), Shard(1), ByExpert())
_BOTH = tuple(((p, p), p) for p in (WHOLE, Shard(0), Shard(1), Halves(1), ByExpert()))
_TABLE = (All(), All(), All())


def _kept(
    placements: tuple[Placement, ...],
) -> tuple[tuple[tuple[Placement, ...], Placement], ...]:
    """Placements that stay as they are, by tables that all ranks have."""
    return tuple(((one, WHOLE), one) for one in placements)


# A product is linear in each of its operands: a summand times a whole is a summand.
_LINEAR = (((Partial(), WHOLE), Partial()), ((WHOLE, Partial()), Partial()))

KINDS = {
    "input": Kind(0, ()),
    "matmul": Kind(2, ((ROW, All()), (All(), COLUMN)), (
        ((WHOLE, WHOLE), WHOLE),
        ((Shard(0), WHOLE), Shard(0)),
        ((WHOLE, Shard(1)), Shard(1)),
        ((WHOLE, Halves(1)), Halves(1)),
        ((Shard(1), Shard(0)), Partial()),
        *_LINEAR,
    )),
    "silu": Kind(1, (_SAME,), (*_ALIKE, ((Halves(1),), Halves(1)))),
    # Columns in pairs, gate and value: silu(h[:, 0::2]) * h[:, 1::2].
    "silu_mul": Kind(1, ((ROW, Along(1, times=2)),), _ALIKE),
    # All columns of gate, then those of value: silu(h[:, :n]) * h[:, n:].
    "silu_mul_halves": Kind(1, ((ROW, All()),), (
        *_kept_alone(WHOLE, Shard(0), ByExpert()), ((Halves(1),), Shard(1)),
    )),
    "mul": Kind(2, (_SAME, _SAME), (*_BOTH, *_LINEAR)),
    "add": Kind(2, (_SAME, _SAME), (*_BOTH, ((Partial(), Partial()), Partial()))),
    # Over whole rows, times one weight per column, which lies as [1, columns].
    "rms_norm": Kind(2, ((ROW, All()), (All(), COLUMN)), (
        ((WHOLE, WHOLE), WHOLE),
        ((Shard(0), WHOLE), Shard(0)),
        ((WHOLE, Partial()), Partial()),
    ), attributes=("eps",)),
    # Tables of where every token's rows are, sorted by expert: on all ranks, of all tokens.
    "moe_route": Kind(1, ((All(), All()),), (((Shard(0),), WHOLE), ((WHOLE,), WHOLE)),
                      is_collective=True, attributes=("top_k",)),
    # A row for each choice of a token; and back, weighted and summed.
    "gather_rows": Kind(2, ((ByTable(), COLUMN), _TABLE), _kept((WHOLE, Shard(1)))),
    "scatter_rows": Kind(2, ((ByTable(), COLUMN), _TABLE), _kept((WHOLE, Shard(1), Partial()))),
    # Each row times its expert's matrix.
    "grouped_matmul": Kind(3, ((ROW, All()), (ByTable(), All(), COLUMN), _TABLE), (
        ((WHOLE, WHOLE, WHOLE), WHOLE),
        ((WHOLE, Shard(2), WHOLE), Shard(1)),
        ((WHOLE, Halves(2), WHOLE), Halves(1)),
        ((Shard(1), Shard(1), WHOLE), Partial()),
        ((ByExpert(), Shard(0), WHOLE), ByExpert()),
        ((Partial(), WHOLE, WHOLE), Partial()),
        ((WHOLE, Partial(), WHOLE), Partial()),
    )),
    # As gather_rows of all ranks' tokens, to where their experts are; and back, as scatter_rows.
    "ep_dispatch": Kind(2, ((ByTable(), COLUMN), _TABLE), (((Shard(0), WHOLE), ByExpert()),),
                        is_collective=True),
    "ep_combine": Kind(2, ((ByTable(), COLUMN), _TABLE), (((ByExpert(), WHOLE), Shard(0)),),
                       is_collective=True),
    # A decode step: heads are split over ranks, lengths are known to all.
    "rope": Kind(2, ((ROW, All()), (All(), All())), _kept((WHOLE, Shard(1))),
                 attributes=("head", "base")),
    "kv_append": Kind(3, (_SAME, (All(), COLUMN), (All(), All())), (
        ((WHOLE, WHOLE, WHOLE), WHOLE),
        ((Shard(1), Shard(1), WHOLE), Shard(1)),
    )),
    "decode_attention": Kind(4, (_SAME, *(((All(), All()),) * 3)), (
        ((WHOLE, WHOLE, WHOLE, WHOLE), WHOLE),
        ((Shard(1), Shard(1), Shard(1), WHOLE), Shard(1)),
    ), attributes=("head",)),
    # Of tokens, one a row: their heads are split over ranks, or they themselves.
    "attention": Kind(3, (_SAME, (All(), All()), (All(), All())), (
        ((WHOLE, WHOLE, WHOLE), WHOLE),
        ((Shard(0), WHOLE, WHOLE), Shard(0)),
        ((Shard(1), Shard(1), Shard(1)), Shard(1)),
    ), attributes=("head", "causal")),
    # The same, of keys and values that are gathered meanwhile.
    "ag_attention": Kind(3, (_SAME, (All(), All()), (All(), All())), (
        ((Shard(0), Shard(0), Shard(0)), Shard(0)),
    ), is_collective=True, attributes=("head", "causal")),
    # With dim: Shard(dim) -> Replicate, Partial -> Shard(dim).
    "all_gather": Kind(1, (_SAME,), is_collective=True, attributes=("dim",)),
    "reduce_scatter": Kind(1, (_SAME,), is_collective=True, attributes=("dim",)),
    "all_reduce": Kind(1, (_SAME,), (((Partial(),), WHOLE),), is_collective=True),
}  # fmt: skip


# Kinds whose tiles have a third extent, along k.
PRODUCTS = ("matmul", "grouped_matmul")


def placements_of(task: Task) -> tuple[tuple[tuple[Placement, ...], Placement], ...]:
    """The rows of placements, in -> out, that this task may have."""
    if task.dim is None:
        return KINDS[task.kind].placements
    if task.kind == "all_gather":
        return (((Shard(task.dim),), WHOLE),)
    return (((Partial(),), Shard(task.dim)),)


def show(program: Program, *, places: bool = True) -> str:
    """The program as text; `parse` takes it back."""
    header = text.Header(program.name, program.mesh, program.stage, program.results, program.place)
    return text.show([header, *program.tasks, *program.choices], places=places)


def parse(source: str) -> Program:
    """Raises  UsageError: with the line"""
    header, statements = text.read(source, RECORDS)
    tasks = tuple(one for one in statements if isinstance(one, Task))
    choices = tuple(one for one in statements if isinstance(one, Choice))
    return Program(
        header.title, header.mesh, tasks, header.results, header.stage, header.place, choices
    )


_VALUES = (Shard, Halves, Replicate, Partial, ByExpert, Times, Type, Along, All, ByTable, Need)
RECORDS = {
    **text.words(Choice),
    **dict.fromkeys(KINDS, Task),
    **{kind.__name__: kind for kind in _VALUES},
}


# ---------------------------------------------------------------------------------------------
# What is legal


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
    return [name, *way] if (way := _way(needs, operand, name)) else []


def _attributes(program: Program) -> Iterator[tuple[str, Place]]:
    for task in program.tasks:
        if task.kind not in KINDS:
            continue
        for name, (is_right, message) in ATTRIBUTES.items():
            given, wanted = getattr(task, name), name in KINDS[task.kind].attributes
            if not is_right(given) if wanted else given is not None:
                message = message if wanted else "none"
                yield f"{task.kind} {task.name} has {name}={given}; it takes {message}", task.place
        if task.scaling not in SCALINGS or (task.kind != "matmul" and task.dtype + task.scaling):
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
    if task.kind == "moe_route" or (task.kind == "input" and kind.dtype == TABLE):
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
        rows = placements_of(task)
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
        wanted = tuple(map(Need, task.operands, KINDS[task.kind].region))
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


def cycle_of(program: Program, kernels: Mapping[str, str]) -> list[str]:
    """Kernels, or tasks without one, that need each other, each the next; empty if there are none.

    `kernels` says of which kernel a task would be.
    """
    made = {task.name: kernels.get(task.name) or task.name for task in program.tasks}
    needs: dict[str, set[str]] = {one: set() for one in made.values()}
    for task in program.tasks:
        needs[made[task.name]] |= {made[name] for name in task.operands} - {made[task.name]}
    return next((way for name in needs if (way := _way(needs, name, name))), [])


def _way(needs: Mapping[str, set[str]], start: str, end: str) -> list[str]:
    """From `start` over what is needed to `end` again; empty where there is no such way."""
    ways, seen = [[start]], {start}
    for way in ways:
        for name in sorted(needs[way[-1]]):
            if name == end:
                return way
            if name not in seen:
                seen.add(name)
                ways.append([*way, name])
    return []


def _planned(program: Program) -> Iterator[tuple[str, Place]]:
    for task in program.tasks:
        known = ENGINES.get(task.kind, ("",)) if task.kernel else ("",)
        if task.engine not in known:
            message = f"{task.name} has engine={task.engine}; {task.kind} may have"
            yield f"{message} {' or '.join(known) or 'none'}", task.place
        if task.chunks != "tiles" if isinstance(task.chunks, str) else task.chunks < 0:
            message = f"{task.name} has chunks={task.chunks}; it is 1 or more, or tiles"
            yield message, task.place
        if is_carried(task):
            yield from _carried(program, task)
    for name in program.kernels:
        chief = program.chief(name)
        if chief.kind != "all_gather" and not (chief.order and chief.programs):
            message = f"{name} has order={chief.order}, programs={chief.programs}"
            yield f"{message}: passes swizzle and partition give both", chief.place


def is_carried(task: Task) -> bool:
    """Do copy engines carry tiles of it to their owners?"""
    return is_carried_by(task.kind, task.engine)


def is_carried_by(kind: str, engine: str) -> bool:
    return kind == "reduce_scatter" and engine == "ce_push"


def are_alike(columns: Size, chunks: int, width: int) -> bool:
    """Are so many chunks of columns alike, and of whole tiles of `width`, at all sizes?"""
    return chunks == 1 or (isinstance(columns, int) and columns % (chunks * width) == 0)


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
    if violations := check(program):
        raise illegal(f"Task IR of {program.name}, {program.stage}", violations)
    return program
