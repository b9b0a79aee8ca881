"""Tiles cover what a rank has, and depend on exactly those tiles that hold what they need."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import ConfigError
from weft.compiler import Shard, Tensor, all_gather, reduce_scatter, silu_mul
from weft.compiler.frontend import trace
from weft.compiler.passes.place import place
from weft.compiler.passes.tile import (
    Region,
    Tile,
    dependencies,
    held_by,
    needed_of,
    region_of,
    tile,
    tiles_of,
)
from weft.ir import task as ir
from weft.ir.task import KINDS, Along, Need


def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


def placed(k: int = 6, f: int = 8, n: int = 5):
    parameters = {
        "x": Tensor("float32", ("m", k), Shard(0)),
        "w1": Tensor("float32", (k, 2 * f), Shard(1)),
        "w2": Tensor("float32", (f, n), Shard(0)),
    }
    return place(trace(mlp, "tp", parameters))


def cells(region: Region) -> set[tuple[int, int]]:
    rows, columns = range(*region[:2]), range(*region[2:])
    return set(product(rows, columns))


TASKS = ("gathered", "product", "gated", "product_2", "scattered")
extents = st.tuples(st.integers(1, 5), st.integers(1, 5))


@settings(max_examples=25)
@given(
    st.integers(0, 9), st.integers(1, 4), st.fixed_dictionaries(dict.fromkeys(TASKS, extents))
)  # fmt: skip
def test_dependencies_are_those_of_elements(m: int, num_ranks: int, cut: dict):
    """Held against regions met element by element, over all pairs of tiles."""
    program = tile(placed(f=2 * num_ranks), cut)
    sizes = {"m": m}
    needs = dependencies(program, sizes, num_ranks)
    for one, producers in needs.items():
        task = program.task(one.task)
        region = region_of(task, one, sizes, num_ranks)
        expected = set()
        for need in task.needs:
            operand = program.task(need.operand)
            wanted = cells(needed_of(need, region, operand.type, sizes))
            for rank in range(num_ranks) if KINDS[task.kind].is_collective else [one.rank]:
                if operand.kind != "input":
                    expected |= {
                        other
                        for other in tiles_of(operand, rank, sizes, num_ranks)
                        if wanted & cells(region_of(operand, other, sizes, num_ranks))
                    }
        assert set(producers) == expected and len(producers) == len(expected)


@settings(max_examples=25)
@given(st.integers(0, 40), st.integers(1, 5), extents)
def test_tiles_cover_what_a_rank_has_once(m: int, num_ranks: int, cut: tuple[int, int]):
    program = tile(placed(), {"product": cut})
    task = program.task("product")
    for rank in range(num_ranks):
        covered = [
            cell
            for one in tiles_of(task, rank, {"m": m}, num_ranks)
            for cell in cells(region_of(task, one, {"m": m}, num_ranks))
        ]
        held = cells(held_by(task.type, rank, {"m": m}, num_ranks))
        assert len(covered) == len(held) and set(covered) == held


def test_the_ir_says_what_a_tile_needs():
    program = tile(placed(), {"gated": (4, 2)})
    gated = program.task("gated")
    assert gated.tile == (4, 2) and gated.needs == (Need("product", (Along(0), Along(1, 2))),)
    assert ir.check(program) == [] and ir.parse(ir.show(program)) == program


def test_dependencies_by_hand():
    """Two ranks with 8 of 16 columns of the product: a gated column needs two of them."""
    program = tile(placed(), {"product": (2, 3), "gated": (4, 2), "scattered": (9, 9)})
    needs = dependencies(program, {"m": 5}, 2)
    # Rows 4 and columns 4 + 2 and 4 + 3 of rank 1: columns 12 to 15, the tiles from 11 and 14 on.
    found = needs[Tile("gated", 1, 1, 1)]
    assert found == (Tile("product", 1, 2, 1), Tile("product", 1, 2, 2))
    # Rank 1's part of the sum, rows 3 and 4, needs every rank's summand.
    assert needs[Tile("scattered", 1, 0, 0)] == tuple(
        Tile("product_2", rank, 0, 0) for rank in range(2)
    )


def test_extents_that_are_none():
    with pytest.raises(ConfigError, match="extents for h, but its tasks are gathered, product"):
        tile(placed(), {"h": (4, 4)})
    with pytest.raises(ConfigError, match=r"product has tile=\(4, 0\)"):
        tile(placed(), {"product": (4, 0)})
