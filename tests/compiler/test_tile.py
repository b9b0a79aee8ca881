"""Tiles cover what a rank has, and depend on exactly those tiles that hold what they need."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ir_reader import read

from weft.base.errors import ConfigError
from weft.compiler import Shard, Tensor, all_gather, reduce_scatter, silu_mul
from weft.compiler.frontend import trace
from weft.compiler.passes.place import place
from weft.compiler.passes.tile import (
    Region,
    Tile,
    held_by,
    meeting,
    needed_of,
    region_within,
    tile,
    tiles_within,
)
from weft.ir import task as ir
from weft.ir import task_rules
from weft.ir.kinds import Along, Need


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
@given(st.integers(0, 40), st.integers(1, 5), extents)
def test_tiles_cover_what_a_rank_has_once(m: int, num_ranks: int, cut: tuple[int, int]):
    program = tile(placed(), {"product": cut})
    task = program.task("product")
    for rank in range(num_ranks):
        held = held_by(task.type, rank, {"m": m}, num_ranks)
        covered = [
            cell
            for one in tiles_within(task, rank, held)
            for cell in cells(region_within(task, one, held))
        ]
        assert len(covered) == len(cells(held)) and set(covered) == cells(held)


def test_the_ir_says_what_a_tile_needs():
    program = tile(placed(), {"gated": (4, 2)})
    gated = program.task("gated")
    assert gated.tile == (4, 2) and gated.needs == (Need("product", (Along(0), Along(1, 2))),)
    assert task_rules.check(program) == [] and read(ir, ir.show(program)) == program


def test_dependencies_by_hand():
    """Two ranks with 8 of 16 columns of the product: a gated column needs two of them."""
    program, sizes = tile(placed(), {"product": (2, 3), "gated": (4, 2)}), {"m": 5}
    product, gated = program.task("product"), program.task("gated")
    region = region_within(gated, Tile("gated", 1, 1, 1), held_by(gated.type, 1, sizes, 2))
    # Row 4 and columns 4 + 2 and 4 + 3 of rank 1: columns 12 to 15, the tiles from 11 and 14 on.
    wanted = needed_of(gated.needs[0], region, product.type, sizes)
    assert wanted == (4, 5, 12, 16)
    found = [*meeting(product, 1, wanted, held_by(product.type, 1, sizes, 2))]
    assert found == [Tile("product", 1, 2, 1), Tile("product", 1, 2, 2)]


def test_extents_that_are_none():
    with pytest.raises(ConfigError, match="extents for h, but its tasks are gathered, product"):
        tile(placed(), {"h": (4, 4)})
    with pytest.raises(ConfigError, match=r"product has tile=\(4, 0\)"):
        tile(placed(), {"product": (4, 0)})
