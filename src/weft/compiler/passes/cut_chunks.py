"""Choose how finely rows are announced.

    all_gather(a, dim=0, kernel=p_gather, engine=ce_push)    ->    ..., chunks=2

A word for each chunk of a rank's rows: more of them let tiles begin earlier, each costs a copy's
start. Sums have a word for each tile: they are told of by the kernel that makes the tile, for the
price of a store; but where engines carry them, they have one for each chunk of a part's columns, of
which several are alike and of whole tiles.
"""

from __future__ import annotations

from dataclasses import replace

from weft.base.errors import ConfigError
from weft.compiler.cost.choose import (
    chunks_of,
    chunks_of_tokens,
    predicted_us,
    shape_of,
    unmeasured,
)
from weft.compiler.facts import Facts, Settings
from weft.compiler.passes.engines import pairs
from weft.ir import text
from weft.ir.choice import Choice
from weft.ir.schedule import FEEDERS
from weft.ir.task import LL, Program, Task, are_alike, arrives, is_staged

MOST = 1024


def chunk(program: Program, facts: Facts, settings: Settings) -> Program:
    """Raises  ConfigError: chunks of what has none, or that are no number of chunks"""
    found = {one.name: products for one, products in pairs(program)}
    cut = [name for name in found if _is_cut(program.task(name))]
    for name, number in settings.chunks.items():
        if name not in cut or not 1 <= number <= MOST:
            message = f"chunks={number} of {name}; it is 1 to {MOST}, of {', '.join(cut) or 'none'}"
            raise ConfigError(f"{program.name}: {message}", place=program.place)
        if is_staged(program.task(name)):
            _check_staged(program, program.task(name), number)
    for name, products in found.items():
        task, chunks, why = program.task(name), "tiles", "a tile's own word costs one store"
        if name in settings.chunks:
            chunks, why = settings.chunks[name], "as the schedule says"
        elif task.engine == "feed":
            chunks = max(1, min(FEEDERS, facts.target.num_sms // 4))
            why = "so many of the product's programs store own rows first"
        elif products and products[0].kind == "grouped_matmul" and _is_cut(task):
            chunks, why = 1, "a tile waits for all tokens of a rank"
            if task.engine == "relay":
                chunks = chunks_of_tokens(program, products[0], facts)
                why = "one is passed on while the next one comes"
        elif task.engine in LL:
            chunks = "tiles" if task.kind != "all_gather" else 1
            why = "packets carry their own flags"
        elif products and _is_cut(task):
            shape = replace(shape_of(program, products[0], facts), tile=products[0].tile)
            us = {
                one: predicted_us(products[0], task, shape, task.engine, one, facts)
                for one in chunks_of(task, shape, task.engine, facts)
            }
            chunks = min(us, key=lambda one: us[one] or 0.0)
            why = ", ".join(f"{one}: {time:.0f} us" for one, time in us.items() if time is not None)
            why = why or f"the first: {unmeasured(facts.target)}"
        changed = tuple(replace(o, chunks=chunks) if o is task else o for o in program.tasks)
        choice = Choice(name, "chunks", str(chunks), why, task.place)
        program = replace(program, tasks=changed, choices=(*program.choices, choice))
    return program


def _is_cut(task: Task) -> bool:
    """Are its rows, or its columns, announced in chunks?"""
    return arrives(task) or is_staged(task)


def _check_staged(program: Program, task: Task, chunks: int) -> None:
    """Raises  ConfigError: chunks that are not alike, or not of whole tiles"""
    assert task.type is not None
    columns, width = task.type.sizes[1], task.tile[1]
    if not are_alike(columns, chunks, width):
        raise ConfigError(
            f"{program.name}: chunks={chunks} of {task.name}, of {text.value(columns)} columns in "
            f"tiles of {width}; several chunks must be alike, of whole tiles, at all sizes: take "
            f"1, or such that chunks * {width} divides a number of columns",
            place=task.place,
        )
