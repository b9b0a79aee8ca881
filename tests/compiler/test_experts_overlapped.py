"""Mixtures of experts that overlap: kernels by tables, run and held against what they mean."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from composed_kernels import GOLDEN
from ir_reader import read
from random_programs import of_rank, random_experts
from test_experts import E, K, chosen, dispatched, layer, split
from test_unfused import run

import weft
from weft.base.errors import ConfigError, ShapeError
from weft.base.target import TARGETS
from weft.compiler import (
    Facts,
    Settings,
    Shard,
    Tensor,
    Times,
    grouped_matmul,
    moe_route,
    reduce_scatter,
    scatter_rows,
)
from weft.compiler.lower import kernels, source
from weft.compiler.lower.signature import Specialised, record
from weft.compiler.pipeline import overlap
from weft.ir import core, device
from weft.ir.device import Call, Channel, Launch
from weft.language import triton_api
from weft.verify import compiled as compiled_check

TILES = {"products": (16, 16, 16), "products_2": (16, 16, 16)}


def stages_of(compiled, num_ranks: int = 2, **settings):
    facts = Facts({"m": 40}, num_ranks, TARGETS["emu"])
    return overlap(compiled.stages.tasks["place"], facts, Settings(**settings))


def test_a_layer_is_a_router_and_three_kernels():
    plan = stages_of(layer(), tiles=TILES).plan
    assert [one.function for one in plan.of(Call)] == ["moe_route"]
    first, second, third = plan.of(Launch)
    assert [do.kind for do in first.body] == [
        "all_gather", "gather_rows", "grouped_matmul", "silu_mul",
    ]  # fmt: skip
    assert [do.kind for do in second.body] == ["grouped_matmul"]
    assert [do.kind for do in third.body] == ["scatter_rows", "reduce_scatter"]
    assert plan.of(Call)[0].tile_rows == first.tile[0] == 16
    assert [one.table for one in plan.of(Channel)] == ["routing", ""]


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "engine"), [(1, "feed"), (3, "feed"), (3, "ce_push")])
def test_a_layer_equals_its_reference(ranks, num_ranks: int, engine: str):
    """Ragged m, fewer tokens than ranks, none; one slot for all calls."""
    settings = Settings(tiles=TILES, engines={"gathered": engine})
    compiled = layer().options(settings=settings)

    def main():
        world = weft.init()
        for m in (7, 1, 0, 37):
            run(world, compiled, {"m": m}, seed=m, lowering="overlapped")
        world.close()

    ranks(main, num_ranks)


def test_ranks_with_fewer_columns_than_others_read_no_more(ranks):
    """Of 16 columns three ranks have 6, 6 and 4."""

    @weft.program(
        mesh="tp", x=Tensor("float32", (Times("m", 2), 16), Shard(1)),
        logits=Tensor("float32", ("m", E), Shard(0)), b=Tensor("float32", (E, 16, K), Shard(1)),
    )  # fmt: skip
    def down(x, logits, b):
        routing = moe_route(logits, top_k=2)
        return reduce_scatter(scatter_rows(grouped_matmul(x, b, routing), routing))

    compiled = down.options(settings=Settings(tiles={"products": (16, 16, 16)}))
    ranks(lambda: run(weft.init(), compiled, {"m": 7}, seed=1, lowering="overlapped"), 3)


def test_of_whole_experts_it_is_the_same_kernels_by_own_tables():
    plan = stages_of(split(), tiles=TILES).plan
    assert [one.function for one in plan.of(Call)] == ["ep_route"]
    kinds = [
        [do.kind for do in one.body] for one in stages_of(layer(), tiles=TILES).plan.of(Launch)
    ]
    assert [[do.kind for do in one.body] for one in plan.of(Launch)] == kinds


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "experts", "engine", "lowering"),
    [
        (2, 4, "feed", "overlapped"), (3, 4, "ce_push", "overlapped"),
        (3, 2, "feed", "overlapped"), (3, 2, "feed", "unfused"),
        *(pytest.param(*one, marks=pytest.mark.slow)
          for one in ((1, 4, "feed", "overlapped"), (2, 4, "feed", "unfused"))),
    ],
)  # fmt: skip
def test_whole_experts(ranks, num_ranks: int, experts: int, engine: str, lowering: str):
    """Of all, fewer than ranks have, or two alone: the last rank has none."""
    compiled = split(experts).options(settings=Settings(tiles=TILES, engines={"gathered": engine}))

    def main():
        world = weft.init()
        for m in (7, 0, 37):
            run(world, compiled, {"m": m}, seed=m, lowering=lowering)
        world.close()

    ranks(main, num_ranks)


@pytest.mark.slow
def test_experts_without_tokens_and_the_same_bits_in_every_run(ranks):
    """All to one rank's experts, none to the first; whatever the schedule. Two nodes."""
    compiled = layer().options(settings=Settings(tiles=TILES))
    placed = compiled.stages.program

    def main():
        world = weft.init()
        generator, outs = torch.Generator().manual_seed(5), []
        for which in ("last", "ends"):
            whole = {
                one.name: torch.randn(
                    [19 if size == "m" else size for size in one.type.sizes], generator=generator
                )
                for one in placed.tasks
                if one.kind == "input"
            }
            whole["logits"] = chosen(19, which)
            parts = [
                of_rank(placed.task(name).type, tensor, {"m": 19}, world.rank, world.num_ranks)
                for name, tensor in whole.items()
            ]
            given = {"world": world, "m": 19}
            unfused = compiled.options(lowering="unfused")
            outs.append(compiled(*parts, **given))
            torch.testing.assert_close(outs[-1], unfused(*parts, **given), rtol=1e-4, atol=1e-4)
        world.close()
        return torch.stack(outs)

    found = [ranks(main, 2, seed=seed) for seed in range(2)]
    assert all(map(torch.equal, *found))
    ranks(main, 2, nodes=2)


