"""Give each kernel the order of its tiles.

    product = matmul(gathered, b, kernel=p_multiply)    ->    matmul(..., order=gather)

gather: own rows first, then those of the next rank, as they arrive. scatter: the next rank's rows
first, own ones last, when the others' shares of them have come; part_by_part: the same, where
engines carry chunks of columns, so that each is whole early. rows: from the first to the last.
Over several nodes these are hierarchical_gather and hierarchical_scatter (tiles/hierarchy.py): node
by node, own node's ranks first, or last. An order of the user's is a function like those of
tiles/swizzle.py; for the sizes of the call it must be a bijection.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from weft.base.errors import ConfigError
from weft.base.parts import full_part, part_of
from weft.base.place import UNKNOWN, Place
from weft.base.topology import Topology, text_of
from weft.compiler.facts import Facts, Settings
from weft.compiler.passes.tile import held_by
from weft.ir.choice import Choice
from weft.ir.task import Program, Task, is_carried
from weft.language.mapping import as_python
from weft.tiles.swizzle import first_to_gather

ORDERS = (
    "gather", "scatter", "rows", "hierarchical_gather", "hierarchical_scatter", "in_turn",
    "in_turn_backwards", "part_by_part",
)  # fmt: skip
# What these are called that go node by node.
BY_NODE = "hierarchical_"
# Those that tables say.
DYNAMIC = ("in_turn", "in_turn_backwards")
# Rows of tiles that share columns in L2.
MOST_GROUPED = 8
WHY = {
    "in_turn": "tiles of own tokens first, then those whose last tokens come next, by the table",
    "in_turn_backwards": "tiles of other ranks' tokens leave while own ones are multiplied",
    "gather": "own rows need not wait; others are multiplied in the order in which they arrive",
    "scatter": "other ranks' rows leave while own ones are multiplied, which nobody waits for",
    "part_by_part": "chunk by chunk, so that engines carry each while others are multiplied",
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
        message = f"orders for {', '.join(unknown)}; tiles are in an order of {', '.join(first)}"
        raise ConfigError(f"{program.name}: {message}", place=program.place)
    orders: dict[str, str] = {}
    choices = []
    for task, name in first.items():
        form = form_of(program, name)
        why = WHY[form]
        if facts.num_nodes > 1 and (by_node := BY_NODE + form) in orders_known:
            if lie_in_turn(facts):
                form, why = by_node, f"node by node; {why}"
            else:
                why += f"; rank by rank, as nodes of {text_of(facts.nodes)} ranks are not alike"
        if task in settings.orders:
            order = settings.orders[task]
            _require_free(program, program.task(task), form, order)
            _check_sizes(program, program.task(task), order, facts)
            form, why = name_of(order), "the user's"
        orders[task] = form
        choices.append(Choice(name, "order", form, why, program.task(task).place))
    tasks = tuple(
        replace(one, order=orders[one.name]) if one.name in orders else one
        for one in program.tasks
    )  # fmt: skip
    return replace(program, tasks=tasks, choices=(*program.choices, *choices))


def lie_in_turn(facts: Facts) -> bool:
    """Are all nodes alike, but for the first ones that may have one rank more?"""
    return facts.nodes == Topology.of(facts.num_ranks, facts.num_nodes).sizes


def form_of(program: Program, kernel: str) -> str:
    """gather, scatter, rows, or grouped: by what the kernel waits for."""
    tasks, chief = program.of_kernel(kernel), program.chief(kernel)
    if chief.kind == "grouped_matmul":
        return DYNAMIC[chief is tasks[0]]
    if tasks[0].kind == "matmul" and program.task(tasks[0].operands[0]).kernel:
        source = program.task(tasks[0].operands[0])
        if source.kind == "all_gather":
            return "gather"
    if any(is_carried(one) for one in tasks):
        return "part_by_part"
    return "rows" if any(one.engine == "one_shot_ll" for one in tasks) else "scatter"


def name_of(order: Callable[..., Any]) -> str:
    return getattr(order, "__name__", None) or type(order).__name__


def check(
    order: Callable[..., Any], num_m: int, num_n: int, args: tuple[int, ...] = (8, 0, 1),
    subject: str = "", place: Place = UNKNOWN,
) -> None:  # fmt: skip
    """Raises  ConfigError: two numbers of one tile, or a tile outside, with both; an order that
    Python's integers cannot ask"""
    function = as_python(order) if hasattr(order, "fn") else order
    message = f"{subject or 'the kernel'}: order {name_of(order)} of {num_m} x {num_n} tiles"

    def tile_at(i: int) -> tuple[int, int]:
        try:
            i_m, i_n, *_ = function(i, num_m, num_n, args)
            return int(i_m), int(i_n)
        except Exception as error:
            raise ConfigError(
                f"{message} cannot be checked: for i={i} it raises {type(error).__name__}: {error}"
                "; write it with what integers have too, + - * // % min max, and give (i_m, i_n)",
                place=place,
            ) from error

    seen: dict[tuple[int, int], int] = {}
    for i in range(num_m * num_n):
        tile = tile_at(i)
        if not (0 <= tile[0] < num_m and 0 <= tile[1] < num_n):
            raise ConfigError(
                f"{message} gives tile {tile} for i={i}, which is none; keep i_m below {num_m} and "
                f"i_n below {num_n}, with % where it counts on, and neither negative",
                place=place,
            )
        if tile in seen:
            taken = {tile_at(j) for j in range(num_m * num_n)}
            left = next((one for one in _tiles(num_m, num_n) if one not in taken), None)
            raise ConfigError(
                f"{message} gives tile {tile} for i={seen[tile]} and i={i}, and never {left}; each "
                "tile must come once: begin with i_m, i_n = i // num_n, i % num_n, which has all, "
                "and change it by steps that can be undone, such as (i_m + first) % num_m",
                place=place,
            )
        seen[tile] = i


