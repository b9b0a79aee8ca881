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

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from weft.base.hashed_once import HashedOnce
from weft.base.place import UNKNOWN, Place
from weft.ir import text
from weft.ir.choice import Choice
from weft.ir.kinds import GATHERED, KINDS, PRODUCTS, WHOLE, Need
from weft.ir.tensor import (
    Halves,
    Partial,
    Pieces,
    Placement,
    Shard,
    Size,
    Type,
)

STAGES = ("traced", "placed", "fused", "tiled", "planned")
# What carries a collective that is part of a kernel. ce_push: pushes by copies on a stream of their
# own, of sums from the staging buffer that tiles are stored in; ce_parts: the same, each chunk
# behind a launch of its own, which a recording can hold; sm_push: stores of SMs; sm_put:
# wl.put with signals, which reaches other nodes; relay: the same once to each node, where a partner
# passes rows on, by a kernel on a stream of its own; one_shot_ll: LL packets, stores of which each
# carries its flag, to all ranks; two_shot_ll: to the ranks that own the rows, and back; feed: puts
# of the product's own first programs, before they multiply. Nobody pulls: pushes were never slower,
# and need neither rows on the heap nor ranks that meet first.
ENGINES = {
    "all_gather": ("ce_push", "sm_push", "relay", "sm_put", "feed", "pushers", "one_shot_ll"),
    "reduce_scatter": ("sm_push", "relay", "sm_put", "ce_push", "ce_parts"),
    "all_reduce": ("sm_push", "relay", "sm_put", "one_shot_ll", "two_shot_ll"),
    "all_to_all": ("sm_push", "ce_push"),
}
LL = ("one_shot_ll", "two_shot_ll")
# Collectives that may end a product's kernel: its tiles travel while others are multiplied.
TRAVELLING = ("reduce_scatter", "all_reduce", "all_to_all")
# What brings gathered rows within the product's own launch: communication CTAs, of rows that tables
# say or of all; or packets.
INSIDE = ("feed", "pushers", "one_shot_ll")
SCALINGS = ("", "rows", "blocks")


@dataclass(frozen=True)
class Task:
    """One operation. `dim` is a collective's, `eps` a norm's, `top_k` a router's; `head` counts the
    columns of a head, `base` is that of their angles; `causal`: no token sees a later one;
    `between`: the first of some columns, and the one behind them; `splits`: of a sequence's keys.
    Where it is not the operands', `dtype` is the result's. Of a matmul `scaling`, of SCALINGS, says
    that they have fp8 scales: one for each row and column, or one for each block.

    `kernel` is there from `fused` on: tasks of one kernel run as one; a task without is a call of a
    library. A product's tile is (rows, columns) or (rows, columns, k). From `planned` on: of a
    collective its `engine` and `chunks`; of a kernel's first task `order`, `programs`, `spare` (SMs
    left free), `split_k`; of sums that are relayed `relayed`, as many parts as a rank has to add up
    for other nodes, and `spare`. The persistent kernel has `split_k` of each of its products.
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
    between: tuple[int, int] | None = None
    splits: int | None = None
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
    relayed: int = 0
    split_k: int = 1
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Program(HashedOnce):
    """Tasks in order; each uses those before it. `choices` say why passes did what they did."""

    name: str
    mesh: str
    tasks: tuple[Task, ...]
    results: tuple[str, ...]
    stage: str = "traced"
    place: Place = UNKNOWN
    choices: tuple[Choice, ...] = ()

    __hash__ = HashedOnce.__hash__

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

    def gathers(self, product: Task) -> tuple[Task, ...]:
        """What brings rows that a product reads as they arrive."""
        places = GATHERED.get(product.kind, ())
        sources = (self.task(product.operands[place]) for place in places)
        return tuple(one for one in sources if arrives(one) and one.kernel)

    def task(self, name: str) -> Task:
        return next(task for task in self.tasks if task.name == name)


def needs_of(task: Task) -> tuple[Need, ...]:
    """The region of each operand that a tile of the task needs, as its kind says."""
    return tuple(map(Need, task.operands, KINDS[task.kind].region))


def placements_of(
    task: Task, given: Sequence[Placement | None] = ()
) -> tuple[tuple[tuple[Placement, ...], Placement], ...]:
    """The rows of placements, in -> out, that this task may have; with the pieces of `given`."""
    if task.dim is None:
        rows, found = KINDS[task.kind].placements, dict.fromkeys(given)
        pieces = [one for one in found if isinstance(one, Pieces)]
        return (*rows, *(row for one in pieces for row in _in_pieces(task, rows, one)))
    if task.kind == "all_gather":
        return (((Shard(task.dim),), WHOLE),)
    if task.kind == "all_to_all":
        return (((Shard(1 - task.dim),), Shard(task.dim)),)
    return (((Partial(),), Shard(task.dim)),)


def _in_pieces(
    task: Task, rows: Sequence[tuple[tuple[Placement, ...], Placement]], pieces: Pieces
) -> Iterator[tuple[tuple[Placement, ...], Placement]]:
    """What leaves halves where they are does so with other pieces; and one piece is a shard."""

    def changed(one: Placement) -> Placement:
        return Pieces(one.dim, pieces.sizes) if isinstance(one, Halves) else one

    for wanted, result in rows:
        if isinstance(result, Halves):
            yield tuple(map(changed, wanted)), changed(result)
    if task.kind == "columns" and pieces.dim == 1 and task.between in pieces.bounds:
        yield (pieces,), Shard(1)


def arrives(task: Task) -> bool:
    """Does it bring a product its rows: all ranks', or own ones of which each rank has columns?"""
    return task.kind == "all_gather" or (task.kind == "all_to_all" and task.dim == 0)


def is_staged(task: Task) -> bool:
    """Do copy engines carry tiles of it to their owners?"""
    return is_staged_by(task.kind, task.engine)


def is_staged_by(kind: str, engine: str) -> bool:
    return kind == "reduce_scatter" and engine in ("ce_push", "ce_parts")


def takes_tokens(task: Task) -> bool:
    """Do these engines begin while the kernel runs that makes the tiles? No recording has that."""
    return is_staged(task) and task.engine == "ce_push"


def are_alike(columns: Size, chunks: int, width: int) -> bool:
    """Are so many chunks of columns alike, and of whole tiles of `width`, at all sizes?"""
    return chunks == 1 or (isinstance(columns, int) and columns % (chunks * width) == 0)


def cycle_of(program: Program, kernels: Mapping[str, str]) -> list[str]:
    """Kernels, or tasks without one, that need each other, each the next; empty if there are none.

    `kernels` says of which kernel a task would be.
    """
    made = {task.name: kernels.get(task.name) or task.name for task in program.tasks}
    needs: dict[str, set[str]] = {one: set() for one in made.values()}
    for task in program.tasks:
        needs[made[task.name]] |= {made[name] for name in task.operands} - {made[task.name]}
    return next((way for name in needs if (way := way_to(needs, name, name))), [])


def way_to(needs: Mapping[str, set[str]], start: str, end: str) -> list[str]:
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


def show(program: Program, *, places: bool = True) -> str:
    """The program as text."""
    header = text.Header(program.name, program.mesh, program.stage, program.results, program.place)
    return text.show([header, *program.tasks, *program.choices], places=places)
