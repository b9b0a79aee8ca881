"""all_reduce: the same bits on all ranks, by both transports, in every way it can be called."""

from __future__ import annotations

import pytest
import torch
from calling import COMPILED, Caller, cases, check_kernels, one_slot_for_all, transports

import weft
from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.target import TARGETS
from weft.ops.all_reduce import Config, Problem, all_reduce, candidates, op

SHAPES = [{"m": 37, "n": 6}, {"m": 3, "n": 16}, {"m": 24, "n": 35}, {"m": 1, "n": 1}]


def is_exact(nodes, transport):
    """A relay between nodes sums each node's first."""
    return transport != "relay" or len(nodes) == 1


@pytest.mark.few(2)
@pytest.mark.parametrize(("nodes", "transport", "shape"), cases(op, SHAPES))
def test_every_way_of_calling(ranks, nodes, transport, shape):
    """Bit by bit the reference, so also the same on all ranks and by all transports but a relay."""
    dtype = op.dtypes[shape["m"] % 3]
    caller = Caller(op, nodes, transport, exact=is_exact(nodes, transport))
    ranks(caller.every_way(shape, dtype), sum(nodes), nodes=nodes)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(3,), (2, 1)], ids=str)
def test_one_slot_twice_in_a_row_and_shapes_that_change(ranks, nodes, monkeypatch):
    one_slot_for_all(monkeypatch)
    shapes = [SHAPES[0], SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[0]]
    for transport in transports(op, nodes):
        for seed in range(2):
            caller = Caller(op, nodes, transport, exact=is_exact(nodes, transport))
            ranks(caller.in_turns(shapes, "float32"), sum(nodes), nodes=nodes, seed=seed)


@pytest.mark.slow
def test_in_place_and_any_number_of_dimensions(ranks):
    def main():
        world = weft.init()
        for transport in op.problem.transports:
            for shape in ((5,), (3, 2, 7), (128,)):
                x = torch.full(shape, 1.0 + world.rank)
                config = Config(transport, channels=2, block=16)
                assert all_reduce(x, world=world, out=x, config=config) is x
                assert (x == 6).all()
        assert all_reduce(torch.ones(0, 4), world=world).shape == (0, 4)

    ranks(main, 3)


@pytest.mark.slow
def test_rounded_once(ranks):
    """1 + 2**-9 + 2**-9 is lost in bfloat16 if each sum is rounded."""

    def main():
        world = weft.init()
        x = torch.full((4,), (1.0, 2**-8, 2**-8)[world.rank]).bfloat16()
        for transport in op.problem.transports:
            out = all_reduce(x, world=world, config=Config(transport, channels=1))
            assert (out.float() == 1 + 2**-7).all()

    ranks(main, 3)


@pytest.mark.parametrize(
    ("x", "keywords", "error", "words"),
    [
        (torch.ones(4, 8).t(), {}, ShapeError, r"x of shape \(8, 4\) has strides"),
        (torch.ones(4, 8), {"out": torch.ones(8, 4)}, ShapeError, r"the result is \(4, 8\)"),
        (torch.ones(4, 8).int(), {}, DtypeError, "dtype int32; it takes float16"),
        (
            torch.ones(4, 8),
            {"config": Config("tree")},
            ConfigError,
            "one of one_shot, two_shot, one_shot_ll",
        ),
    ],
)
def test_what_does_not_fit(ranks, x, keywords, error, words):
    with pytest.raises(error, match=words):
        ranks(lambda: all_reduce(x, world=weft.init(), **keywords), 2)


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_choices_are_checked_and_follow_size(target):
    for m, first in ((8, "one_shot_ll"), (128, "two_shot_ll"), (8192, "two_shot")):
        problem = Problem(m, 4096, 4)
        found = list(candidates(problem, target))
        assert found[0].transport == first
        for config in found:
            config.check(problem, target)


def test_large_sums_are_relayed_between_nodes():
    target = TARGETS["cuda:90"]
    for m, expected in ((1, "two_shot"), (64, "relay")):
        assert next(candidates(Problem(m, 4096, 4, nodes=(2, 2)), target)).transport == expected


@pytest.mark.few(1)
@pytest.mark.parametrize(("target", "every"), COMPILED)
def test_compiles_everywhere_and_keeps_its_waits(target, every):
    check_kernels(op, target, every, {"m": 4096, "n": 4096}, "bfloat16")
