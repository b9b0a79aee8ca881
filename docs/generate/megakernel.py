"""Blocks of docs/megakernel.md: one program to tasks, counters, workers and its kernel."""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace

from generate.blocks import code, table
from generate.compiler import mlp

from weft.compiler import Shard, Tensor
from weft.compiler.frontend import trace
from weft.compiler.passes.place import place
from weft.compiler.passes.tile import tile
from weft.megakernel import codegen
from weft.megakernel.check import RULES, check
from weft.megakernel.counters import stages_of, without_implied
from weft.megakernel.graph import build
from weft.megakernel.memory import bytes_of, lay_out, lifetimes, reuses
from weft.megakernel.records import TaskGraph
from weft.megakernel.tiles import cut

# Small enough to be read: two ranks of three workers, tiles of 16 x 16.
SIZES, RANKS, WORKERS = {"m": 37}, 2, 3
PARAMETERS = {
    "x": Tensor("bfloat16", ("m", 32), Shard(0)),
    "w1": Tensor("bfloat16", (32, 128), Shard(1)),
    "w2": Tensor("bfloat16", (64, 32), Shard(0)),
}


@functools.cache
def _graph() -> TaskGraph:
    """The program of the page."""
    placed = place(trace(mlp, "tp", PARAMETERS))
    extents = {task.name: (16, 16) for task in placed.tasks if task.kind != "input"}
    graph = build(tile(placed, extents), SIZES, RANKS, rest=0)
    return replace(graph, num_workers=WORKERS)


def program() -> str:
    return code(inspect.getsource(mlp))


def tasks() -> str:
    """How many tasks each operation is on each rank, and the first of them."""
    graph = _graph()
    kinds = dict.fromkeys((task.op, task.kind) for task in graph.tasks)
    lines = []
    for op, kind in kinds:
        each = [
            [task for task in rank.tasks if (task.op, task.kind) == (op, kind)]
            for rank in graph.ranks
        ]
        counts = " + ".join(str(len(tasks)) for tasks in each)
        lines.append(f"{op:10} {kind:9} {counts:8} {each[0][0]}, {each[0][1]}, ...")
    return code("\n".join(lines), "text")


SHOWN = ("gathered gather[1, 0]@1", "gated[1, 1]@0", "scattered send[0, 1] of 1@0",
         "scattered reduce[0, 1]@1")  # fmt: skip


def accesses() -> str:
    lines = []
    for name in SHOWN:
        task = next(task for task in _graph().tasks if str(task) == name)
        lines.append(name)
        for word, accesses in (("reads", task.reads), ("writes", task.writes)):
            for one in accesses:
                row, end, column, last = one.region
                where = f"{one.buffer}@{one.rank}[{row}:{end}, {column}:{last}]"
                lines.append(f"    {word:6} {where}")
    return code("\n".join(lines), "text")


def counters() -> str:
    """Some of rank 0's counters: who bumps them, who waits."""
    graph, lines = _graph(), []
    for counter in (0, 1, 3, len(graph.ranks[0].counters) - 1):
        makers = [
            str(task)
            for task in graph.tasks
            if any((one.rank, one.counter) == (0, counter) for one in task.bumps)
        ]
        users = [
            str(task)
            for task in graph.ranks[0].tasks
            if any(one.counter == counter for one in task.waits)
        ]
        head = f"counter {counter}@0, full at {graph.ranks[0].counters[counter]}"
        lines += [head, f"    {_few(makers)}", f"    -> {_few(users)}"]
    return code("\n".join(lines), "text")


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f", ... {len(names)} in all" if len(names) > 4 else "")


def lives() -> str:
    """Where buffers lie and in which stages they live."""
    made = cut(_graph().program, SIZES, RANKS)
    layout, lives = lay_out(made, rest=0), lifetimes(made)
    lines = [f"{'buffer':20} {'offset':>16} {'bytes':>6}  stages 1 to {len(made.stages)}"]
    for name, buffer in layout.buffers[0].items():
        if buffer.role in ("local", "symmetric"):
            life = lives[name]
            marks = "".join(
                "#" if life.first <= i <= life.last else "." for i in range(len(made.stages))
            )
            where = f"{buffer.role} {buffer.offset}"
            lines.append(f"{name:20} {where:>16} {bytes_of(buffer):>6}  {marks}")
    return code("\n".join(lines), "text")


def reused() -> str:
    """What is waited for since memory is used again, beyond what is waited for anyhow."""
    made = cut(_graph().program, SIZES, RANKS)
    stage_of = stages_of(made.stages)
    anyhow = without_implied(made.needs, stage_of)
    lines = []
    for need in without_implied([*made.needs, *reuses(made, lay_out(made, rest=0))], stage_of):
        before, after = ([str(made.tasks[i]) for i in one] for one in need)
        if need not in anyhow and made.tasks[need.after[0]].rank == 0:
            lines.append(f"{_few(before)}\n    -> {_few(after)}")
    return code("\n".join(lines), "text")


def workers() -> str:
    lines = []
    for rank in _graph().ranks:
        for worker in range(WORKERS):
            names = [str(one) for one in rank.tasks[worker::WORKERS]]
            shown = ", ".join(name.removesuffix(f"@{rank.rank}") for name in names[:5])
            lines.append(f"rank {rank.rank} worker {worker}: {shown}, ... {len(names)} in all")
    return code("\n".join(lines), "text")


def rules() -> str:
    return table(("rule", "why"), [(one.name, one.why) for one in RULES])


def breach() -> str:
    """What is said where a rank's tasks are the wrong way around."""
    graph = _graph()
    rank = graph.ranks[0]
    tasks = tuple(replace(one, id=i) for i, one in enumerate(rank.tasks[::-1]))
    wrong = replace(graph, ranks=(replace(rank, tasks=tasks), *graph.ranks[1:]))
    return code("\n".join(one.message for one in check(wrong)), "text")


def kernel() -> str:
    """The generated kernel, without what comes before it in its file."""
    text = codegen.text(_graph())
    head = f"@triton.jit\ndef {codegen.kernel_name(_graph())}("
    return code(text[text.index(head) :])


def body() -> str:
    """One of its bodies."""
    text = codegen.text(_graph())
    begin = text.index("@triton.jit\ndef _matmul(")
    return code(text[begin : text.index("\n\n\n", begin)])
