"""Tiles that are chosen: powers of two, as many as keep workers busy, and no worse than others."""

from __future__ import annotations

from math import ceil

import pytest
from persistent_programs import tiled, tiled_mlp

from weft.compiler import Replicate, Shard, Tensor, all_reduce, rms_norm, silu_mul
from weft.megakernel.extents import chosen

WORKERS = 132


def layer(x, weight, up, down):
    return all_reduce(silu_mul(rms_norm(x, weight) @ up) @ down) + x


def layer_of(hidden: int, inner: int):
    """As the pass `tile` cuts it."""
    return tiled(layer, {
        "x": Tensor("bfloat16", ("m", hidden), Replicate()),
        "weight": Tensor("bfloat16", (1, hidden), Replicate()),
        "up": Tensor("bfloat16", (hidden, 2 * inner), Shard(1)),
        "down": Tensor("bfloat16", (inner, hidden), Shard(0)),
    }, default=(128, 128))  # fmt: skip


def tiles_of(program) -> dict[str, tuple[int, ...]]:
    return {task.name: task.tile for task in program.tasks if task.kind != "input"}


@pytest.mark.parametrize("m", [0, 1, 16, 200])
def test_tiles_are_powers_of_two(m: int):
    """At sizes of llama3-8b on four ranks."""
    found = chosen(layer_of(4096, 14336), {"m": m}, 4, WORKERS)
    for cut in tiles_of(found).values():
        assert all(extent & (extent - 1) == 0 for extent in cut)


def test_few_rows_are_cut_by_columns_and_many_into_large_tiles():
    program = layer_of(4096, 14336)
    few, many = (tiles_of(chosen(program, {"m": m}, 4, WORKERS)) for m in (16, 8192))
    assert few["product"][0] == 16 and ceil(7168 / few["product"][1]) >= 0.8 * WORKERS
    assert ceil(4096 / few["product_2"][1]) >= 0.8 * WORKERS
    assert many["product"] == (128, 128, 64)
    # Steps over k are as long as narrow tiles leave room for.
    assert few["product_2"][2] == 256


def test_what_is_settled_stays():
    program = tiled_mlp(extents={"product": (32, 16)})
    found = chosen(program, {"m": 64}, 2, WORKERS, settled=("product",))
    assert tiles_of(found)["product"] == (32, 16)
    assert tiles_of(found)["product_2"] != tiles_of(program)["product_2"]


def test_tiles_are_no_larger_than_need_be():
    found = tiles_of(chosen(tiled_mlp(), {"m": 5}, 2, WORKERS))
    assert found["product"][:2] == (16, 32) and found["product"][2] == 32
    assert found["gathered"][0] == 16
