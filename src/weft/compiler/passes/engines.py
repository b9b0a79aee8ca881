"""Choose for each collective of a kernel what carries its data, and whether to fuse at all.

    gathered = all_gather(a, dim=0, kernel=p_gather)
    ->    all_gather(a, dim=0, kernel=p_gather, engine=ce_push)

Copy engines leave all SMs to the product but start late; SMs push at once but are missing there;
puts with signals reach other nodes, relays cross to each of them once; packets save the signal of
small messages. Which is first is predicted, with the tiles that go with it (weft.compiler.cost);
where the libraries one after the other would be first, they are taken.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from weft.base.errors import ConfigError
from weft.compiler.cost.choose import (
    LIBRARY,
    Way,
    grouped,
    is_read,
    of_rows,
    unmeasured,
    ways,
)
from weft.compiler.facts import Facts, Settings
from weft.ir.choice import Choice
from weft.ir.kinds import GATHERED, PRODUCTS
from weft.ir.task import ENGINES, INSIDE, LL, Program, Task, arrives
from weft.ir.tensor import Shard
from weft.ir.text import untaken

# Of products, what an operator's schedule asks for: their kernels are written, not generated.
BY_REQUEST = ("pushers", *LL)


def engines(program: Program, facts: Facts, settings: Settings) -> Program:
    """Raises  ConfigError: an engine that is asked for and cannot be, with those that can"""
    _check_names(program, settings.engines)
    for collective, products in pairs(program):
        if products and products[0].kind == "grouped_matmul":
            found = grouped(program, products[0], collective, facts)
        else:
            found = (
                ways(program, products, collective, facts) if products
                else of_rows(collective, facts)
            )  # fmt: skip
        asked = settings.engines.get(collective.name)
        # For rows that are worked on where they are summed all of them are generated.
        is_rows = not arrives(collective) and (
            program.chief(collective.kernel).kind not in PRODUCTS
        )
        usual = [
            way for way in found
            if is_rows or way.engine == LIBRARY or (
                way.engine not in BY_REQUEST
                and is_read(program, products, collective, way, facts)
            )
        ]  # fmt: skip
        best = _asked(program, collective, asked, found) if asked else usual[0]
        message = f"the best is {_times_text(found)}" if asked else _times_text(usual)
        if any(way.us is None for way in found):
            message = unmeasured(facts.target)
        message = f"as the schedule says; {message}" if asked else message
        program = _with(program, collective, products, best)
        if collective.kind == "all_reduce" and best.engine == "relay":
            program = _in_two(program, program.task(collective.name))
        choice = Choice(collective.name, "engine", best.engine, message, collective.place)
        program = replace(program, choices=(*program.choices, choice))
    return program


def pairs(program: Program) -> Iterator[tuple[Task, tuple[Task, ...]]]:
    """Each collective of a kernel, with the products that hide it; none where rows are reduced."""
    for task in program.tasks:
        if not task.kernel or task.kind not in ENGINES:
            continue
        if arrives(task):
            users = program.users(task.name)
            yield task, tuple(o if o.kind in GATHERED else program.chief(o.kernel) for o in users)
        else:
            chief = program.chief(task.kernel)
            if chief.kind == "scatter_rows":
                chief = program.task(chief.operands[0])
            yield task, (chief,) if chief.kind in PRODUCTS else ()


def _asked(program: Program, collective: Task, engine: str, found: list[Way]) -> Way:
    if engine == LIBRARY:
        return Way(LIBRARY, (), 0, 0.0)
    for way in found:
        if way.engine == engine:
            return way
    if collective.kind == "all_gather" and engine in INSIDE and engine != "feed":
        return Way(engine, (), 1, 0.0)
    can = ", ".join(dict.fromkeys(way.engine for way in found))
    message = f"{collective.kind} {collective.name} has engine={engine}; here it can have {can}"
    raise ConfigError(f"{program.name}: {message}", place=collective.place)


def _with(program: Program, collective: Task, products: tuple[Task, ...], way: Way) -> Program:
    """The program where that way is taken."""
    kernels = {collective.kernel, *(one.kernel for one in products)}

    def taken(task: Task) -> Task:
        if way.engine == LIBRARY and task.kernel in kernels:
            return replace(task, kernel="")
        if task.name == collective.name:
            return replace(task, engine=way.engine)
        if way.tile and task.name in {one.name for one in products}:
            return replace(task, tile=way.tile)
        return task

    return replace(program, tasks=tuple(map(taken, program.tasks)))


def _in_two(program: Program, total: Task) -> Program:
    """Sums that are relayed go to their rows' owners; a library relays them to all ranks.

    c = all_reduce(product, engine=relay)    ->    c_scattered = reduce_scatter(product, dim=0,
                                                     engine=relay); c = all_gather(c_scattered)
    """
    assert total.type is not None
    name = untaken(f"{total.name}_scattered", {one.name for one in program.tasks})
    owned = replace(total.type, placement=Shard(0))
    sums = replace(total, name=name, kind="reduce_scatter", dim=0, type=owned)
    gather = Task(total.name, "all_gather", (name,), total.type, dim=0, place=total.place)
    tasks = [each for one in program.tasks
             for each in ((sums, gather) if one is total else (one,))]  # fmt: skip
    return replace(program, tasks=tuple(tasks))


def _times_text(found: list[Way]) -> str:
    """The best of each engine, in us."""
    best: dict[str, Way] = {}
    for way in found:
        best.setdefault(way.engine, way)
    return ", ".join(map(_way_text, best.values()))


def _way_text(way: Way) -> str:
    message = f"{way.engine} {way.us:.0f} us" if way.us else way.engine
    message += f" in tiles of {way.tile[0]} x {way.tile[1]}" if way.tile else ""
    return message if way.us else f"{message}, not predicted"


def _check_names(program: Program, asked: Mapping[str, str]) -> None:
    known = [task.name for task, _ in pairs(program)]
    if unknown := sorted(set(asked) - set(known)):
        message = f"engines for {', '.join(unknown)}; collectives that kernels hide are"
        raise ConfigError(f"{program.name}: {message} {', '.join(known) or 'none'}",
                          place=program.place)  # fmt: skip
