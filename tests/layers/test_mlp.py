"""The feed-forward part of a layer: gated and plain, by the names of ordinary modules."""

from __future__ import annotations

import pytest
import torch
from ordinary import MLP
from parallel import check
from torch import nn

import weft
from weft.layers import ParallelMLP


def plain():
    return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))


@pytest.mark.few(1)
@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    ("num_ranks", "make", "shape"),
    [(2, MLP, (2, 5, 8)), (3, MLP, (1, 1, 8)), (3, plain, (4, 8)), (2, plain, (0, 8)),
     (2, lambda: MLP(bias=True), (3, 8))],
)  # fmt: skip
def test_as_the_ordinary_module(ranks, num_ranks, make, shape, split):
    check(ranks, num_ranks, make, ParallelMLP.from_module, shape, split)


def test_mistakes_say_values_place_and_remedy(ranks):
    def main():
        with weft.init() as world:
            with pytest.raises(weft.ShapeError, match="ParallelMLP: inner=10 over 3 ranks"):
                ParallelMLP(4, 10, world)
            with pytest.raises(weft.UsageError, match=r"Sequential has none of .*gate_proj"):
                ParallelMLP.from_module(nn.Sequential(), world)

    ranks(main, 3)


def test_a_state_dict_that_lacks_a_part_is_refused_by_name(ranks):
    def main():
        with weft.init() as world:
            mlp = ParallelMLP(4, 6, world)
            state = mlp.state_dict()
            assert {"gate_proj.weight", "up_proj.weight", "down_proj.weight"} == set(state)
            del state["gate_proj.weight"]
            with pytest.raises(RuntimeError, match=r"up\.weight"):
                mlp.load_state_dict(state)

    ranks(main, 2)


@pytest.mark.slow
@pytest.mark.parametrize("split", [False, True])
def test_in_one_graph_of_torch_compile(ranks, split):
    def parallel(module, world, activations):
        layer = ParallelMLP.from_module(module, world, activations)
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True)
        return layer

    check(ranks, 2, MLP, parallel, (5, 8), split)


@pytest.mark.parametrize("split", [False, True])
def test_recorded_and_replayed(ranks, split):
    def main():
        with weft.init() as world, torch.no_grad():
            lie = weft.layers.Activations(world, 0 if split else float("inf"))
            mlp = ParallelMLP(8, 12, world, activations=lie)
            x = torch.randn(6, 8, device=world.device)
            for _ in range(3):
                want = lie.leave(mlp(lie.enter(x)))
            with world.record() as recording:
                got = lie.leave(mlp(lie.enter(x)))
            want = want.clone()
            got.zero_()
            recording.replay()
            world.synchronize()
            assert torch.equal(got, want)

    ranks(main, 2)
