"""Choose how finely rows are announced.

    all_gather(a, dim=0, kernel=p_gather, engine=copy_engine)    ->    ..., chunks=2

A word for each chunk of a rank's rows: more of them let tiles begin earlier, each costs a copy's
start. Sums have a word for each tile: they are told of by the kernel that makes the tile, for the
price of a store.
"""

from __future__ import annotations

from dataclasses import replace

from weft.base.errors import ConfigError
from weft.compiler.cost.choose import chunks_of, predicted_us, shape_of
from weft.compiler.facts import Facts, Settings
from weft.compiler.passes.engines import pairs
from weft.ir.choice import Choice
from weft.ir.task import PACKETS, Program

MOST = 1024
# Programs that store own rows before they multiply.
LANES = 8


def chunk(program: Program, facts: Facts, settings: Settings) -> Program:
    """Raises  ConfigError: chunks of what has none, or that are no number of chunks"""
    found = {one.name: products for one, products in pairs(program)}
    gathers = [name for name in found if program.task(name).kind == "all_gather"]
    for name, number in settings.chunks.items():
        if name not in gathers or not 1 <= number <= MOST:
            told = (
                f"chunks={number} of {name}; it is 1 to {MOST}, of {', '.join(gathers) or 'none'}"
            )
            raise ConfigError(f"{program.name}: {told}", place=program.place)
    for name, products in found.items():
        task, chunks, why = program.task(name), "tiles", "a tile's own word costs one store"
        if name in settings.chunks:
            chunks, why = settings.chunks[name], "asked for"
        elif task.engine == "feed":
            chunks = max(1, min(LANES, facts.target.num_sms // 4))
            why = "so many of the product's programs store own rows first"
        elif task.engine in PACKETS:
            why = "packets carry their own flags"
        elif products and task.kind == "all_gather":
            shape = replace(shape_of(program, products[0], facts), tile=products[0].tile)
            us = {
                one: predicted_us(task, shape, task.engine, one, facts)
                for one in chunks_of(task, shape, task.engine, facts)
            }
            chunks = min(us, key=lambda one: us[one])
            why = ", ".join(f"{one}: {time:.0f} us" for one, time in us.items())
        changed = tuple(replace(o, chunks=chunks) if o is task else o for o in program.tasks)
        choice = Choice(name, "chunks", str(chunks), why, task.place)
        program = replace(program, tasks=changed, choices=(*program.choices, choice))
    return program
