"""Every mutant of every operator, by every transport, on one node and on two."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from weft.base.target import TARGETS
from weft.ops import cards
from weft.tools.check import Work
from weft.tools.mutants import op_run
from weft.verify.mutants import Bounds, Run, search

EMU = TARGETS["emu"]
NODES = ((3,), (2, 1), (2,), (1,))
# The last rank's rows fill two lanes, or tiles lie within a rank and across two.
SHAPES = {"ag_gemm": {"m": 56, "n": 24, "k": 16}}
SHAPE = {"m": 8, "n": 40}
VARIANTS: dict[str, list[dict[str, int]]] = {"all_to_all": [{"variable": 0}, {"variable": 1}]}
# Where peers may read inputs in place: rows that divide by ranks and tiles.
IN_PLACE = {("ag_gemm", "pull"): [{"m": 64, "n": 24, "k": 16}]}
# Blocks and tiles so small that there are several.
SMALL = {"block": 32, "tile_m": 16, "tile_n": 16, "tile_k": 16}
# What a laptop runs; the rest is for those who have minutes.
QUICK = [("all_gather", "copy_engine"), ("reduce_scatter", "push")]
# Transports with more signals than this come by all of them.
FEWEST = 8


def runs_of(name: str, transport: str) -> list[Run]:
    op = cards()[name]
    runs = []
    for nodes in NODES:
        for variant in VARIANTS.get(name, [{}]):
            shape = {**SHAPES.get(name, SHAPE), **variant}
            work = Work(op, sum(nodes), shape, "float32", nodes)
            for config in configs(work):
                if config.transport == transport:
                    runs.append(op_run(work, smaller(config)))
    if (name, transport) == ("ag_gemm", "pull"):
        # Words of chunks without rows are the last ones that engines copy: they may come late.
        work = Work(op, 3, SHAPES[name], "float32", (3,))
        config = next(one for one in configs(work) if one.transport == transport)
        runs.append(op_run(work, smaller(config), calls=(2, 0, 2, 0, 2, 0)))
    for shape in IN_PLACE.get((name, transport), ()):
        work = Work(op, 2, shape, "float32", (2,))
        config = next(one for one in configs(work) if one.transport == transport)
        # In place again and again, where inputs change; and staged in turns: each must leave the
        # slot as the other needs it.
        runs.append(op_run(work, smaller(config), on_heap=True, calls=(0, 0, 0, 1, 0, 1, 0)))
    return runs


def configs(work: Work) -> list[Any]:
    """Those that reach all ranks of `work.nodes`."""
    found = list(work.op.candidates(work.problem(), EMU))
    if work.op.takes_nodes or len(work.nodes) == 1:
        return found
    return [config for config in found if config.transport == "push"]


def smaller(config: Any) -> Any:
    known = {field.name for field in fields(config)}
    return replace(config, **{name: size for name, size in SMALL.items() if name in known})


def cases() -> list[Any]:
    found = []
    for name, op in cards().items():
        work = Work(op, 3, SHAPES.get(name, SHAPE), "float32", (3,))
        for config in configs(work):
            case = (name, config.transport)
            marks = () if case in QUICK else pytest.mark.slow
            found.append(pytest.param(*case, id="-".join(case), marks=marks))
    return found


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("name", "transport"), cases())
def test_every_signal_is_needed(name, transport):
    bounds = Bounds(schedules=16, jobs=1)
    report = search(runs_of(name, transport), bounds, subject=f"{name} {transport}", ranks=3)
    print(report)
    assert report.ok and not report.unreached, str(report)
    assert len(report.verdicts) >= FEWEST
