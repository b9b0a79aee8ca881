"""Random programs whose collectives are hidden, compiled, emulated and held against their meaning."""

from __future__ import annotations

import pytest
from random_programs import random_layers, random_program
from test_unfused import run

import weft


def several(ranks, seeds, num_ranks: int, made=random_layers) -> None:
    programs = {seed: made(seed, num_ranks) for seed in seeds}

    def main():
        world = weft.init()
        for seed, compiled in programs.items():
            for m in (seed % 5 + 1, 40 + seed % 7):
                run(world, compiled, {"m": m}, seed, lowering="overlapped")
        world.close()

    ranks(main, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_random_layers(ranks, num_ranks: int):
    several(ranks, range(10 * num_ranks, 10 * num_ranks + 3), num_ranks)


def test_random_programs(ranks):
    several(ranks, range(20, 23), 2, random_program)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_many_random_layers(ranks, num_ranks: int):
    several(ranks, range(1000 * num_ranks, 1000 * num_ranks + 20), num_ranks)
