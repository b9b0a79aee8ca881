"""Gate and up side by side, as checkpoints have them: all lowerings, gradients, what is refused."""

from __future__ import annotations

import pytest
import torch
from random_programs import global_inputs, of_rank
from test_gradients import check
from test_unfused import run

import weft
import weft.megakernel
from weft.base.dtypes import tolerance
from weft.base.errors import PlacementError, ShapeError
from weft.compiler import (
    Halves,
    Replicate,
    Settings,
    Shard,
    Tensor,
    all_gather,
    gather_rows,
    grouped_matmul,
    libraries,
    moe_route,
    program,
    reduce_scatter,
    scatter_rows,
    silu,
    silu_mul,
)
from weft.compiler.binding import check_pairs

K, F = 12, 12


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def of(*sizes) -> Tensor:
    return Tensor("fp32", sizes[:-1], sizes[-1])


@program(mesh="tp", x=of("m", K, Shard(0)), w1=of(K, 2 * F, Halves(1)), w2=of(F, K, Shard(0)))
def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1, side_by_side=True) @ w2)


def test_the_meaning_is_that_of_the_checkpoint():
    """Of global tensors: gate is the first half of the columns; no rank is asked for."""
    inputs = global_inputs(mlp.stages.program, {"m": 5}, 0)
    (found,) = libraries.reference(mlp.stages.program, inputs)
    gate, up = (inputs["x"] @ inputs["w1"]).chunk(2, dim=1)
    assert torch.allclose(found, torch.nn.functional.silu(gate) * up @ inputs["w2"], atol=1e-4)


def test_a_rank_has_its_part_of_both():
    checkpoint = torch.arange(24.0)[None]
    kind = of(1, 24, Halves(1))
    assert of_rank(kind, checkpoint, {}, 1, 3)[0].tolist() == [4, 5, 6, 7, 16, 17, 18, 19]


@pytest.mark.few(2)
@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("lowering", ["unfused", "overlapped"])
def test_it_is_right(ranks, num_ranks, lowering):
    def main():
        with weft.init() as world:
            for m in (7, 1, 12):
                run(world, mlp, {"m": m}, seed=m, lowering=lowering)

    ranks(main, num_ranks)


@pytest.mark.few(1)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_persistent_kernel(ranks, num_ranks):
    """In tiles that the columns of gate do not divide into, and chosen ones."""
    small = mlp.options(settings=Settings(tiles={"gated": (4, 4), "product": (16, 16, 16)}))

    def main():
        with weft.init() as world:
            whole = global_inputs(mlp.stages.program, {"m": 9}, 1)
            (want,) = libraries.reference(mlp.stages.program, whole)
            for made in (mlp, small):
                kinds = {one.name: one.type for one in made.stages.program.tasks}
                mine = [of_rank(kinds[name], one, {"m": 9}, world.rank, num_ranks)
                        for name, one in whole.items()]  # fmt: skip
                got = made.options(lowering="persistent")(*mine, world=world, m=9)
                part = of_rank(kinds["scattered"], want, {"m": 9}, world.rank, num_ranks)
                assert (got - part).norm() <= tolerance("float32", 64) * part.norm()

    ranks(main, num_ranks)


def test_gradients(ranks):
    def main():
        with weft.init() as world:
            for lowering in ("unfused", "overlapped"):
                check(world, mlp, {"m": 7}, 3, lowering)

    ranks(main, 2)


def test_a_mixture_of_experts(ranks):
    @program(
        mesh="tp", x=of("m", K, Shard(0)), logits=of("m", 3, Shard(0)),
        up=of(3, K, 2 * F, Halves(2)), down=of(3, F, K, Shard(1)),
    )  # fmt: skip
    def mixture(x, logits, up, down):
        routing = moe_route(logits, top_k=2)
        h = grouped_matmul(gather_rows(all_gather(x), routing), up, routing)
        y = grouped_matmul(silu_mul(h, side_by_side=True), down, routing)
        return reduce_scatter(scatter_rows(y, routing))

    def main():
        with weft.init() as world:
            run(world, mixture, {"m": 8}, seed=2, lowering="overlapped")

    ranks(main, 2)


def test_weights_that_all_ranks_have():
    @program(mesh="tp", x=of("m", K, Shard(0)), w=of(K, 2 * F, Replicate()))
    def alone(x, w):
        return silu_mul(x @ w, side_by_side=True)

    assert alone.stages.program.task("gated").type == of("m", F, Shard(0))


def test_halves_may_be_worked_on_before():
    @program(mesh="tp", x=of("m", K, Replicate()), w=of(K, 2 * F, Halves(1)))
    def scaled(x, w):
        h = x @ w
        return silu_mul(silu(h) * h, side_by_side=True)

    assert scaled.stages.program.task("gated").type == of("m", F, Shard(1))


def declared(placement, side_by_side: bool):
    @program(mesh="tp", x=of("m", K, Shard(0)), w=of(K, 2 * F, placement))
    def one(x, w):
        return silu_mul(all_gather(x) @ w, side_by_side=side_by_side)


def test_the_other_form_is_refused_with_the_remedy():
    """Columns of gate and of up would be taken for each other's."""
    with pytest.raises(PlacementError, match=r"declare the weight that it is made of @ Halves.1."):
        declared(Shard(1), side_by_side=True)
    with pytest.raises(PlacementError, match=r"silu_mul\(product, side_by_side=True\)"):
        declared(Halves(1), side_by_side=False)


def test_halves_that_ranks_cannot_share():
    with pytest.raises(ShapeError, match="of 24 on 5 ranks each has 5; take a width of which each"):
        check_pairs(mlp.stages.program, {"m": 5}, 5)
    check_pairs(mlp.stages.program, {"m": 5}, 4)
