"""The C of a plan: a function for each kernel, and the program's body, which calls them in turn.

It is meant to be read: sizes stand as numbers, scratchpads as offsets, loops as they run. What all
programs share is in manycore.h.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.manycore import emit_rows, vendor
from weft.manycore.attention import TILE_KV, TILE_Q, Attention
from weft.manycore.exchanges import Exchange
from weft.manycore.lower import Kernel, Plan
from weft.manycore.nest import times
from weft.manycore.pieces_of_c import (
    awaits,
    begin,
    block,
    buffers,
    folded,
    memory,
    transfer,
)
from weft.manycore.products import Product
from weft.manycore.record import Machine
from weft.manycore.rows import Rows
from weft.manycore.vendor import Vendor

COUNTER_BYTES, SIGNAL_BYTES, PAGE = 48, 16, 4096


def header_bytes(plan: Plan) -> int:
    """Counters of each kernel, then signals, in whole pages; values lie behind them."""
    used = len(plan.kernels) * COUNTER_BYTES + plan.num_signals * SIGNAL_BYTES
    return -(-used // PAGE) * PAGE


def rank_bytes(plan: Plan) -> int:
    return header_bytes(plan) + -(-plan.memory_bytes // PAGE) * PAGE


def source(plan: Plan) -> str:
    """The program as C11, beside manycore.h."""
    parts = [_head(plan), *_values(plan)]
    kinds = dict.fromkeys(one.task.kind for one in plan.kernels if isinstance(one, Vendor))
    parts += [vendor.ROUTINES[kind].strip() for kind in kinds]
    parts += [function(plan, one, i) for i, one in enumerate(plan.kernels)]
    return "\n\n".join([*parts, _body(plan), _program(plan)]) + "\n"


def function(plan: Plan, kernel: Kernel, number: int) -> str:
    """One kernel, with what it computes and how."""
    lines = [part for line in EMITTED[type(kernel)](kernel, number) for part in folded(line)]
    return "\n".join([f"static void make_{kernel.name}(mc_core *core)", "{", *lines, "}"])


def _head(plan: Plan) -> str:
    ranks, machine = plan.num_ranks, plan.machine
    about = f"{plan.name} on {ranks} rank{'s' * (ranks != 1)} of {machine.name}, {plan.dtype}."
    lines = [f"/* {about} Written by weft. */"]
    if plan.dtype == "bfloat16":
        lines.append("#define MC_BF16")
    if any(isinstance(one, Vendor) for one in plan.kernels):
        lines += ["#ifdef MC_BLAS", "#include <cblas.h>", "#endif"]
    return "\n".join([*lines, '#include "manycore.h"'])


def _values(plan: Plan) -> Iterator[str]:
    lines = ["/* Where values lie in a rank's main memory: first byte, bytes from row to row. */"]
    for one in plan.values:
        lines.append(f"static const mc_value {memory(one)} = {{{one.offset}, {one.pitch}}};")
    yield "\n".join(lines)
    signals = dict.fromkeys(
        ready for kernel in plan.kernels for ready in _signals_of(kernel)
    )  # fmt: skip
    if signals:
        names = ", ".join(f"{one.symbol} = {one.base}" for one in signals)
        yield f"/* Signals, one for each rank that notifies. */\nenum {{ {names} }};"


def _signals_of(kernel: Kernel) -> Iterator:
    if isinstance(kernel, Exchange):
        yield kernel.ready
    if isinstance(kernel, Product) and kernel.sums:
        yield kernel.sums.ready


def _body(plan: Plan) -> str:
    lines = [f"    make_{one.name}(core);" for one in plan.kernels]
    if plan.awaited:
        lines += [part for line in awaits(plan.awaited) for part in folded(line)]
        lines.append("    mc_leave(core);")
    return "\n".join(["static void body(mc_core *core)", "{", *lines, "}"])


def _program(plan: Plan) -> str:
    record = ",\n".join(f"        {one}" for one in _record(plan.machine))
    return f"""\
static const mc_program program = {{
    .name = "{plan.name}",
    .machine = {{
{record},
    }},
    .ranks = {plan.num_ranks},
    .kernels = {len(plan.kernels)},
    .header_bytes = {header_bytes(plan)},
    .rank_bytes = {rank_bytes(plan)},
    .body = body,
}};

