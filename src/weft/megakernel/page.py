"""The page that follows one program to tasks, counters and queues, written by running it.

python -m weft.megakernel.page > docs/megakernel.md
"""

from __future__ import annotations

import inspect
import sys
from dataclasses import replace

from weft.compiler import Shard, Tensor, all_gather, reduce_scatter, silu_mul
from weft.compiler.frontend import trace
from weft.compiler.passes.place import place
from weft.compiler.passes.tile import tile
from weft.megakernel import codegen
from weft.megakernel.check import RULES, check
from weft.megakernel.counters import stages_of, without_implied
from weft.megakernel.graph import build
from weft.megakernel.memory import bytes_of, lay_out, lifetimes, reuses
from weft.megakernel.predicted import play
from weft.megakernel.records import SCHEDULES, TaskGraph, TileTask
from weft.megakernel.schedule import schedule
from weft.megakernel.tiles import cut

SIZES, RANKS, WORKERS = {"m": 37}, 2, 3
PARAMETERS = {
    "x": Tensor("bfloat16", ("m", 32), Shard(0)),
    "w1": Tensor("bfloat16", (32, 128), Shard(1)),
    "w2": Tensor("bfloat16", (64, 32), Shard(0)),
}


def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


def example() -> TaskGraph:
    """The program of the page, without queues."""
    placed = place(trace(mlp, "tp", PARAMETERS))
    extents = {task.name: (16, 16) for task in placed.tasks if task.kind != "input"}
    return build(tile(placed, extents), SIZES, RANKS, rest=0)


