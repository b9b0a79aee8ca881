"""Give each kernel the order of its tiles.

    product = matmul(gathered, b, kernel=p_multiply)    ->    matmul(..., order=gather)

gather: own rows first, then those of the next rank, as they arrive. scatter: the next rank's rows
first, own ones last, when the others' shares of them have come. rows: from the first to the last.
With several nodes both would go node by node (tiles/hierarchy.py); no kernel is generated with that
order yet. An order of the user's is a function like those of tiles/swizzle.py; for the sizes of the
call it must be a bijection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from weft.base.errors import ConfigError
from weft.base.place import UNKNOWN, Place
from weft.compiler.facts import Facts, Settings
from weft.compiler.passes.tile import held_by
from weft.ir.choice import Choice
from weft.ir.task import Program, Shard, Task

ORDERS = (
    "gather", "scatter", "rows", "hierarchical_gather", "hierarchical_scatter", "in_turn",
    "in_turn_backwards",
)  # fmt: skip
# Those that tables say.
BY_TABLE = ("in_turn", "in_turn_backwards")
WHY = {
    "in_turn": "tiles of own tokens first, then those whose last tokens come next, by the table",
    "in_turn_backwards": "tiles of other ranks' tokens leave while own ones are multiplied",
    "gather": "own rows need not wait; others are multiplied in the order in which they arrive",
    "scatter": "other ranks' rows leave while own ones are multiplied, which nobody waits for",
    "rows": "all ranks need all rows: none comes first",
}


def swizzle(
    program: Program, facts: Facts, settings: Settings, orders_known: Collection[str] = ORDERS
) -> Program:
    """`orders_known` are those that kernels can take.

    Raises  ConfigError: a user's order that is no bijection, with the collision"""
    kernels = [name for name in program.kernels if not _is_gather(program, name)]
    first = {program.chief(name).name: name for name in kernels}
    if unknown := sorted(set(settings.orders) - set(first)):
        told = f"orders for {', '.join(unknown)}; tiles are in an order of {', '.join(first)}"
        raise ConfigError(f"{program.name}: {told}", place=program.place)
    orders: dict[str, str] = {}
    choices = []
    for task, name in first.items():
        form = form_of(program, name)
        why = WHY[form]
        if facts.num_nodes > 1 and (by_node := f"hierarchical_{form}") in orders_known:
            form, why = by_node, f"node by node; {why}"
        if task in settings.orders:
            order = settings.orders[task]
            if form in BY_TABLE:
                told = f"{program.name}: {task} has order={name_of(order)}; its tiles come in the"
                raise ConfigError(f"{told} turns of {program.task(task).operands[2]}",
                                  place=program.task(task).place)  # fmt: skip
            _check_sizes(program, program.task(task), order, facts)
            form, why = name_of(order), "the user's"
        orders[task] = form
        choices.append(Choice(name, "order", form, why, program.task(task).place))
    tasks = tuple(
        replace(one, order=orders[one.name]) if one.name in orders else one
        for one in program.tasks
    )  # fmt: skip
    return replace(program, tasks=tasks, choices=(*program.choices, *choices))


def form_of(program: Program, kernel: str) -> str:
    """gather, scatter, rows, or by tables: by what the kernel waits for."""
    tasks, chief = program.of_kernel(kernel), program.chief(kernel)
    if chief.kind == "grouped_matmul":
        return BY_TABLE[chief is tasks[0]]
    if tasks[0].kind == "matmul" and program.task(tasks[0].operands[0]).kernel:
        source = program.task(tasks[0].operands[0])
        if source.kind == "all_gather":
            return "gather"
    return "rows" if any(one.engine == "packets" for one in tasks) else "scatter"


def name_of(order: Callable[..., Any]) -> str:
    return getattr(order, "__name__", None) or type(order).__name__


def check(
    order: Callable[..., Any], num_m: int, num_n: int, args: tuple[int, ...] = (8, 0, 1),
    subject: str = "", place: Place = UNKNOWN,
) -> None:  # fmt: skip
    """Raises  ConfigError: two numbers of one tile, or a tile outside; with both"""
    function = getattr(order, "fn", order)
    told = f"{subject or 'the kernel'}: order {name_of(order)} of {num_m} x {num_n} tiles"
    seen: dict[tuple[int, int], int] = {}
    for i in range(num_m * num_n):
        at = function(i, num_m, num_n, args)
        tile = (int(at[0]), int(at[1]))
        if not (0 <= tile[0] < num_m and 0 <= tile[1] < num_n):
            raise ConfigError(f"{told} gives tile {tile} for i={i}, which is none", place=place)
        if tile in seen:
            taken = {
                (int(a), int(b))
                for a, b, *_ in (function(j, num_m, num_n, args) for j in range(num_m * num_n))
            }
            left = next((one for one in _tiles(num_m, num_n) if one not in taken), None)
            raise ConfigError(
                f"{told} gives tile {tile} for i={seen[tile]} and i={i}, and never {left}; each "
                "tile must come once",
                place=place,
            )
        seen[tile] = i


def _tiles(num_m: int, num_n: int):
    return ((i, j) for i in range(num_m) for j in range(num_n))


def _check_sizes(program: Program, task: Task, order: Callable[..., Any], facts: Facts) -> None:
    """For every rank's rows in turn: an order begins where its own are."""
    assert task.type is not None
    held = held_by(task.type, 0, facts.sizes, facts.num_ranks)
    rows = held.end_row * (facts.num_ranks if task.type.placement == Shard(0) else 1)
    num_m = max(1, ceil(rows / task.tile[0]))
    num_n = max(1, ceil(held.end_column / task.tile[1]))
    for rank in range(facts.num_ranks):
        first = rank * num_m // facts.num_ranks
        head = max(1, min(num_m, ceil(num_m / facts.num_ranks)))
        check(order, num_m, num_n, (8, first, head), f"{program.name}: {task.name}", task.place)


def _is_gather(program: Program, kernel: str) -> bool:
    return program.of_kernel(kernel)[0].kind == "all_gather"


def functions(program: Program, settings: Settings) -> Mapping[str, Callable[..., Any]]:
    """The user's orders by the name that the plan has for them."""
    return {name_of(order): order for order in settings.orders.values()}
