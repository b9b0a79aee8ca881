"""Give each kernel the order of its tiles.

    product = matmul(gathered, b, kernel=p_multiply)    ->    matmul(..., order=gather)

gather: own rows first, then those of the next rank, as they arrive. scatter: the next rank's rows
first, own ones last, when the others' shares of them have come; part_by_part: the same, where
engines carry chunks of columns, so that each is whole early. exchange: own rows, the next rank's
columns of them first and own ones last. rows: from the first to the last; grouped: the same, some
rows of tiles column by column.
split_k: all tiles, once for each split of the rows that they sum over.
Over several nodes these are hierarchical_gather and hierarchical_scatter (tiles/hierarchy.py): node
by node, own node's ranks first, or last.
"""

from __future__ import annotations

from dataclasses import replace

from weft.base.topology import Topology, text_of
from weft.compiler.cost.choose import is_read_once
from weft.compiler.facts import Facts
from weft.ir.choice import Choice
from weft.ir.task import Program, arrives, is_staged

# What those are called that go node by node, and of which orders there are such.
BY_NODE, WITH_NODES = "hierarchical_", ("gather", "scatter")
# Those that tables say.
DYNAMIC = ("in_turn", "by_expert")
WHY = {
    "in_turn": "tiles of own tokens first, then those whose last tokens come next, by the table",
    "by_expert": "tiles that share an expert's matrix come together, and it is read once",
    "gather": "own rows need not wait; others are multiplied in the order in which they arrive",
    "scatter": "other ranks' rows leave while own ones are multiplied, which nobody waits for",
    "part_by_part": "chunk by chunk, so that engines carry each while others are multiplied",
    "grouped": "own rows, of which all ranks send the first columns first",
    "exchange": "other ranks' columns leave while own ones are multiplied",
    "split_k": "the first splits are of own rows, the others' are multiplied as they arrive",
    "rows": "all ranks need all rows: none comes first",
}


def swizzle(program: Program, facts: Facts) -> Program:
    kernels = [one for one in program.kernels if not arrives(program.of_kernel(one)[0])
               and not program.chief(one).order]  # fmt: skip
    orders: dict[str, str] = {}
    choices = []
    for name in kernels:
        chief, form = program.chief(name), form_of(program, name)
        if form == "in_turn" and is_read_once(program, chief, facts):
            form = "by_expert"
        why = WHY[form]
        if facts.num_nodes > 1 and form in WITH_NODES:
            if lie_in_turn(facts):
                form, why = BY_NODE + form, f"node by node; {why}"
            else:
                why += f"; rank by rank, as nodes of {text_of(facts.nodes)} ranks are not alike"
        orders[chief.name] = form
        choices.append(Choice(name, "order", form, why, chief.place))
    tasks = tuple(
        replace(one, order=orders[one.name]) if one.name in orders else one
        for one in program.tasks
    )  # fmt: skip
    return replace(program, tasks=tasks, choices=(*program.choices, *choices))


def lie_in_turn(facts: Facts) -> bool:
    """Are all nodes alike, but for the first ones that may have one rank more?"""
    return facts.nodes == Topology.of(facts.num_ranks, facts.num_nodes).sizes


def form_of(program: Program, kernel: str) -> str:
    """gather, scatter, rows, split_k, or grouped: by what the kernel waits for."""
    tasks, chief = program.of_kernel(kernel), program.chief(kernel)
    if chief.kind == "grouped_matmul":
        return "in_turn" if any(one.kind == "gather_rows" for one in tasks) else "by_expert"
    if chief.kind == "matmul_tn":
        return "split_k"
    if gathers := program.gathers(tasks[0]):
        return "gather" if gathers[0].kind == "all_gather" else "grouped"
    if any(is_staged(one) for one in tasks):
        return "part_by_part"
    if any(one.kind == "all_to_all" for one in tasks):
        return "exchange"
    return "rows" if any(one.engine == "one_shot_ll" for one in tasks) else "scatter"
