"""Random programs as one kernel, emulated and held against their meaning."""

from __future__ import annotations

import random

import pytest
from persistent_programs import random_program
from random_programs import random_layers
from test_run import cache
from test_unfused import run

import weft
from weft.base.errors import UnsupportedError
from weft.compiler import Compiled, Settings
from weft.megakernel import Persistent

assert cache  # a fixture


def drawn(seed: int, num_ranks: int, made) -> Compiled:
    """With tiles of which some are chosen, some settled; few workers or many."""
    chooser, compiled = random.Random(seed), made(seed, num_ranks)
    kinds = {task.name: task.kind for task in compiled.stages.tasks["place"].tasks}
    tiles = {
        name: tuple(chooser.choice([16, 32]) for _ in range(3 if kind == "matmul" else 2))
        for name, kind in kinds.items()
        if kind != "input" and chooser.random() < 0.7
    }
    how = Persistent(num_workers=chooser.choice([1, 3, 8]))
    return compiled.options(settings=Settings(tiles=tiles), lowering=how)


def several(ranks, seeds, num_ranks: int, made) -> int:
    """Gives how many were run."""
    count = 0
    for seed in seeds:
        program = drawn(seed, num_ranks, made)

        def main(program=program, seed=seed):
            world = weft.init()
            for m in (seed % 5 + 1, 33 + seed % 7):
                run(world, program, {"m": m}, seed, lowering=None)
            world.close()

        try:
            ranks(main, num_ranks)
        except UnsupportedError:
            continue
        count += 1
    return count


def test_random_layers(ranks):
    assert several(ranks, [1], 2, random_layers) == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks, first", [(3, 200), (4, 300)])
def test_more_random_programs(ranks, num_ranks: int, first: int):
    assert several(ranks, range(first, first + 2), num_ranks, random_layers) == 2
    assert several(ranks, range(first, first + 4), num_ranks, random_program) >= 2
