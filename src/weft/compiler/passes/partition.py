"""Give each kernel its programs: how many, and which SMs it leaves free.

    matmul(gathered, b, kernel=p_multiply, order=gather)    ->    ..., programs=resident, spare=1

Programs that wait for each other, here or on other ranks, must all be resident: a grid of as many
as there are SMs, each doing tiles in turn. Behind copies that are announced by small kernels on a
stream of their own one SM is left free, or those would wait for the product that waits for them;
beside a kernel that relays rows between nodes as many as that has programs.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from weft.compiler.facts import Facts
from weft.compiler.fit import check_fit
from weft.ir.choice import Choice
from weft.ir.kinds import PRODUCTS
from weft.ir.schedule import relays_on
from weft.ir.task import INSIDE, Program, Task, arrives
from weft.tiles.relay import groups_among

# For the kernels that announce, one after the other, beside a resident grid; with communication
# CTAs for what else runs.
SPARE_SMS = 1
# Programs that share one tile's sum where there are few tiles.
SPLIT_K = 4


def partition(program: Program, facts: Facts) -> Program:
    """Raises  ConfigError: a tile that the target cannot hold"""
    tasks, choices = list(program.tasks), []
    for name in program.kernels:
        first = program.chief(name)
        if first.kind == "all_gather" and first.engine in INSIDE:  # by the product's own programs
            continue
        if first.programs:  # rows of this rank alone
            continue
        if first.kind in PRODUCTS:
            left = program.task(first.operands[0]).type
            assert left is not None
            check_fit(first, left.dtype, facts.target)
        changed, why = _of_kernel(program, first, facts)
        tasks[tasks.index(first)] = changed
        for one in program.of_kernel(name):
            if one is not first and one.engine == "relay":
                left = max(0, facts.target.num_sms - relays_on(facts.target))
                kept = replace(one, spare=left, relayed=prod(groups_among(facts.nodes)))
                tasks[tasks.index(one)] = kept
        taken = changed.programs + (f", {changed.spare} SM left" if changed.spare else "")
        if first.engine == "relay":
            taken = f"{changed.programs}, on {relays_on(facts.target)} SMs"
        choices.append(Choice(name, "programs", taken, why, first.place))
    return replace(
        program, tasks=tuple(tasks), stage="planned", choices=(*program.choices, *choices)
    )


def _of_kernel(program: Program, first: Task, facts: Facts) -> tuple[Task, str]:
    if first.engine == "relay":
        left = max(0, facts.target.num_sms - relays_on(facts.target))
        why = "programs wait for other nodes' rows beside the product: all must be resident"
        return replace(first, programs="resident", spare=left), why
    if arrives(first):
        return replace(first, programs="pieces"), "as many as share a rank's rows"
    spare = 0
    engines = [one.engine for one in program.gathers(first)]
    if {*engines} & {"ce_push", "pushers"}:
        spare = SPARE_SMS
    tasks = program.of_kernel(first.kernel)
    sums = [one.engine for one in tasks if one.kind != "all_gather"]
    engines += [program.task(one.operands[0]).engine for one in tasks if one.kind == "gather_rows"]
    if "relay" in (*engines, *sums):
        spare = relays_on(facts.target)
    is_split = first.kind in PRODUCTS and any(
        one.engine == "one_shot_ll" for one in program.of_kernel(first.kernel)
    )
    why = "programs wait for each other's tiles: all must be resident"
    if spare:
        is_relayed = "relay" in (*engines, *sums)
        beside = "rows are relayed" if is_relayed else "copies are announced"
        why += f"; {beside} beside them"
    changed = replace(first, programs="resident", spare=spare, split_k=SPLIT_K if is_split else 1)
    return changed, why