def _tiles(num_m: int, num_n: int):
    return ((i, j) for i in range(num_m) for j in range(num_n))


def _require_free(program: Program, task: Task, form: str, order: Callable[..., Any]) -> None:
    """Raises  ConfigError: a kernel whose tiles come in one order only"""
    if form in DYNAMIC:
        message = f"its tiles come in the turns of {task.operands[2]}"
    elif not form.endswith("gather"):
        message = "ranks wait for each other's tiles, and would for ever if own ones came too early"
    else:
        return
    raise ConfigError(
        f"{program.name}: {task.name} has order={name_of(order)}; here {message}: leave it to "
        f"{form}; an order of one's own is for a product of gathered rows",
        place=task.place,
    )


def _check_sizes(program: Program, task: Task, order: Callable[..., Any], facts: Facts) -> None:
    assert task.type is not None
    held = held_by(task.type, 0, facts.sizes, facts.num_ranks)
    check_gather(
        order, held.end_row, held.end_column, task.tile, facts.num_ranks,
        f"{program.name}: {task.name}", task.place,
    )  # fmt: skip


def check_gather(
    order: Callable[..., Any], m: int, n: int, tile: tuple[int, ...], num_ranks: int, subject: str,
    place: Place,
) -> None:  # fmt: skip
    """For every rank in turn, as kernels ask it for m gathered rows: it may begin at own ones.

    Raises  ConfigError: as `check`, on all ranks alike
    """
    num_m, num_n, rank_rows = ceil(m / tile[0]), ceil(n / tile[1]), max(1, full_part(m, num_ranks))
    group_m = max(1, min(MOST_GROUPED, rank_rows // tile[0]))
    head = max(1, min(rank_rows // tile[0], num_m))
    for rank in range(num_ranks if num_m else 0):
        first, end = part_of(m, rank, num_ranks)
        start = first_to_gather.fn(first, end, tile[0], num_m)
        message = f"{subject} with m={m} on rank {rank}"
        check(order, num_m, num_n, (group_m, start, head), message, place)


def _is_gather(program: Program, kernel: str) -> bool:
    return program.of_kernel(kernel)[0].kind == "all_gather"


def functions(program: Program, settings: Settings) -> Mapping[str, Callable[..., Any]]:
    """The user's orders by the name that the plan has for them."""
    return {name_of(order): order for order in settings.orders.values()}
