"""Random programs, compiled so that they overlap, emulated and held against their meaning."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from effort import slow_but
from random_programs import global_inputs, of_rank, random_layers, random_program
from test_unfused import run

import weft
from weft.base.errors import (
    AllocationOrderError,
    CallOrderError,
    ConfigError,
    UnsupportedError,
)
from weft.base.target import TARGETS
from weft.compiler import Compiled, Facts, Settings
from weft.compiler.passes.engines import pairs
from weft.compiler.passes.fuse import fuse

ENGINES = {
    "all_gather": ("ce_push", "sm_push"),
    "reduce_scatter": ("sm_push", "ce_push"),
    "all_reduce": ("sm_push", "one_shot_ll", "two_shot_ll"),
}


def drawn(seed: int, num_ranks: int, made=random_layers) -> Compiled:
    """A random program with random engines and tiles, as far as kernels are generated for them."""
    chooser, compiled = random.Random(seed), made(seed, num_ranks)
    program = fuse(compiled.stages.tasks["place"])
    found = list(pairs(program))
    tiles = {
        one.name: tuple(chooser.choice([16, 32]) for _ in range(3))
        for _, products in found
        for one in products
    }
    compiled = compiled.options(settings=Settings(tiles=tiles))
    for collective, _ in found if num_ranks > 1 else ():
        engine = chooser.choice(ENGINES.get(collective.kind, ("sm_push",)))
        engines = {**compiled.settings.engines, collective.name: engine}
        asked = compiled.options(settings=replace(compiled.settings, engines=engines))
        try:
            asked.overlapped(Facts({"m": 64}, num_ranks, TARGETS["emu"]))
        except (ConfigError, UnsupportedError):
            continue  # the compiler chooses
        compiled = asked
    return compiled


def several(ranks, seeds, num_ranks: int, made=random_layers) -> set[str]:
    """Gives the engines that were run, by what they carried."""
    programs = {seed: drawn(seed, num_ranks, made) for seed in seeds}

    def main():
        world = weft.init()
        for seed, compiled in programs.items():
            for m in (seed % 5 + 1, 40 + seed % 7):
                run(world, compiled, {"m": m}, seed, lowering="overlapped")
        world.close()

    ranks(main, num_ranks)
    facts = Facts({"m": 48}, num_ranks, TARGETS["emu"])
    return {
        f"{one.kind} {one.engine}"
        for compiled in programs.values()
        for one in compiled.overlapped(facts).program.tasks
        if one.kernel and one.engine
    }


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks",), slow_but([(3,)], [(1,), (2,)]))
def test_random_layers(ranks, num_ranks: int):
    found = several(ranks, range(10 * num_ranks, 10 * num_ranks + 2), num_ranks)
    wanted = [
        {"all_gather sm_push", "reduce_scatter sm_push"},
        {"all_gather sm_push", "all_gather ce_push", "reduce_scatter sm_push",
         "all_reduce one_shot_ll", "all_reduce two_shot_ll"},
        {"all_gather ce_push", "reduce_scatter sm_push", "reduce_scatter ce_push",
         "all_reduce sm_push"},
    ]  # fmt: skip
    assert found == wanted[num_ranks - 1]


@pytest.mark.slow
def test_layers_over_two_nodes(ranks):
    """Rows are put or relayed and sums are put; nobody has an address in another node."""
    programs = {seed: random_layers(seed, 4) for seed in (0, 1, 2, 5)}
    programs |= {-seed: relayed(random_layers(seed, 4)) for seed in (5, 6)}

    def main():
        world = weft.init()
        for seed, compiled in programs.items():
            run(world, compiled, {"m": 21}, seed, lowering="overlapped")
        world.close()

    ranks(main, 4, nodes=2)
    facts = Facts({"m": 21}, 4, TARGETS["emu"], (2, 2))
    found = [one.engine for compiled in programs.values()
             for one in compiled.overlapped(facts).program.tasks if one.engine]  # fmt: skip
    assert set(found) == {"relay", "sm_put"}


def relayed(compiled: Compiled) -> Compiled:
    """The program with rows and sums that cross to each other node once."""
    program = fuse(compiled.stages.tasks["place"])
    found = [one.name for one, _ in pairs(program) if one.kind != "all_reduce"]
    return compiled.options(settings=Settings(engines=dict.fromkeys(found, "relay")))


def test_ranks_that_disagree_on_a_size(ranks):
    """Of one rank m is larger: told before anything is launched, with both."""
    compiled = random_layers(13, 2)
    program = compiled.stages.program

    def main():
        world = weft.init()
        sizes = {"m": 40 + 2 * world.rank}
        parts = [
            of_rank(program.task(name).type, tensor, sizes, world.rank, 2)
            for name, tensor in global_inputs(program, sizes, 0).items()
        ]
        compiled(*parts, world=world, **sizes)

    with pytest.raises((CallOrderError, AllocationOrderError), match="m=40.*m=42|m=42.*m=40"):
        ranks(main, 2)


def test_random_programs(ranks):
    several(ranks, range(20, 23), 2, random_program)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_many_random_layers(ranks, num_ranks: int):
    several(ranks, range(1000 * num_ranks, 1000 * num_ranks + 10), num_ranks)
