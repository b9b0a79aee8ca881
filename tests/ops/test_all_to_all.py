"""all_to_all: bit by bit, even and by splits, in every way it can be called."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calling import COMPILED, Caller, cases, check_kernels, one_slot_for_all, transports

import weft
from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.target import TARGETS
from weft.ops.all_to_all import Config, Problem, all_to_all, candidates, op

SHAPES = [
    {"m": 37, "n": 6, "variable": 1},
    {"m": 37, "n": 6, "variable": 0},
    {"m": 3, "n": 16, "variable": 1},
    {"m": 3, "n": 16, "variable": 0},
    {"m": 24, "n": 35, "variable": 1},
]
EVEN = [shape for shape in SHAPES if not shape["variable"]]
BY_SPLITS = [name for name in op.problem.transports if name != "ll"]


def every_case():
    """Packets move shards of one size only."""
    found = cases(op, EVEN)
    return [
        *(one for one in found if one.values[1] == "ll"),
        *(one for one in cases(op, SHAPES) if one.values[1] != "ll"),
    ]


@pytest.mark.few(2)
@pytest.mark.parametrize(("nodes", "transport", "shape"), every_case())
def test_every_way_of_calling(ranks, nodes, transport, shape):
    ranks(Caller(op, nodes, transport).every_way(shape, "bfloat16"), sum(nodes), nodes=nodes)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(3,), (2, 1)], ids=str)
def test_one_slot_twice_in_a_row_and_shapes_that_change(ranks, nodes, monkeypatch):
    one_slot_for_all(monkeypatch)
    for transport in transports(op, nodes):
        some = EVEN if transport == "ll" else SHAPES
        shapes = [some[0], *some, some[0]]
        for seed in range(2):
            main = Caller(op, nodes, transport).in_turns(shapes, "float32")
            ranks(main, sum(nodes), nodes=nodes, seed=seed)


@pytest.mark.parametrize("dtype", ["bool", "int8", "float8_e5m2", "float64"])
def test_any_dtype(ranks, dtype):
    ranks(Caller(op, (2,), "sm_push").in_turns(SHAPES[:2], dtype), 2)


@pytest.mark.parametrize("transport", BY_SPLITS)
def test_splits_change_between_replays(ranks, transport):
    """The host knows nothing of the splits: the same recording moves what they say."""

    def main():
        world = weft.init()
        x = torch.arange(12).view(6, 2) + 100 * world.rank
        splits = torch.zeros(2, dtype=torch.int64)
        config = Config(transport, channels=2, block=16)
        all_to_all(x, world=world, splits=splits, config=config)  # a recording cannot allocate
        all_to_all(x, world=world, splits=splits, config=config)
        with world.record() as recording:
            out, received = all_to_all(x, world=world, splits=splits, config=config)
        for first, second in ((2, 1), (0, 6), (6, 0), (0, 0), (3, 3)):
            splits.copy_(torch.tensor([first, second]))
            recording.replay()
            count, begin = ((first, 0), (second, first))[world.rank]
            assert received.tolist() == [count, count]
            rows = torch.arange(12).view(6, 2)[begin : begin + count]
            assert torch.equal(out[: 2 * count], torch.cat([rows, rows + 100]))
            assert not out[2 * count :].any()

    ranks(main, 2)


@pytest.mark.parametrize("transport", BY_SPLITS)
def test_what_is_too_much_is_left_out(ranks, transport):
    """More than out holds: nothing out of bounds."""

    def main():
        world = weft.init()
        x = torch.arange(1.0, 5.0).view(4, 1) + 10 * world.rank
        splits = torch.tensor([3, 1] if world.rank else [0, 3])
        out, received = all_to_all(
            x, world=world, splits=splits, capacity=2, config=Config(transport, channels=2)
        )
        expected = ([0, 3], [11.0, 12.0]) if world.rank == 0 else ([3, 1], [1.0, 2.0])
        assert (received.tolist(), out.flatten().tolist()) == expected
        world.close()

    ranks(main, 2)


WRONG_SPLITS = [
    ([2, 3], r"splits of rank 1 ask for 5 rows, more than x has"),
    ([-1, 3], r"splits\[0\] of rank 1 is -1"),
    ([0, -(2**62)], r"splits\[1\] of rank 1 is -4294967295 or less"),
    ([2**40, 0], r"splits of rank 1 ask for 4294967295 or more rows"),
    ([2**62, 2**62], r"splits of rank 1 ask for 4294967295 or more rows"),
]


@pytest.mark.parametrize("transport", BY_SPLITS)
@pytest.mark.parametrize(("wrong", "told"), WRONG_SPLITS)
def test_splits_that_x_has_not_are_an_error_on_all_ranks(ranks, transport, wrong, told):
    """Nothing comes of them, and the world goes on."""

    def main():
        world = weft.init()
        x = torch.arange(1.0, 5.0).view(4, 1) + 10 * world.rank
        config = Config(transport, channels=2)
        right = torch.tensor([1, 2])
        splits = torch.tensor(wrong) if world.rank else right
        out, received = all_to_all(x, world=world, splits=splits, config=config)
        assert received.tolist() == [1 + world.rank, 0]
        assert out.flatten().tolist() == ([1.0] if world.rank == 0 else [2.0, 3.0]) + [0.0] * (
            7 - world.rank
        )
        with pytest.raises(ShapeError, match=told):
            world.synchronize()
        world.synchronize()
        out, received = all_to_all(x, world=world, splits=right, config=config)
        assert received.tolist() == [1 + world.rank] * 2
        all_to_all(x, world=world, splits=splits, config=config)
        with pytest.raises(ShapeError, match=told):
            world.close()
        world.close()

    ranks(main, 2)


def test_nothing_to_send(ranks):
    def main():
        world = weft.init()
        assert all_to_all(torch.ones(0, 4), world=world).shape == (0, 4)
        splits = torch.zeros(2, dtype=torch.int64)
        out, received = all_to_all(torch.ones(0, 4), world=world, splits=splits, capacity=3)
        assert out.shape == (3, 4) and not out.any() and received.tolist() == [0, 0]
        out, received = all_to_all(torch.ones(3, 0), world=world, splits=splits + 1)
        assert out.shape == (6, 0) and received.tolist() == [1, 1]

    ranks(main, 2)


@pytest.mark.parametrize(
    ("keywords", "error", "words"),
    [
        ({"splits": torch.ones(3).long()}, ShapeError, r"splits has shape \(3,\); it must be \(2,"),
        ({"splits": torch.ones(2)}, DtypeError, "splits are torch.float32"),
        ({"out": torch.ones(3, 8)}, ShapeError, r"the result is \(4, 8\)"),
        ({"config": Config("ring")}, ConfigError, "one of sm_push, ll, sm_pull"),
    ],
)
def test_what_does_not_fit(ranks, keywords, error, words):
    with pytest.raises(error, match=words):
        ranks(lambda: all_to_all(torch.ones(4, 8), world=weft.init(), **keywords), 2)


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_choices_are_checked_and_follow_the_slots_size(target):
    even, variable = Problem(8192, 4096, 4), Problem(8192, 4096, 4, variable=True)
    far = replace(variable, nodes=(2, 2))
    small, ragged = replace(even, m=16), replace(even, m=8191)
    for problem, first in (
        (even, "sm_push"), (small, "ll"), (ragged, "sm_push"), (variable, "sm_pull"),
        (far, "sm_push"),
    ):  # fmt: skip
        found = list(candidates(problem, target))
        assert found[0].transport == first
        for config in found:
            config.check(problem, target)


@pytest.mark.parametrize(("target", "every"), COMPILED)
def test_compiles_everywhere_and_keeps_its_waits(target, every):
    check_kernels(op, target, every, {"m": 4096, "n": 4096, "variable": 1}, "bfloat16")
