"""The source of a program's one kernel, meant to be read: a switch over bodies in a worker's loop.

    text(graph)    the module's text: what the operations are, a function for each body, the kernel
    load(graph)    the same in a file of the cache, imported: the kernel, a JITFunction

Bodies are those of tasks/; generated is which buffers and sizes an operation gives to its body. The
text depends on the program, its tiles and its dtypes, and on no size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from textwrap import wrap
from typing import Any, NamedTuple

from weft.ir import task as task_ir
from weft.megakernel.bodies import TO_ALL, Body, bodies
from weft.megakernel.forms import KINDS
from weft.megakernel.loading import import_text
from weft.megakernel.operands import Operands, field_of
from weft.megakernel.records import TaskGraph

WIDTH = 100


class Generated(NamedTuple):
    """The kernel, a JITFunction, and the records of its buffers and sizes."""

    kernel: Any
    values: Any
    sizes: Any


def load(graph: TaskGraph, transposed: Set[str] = frozenset()) -> Generated:
    """The kernel, from a file that is written once for each text."""
    module = import_text(kernel_name(graph), text(graph, transposed))
    return Generated(getattr(module, kernel_name(graph)), module.Values, module.Sizes)


def kernel_name(graph: TaskGraph) -> str:
    return f"{graph.program.name}_persistent"


_HERE = "destinations.Here({out}, {m}, {n}, {stride})"
_PLACED = "destinations.Placed({out}, {n}, {stride}, rank)"
_SUMMANDS = (
    "destinations.Summands({out}, {m}, {n}, {stride}, {partials}, {partials_stride}, {slab}, rank)"
)


def _body(body: Body, rows: Sequence[Mapping[str, str]]) -> str:
    """The function of a body."""
    chosen, words = _chosen(rows)
    lines = ["@triton.jit", f"def _{body.name}(task, v, s, tile, rank, world):"]
    formulas = "\n    ".join(one.formula for one in body.operations)
    end = "\n    " if len(body.operations) > 1 else ""
    lines += [f'    """{formulas}{end}"""', *chosen]
    attributes = dict(body.attributes)
    if in_parts := attributes.pop("parts", None):
        split_k, dtype = in_parts
        words["x"] = f"parts.Parts({words['x']}, {words['part_stride']}, {split_k}, tl.{dtype})"
    words |= {name: repr(value) for name, value in attributes.items()}
    form = KINDS[body.kind]
    given = [one.format(**words) for one in form.called_with()]
    function = "matmul.sent" if body.destination == TO_ALL else form.function
    lines += [f"    {function}(", *_wrapped(["task", *given, "tile"])]
    if body.destination:
        args = {"here": [_HERE], TO_ALL: [_SUMMANDS, "world"]}.get(
            body.destination, [_PLACED, "world"]
        )
        given = [one.format(**words) for one in args]
        lines += _wrapped([f"destinations.{body.destination}", *given])
    return "\n".join([*lines, "    )  # fmt: skip"])


def _chosen(rows: Sequence[Mapping[str, str]]) -> tuple[list[str], dict[str, str]]:
    """What operations of a body differ in are variables: the lines that set them, and by what name
    each operand goes."""
    varying = [name for name, value in rows[0].items() if any(row[name] != value for row in rows)]
    lines = [f"    {name} = {rows[0][name]}" for name in varying]
    for i, row in enumerate(rows[1:], 1):
        if given := {name: row[name] for name in varying if row[name] != rows[0][name]}:
            lines.append(f"    if task.op == {i}:")
            lines += [f"        {name} = {value}" for name, value in given.items()]
    return lines, {**rows[0], **{name: name for name in varying}}


def _wrapped(items: Sequence[str], margin: int = 8) -> list[str]:
    """Arguments of a call over as many lines as they need; none is torn."""
    words = ", ".join(item.replace(" ", "\0") for item in items) + ","
    blank = " " * margin
    lines = wrap(words, WIDTH, initial_indent=blank, subsequent_indent=blank,
                 break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return [line.replace("\0", " ") for line in lines]


# ---------------------------------------------------------------------------------------------
# The module


def text(graph: TaskGraph, transposed: Set[str] = frozenset()) -> str:
    """The module's source."""
    found = bodies(graph, transposed)
    operands = Operands(graph, found, transposed)
    buffers = map(field_of, operands.buffers)
    return "\n\n\n".join(
        [_heading(graph), _record("Values", "Buffers of this rank.", buffers),
         _record("Sizes", "Extents of this rank's parts; how far rows lie apart.", operands.sizes),
         *map(_body, found, operands.rows), _kernel(graph, found)]
    ) + "\n"  # fmt: skip


