"""Random layers and programs as one kernel: tiles, workers and rows drawn, too."""

from __future__ import annotations

import random

import pytest
import torch
from persistent_programs import random_program
from random_programs import global_inputs, of_rank, random_layers
from test_run import cache

import weft
from weft.base.errors import UnsupportedError
from weft.compiler import Partial, Settings, libraries
from weft.megakernel import Persistent

assert cache  # a fixture


def drawn(seed: int, kind):
    """A program in tiles of some size, the ranks, how it runs, and two numbers of rows."""
    chooser = random.Random(seed)
    num_ranks = chooser.choice([1, 2, 3])
    made = kind(seed, num_ranks)
    how = Persistent(num_workers=chooser.randint(1, 4))
    tiles = {
        task.name: (16, 16, 16)
        if task.kind == "matmul"
        else (chooser.choice([4, 16]), chooser.choice([4, 16]))
        for task in made.stages.tasks["place"].tasks
        if task.kind != "input"
    }
    made = made.options(settings=Settings(tiles=tiles if chooser.random() < 0.7 else {}))
    return made, num_ranks, how, [chooser.randint(1, 20) for _ in range(2)]


def compare(ranks, seed: int, kind) -> None:
    made, num_ranks, how, rows = drawn(seed, kind)
    placed = made.stages.tasks["place"]

    def main():
        world = weft.init()
        for m in rows:
            whole = global_inputs(placed, {"m": m}, seed)
            mine = [
                of_rank(placed.task(name).type, one, {"m": m}, world.rank, num_ranks)
                for name, one in whole.items()
            ]
            given = {"world": world, "m": m}
            got = made.options(lowering=how)(*mine, **given)
            got = got if isinstance(got, tuple) else (got,)
            for name, result, want in zip(placed.results, got, libraries.reference(placed, whole)):
                type_ = placed.task(name).type
                if type_.placement == Partial():
                    result = world_sum(world, result)
                else:
                    want = of_rank(type_, want, {"m": m}, world.rank, num_ranks)
                torch.testing.assert_close(result, want, rtol=1e-3, atol=1e-3)
        world.close()

    ranks(main, num_ranks)


def world_sum(world, summand: torch.Tensor) -> torch.Tensor:
    """What the ranks' summands come to."""
    import weft.ops

    return weft.ops.all_reduce(summand.contiguous(), world=world)


@pytest.mark.parametrize("seed", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 5))])
def test_layers(ranks, seed):
    compare(ranks, seed, random_layers)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40, 44))
def test_programs(ranks, seed):
    try:
        compare(ranks, seed, random_program)
    except UnsupportedError as refused:
        assert "over columns is not made of tasks" in str(refused)