def test_experts_on_other_ranks_beside_what_overlaps(ranks):
    """Nothing of it is fused: the operators' calls, with a router within."""
    compiled = dispatched()
    assert not stages_of(compiled).plan.of(Launch)

    def main():
        world = weft.init()
        for m in (9, 2):
            run(world, compiled, {"m": m}, seed=m, lowering="overlapped")
        world.close()

    ranks(main, 2)


def several(ranks, seeds, num_ranks: int) -> set[str]:
    """Random layers in tiles of 16; gives the templates that were run."""
    programs, found = [], set()
    for seed in seeds:
        compiled = random_experts(seed, num_ranks)
        placed = compiled.stages.program
        tiles = {one.name: (16, 16, 16) for one in placed.tasks if one.kind == "grouped_matmul"}
        programs.append((seed, compiled.options(settings=Settings(tiles=tiles))))
        found |= {one.template for one in stages_of(compiled, num_ranks).plan.of(Launch)}

    def main():
        world = weft.init()
        for seed, compiled in programs:
            for m in (seed % 3 + 1, 17 + seed % 5):
                run(world, compiled, {"m": m}, seed, lowering="overlapped")
        world.close()

    ranks(main, num_ranks)
    return found


@pytest.mark.slow
def test_random_layers(ranks):
    assert several(ranks, range(2), 2) == {"grouped", "rows"}


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_many_random_layers(ranks, num_ranks: int):
    several(ranks, range(1000 * num_ranks, 1000 * num_ranks + 6), num_ranks)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"tiles": {"products": (32, 16, 16), "products_2": (16, 16, 16)}},
         "routing is cut for tiles of one height; rows of tiles are of products 32, products_2 16"),
        ({"engines": {"gathered": "sm_push"}},
         "all_gather gathered has engine=sm_push; .* have feed"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_for(settings, told: str):
    with pytest.raises(ConfigError, match=told) as caught:
        stages_of(layer(), **settings)
    assert caught.value.place.frames


@pytest.mark.slow
def test_weights_lie_either_way_and_no_other(ranks):
    """[experts, n, k] transposed, as weights usually lie; every other column of something wider."""
    compiled = layer().options(settings=Settings(tiles=TILES))

    def main():
        world = weft.init()
        generator = torch.Generator().manual_seed(3)
        x, logits, w1, w2 = (
            torch.randn(shape, generator=generator)
            for shape in ((9, K), (9, E), (E, K, 24), (E, 12, K))
        )
        given = {"world": world, "m": 9}
        wanted = compiled(x, logits, w1, w2, **given)
        turned = [one.mT.contiguous().mT for one in (w1, w2)]
        torch.testing.assert_close(compiled(x, logits, *turned, **given), wanted)
        wide = torch.zeros(E, K, 48)
        wide[:, :, ::2] = w1
        with pytest.raises(ShapeError, match=r"w1 of shape .* pass w1\.contiguous\(\)"):
            compiled(x, logits, wide[:, :, ::2], w2, **given)
        world.close()

    ranks(main, 1)


def test_libraries_where_they_are_asked_for_or_a_rank_would_have_nothing():
    asked = stages_of(layer(), engines={"scattered": "library"}).plan
    assert len(asked.of(Launch)) == 1
    # Of 24 columns the last of 25 ranks has none.
    assert not stages_of(layer(), num_ranks=25).plan.of(Launch)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:90", "cuda:100", "hip:gfx942"])
def test_kernels_compile_and_their_waits_hold(target: str):
    plan = read(device, (GOLDEN / "moe.plan").read_text())
    stages = 2 if target.startswith("hip") else 3
    given = {
        "plain": Specialised("bfloat16", (128, 128, 64), 4, num_warps=8, num_stages=stages),
        "sm90": Specialised("bfloat16", (128, 256, 64), 4, num_warps=4, num_stages=4),
    }
    for kernel in kernels.lower(plan).values():
        variants = source.load(kernel)
        is_rows = kernel.of(core.Template)[0].function == "rows"
        assert (variants.sm90 is None) == is_rows
        for variant in ("plain", "sm90") if target == "cuda:90" and not is_rows else ("plain",):
            cut = replace(given[variant], tile=(2, 4096)) if is_rows else given[variant]
            made = record(kernel, variant, cut)
            binary = triton_api.compile_kernel(getattr(variants, variant), made, TARGETS[target])
            report = compiled_check(binary, TARGETS[target])
            assert report.ok, str(report)
            assert "ld.local" not in binary.asm.get("ptx", "")