def _heading(graph: TaskGraph) -> str:
    program = task_ir.show(graph.program, places=False).rstrip().splitlines()
    shown = [
        one
        for line in program
        for one in wrap(line, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)
    ]
    return "\n".join(
        [f'"""{graph.program.name}: one persistent kernel, whose workers take task after task.', "",
         "Generated by weft from the Task IR below; do not edit it.", "",
         "Signals   board.words: counters of this rank; a task waits until what it reads is there, "
         "and",
         "            adds to counters, here and on other ranks, when its tile is stored",
         "          slot_free: waited for by every worker before its first task; given to every "
         "rank by",
         "            the last one", "", *shown, '"""', "",
         "from __future__ import annotations", "", "from typing import Any, NamedTuple", "",
         "import triton", "import triton.language as tl", "", "import weft.language as wl",
         *_imports(bodies(graph))]
    )  # fmt: skip


def _imports(found: Sequence[Body]) -> Iterator[str]:
    used = {KINDS[body.kind].function.split(".")[0] for body in found}
    used |= {"parts" for body in found if "parts" in dict(body.attributes)}
    names = ", ".join(sorted({"destinations", "scoreboard", *used}))
    yield f"from weft.megakernel.tasks import {names}"
    given = " ".join(one for body in found for one in KINDS[body.kind].arguments)
    yield f"from weft.tiles import {'gemm, ' if 'gemm.' in given else ''}tile_trace"
    if "epilogue." in given:
        yield "from weft.tiles.hooks import epilogue"


def _record(name: str, what: str, fields: Iterable[str]) -> str:
    return "\n".join([f"class {name}(NamedTuple):", f'    """{what}"""', "",
                      *(f"    {one}: Any" for one in fields)])  # fmt: skip


def _kernel(graph: TaskGraph, found: Sequence[Body]) -> str:
    tiles = [f"{body.name}_tile" for body in found]
    names = ["v", "s", *tiles, "board", "slot", "world"]
    lines = [
        "@triton.jit",
        f"def {kernel_name(graph)}(",
        *_wrapped(names, 4),
        "):  # fmt: skip",
        '    """Workers take the tasks by turns until none is left."""',
        "    rank = wl.rank(world).to(tl.int32)",
        "    turn, num_workers = tl.program_id(0), tl.num_programs(0)",
        "    e = scoreboard.begin(world, slot)",
        "    num_tasks = tl.load(board.counts)",
        "    traced = tile_trace.kept(world)",
        "    while turn < num_tasks:",
        "        task = scoreboard.task_at(board, turn)",
        "        if traced is not None:",
        "            start = wl.timestamp()",
        "        scoreboard.wait_for(world, board, task)",
        "        if traced is not None:",
        "            tile_trace.open_record(traced, turn, task, start, wl.timestamp() - start)",
    ]
    for i, body in enumerate(found):
        word = "if" if i == 0 else "elif"
        lines += [
            f"        {word} task.body == {i}:",
            f"            _{body.name}(task, v, s, {body.name}_tile, rank, world)",
        ]
    lines += [
        "        if traced is not None:",
        "            tile_trace.stamp(traced, turn, tile_trace.SUMMED)",
        "        scoreboard.notify(world, board, task)",
        "        if traced is not None:",
        "            tile_trace.stamp(traced, turn, tile_trace.END)",
        "        turn += num_workers",
        "    scoreboard.finish(world, board, slot, e, num_workers)",
    ]
    return "\n".join(lines)