int main(int count, char **words)
{{
    return mc_main(&program, count, words);
}}"""


def _record(machine: Machine) -> Iterator[str]:
    yield f".groups = {machine.groups}"
    yield f".cores = {machine.cores}"
    yield f".scratchpad_bytes = {machine.scratchpad_bytes}"
    yield f".align = {machine.dma_align}"
    for name, ns in (
        ("latency", machine.dma_latency_ns), ("startup", machine.dma_startup_ns),
        ("block", machine.dma_block_ns), ("link_latency", machine.link_latency_ns),
        ("signal", machine.signal_ns), ("barrier", machine.barrier_ns),
    ):  # fmt: skip
        yield f".{name}_ps = {round(ns * 1000)}"
    yield f".dma_ps_per_byte = {1000 / machine.dma_gbps!r}"
    yield f".link_ps_per_byte = {1000 / machine.link_gbps!r}"
    yield f".flop_ps = {1000 / machine.gflops!r}"


# -------------------------------------------------------------------------------------------------
# Products


def _product(one: Product, number_of: int) -> list[str]:
    tile_m, tile_n, tile_k = one.tile
    grid_m, grid_n = one.grid
    outer, inner = one.order[:2]
    first = ""
    if one.gathered or one.sums:
        ahead = "core->rank" if one.gathered else "core->rank + 1"
        first = f"mc_tiles(mc_first({one.m.size}, {ahead}, core->ranks), TILE_M)"
    lines = [
        f"    /* {one.text}. Tiles of {tile_m} x {tile_n} x {tile_k} on {grid_m} x {grid_n} cores; "
        f"for i_{outer}, for i_{inner}, for i_k: {_where(one)}. */"
    ]
    lines += f"""\
    enum {{ TILE_M = {tile_m}, TILE_N = {tile_n}, TILE_K = {tile_k} }};
    enum {{ GRID_M = {grid_m}, GRID_N = {grid_n} }};
    const int m = {one.m.text}, n = {one.n.text}, k = {one.k.text};
    const int tiles_m = mc_tiles(m, TILE_M), tiles_n = mc_tiles(n, TILE_N);
    const int tiles_k = k ? mc_tiles(k, TILE_K) : 1;
    const int row = core->index / GRID_N, column = core->index % GRID_N;
    const int mine_m = mc_turns(tiles_m, row, GRID_M), mine_n = mc_turns(tiles_n, column, GRID_N);
    const int steps = mine_m * mine_n * tiles_k;""".splitlines()
    if first:
        whose = "this rank's rows" if one.gathered else "the rows of the next rank"
        lines.append(f"    /* Tiles begin with {whose}. */")
        lines.append(f"    const int first = {first};")
    lines += buffers(one.map, slots_of=("x", "w", "out"), names=_names(one))
    lines += [
        "    mc_ticket stored[2] = {{0, 0}, {0, 0}};",
        "    mc_step now = {-1, -1, -1, 0, 0, {0, 0}}, next;",
        "    int to = 0;",
        "",
        *begin(number_of, one.active),
        *awaits(one.awaits),
    ]
    decode = _decode(one, first)
    fetch = _fetch(one)
    compute = _multiply(one)
    if one.choices.double_buffer:
        lines += [
            "    for (int s = 0; s <= steps; s++) {",
            "        next = now;",
            "        if (s < steps) { /* got while the step before is computed */",
            *_indented([*decode, *fetch], 3),
            "        }",
            "        if (s > 0) {",
            *_indented(compute, 3),
            "        }",
            "        now = next;",
            "    }",
        ]
    else:
        lines += [
            "    for (int s = 0; s < steps; s++) {",
            "        next = now;",
            "        {",
            *_indented([*decode, *fetch], 3),
            "        }",
            "        now = next;",
            *_indented(compute, 2),
            "    }",
        ]
    return [*lines, "    mc_end(core);"]


def _where(one: Product) -> str:
    """In which loop each operand is got, at the sizes of the first rank."""
    m, n, k = one.counts(0)
    counts = {"m": -(-m // one.grid[0]), "n": -(-n // one.grid[1]), "k": k}
    found = []
    for view, letters in ((one.x, "mk"), (one.w, "nk")):
        turning = [i for i in one.order if i in letters and counts[i] > 1]
        where = f"i_{turning[-1]}" if turning else "front"
        if not one.choices.choose_order:
            where = "i_k"
        num = times(one.order, letters, counts, one.choices.choose_order)
        often = "once" if num == 1 else f"{num} times"
        found.append(f"{view.name} is got in {where}, {often}")
    return ", ".join(found)


def _names(one: Product) -> dict[str, str]:
    return {f"{one.x.name}_tile": "x", f"{one.w.name}_tile": "w", "sums": "sums", "out_tile": "out"}


def _decode(one: Product, first: str) -> list[str]:
    """From the number of a step to its tiles."""
    turns = {"m": "s / tiles_k / mine_n", "n": "s / tiles_k % mine_n"}
    if one.order == "nmk":
        turns = {"m": "s / tiles_k % mine_m", "n": "s / tiles_k / mine_m"}
    i_m = f"row + {turns['m']} * GRID_M"
    return [
        "next.i_k = s % tiles_k;",
        f"next.i_n = column + {turns['n']} * GRID_N;",
        f"next.i_m = ({i_m} + first) % tiles_m;" if first else f"next.i_m = {i_m};",
        "const int at_m = next.i_m * TILE_M, rows = mc_min(TILE_M, m - at_m);",
        "const int at_n = next.i_n * TILE_N, columns = mc_min(TILE_N, n - at_n);",
        "const int at_k = next.i_k * TILE_K, depth = mc_min(TILE_K, k - at_k);",
    ]


def _fetch(one: Product) -> list[str]:
    """The tiles of a step that are others than those of the step before."""
    get, turn = transfer("get", one.choices), one.choices.double_buffer
    is_hoisted = one.choices.choose_order
    lines = []
    for letter, view, new, row, column, extents in (
        ("x", one.x, "next.i_m != now.i_m || next.i_k != now.i_k", "at_m", "at_k", "rows, depth"),
        ("w", one.w, "next.i_n != now.i_n || next.i_k != now.i_k", "at_k", "at_n",
         "depth, columns"),
    ):  # fmt: skip
        inner = [f"next.{letter} ^= 1;"] if turn else []
        if letter == "x" and one.gathered:
            ready, size = one.gathered, one.m.size
            inner.append(f"mc_await_rows(core, {ready.symbol}, {size}, at_m, at_m + rows);")
        at = block(view, row, column)
        pitch = one.map[f"{view.name}_tile"].pitch  # type: ignore
        inner += [
            f"next.got = {get}(core, {letter}[next.{letter}], {pitch}, {at},",
            f"                  {memory(view.value)}.pitch, {extents});",
        ]
        if is_hoisted:
            lines += [f"if ({new}) {{", *_indented(inner, 1), "}"]
        else:
            lines += inner
    return lines


def _multiply(one: Product) -> list[str]:
    x, w, out = (one.map[name] for name in (f"{one.x.name}_tile", f"{one.w.name}_tile", "out_tile"))  # type: ignore
    put = transfer("put", one.choices)
    lines = [
        "const int rows = mc_min(TILE_M, m - now.i_m * TILE_M);",
        "const int columns = mc_min(TILE_N, n - now.i_n * TILE_N);",
        "const int depth = mc_min(TILE_K, k - now.i_k * TILE_K);",
        "mc_wait(core, now.got);",
        "if (now.i_k == 0)",
        "    memset(sums, 0, sizeof(float) * TILE_M * TILE_N);",
        f"mc_multiply(core, sums, TILE_N, x[now.x], {x.pitch}, w[now.w], {w.pitch},",
        "            rows, columns, depth);",
        "if (now.i_k == tiles_k - 1) {",
        "    mc_wait(core, stored[to]);",
        f"    mc_round_tile(core, out[to], {out.pitch}, sums, TILE_N, rows, columns);",
    ]
    if one.sums:
        ready, parts = one.sums.ready, memory(one.sums.parts)
        lines += [
            f"    stored[to] = mc_send_sums(core, {ready.symbol}, {parts}, {one.sums.size},",
            f"        now.i_m * TILE_M, now.i_n * TILE_N, out[to], {out.pitch}, rows, columns);",
        ]
    else:
        assert one.out is not None
        at = f"mc_here(core, {memory(one.out)}, now.i_m * TILE_M, now.i_n * TILE_N)"
        lines += [
            f"    stored[to] = {put}(core,",
            f"        {at},",
            f"        {memory(one.out)}.pitch, out[to], {out.pitch}, rows, columns);",
        ]
    lines.append("    to ^= 1;" if one.choices.double_buffer else "    mc_wait(core, stored[to]);")
    return [*lines, "}"]


# -------------------------------------------------------------------------------------------------
# Exchanges, attention, routines


def _exchange(one: Exchange, number_of: int) -> list[str]:
    own = f"mc_first({one.size}, core->rank, core->ranks)"
    theirs = f"mc_first({one.size}, peer, core->ranks)"
    part = f"mc_part({one.size}, {'core->rank' if one.is_gather else 'peer'}, core->ranks)"
    rows = part if one.dim == 0 else one.source.num_rows.text
    columns = one.source.columns.text if one.dim == 0 else part
    from_, to = ("first", "0"), ("first", "0")
    if one.is_gather:
        to = (f"{own} + first", "0") if one.dim == 0 else ("first", own)
    else:
        from_ = (f"{theirs} + first", "0") if one.dim == 0 else ("first", theirs)
        to = (f"core->rank * {one.into.rows.most // one.num_ranks} + first", "0")
    into = f"mc_at(core, peer, {memory(one.into)}, {to[0]}, {to[1]})"
    return [
        f"    /* {one.text}.",
        "     * Own part first, then that of the rank before this one, which reads it first. */",
        *begin(number_of, one.active),
        *awaits(one.awaits),
        "    for (int i = 0; i < core->ranks; i++) {",
        "        const int peer = (core->rank + core->ranks - i) % core->ranks;",
        f"        const int rows = {rows}, columns = {columns};",
        f"        const int each = mc_tiles(rows, {one.machine.cores});",
        "        const int first = core->index * each, end = mc_min(first + each, rows);",
        "        if (first < end)",
        f"            mc_send(core, peer, {one.ready.symbol} + core->rank,",
        f"                    {into},",
        f"                    {memory(one.into)}.pitch,",
        f"                    {block(one.source, *from_)},",
        f"                    {memory(one.source.value)}.pitch, end - first, columns);",
        "    }",
        "    mc_leave(core);",
    ]


def _attention(one: Attention, number_of: int) -> list[str]:
    assert one.map is not None
    get, put = transfer("get", one.choices), transfer("put", one.choices)
    pitch, group = one.map["q_tile"].pitch, one.group
    size = one.q.num_rows.size
    first = f"mc_first({size}, core->rank, core->ranks)" if one.is_split else "0"
    seen = "mc_min(keys, first + i_q * TILE_Q + rows)" if one.causal else "keys"
    head = f"i_head / {group} * HEAD" if group > 1 else "i_head * HEAD"
    q_at = block(one.q, "i_q * TILE_Q", "i_head * HEAD")
    q_to = "0" if one.choices.choose_order else "to"
    fetch_q = [f"{get}(core, q[{q_to}], {pitch}, {q_at},",
               f"    {memory(one.q.value)}.pitch, rows, HEAD);"]  # fmt: skip
    lines = [
        f"    /* {one.text}: {TILE_Q} queries and {TILE_KV} keys at a time. */",
        f"    enum {{ TILE_Q = {TILE_Q}, TILE_KV = {TILE_KV}, HEAD = {one.head} }};",
        f"    const int queries = {one.q.num_rows.text}, keys = {one.k.num_rows.text};",
        f"    const int first = {first}; /* the key at which this rank's first query stands */",
        f"    const int tiles_q = mc_tiles(queries, TILE_Q), jobs = tiles_q * {one.heads.most};",
        *buffers(one.map, slots_of=("q", "k", "v"),
                 names={f"{x}_tile": x for x in ("q", "k", "v", "out")}),
        *begin(number_of, one.active),
        *awaits(one.awaits),
        f"    for (int job = core->index; job < jobs; job += {one.machine.cores}) {{",
        "        const int i_head = job / tiles_q, i_q = job % tiles_q;",
        "        const int rows = mc_min(TILE_Q, queries - i_q * TILE_Q);",
        f"        const int last = {seen}, tiles = mc_tiles(last, TILE_KV);",
        f"        const int column = {head};",
        "        mc_ticket got[2] = {{0, 0}, {0, 0}};",
    ]  # fmt: skip
    if one.choices.choose_order:
        lines += _indented(fetch_q, 2)
    lines += """\
        memset(sums, 0, sizeof(float) * TILE_Q * HEAD);
        for (int i = 0; i < TILE_Q; i++) {
            softmax[2 * i] = -INFINITY;
            softmax[2 * i + 1] = 0.0f;
        }""".splitlines()
    loop_end = "j <= tiles" if one.choices.double_buffer else "j < tiles"
    lines.append(f"        for (int j = 0; {loop_end}; j++) {{")
    now = "j - 1" if one.choices.double_buffer else "j"
    slot = "j % 2" if one.choices.double_buffer else "0"
    fetch = [f"const int num = mc_min(TILE_KV, last - j * TILE_KV), to = {slot};"]
    if not one.choices.choose_order:
        fetch += fetch_q
    for letter, view in (("k", one.k), ("v", one.v)):
        at = block(view, "j * TILE_KV", "column")
        fetch += [f"got[to] = {get}(core, {letter}[to], {pitch}, {at},",
                  f"    {memory(view.value)}.pitch, num, HEAD);"]  # fmt: skip
    now_slot = f"({now}) % 2" if one.choices.double_buffer else "0"
    q_from = "0" if one.choices.choose_order else "from"
    compute = [
        f"const int at = ({now}) * TILE_KV, from = {now_slot};" if now != "j"
        else "const int at = j * TILE_KV, from = 0;",
        "mc_wait(core, got[from]);",
        f"mc_attend(core, sums, softmax, scores, q[{q_from}], k[from], v[from], {pitch}, rows,",
        "          mc_min(TILE_KV, last - at), HEAD, first + i_q * TILE_Q + 1 - at,",
        f"          {int(one.causal)});",
    ]  # fmt: skip
    if one.choices.double_buffer:
        lines += ["            if (j < tiles) {", *_indented(fetch, 4), "            }",
                  "            if (j > 0) {", *_indented(compute, 4), "            }"]  # fmt: skip
    else:
        lines += _indented([*fetch, *compute], 3)
    at = f"mc_here(core, {memory(one.out)}, i_q * TILE_Q, i_head * HEAD)"
    lines += f"""\
        }}
        for (int i = 0; i < rows; i++)
            for (int c = 0; c < HEAD; c++)
                ((mc_elem *)((char *)out + i * {pitch}))[c] =
                    mc_store(sums[i * HEAD + c] / softmax[2 * i + 1]);
        mc_compute(core, (double)rows * HEAD);
        mc_wait(core, {put}(core, {at},
            {memory(one.out)}.pitch, out, {pitch}, rows, HEAD));
    }}
    mc_end(core);""".splitlines()
    return lines


def _vendor(one: Vendor, number_of: int) -> list[str]:
    operands = ", ".join(
        f"{{{block(view, '0', '0')}, {memory(view.value)}.pitch, "
        f"{view.num_rows.text}, {view.columns.text}}}"
        for view in one.operands
    )
    out = (f"{{mc_here(core, {memory(one.out)}, 0, 0), {memory(one.out)}.pitch, "
           f"{one.out.rows.text}, {one.out.columns.text}}}")  # fmt: skip
    return [
        f"    /* {one.text}: the first core calls it. */",
        f"    const mc_matrix operands[] = {{{operands}}};",
        f"    const mc_matrix out = {out};",
        *begin(number_of, 1),
        *awaits(one.awaits),
        "    if (core->index == 0)",
        f"        vendor_{one.task.kind}(core, out, operands);",
        "    mc_end(core);",
    ]


def _rows(one: Rows, number_of: int) -> list[str]:
    return emit_rows.lines(one, number_of)


def _indented(lines: list[str], levels: int) -> list[str]:
    return [("    " * levels + line).rstrip() for line in lines]


EMITTED = {
    Product: _product, Exchange: _exchange, Rows: _rows, Attention: _attention, Vendor: _vendor,
}  # fmt: skip
