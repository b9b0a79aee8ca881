"""The C of a kernel on whole rows: blocks of rows in turn, and each task as a loop over columns.

Nobody waits for what was put: the engine is in order, so that by the time a block has come that was
asked for behind it, its buffer is free again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from weft.ir.shapes import ACTIVATIONS, GATED
from weft.manycore.pieces_of_c import (
    awaits,
    begin,
    block,
    bracketed,
    buffers,
    memory,
    number,
    transfer,
)
from weft.manycore.rows import FLOPS, HALVES, SUM_RANKS, Rows, Step


def lines(one: Rows, number_of: int) -> list[str]:
    get, put = transfer("get", one.choices), transfer("put", one.choices)
    is_double = one.slots == 2
    names = {name: name for name in (f"{x.name}_tile" for x in one.loaded)}
    in_slots = [f"{x.name}_tile" for x in (*one.loaded, *one.outs)]
    found = [
        f"    /* {one.text}. Blocks of {one.tile} rows. */",
        f"    enum {{ TILE = {one.tile}, CORES = {one.machine.cores} }};",
        f"    const int rows = {one.rows.text}, tiles = mc_tiles(rows, TILE);",
        *buffers(one.map, in_slots, names),
        "    mc_ticket got[2] = {{0, 0}, {0, 0}};",
        *begin(number_of, one.active),
        *awaits(one.awaits),
    ]
    once, each = [], []
    for x in one.loaded:
        is_kept = x.is_row and one.choices.choose_order
        to, row = ("0" if is_kept else "to"), ("0" if x.is_row else "tile * TILE")
        pitch = one.map[f"{x.name}_tile"].pitch  # type: ignore
        num = "1" if x.is_row else "num"
        (once if is_kept else each).extend([
            f"got[{to}] = {get}(core, {x.name}_tile[{to}], {pitch},",
            f"    {block(x.view, row, '0')}, {memory(x.view.value)}.pitch, {num},"
            f" {x.view.columns.text});",
        ])  # fmt: skip
    found += ["    if (core->index >= tiles) { /* fewer blocks than cores */"]
    found += ["        mc_end(core);", "        return;", "    }", *(f"    {x}" for x in once)]
    if is_double:
        loop = [
            "    for (int i = 0, tile = core->index; tile < tiles + CORES; i++, tile += CORES) {",
            "        if (tile < tiles) { /* got while the block before is computed */",
            "            const int num = mc_min(TILE, rows - tile * TILE), to = i % 2;",
            *(f"            {line}" for line in each),
            "        }",
            "        if (i > 0) {",
            "            const int first = (tile - CORES) * TILE, now = (i - 1) % 2;",
        ]
        depth, close = 3, ["        }", "    }"]
    else:
        loop = [
            "    for (int tile = core->index; tile < tiles; tile += CORES) {",
            "        const int num = mc_min(TILE, rows - tile * TILE), to = 0;",
            *(f"        {line}" for line in each),
            "        const int first = tile * TILE, now = 0;",
        ]
        depth, close = 2, ["    }"]
    inner = [
        "const int block = mc_min(TILE, rows - first);",
        "mc_wait(core, got[now]);",
        "for (int r = 0; r < block; r++) {",
        *(f"    {line}" for line in _row_pointers(one)),
        *(f"    {line}" for run in one.runs for line in _run(one, run)),
        "}",
        f"mc_compute(core, (double)block * ({_flops(one)}));",
    ]
    for out in one.outs:
        pitch = one.map[f"{out.name}_tile"].pitch  # type: ignore
        at = f"mc_here(core, {memory(out)}, first, 0)"
        inner += [f"{put}(core, {at},",
                  f"    {memory(out)}.pitch, {out.name}_tile[now], {pitch}, block, "
                  f"{out.columns.text});"]  # fmt: skip
    if not is_double:
        inner.append("mc_wait(core, core->last);")
    return [*found, *loop, *("    " * depth + line for line in inner), *close, "    mc_end(core);"]


def _row_pointers(one: Rows) -> Iterator[str]:
    """`at_NAME`: the row's elements of what is got or stored, floats of what is neither."""
    of_elements = [x.name for x in one.loaded if not x.is_row]
    of_elements += [x.task.name for x in one.steps if x.is_result]
    for name in of_elements:
        pitch = one.map[f"{name}_tile"].pitch  # type: ignore
        yield f"mc_elem *const at_{name} = (mc_elem *)((char *){name}_tile[now] + r * {pitch});"
    for x in one.loaded:
        if x.is_row:
            at = "0" if one.choices.choose_order else "now"
            yield f"const mc_elem *const at_{x.name} = {x.name}_tile[{at}];"
    for step in one.steps:
        if one.has_row(step):
            yield f"float *const at_{step.task.name} = {step.task.name}_row;"


