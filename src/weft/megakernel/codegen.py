"""The source of a program's one kernel, meant to be read: a switch over bodies in a worker's loop.

    text(graph)    the module's text: what the operations are, a function for each body, the kernel
    load(graph)    the same in a file of the cache, imported: the kernel, a JITFunction

Bodies are those of tasks/; generated is which buffers and sizes an operation gives to its body. The
text depends on the program, its tiles and its dtypes, and on no size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from textwrap import wrap
from typing import Any, NamedTuple

from weft.compiler.lower.layout import WIDTH, call
from weft.compiler.lower.loading import import_text
from weft.ir import task as task_ir
from weft.megakernel.bodies import Body, Operation, bodies
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


def buffers_of(found: Sequence[Body]) -> tuple[str, ...]:
    """The buffers that the kernel is given, in the order of their first use."""
    names = [name for body in found for one in body.operations for name in (*one.reads, one.write)]
    return tuple(dict.fromkeys(names))


def sizes_of(found: Sequence[Body]) -> tuple[str, ...]:
    """The sizes that the kernel is given: X_m and X_n are a rank's extents of X, X_stride how far
    its rows lie apart."""
    names = []
    for body in found:
        for one in body.operations:
            names += [word.removeprefix("s.") for row in _rows(body, one).values() for word in
                      row.replace(",", " ").replace("(", " ").replace(")", " ").split()
                      if word.startswith("s.")]  # fmt: skip
    return tuple(dict.fromkeys(names))


def tiles_of(found: Sequence[Body]) -> tuple[str, ...]:
    """The parameters that say how large a body's tiles are."""
    return tuple(f"{body.name}_tile" for body in found)


# ---------------------------------------------------------------------------------------------
# What an operation gives to its body: by the name that the body knows it by


def _rows(body: Body, one: Operation) -> dict[str, str]:
    """Expressions over v, the buffers, and s, their sizes."""
    return {**_KINDS[body.kind](one), **_target(body, one)}


def _target(body: Body, one: Operation) -> dict[str, str]:
    if not body.destination:
        return {}
    out = f"v.{one.write}"
    if body.kind == GATHER and one.task.dim == 1:  # behind the columns of the ranks before
        out += f" + rank * s.{one.task.name}_part"
    return {"out": out, "stride": f"s.{one.write}_stride"}


def _extents(name: str) -> dict[str, str]:
    return {"m": f"s.{name}_m", "n": f"s.{name}_n"}


def _product(one: Operation) -> dict[str, str]:
    x, w = one.reads
    return {
        "x": f"v.{x}", "w": f"v.{w}", "m": f"s.{one.task.name}_m", "n": f"s.{one.task.name}_n",
        "k": f"s.{x}_n", "stride_x": f"s.{x}_stride", "stride_w": f"s.{w}_stride",
    }  # fmt: skip


def _elements(one: Operation) -> dict[str, str]:
    given = {"x": f"v.{one.reads[0]}", **_extents(one.task.name)}
    return {**given, "stride_x": f"s.{one.reads[0]}_stride"}


def _pairs(one: Operation) -> dict[str, str]:
    x, y = one.reads[0], one.reads[-1]
    given = {"x": f"v.{x}", "y": f"v.{y}", **_extents(one.task.name)}
    return {**given, "stride_x": f"s.{x}_stride", "stride_y": f"s.{y}_stride"}


def _normed(one: Operation) -> dict[str, str]:
    x, weight = one.reads
    given = {"x": f"v.{x}", "weight": f"v.{weight}", **_extents(one.task.name)}
    return {**given, "stride_x": f"s.{x}_stride"}


def _moved(one: Operation) -> dict[str, str]:
    (x,) = one.reads
    return {"x": f"v.{x}", "n": f"s.{x}_n", "stride_x": f"s.{x}_stride"}


def _summed(one: Operation) -> dict[str, str]:
    own, partials = one.reads[0], one.reads[-1]
    return {
        "own": f"v.{own}", "own_stride": f"s.{own}_stride", "partials": f"v.{partials}",
        "partials_stride": f"s.{partials}_stride", "slab": f"s.{partials}_slab",
        "n": f"s.{one.task.name}_n",
    }  # fmt: skip


def _turned(one: Operation) -> dict[str, str]:
    x, lengths = one.reads
    given = {"x": f"v.{x}", "lengths": f"v.{lengths}", **_extents(one.task.name)}
    return {**given, "stride_x": f"s.{x}_stride"}


def _appended(one: Operation) -> dict[str, str]:
    cache, x, lengths = one.reads
    return {
        "cache": f"v.{cache}", "x": f"v.{x}", "lengths": f"v.{lengths}", "n": f"s.{x}_n",
        "max_kv": f"s.{cache}_m // s.{x}_m", "stride_x": f"s.{x}_stride",
        "stride": f"s.{cache}_stride",
    }  # fmt: skip


def _attended(one: Operation) -> dict[str, str]:
    q, k, v, lengths = one.reads
    return {
        "q": f"v.{q}", "keys": f"v.{k}", "values": f"v.{v}", "lengths": f"v.{lengths}",
        **_extents(one.task.name), "kv_n": f"s.{k}_n", "max_kv": f"s.{k}_m // s.{one.task.name}_m",
        "out": f"v.{one.write}",
    }  # fmt: skip


_KINDS: dict[str, Callable[[Operation], dict[str, str]]] = {
    "matmul": _product, "silu": _elements, "silu_mul": _elements, "mul": _pairs, "add": _pairs,
    "rms_norm": _normed, "rope": _turned, "kv_append": _appended, "decode_attention": _attended,
    GATHER: _moved, SEND: _moved, COPY: _moved, REDUCE: _summed,
}  # fmt: skip

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


def _body(body: Body) -> str:
    """The function of a body: what its operations differ in are variables."""
    rows = [_rows(body, one) for one in body.operations]
    varying = [name for name, value in rows[0].items() if any(row[name] != value for row in rows)]
    lines = ["@triton.jit", f"def _{body.name}(task, v, s, tile, rank, world):"]
    lines += _quoted([one.formula for one in body.operations])
    for i, row in enumerate(rows if varying else ()):
        margin = " " * (8 if i else 4)
        lines += [f"    if task.op == {i}:"] if i else []
        given = [f"{name} = {row[name]}" for name in varying if i == 0 or row[name] !=
                 rows[0][name]]  # fmt: skip
        lines += [f"{margin}{one}" for one in given]
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
    return "\n\n\n".join(
        [_heading(graph), _record("Values", "Buffers of this rank.", buffers_of(found)),
         _record("Sizes", "Extents of this rank's parts; how far rows lie apart.", sizes_of(found)),
         *(_body(one) for one in found), _kernel(graph, found)]
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


def _record(name: str, what: str, fields: Sequence[str]) -> str:
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
        "        scoreboard.tell(world, board, task)",
        "        turn = scoreboard.next_turn(board, turn, num_workers, is_dynamic)",
        "    scoreboard.finish(world, board, slot, e, num_workers)",
    ]
    return "\n".join(lines)