def page() -> str:
    """docs/megakernel.md."""
    graph = example()
    queued = schedule(graph, "balanced", WORKERS)
    told = {"m": SIZES["m"], "ranks": RANKS, "workers": WORKERS, "tasks": len(graph.tasks)}
    parts = [
        INTRODUCTION, _code(inspect.getsource(mlp).strip(), "python"), CALLED,
        TASKS.format(**told), _code(_stages(graph)), REGIONS, _code(_accesses(graph)),
        COUNTERS, _code(_counters(graph)), TRUTH, MEMORY, _code(_lives()), AGAIN, _code(_reuses()),
        EPOCHS, SCHEDULED.format(**told), _code(_queues(queued)), OTHERS, _code(_ends(graph)),
        RULED, _rules(), BROKEN, _code(_breach(queued)), KERNEL, _code(_kernel(queued), "python"),
        BODIES, _code(_function(queued, "_matmul"), "python"), BITS, LEFT,
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _code(text: str, language: str = "") -> str:
    return f"```{language}\n{text}\n```"


def _rules() -> str:
    return "\n".join(
        ["| rule | why |", "|---|---|", *(f"| {one.name} | {one.why} |" for one in RULES)]
    )


def _stages(graph: TaskGraph) -> str:
    """How many tasks each operation is on each rank, and the first of them."""
    kinds = dict.fromkeys((task.op, task.kind) for task in graph.tasks)
    lines = []
    for op, kind in kinds:
        each = [
            [task for task in rank.tasks if (task.op, task.kind) == (op, kind)]
            for rank in graph.ranks
        ]
        counts = " + ".join(str(len(tasks)) for tasks in each)
        lines.append(f"{op:10} {kind:9} {counts:8} {each[0][0]}, {each[0][1]}, ...")
    return "\n".join(lines)


def _named(graph: TaskGraph, name: str) -> TileTask:
    return next(task for task in graph.tasks if str(task) == name)


SHOWN = ("gathered gather[1, 0]@1", "gated[1, 1]@0", "scattered send[0, 1] of 1@0",
         "scattered reduce[0, 1]@1")  # fmt: skip


def _accesses(graph: TaskGraph) -> str:
    lines = []
    for name in SHOWN:
        task = _named(graph, name)
        lines.append(name)
        for word, accesses in (("reads", task.reads), ("writes", task.writes)):
            for one in accesses:
                row, end, column, last = one.region
                where = f"{one.buffer}@{one.rank}[{row}:{end}, {column}:{last}]"
                lines.append(f"    {word:6} {where}")
    return "\n".join(lines)


def _counters(graph: TaskGraph) -> str:
    """Some of rank 0's counters: who bumps them, who waits."""
    lines = []
    for counter in (0, 1, 3, 9, len(graph.ranks[0].counters) - 1):
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
        told = f"counter {counter}@0, full at {graph.ranks[0].counters[counter]}"
        lines += [told, f"    {_few(makers)}", f"    -> {_few(users)}"]
    return "\n".join(lines)


def _few(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f", ... {len(names)} in all" if len(names) > 4 else "")


def _lives() -> str:
    """Where buffers lie and in which stages they live."""
    made = cut(example().program, SIZES, RANKS)
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
    return "\n".join(lines)


def _reuses() -> str:
    """What is waited for since memory is used again, beyond what is waited for anyhow."""
    made = cut(example().program, SIZES, RANKS)
    stage_of = stages_of(made.stages)
    anyhow = without_implied(made.needs, stage_of)
    lines = []
    for need in without_implied([*made.needs, *reuses(made, lay_out(made, rest=0))], stage_of):
        before, after = ([str(made.tasks[i]) for i in one] for one in need)
        if need not in anyhow and made.tasks[need.after[0]].rank == 0:
            lines.append(f"{_few(before)}\n    -> {_few(after)}")
    return "\n".join(lines)


def _queues(graph: TaskGraph) -> str:
    lines = []
    for rank in graph.ranks:
        for worker, queue in enumerate(rank.queues):
            names = [str(rank.tasks[i]) for i in queue]
            shown = ", ".join(name.removesuffix(f"@{rank.rank}") for name in names[:5])
            lines.append(f"rank {rank.rank} worker {worker}: {shown}, ... {len(names)} in all")
    return "\n".join(lines)


def _ends(graph: TaskGraph) -> str:
    """What each schedule would take."""
    lines = []
    for how in SCHEDULES:
        ends = [max(one.end_us for one in play(schedule(graph, how, n))) for n in (1, WORKERS, 8)]
        lines.append(f"{how:12} {ends[0]:6.1f} {ends[1]:6.1f} {ends[2]:6.1f}")
    return "\n".join([f"{'us, workers:':12} {1:6} {WORKERS:6} {8:6}", *lines])


def _breach(graph: TaskGraph) -> str:
    """What is told where two tasks of a queue are the wrong way around."""
    rank = graph.ranks[0]
    queues = (rank.queues[0][::-1], *rank.queues[1:])
    wrong = replace(graph, ranks=(replace(rank, queues=queues), *graph.ranks[1:]))
    return "\n".join(_wrapped(one.message) for one in check(wrong))


def _wrapped(message: str) -> str:
    return message.replace(", ", ",\n    ").replace("[0,\n    ", "[0, ").replace(
        "[1,\n    ", "[1, ").replace("[2,\n    ", "[2, ")  # fmt: skip


def _kernel(graph: TaskGraph) -> str:
    """The generated kernel, without what comes before it in its file."""
    text = codegen.text(graph)
    return text[text.index(f"def {codegen.kernel_name(graph)}(") - len("@triton.jit\n") :].strip()


def _function(graph: TaskGraph, name: str) -> str:
    """One of its bodies."""
    text = codegen.text(graph)
    begin = text.index(f"@triton.jit\ndef {name}(")
    return text[begin : text.index("\n\n\n", begin)]


INTRODUCTION = """# A program as one kernel

This page is generated by running `src/weft/megakernel/page.py`; do not edit it:
`python -m weft.megakernel.page > docs/megakernel.md`.

A program of the [compiler](compiler.md) can be lowered a third way: not to calls of libraries, not
to kernels that overlap, but to **one kernel that runs until all is done**. Its programs are
workers; what they do are tasks of one tile each. A task begins when what it reads has been made, on
whichever rank, and tells those who wait for it. Nothing waits for a whole operation."""

CALLED = """```python
y = mlp(x, w1, w2, world=world, collectives=weft.megakernel, lowering="persistent")
```

What follows is computed on the host from sizes alone, by every rank for all ranks, and each takes
its own part of it. Tiles that `Settings` does not settle are chosen first, for these sizes and as
many workers as there are (`extents.py`): of few rows a product is cut into narrow tiles, so that
all SMs read its right operand."""

TASKS = """## Tasks

Every operation becomes one task for each of its tiles, on each rank that makes them. Collectives
become tasks that push; nobody reads another rank's memory:

| of | tasks | what one does |
|---|---|---|
| `all_gather` | `gather` | an own tile goes to its place on every rank |
| `reduce_scatter`, `all_reduce` | `send` | a tile of the own summand goes to the rank that sums \
it, or to all |
| | `reduce` | sums that tile of all ranks in a fixed order, in fp32; of `all_reduce` either each \
rank sums all tiles (`one_shot`) or its own, and stores them on all ranks (`two_shot`) |
| results that peers write | `copy` | from memory that the next call uses again to the caller's |
| all else | its own kind | a tile of the result |

Tiles are cut within what a rank makes, so that no tile straddles two ranks where it is written; who
reads may need tiles of several. With m = {m} on {ranks} ranks, tiles of 16 x 16, {tasks} tasks:"""

REGIONS = """Regions are met in global coordinates by the pass `tile`, ragged parts and ranks
included; what a task touches is then counted from the first row that the rank has of it:"""

COUNTERS = """## Counters

Who needs whom are pairs of tasks, too many to signal one by one. A **counter** stands for a group
of tasks that are *all* needed by *each* of another group: it is full when all of the former are
done. So nothing is lost by counting: nobody waits for a task that it does not need, and the rule is
only which groups to take. Between two operations there are two ways, and the cheaper is taken (a
bump is a release and an atomic, a wait that is over one load):

* *by need*: a counter for each set of tasks that is needed: one wait, many bumps;
* *by maker*: a counter for each set of tasks that the same ones need: one bump, many waits.

A product needs whole rows of its operand, so both give a counter for each row of tiles. A narrow
tile behind a wide one bumps once by maker, a wide one behind narrow ones waits once by need.
Counters that the same tasks wait for become one. What follows from other needs over several tasks
is left out, operation by operation, so that what is left stays regular: signals carry on what those
who send them have waited for."""

TRUTH = """A counter is on the rank of those who wait for it: waiting is local, telling may be
remote. `tests/megakernel/test_graph.py` holds this against brute force: of random programs in
random tiles, whoever wrote an element of memory last before it is read, cell by cell, must be
waited for, and where no memory is used again nobody else."""

MEMORY = """## Memory

Values between operations lie in one piece of local and one of symmetric memory, each at a place
where nothing lies that lives at the same time; of places that are free, the one whose last reader
is longest ago. It rests for some stages before it is used again (`memory.REST`): then whoever would
have to wait for its last readers has waited for others who have, as a rule. A buffer lives in the
stages that touch it; here, where nothing rests:"""

AGAIN = """Of memory that is used again all accesses of the former must be over before the latter is
written: dependencies like all others. Where peers write into it they wait for the readers on *that*
rank, tile by tile: that is all there is of credits within a call. They are found by rows that share
bytes. On rank 0, beyond what is waited for anyhow:"""

EPOCHS = """Between calls there are the slot's credits ([memory model](memory_model.md)): before
anything else a worker waits until every rank has ended the slot's last call. No number that the
host knows enters a wait: counters only grow, and a wait asks for `base + what comes in this call`,
where bases lie on the device and move by the call's totals when it ends. All bumps of a call have
come by then, since every wait asks for the whole total and every counter is waited for. So the same
tables are right eager, recorded, replayed and mixed, also with calls of other sizes on the same
counters."""

SCHEDULED = """## Queues

| schedule | queues |
|---|---|
| `round_robin` | in the order of the program, dealt to workers by turns |
| `balanced` | by list scheduling in predicted time: a free worker takes, of what is ready on its \
rank, the task with the longest way to the end behind it; all ranks are played at once |
| `dynamic` | one queue, in the order in which `balanced` has tasks begin; workers take the next \
by a ticket |

`balanced`, {workers} workers on each of {ranks} ranks; rank 1 begins to multiply with the rows that
it has itself, since others are not there yet:"""

OTHERS = """Played through on both ranks, by predicted times (tiles this small are all overhead):"""

RULED = """## Why nothing stands still

Order all ranks' tasks by who waits for whom and by the order of each queue. If that has no cycle
there is one order of all tasks in which each comes behind whatever it waits for and behind those
before it in its queue. Take the first task in it that is not done. All that it waits for is done,
so its counters are full. With a queue for each worker, all before it in its queue are done, so its
worker is at it. With one queue, all before it have been taken and done, so there is a worker free
to take it: one worker is enough. It ends, and there is one less. Workers must all be on the device
together (a cooperative launch) where there are several queues.

`check.require` shows it of every graph and its queues before they run, from the records alone, and
that memory is right; a wrong set of queues never reaches the device:"""

BROKEN = """`tests/megakernel/test_check.py` has a breach of each. With worker 0's queue turned
around:"""

KERNEL = """## The kernel

`codegen.py` writes one Triton kernel for a program, to a file that is meant to be read. A worker
takes a task, waits for its counters, does it, tells whom it concerns, and takes the next. Of the
tables it reads (`tables.py`) a row is a task: which body, which of the body's operations, which
tile, and where its waits and bumps stand. Above, `tasks/scoreboard.py` is all that concerns
signals: `begin` waits for the slot's credits, `finish` lets the last worker move bases, epoch and
credits."""

BODIES = """A body is the function of a kind of task for tiles of one size, from `tasks/`: a product
calls the GEMM template's body, `gemm.one_tile`, where overlapped kernels call its loop. Operations
that are done alike share one, told apart by `task.op`, which gives it other buffers: so the kernel
of a model with many layers is hardly longer than that of one. What becomes of a tile is the hook
`emit`, here a *destination*: this rank's buffer, the rank that sums, everywhere. Sizes are
arguments: no size compiles anything anew (`operands.py` says which are the same)."""

BITS = """## The bits of what overlaps

Sums over k go in steps of `tile_k` from 0 on, in fp32, and a summand that stays on its rank is
never rounded, as it is not in the kernels that overlap; the others are rounded when they leave, and
added in the same order of ranks. So with the same `tile_k`, and `sums="two_shot"` for `all_reduce`,
both lowerings give the same bits, in every schedule, on every rank
(`tests/megakernel/test_run.py`; on the emulator rows and columns of tiles must be the same too,
since its products are a library's). `Settings(tiles=..)` settles `tile_k`. On Hopper overlapped
kernels are another twin of the template, which may cut the last tiles' k in parts: then they differ
in the last place.

`tests/megakernel/test_scoreboard_mutants.py` changes every bump of the tables, each of which is
refused before anything runs, and every signal of the kernel, of which none is missed;
`test_every_schedule.py` goes through all orders of the smallest worlds' steps."""

LEFT = """## What is not there

Whole operations are not fused into tasks: each reads what the one before stored, mostly from L2.
`reduce_scatter` over columns and operations with tables filled at run time are left to the other
lowerings. The rules of memory are asked of graphs of up to 2000 tasks. Predicted times of tasks are
guesses: no trace of a persistent kernel has been taken on GPUs.

Whole it has been timed: `benchmarks/decode_step.py` reads a decode step of two layers of llama3-8b,
beside torch's kernels and NCCL in one CUDA graph. On 4 x H200, context 1024, it takes 234 to 240 us
at batch 1, by every schedule and with `sums="two_shot"` too, where torch takes 361; 248 to 260 at
batch 16, torch 392 ([all of it](results.md), [why](performance/experts_and_attention.md)).
`balanced` and `dynamic` are 2 % behind `round_robin` at batch 1, up to 3 % ahead of it at 16. On
two, batch 1, qwen3-32b takes 500 to 517 us (torch 555) and llama3-70b 687 to 705 (torch 743)."""


if __name__ == "__main__":
    sys.stdout.write(page())