def _flops(one: Rows) -> str:
    """Of a row, as C."""
    found: Counter[str] = Counter()
    for step in one.steps:
        found[step.columns.text] += max(len(step.operands) - 1, 1) * FLOPS[step.task.kind]
    return " + ".join(f"{flops} * {bracketed(columns)}" for columns, flops in found.items())


def _run(one: Rows, run: tuple[Step, ...]) -> list[str]:
    """A loop over columns; what it makes of a column goes by the name NAME_c within it."""
    if run[0].task.kind in ("rms_norm", "head_norm"):
        return _norm(run[0], [_load(one, run[0], i, ()) for i in range(2)])
    inner = []
    for step in run:
        name = step.task.name
        value = _value(one, step, run)
        is_used = any(name == other for x in run for other, _ in x.operands)
        if is_used:
            inner.append(f"const float {name}_c = mc_round({value});")
            value = f"{name}_c"
        if step.is_result or one.has_row(step) or not is_used:
            inner.append(f"at_{name}[c] = {_kept(step, value)};")
    head = f"for (int c = 0; c < {run[0].columns.text}; c++)"
    if len(inner) == 1:
        return [head, f"    {inner[0]}"]
    return [f"{head} {{", *(f"    {line}" for line in inner), "}"]


def _value(one: Rows, step: Step, run: tuple[Step, ...]) -> str:
    """What one task makes of column c."""
    task = step.task
    loads = [_load(one, step, i, run) for i in range(len(step.operands))]
    if task.kind == SUM_RANKS:
        return " + ".join(load("c") for load in loads)
    if task.kind in ACTIVATIONS:
        return f"mc_{task.kind}({loads[0]('c')})"
    if task.kind in GATED or task.kind in HALVES:
        activation = task.kind.removesuffix("_halves").removesuffix("_mul")
        gate, up = ("2 * c", "2 * c + 1")
        if task.kind in HALVES:
            gate, up = "c", f"c + {bracketed(step.columns.text)}"
        return f"mc_round(mc_{activation}({loads[0](gate)})) * {loads[0](up)}"
    if task.kind == "columns":
        assert task.between is not None
        return loads[0](f"c + {task.between[0]}")
    sign = "*" if task.kind.startswith("mul") else "+"
    return f"{loads[0]('c')} {sign} {loads[1]('c')}"


def _load(one: Rows, step: Step, i: int, run: tuple[Step, ...]) -> Callable[[str], str]:
    """A column of an operand as a float: of this loop, of a row of floats, or of elements."""
    name, first = step.operands[i]
    if any(x.task.name == name for x in run):
        return lambda column: f"{name}_c"
    is_float = any(x.task.name == name and not x.is_result for x in one.steps)

    def load(column: str) -> str:
        found = f"at_{name}[{f'{first} + {column}' if first else column}]"
        return found if is_float else f"mc_load({found})"

    return load


def _kept(step: Step, value: str) -> str:
    return f"mc_store({value})" if step.is_result else f"mc_round({value})"


def _norm(step: Step, loads: list[Callable[[str], str]]) -> list[str]:
    """Of the row, or of each head of it: then `h` is its first column."""
    task, columns = step.task, step.columns.text
    x, weight = loads
    is_by_head = task.kind == "head_norm"
    width, at = (str(task.head), "h + c") if is_by_head else (bracketed(columns), "c")
    value = f"{x(at)} * scale * {weight('c')}"
    inner = [
        "float sum = 0.0f;",
        f"for (int c = 0; c < {width}; c++)",
        f"    sum += {x(at)} * {x(at)};",
        f"const float scale = 1.0f / sqrtf(sum / {width} + {number(task.eps or 0.0)});",
        f"for (int c = 0; c < {width}; c++)",
        f"    at_{task.name}[{at}] = {_kept(step, value)};",
    ]
    head = f"for (int h = 0; h < {columns}; h += {width}) {{" if is_by_head else "{"
    return [head, *(f"    {line}" for line in inner), "}"]
