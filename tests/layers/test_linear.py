"""Linear layers: as torch's, forward and backward, however rows lie."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from parallel import check, close, drawn, seeded
from torch import nn

import weft
from weft.base.target import TARGETS
from weft.layers import Activations, ColumnParallelLinear, RowParallelLinear, split_from


class Pair(nn.Module):
    """What both are used for: columns, then sums of them."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12, bias=bias), nn.Linear(12, 8, bias=bias)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def in_parallel(pair, world, activations):
    pair.up = ColumnParallelLinear.from_module(pair.up, world, activations)
    pair.down = RowParallelLinear.from_module(pair.down, world, activations)
    return pair


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "shape", "split"),
    [(1, (3, 8), True), (2, (2, 3, 8), False), (2, (1, 8), True), (2, (0, 8), True),
     (2, (0, 8), False), (3, (7, 8), True)],
)  # fmt: skip
def test_as_torchs(ranks, num_ranks, shape, split):
    check(ranks, num_ranks, Pair, in_parallel, shape, split)


@pytest.mark.slow
def test_without_a_bias_in_three_dimensions_that_ranks_do_not_divide(ranks):
    check(ranks, 3, lambda: Pair(bias=False), in_parallel, (2, 1, 2, 8), True)


def test_parts_of_a_dtensor(ranks):
    """However it lies: as the layer needs it, or not."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    def main():
        with weft.init() as world:
            mesh = init_device_mesh("cpu", (2,))
            x, plain = drawn(4, 8), seeded(Pair)
            want = plain(x)
            for place in (Shard(0), Shard(1), Replicate()):
                pair = seeded(Pair)
                for one in (pair.up, pair.down):
                    one.weight = nn.Parameter(distribute_tensor(one.weight.data, mesh, [place]))
                close(in_parallel(pair, world, Activations(world))(x), want)

    ranks(main, 2)


def test_what_is_frozen_stays_so(ranks):
    def main():
        with weft.init() as world:
            linear = nn.Linear(4, 4).requires_grad_(False)
            for kind in (ColumnParallelLinear, RowParallelLinear):
                assert not any(
                    p.requires_grad for p in kind.from_module(linear, world).parameters()
                )

    ranks(main, 2)


def test_mistakes_say_values_place_and_remedy(ranks):
    def main():
        with weft.init() as world:
            with pytest.raises(weft.ShapeError, match="out_features=7 over 3 ranks leaves 1"):
                ColumnParallelLinear(4, 7, world)
            with pytest.raises(weft.ShapeError, match="in_features=4 .* take a world of 1, 2, 4"):
                RowParallelLinear.from_module(nn.Linear(4, 7), world)
            with pytest.raises(weft.UsageError, match=r"torch.nn.Linear, not of Conv1d"):
                RowParallelLinear.from_module(nn.Conv1d(1, 1, 1), world)
            lie = Activations(world, 0)
            layer = ColumnParallelLinear(4, 6, world, activations=lie)
            with pytest.raises(weft.UsageError, match=r"call enter\(x\)"):
                lie.own(torch.ones(2, 4), "here")
            lie.begin((5,))
            with pytest.raises(weft.ShapeError, match="x has 5 rows on rank ., but of the 5 rows"):
                layer(torch.ones(5, 4))
            with pytest.raises(weft.ShapeError, match=r"\(2, 5\), but the weight .* \[.., 4\]"):
                layer(torch.ones(2, 5))

    ranks(main, 3)


def test_few_rows_are_alike_and_many_are_split(ranks):
    def main():
        with weft.init() as world:
            lie = Activations(world, split_from(world, 4096, 14336, torch.bfloat16))
            found = []
            for shape in ((1,), (1, 1 << 16)):
                lie.begin(shape)
                found.append(lie.is_split)
            return found

    assert ranks(main, 2) == [[False, True]] * 2
    assert ranks(main, 1) == [[False, False]]


@pytest.mark.parametrize(
    ("target", "least", "most"), [("cuda:90", 256, 8192), ("cuda:100", 512, 512)]
)
def test_from_where_rows_are_split_is_predicted_where_a_machine_was_measured(target, least, most):
    seats = SimpleNamespace(nodes=(0,) * 4)
    world = SimpleNamespace(
        target=TARGETS[target], num_ranks=4, backend=SimpleNamespace(seats=seats)
    )
    assert least <= split_from(world, 4096, 14336, torch.bfloat16) <= most
