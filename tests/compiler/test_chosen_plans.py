"""Every plan that the compiler chooses can run: layers x rows x ranks x targets are lowered."""

from __future__ import annotations

from dataclasses import replace

import operators
import pytest
from operators import of_type

from weft.base.errors import ConfigError
from weft.base.target import parse_target
from weft.compiler import Compiled, Shard, program
from weft.compiler.cost import choose
from weft.compiler.facts import Facts
from weft.compiler.lower import kernels
from weft.compiler.pipeline import Stages
from weft.ir import core
from weft.ir.device import Launch
from weft.plan.product_launches import PLAIN_STAGES, PLAIN_WARPS
from weft.tiles import gemm_sm90, multiply_sm90
from weft.tiles.blocking import Blocking

# Hidden and inner sizes; the last one's columns divide by no tile.
LAYERS = {
    "qwen3-8b": (4096, 12288), "llama3-8b": (4096, 14336), "llama3-70b": (8192, 28672),
    "qwen3-32b": (5120, 25600), "llama3-405b": (16384, 53248), "gpt-oss-20b": (2880, 2880),
}  # fmt: skip
ROWS = (1, 16, 64, 128, 256, 384, 512, 768, 1024, 2048, 3988, 4096, 8192, 16384)
RANKS = (1, 2, 4, 8)
TARGETS = ("cuda:80", "cuda:100", "hip:gfx942", "hip:gfx950", "emu")


def declared(layer: str, function) -> Compiled:
    hidden, inner = LAYERS[layer]
    rows, columns = of_type("m", hidden, Shard(0)), of_type(hidden, 2 * inner, Shard(1))
    inner_rows, down = of_type("m", inner, Shard(1)), of_type(inner, hidden, Shard(0))
    parameters = {
        operators.mlp: {"x": rows, "w1": columns, "w2": down},
        operators.ag_gemm: {"a": rows, "b": columns},
        operators.gemm_rs: {"a": inner_rows, "b": down},
        operators.gemm_ar: {"a": inner_rows, "b": down},
    }[function]
    return program(mesh="tp", **parameters)(function)


FUNCTIONS = (operators.mlp, operators.ag_gemm, operators.gemm_rs, operators.gemm_ar)


def lowers(stages: Stages, facts: Facts) -> list[tuple[int, ...]]:
    """The tiles of the plan's products, each of which a template takes and the target can hold."""
    found = []
    generated = kernels.lower(stages.plan)
    for launch in stages.plan.of(Launch):
        if launch.template != "gemm":
            continue
        assert launch.kernel in generated
        tile_m, tile_n, tile_k = launch.tile
        target = facts.target
        if target.name == "cuda:90" and gemm_sm90.has_tile(launch.tile):
            most = gemm_sm90.most_stages(*launch.tile, target)
            gemm_sm90.check(launch.kernel, *launch.tile, most, target)
        columns = multiply_sm90.wide_columns(tile_n)
        plain = Blocking(tile_m, columns, tile_k, PLAIN_WARPS, PLAIN_STAGES)
        plain.check(launch.kernel, "bfloat16", "bfloat16", False, target)
        found.append(launch.tile)
    if stages.recorded is not None:
        found += lowers(stages.recorded, facts)
    return found


def sweep(layer: str, rows=ROWS, ranks=RANKS, target: str = "cuda:90", nodes: int = 1) -> set:
    """The tiles of all plans that are chosen for a layer."""
    found: set = set()
    for function in (operators.mlp, operators.ag_gemm, operators.gemm_rs, operators.gemm_ar):
        one = declared(layer, function)
        for m in rows:
            for num_ranks in ranks:
                on = (num_ranks // nodes,) * nodes if nodes > 1 else ()
                facts = Facts({"m": m}, num_ranks, parse_target(target), on)
                found.update(lowers(one.overlapped(facts), facts))
    return found


def test_plans_of_a_few_layers_can_run():
    found = set()
    for layer in ("qwen3-8b", "llama3-8b"):
        found |= sweep(layer, rows=(1, 128, 512, 8192), ranks=(2, 4))
    assert {(128, 128, 64), (128, 256, 64)} <= found


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:90", *TARGETS])
@pytest.mark.parametrize("layer", LAYERS)
def test_all_plans_of_a_layer_can_run(layer, target):
    assert sweep(layer, target=target)


@pytest.mark.slow
@pytest.mark.parametrize("layer", LAYERS)
def test_all_plans_over_two_nodes_can_run(layer):
    sweep(layer, ranks=(2, 4, 8), nodes=2)


def test_a_candidate_is_what_the_template_takes(monkeypatch):
    """What generates candidates asks the rule by which kernels are refused."""
    odd = replace(gemm_sm90.MIDDLE, tile_n=144)
    monkeypatch.setattr(choose, "HOPPER_CUTS", (odd, *choose.PLAIN_CUTS))
    one = declared("qwen3-8b", operators.ag_gemm)
    facts = Facts({"m": 8192})
    assert lowers(one.overlapped(facts), facts) == [(128, 256, 64)]
    assert core.wrong_tile("gemm", (128, 144, 64), is_static=True)


@pytest.mark.parametrize(
    ("function", "tile", "told"),
    [
        (operators.ag_gemm, (128, 144, 64), "product has tile=.128, 144, 64.; it takes 3 extents"),
        (operators.ag_gemm, (100, 128, 64), "each a power of two from 16 on; columns may also be"),
        (operators.gemm_rs, (128, 144, 64), "product has tile=.128, 144, 64.; it takes 3 extents"),
        (operators.gemm_rs, (8, 128), "product has tile=.8, 128, 64."),
    ],
)
def test_a_tile_that_no_template_takes_is_refused_at_the_users_line(function, tile, told):
    with pytest.raises(ConfigError, match=told) as caught:
        operators.compiled(function, tiles={"product": tile})
    frame = caught.value.place.outermost
    assert frame is not None and frame.file == operators.__file__


def test_a_tile_of_rows_and_columns_keeps_the_k_that_was_chosen():
    found = operators.compiled(operators.ag_gemm, m=2048, tiles={"product": (128, 192)})
    assert found.program.task("product").tile == (128, 192, 64)
    assert kernels.lower(found.plan)
