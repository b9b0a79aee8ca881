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
from weft.megakernel.bodies import Body, bodies
from weft.megakernel.layout import WIDTH, call
from weft.megakernel.loading import import_text
from weft.megakernel.operands import Operands, field_of
from weft.megakernel.records import COPY, GATHER, REDUCE, SEND, TaskGraph


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


def tiles_of(found: Sequence[Body]) -> tuple[str, ...]:
    """The parameters that say how large a body's tiles are."""
    return tuple(f"{body.name}_tile" for body in found)


# The call of a body, over the names above.
_SHAPE = "gemm.Shape({m}, {n}, {k}, {stride_x}, {stride_w}, {stride})"
_SUMMANDS = "move.Summands({own}, {own_stride}, {partials}, {partials_stride}, {slab})"
_ONE = ("{x}", "{m}", "{n}", "{stride_x}")
_TWO = ("{x}", "{y}", "{m}", "{n}", "{stride_x}", "{stride_y}")
_MOVED = ("{x}", "{n}", "{stride_x}")
_CALLS = {
    "matmul": ("matmul.matmul", ("{x}", "{w}", _SHAPE)),
    "silu": ("elementwise.silu", _ONE),
    "silu_mul": ("elementwise.silu_mul", _ONE),
    "silu_mul_halves": ("elementwise.silu_mul_halves", _ONE),
    "mul": ("elementwise.mul", _TWO),
    "add": ("elementwise.add", _TWO),
    "rms_norm": ("norm.rms_norm", ("{x}", "{weight}", "{m}", "{n}", "{stride_x}", "{eps}")),
    "rope": ("decode.rope", ("{x}", "{lengths}", "{m}", "{n}", "{stride_x}", "{head}",
                             "{log2_base}")),
    "kv_append": ("decode.kv_append", ("{cache}", "{x}", "{lengths}", "{max_kv}", "{n}",
                                       "{stride_x}", "{stride}")),
    "decode_attention": ("decode.attention", ("{q}", "{keys}", "{values}", "{lengths}", "{m}",
                                              "{n}", "{kv_n}", "{max_kv}", "{head}", "{out}")),
    GATHER: ("move.move", _MOVED),
    SEND: ("move.move", _MOVED),
    COPY: ("move.move", _MOVED),
    REDUCE: ("move.reduce", (_SUMMANDS, "rank", "{n}", "{is_rounded}")),
}  # fmt: skip
_HERE = "destinations.Here({out}, {m}, {n}, {stride})"
_PLACED = "destinations.Placed({out}, {n}, {stride}, rank)"


def _body(body: Body, rows: Sequence[Mapping[str, str]]) -> str:
    """The function of a body: what its operations differ in are variables."""
    varying = [name for name, value in rows[0].items() if any(row[name] != value for row in rows)]
    lines = ["@triton.jit", f"def _{body.name}(task, v, s, tile, rank, world):"]
    lines += _quoted([one.formula for one in body.operations])
    if varying:
        lines += _assigned({name: rows[0][name] for name in varying}, 4)
    for i, row in enumerate(rows[1:], 1):
        if given := {name: row[name] for name in varying if row[name] != rows[0][name]}:
            lines += [f"    if task.op == {i}:", *_assigned(given, 8)]
    words = {**rows[0], **{name: name for name in varying}}
    words |= {name: repr(value) for name, value in body.attributes}
    function, arguments = _CALLS[body.kind]
    args = [_HERE] if body.destination == "here" else [_PLACED, "world"]
    rows_of_call = [["task", *arguments, "tile"], [f"destinations.{body.destination}", *args]]
    if not body.destination:
        rows_of_call.pop()
    lines.append(f"    {function}(")
    for row in rows_of_call:
        lines += _laid_out([one.format(**words) for one in row])
    return "\n".join([*lines, "    )  # fmt: skip"])


def _laid_out(items: Sequence[str], margin: int = 8) -> Iterator[str]:
    """Arguments of a call over as many lines as they need; a record is not torn if it fits."""
    line = " " * margin
    for item in items:
        word = f"{item}, "
        if len(line) + len(word) - 1 > WIDTH and line.strip():
            yield line.rstrip()
            line = " " * margin
        if len(line) + len(word) - 1 > WIDTH:
            name, _, fields = item.partition("(")
            yield f"{line}{name}("
            yield from _laid_out(fields.removesuffix(")").split(", "), margin + 4)
            line, word = " " * margin, "), "
        line += word
    yield line.rstrip()


def _assigned(given: Mapping[str, str], margin: int) -> Iterator[str]:
    """x, w = v.gathered, v.w1"""
    line = f"{' ' * margin}{', '.join(given)} = {', '.join(given.values())}"
    if len(line) <= WIDTH:
        yield line
    else:
        yield from (f"{' ' * margin}{name} = {value}" for name, value in given.items())


def _quoted(formulas: Sequence[str]) -> Iterator[str]:
    if len(formulas) == 1:
        yield f'    """{formulas[0]}"""'
        return
    yield f'    """{formulas[0]}'
    yield from (f"    {one}" for one in formulas[1:])
    yield '    """'


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
    used = {_CALLS[body.kind][0].split(".")[0] for body in found}
    names = ", ".join(sorted({"destinations", "scoreboard", *used}))
    yield f"from weft.megakernel.tasks import {names}"
    if any(body.kind == "matmul" for body in found):
        yield "from weft.tiles import gemm"


def _record(name: str, what: str, fields: Iterable[str]) -> str:
    return "\n".join([f"class {name}(NamedTuple):", f'    """{what}"""', "",
                      *(f"    {one}: Any" for one in fields)])  # fmt: skip


def _kernel(graph: TaskGraph, found: Sequence[Body]) -> str:
    names = ["v", "s", *tiles_of(found), "board", "slot", "world", "is_dynamic: tl.constexpr"]
    lines = ["@triton.jit", *call(f"def {kernel_name(graph)}(", names, "):", skip=True)]
    lines += [
        '    """Workers take tasks, from queues of their own or by ticket, until none is left."""',
        "    rank = wl.rank(world).to(tl.int32)",
        "    worker, num_workers = tl.program_id(0), tl.num_programs(0)",
        "    e = scoreboard.begin(world, slot)",
        "    turn, end = scoreboard.first_turn(board, worker, num_workers, is_dynamic)",
        "    while turn < end:",
        "        task = scoreboard.task_at(board, turn)",
        "        scoreboard.wait_for(world, board, task)",
    ]
    for i, body in enumerate(found):
        word = "if" if i == 0 else "elif"
        lines += [
            f"        {word} task.body == {i}:",
            f"            _{body.name}(task, v, s, {body.name}_tile, rank, world)",
        ]
    lines += [
        "        scoreboard.notify(world, board, task)",
        "        turn = scoreboard.next_turn(board, turn, end, num_workers, is_dynamic)",
        "    scoreboard.finish(world, board, slot, e, num_workers)",
    ]
    return "\n".join(lines)
