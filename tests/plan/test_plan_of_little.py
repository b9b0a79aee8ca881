"""Plans called with fewer rows or columns than ranks: who meets nobody must still not be overtaken.

On one slot, with ranks that are late: only the plan's own signals keep them apart.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import weft
import weft.ops
from weft.base.dtypes import tolerance
from weft.compiler import Compiled, Settings, Shard, Tensor, all_gather, libraries, program, silu
from weft.compiler import reduce_scatter as summed
from weft.plan.starts import Starts
from weft.verify.laggards import chooser_of

sys.path.insert(0, str(Path(__file__).parents[1] / "compiler"))
from random_programs import global_inputs, of_rank

RANKS, K = 3, 16


def compiled(function: Callable, inputs: dict[str, Tensor], **engines: str) -> Compiled:
    made = program(mesh="tp", **inputs)(function)
    tasks = made.stages.program.tasks
    tiles = {one.name: (16, 16, 16) for one in tasks if one.kind == "matmul"}
    engines |= {one.name: "sm_push" for one in tasks if one.kind == "all_gather"}
    return made.options(settings=Settings(tiles=tiles, engines=engines))


def of(*sizes: int | str | Shard) -> Tensor:
    return Tensor("float32", sizes[:-1], sizes[-1])


def three_gathers() -> Compiled:
    """The third one's rows lie where the first one's lay."""
    rows = {name: of("m", K, Shard(0)) for name in ("x", "y", "z")}

    def three(x, y, z, w):
        return all_gather(x) @ w, all_gather(y) @ w, all_gather(z) @ w

    return compiled(three, rows | {"w": of(K, 3 * K, Shard(1))})


def two_products() -> Compiled:
    """Of one gather, for which the first waits."""

    def two(x, v, w):
        rows = all_gather(x)
        return rows @ v, rows @ w

    inputs = {"x": of("m", K, Shard(0)), "v": of(K, "f", Shard(1)), "w": of(K, 3 * K, Shard(1))}
    return compiled(two, inputs)


def two_layers(**engines: str) -> Compiled:
    """The second one's sums lie where the first one's lay."""

    def layers(x, v, w):
        for _ in range(2):
            x = summed(silu(all_gather(x) @ v) @ w)
        return x

    inputs = {"x": of("m", K, Shard(0)), "v": of(K, "f", Shard(1)), "w": of("f", K, Shard(0))}
    return compiled(layers, inputs, **engines)


def staged_layers() -> Compiled:
    return two_layers(scattered="ce_push", scattered_2="ce_push")


# Sizes of the calls, one after the other. Of two columns, or rows, a third rank has none.
CASES = {
    "rows": (three_gathers, [{"m": 1}, {"m": 2}, {"m": 20}, {"m": 1}]),
    "columns": (two_products, [{"m": 5, "f": 2}, {"m": 20, "f": 48}, {"m": 5, "f": 1}]),
    "layers": (two_layers, [{"m": 3, "f": 2}, {"m": 20, "f": 16}, {"m": 3, "f": 1}]),
    "carried": (staged_layers, [{"m": 3, "f": 2}, {"m": 20, "f": 16}, {"m": 1, "f": 1}]),
}


def run(made: Compiled, turns: list[dict[str, int]], seed: int) -> weft.Report:
    """All calls back to back, each against its meaning unless something is found."""
    program = made.stages.program
    data = [global_inputs(program, sizes, turn) for turn, sizes in enumerate(turns)]

    def parts(names, whole, sizes, rank):
        kinds = [program.task(name).type for name in names]
        return [of_rank(kind, one, sizes, rank, RANKS) for kind, one in zip(kinds, whole)]

    def main(rank: int) -> list[list[torch.Tensor]]:
        os.environ["WEFT_SLOTS"] = "1"  # of this emulated rank
        world = weft.init()
        given = [parts(one, one.values(), sizes, rank) for one, sizes in zip(data, turns)]
        found = [made(*mine, world=world, **sizes) for mine, sizes in zip(given, turns)]
        found = [[*one] if isinstance(one, tuple) else [one] for one in found]
        world.synchronize()
        world.close()
        return found

    chooser = chooser_of(seed)
    with weft.emulated(ranks=RANKS, seed=seed, collect=True, chooser=chooser) as session:
        results = session.run(main)
    if session.report.ok:
        for turn, (whole, sizes) in enumerate(zip(data, turns)):
            wanted = libraries.reference(program, whole)
            for rank, outs in enumerate(results):
                for got, want in zip(outs[turn], parts(program.results, wanted, sizes, rank)):
                    assert got.shape == want.shape
                    assert (got - want).norm() <= tolerance("float32", 64) * wanted[0].norm()
    return session.report


NAMES = ["rows", "columns", pytest.param("layers", marks=pytest.mark.slow)]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*NAMES, "carried"])
def test_nobody_is_overtaken(name: str) -> None:
    made, turns = CASES[name]
    for seed in range(2):
        assert run(made(), turns, seed).ok


@pytest.mark.parametrize("name", NAMES)
def test_the_wait_for_those_in_no_tile_is_needed(name: str, monkeypatch) -> None:
    monkeypatch.setattr(Starts, "_hearing", lambda *_: ())
    made, turns = CASES[name]
    found = (kind for seed in range(30) for kind in run(made(), turns, seed).findings)
    assert next(found).kind == "race"
