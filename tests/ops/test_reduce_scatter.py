"""reduce_scatter: in every way it can be called, by every transport, near and far; its order."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calling import COMPILED, EMU, Caller, cases, check_kernels, one_slot_for_all, transports

import weft
from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.target import TARGETS
from weft.ops.reduce_scatter import Config, Problem, candidates, op, reduce_scatter

SHAPES = [{"m": 37, "n": 6}, {"m": 3, "n": 16}, {"m": 24, "n": 35}, {"m": 1, "n": 1}]
DTYPES = {
    "sm_push": "bfloat16", "relay": "float16", "ll": "float16",
    "sm_pull": "float32",
}  # fmt: skip


def is_exact(nodes, transport):
    """Are sums made in the order of ranks?"""
    return transport in ("sm_push", "ll", "sm_pull") or (transport == "relay" and len(nodes) == 1)


@pytest.mark.few(2)
@pytest.mark.parametrize(("nodes", "transport", "shape"), cases(op, SHAPES))
def test_every_way_of_calling(ranks, nodes, transport, shape):
    caller = Caller(op, nodes, transport, exact=is_exact(nodes, transport))
    ranks(caller.every_way(shape, DTYPES[transport]), sum(nodes), nodes=nodes)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(3,), (2, 1)], ids=str)
def test_one_slot_twice_in_a_row_and_shapes_that_change(ranks, nodes, monkeypatch):
    one_slot_for_all(monkeypatch)
    shapes = [SHAPES[0], SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[0]]
    for transport in transports(op, nodes):
        for seed in range(2):
            caller = Caller(op, nodes, transport, exact=is_exact(nodes, transport))
            ranks(caller.in_turns(shapes, "float32"), sum(nodes), nodes=nodes, seed=seed)


def test_another_order_of_sums_is_still_the_same_in_every_run(ranks):
    nodes, transport = (2, 2), "relay"
    problem = Problem(24, 35, 4, "float32", nodes)
    config = next(c for c in candidates(problem, EMU) if c.transport == transport)

    def main():
        world = weft.init()
        x = op.make_inputs(problem, world.rank)["x"]
        outs = [
            reduce_scatter(x, world=world, config=replace(config, channels=n)) for n in (1, 2, 5)
        ]
        assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2])
        return outs[0]

    first, second = (ranks(main, 4, nodes=nodes, seed=seed) for seed in (0, 7))
    assert all(map(torch.equal, first, second))


def test_out_and_more_dimensions(ranks):
    def main():
        world = weft.init()
        x = torch.arange(3 * 2 * 5.0).view(3, 2, 5)
        out = torch.empty(2 - world.rank, 2, 5)
        assert reduce_scatter(x, world=world, out=out) is out
        assert torch.equal(out, 2 * x[2 * world.rank :][:2])
        assert reduce_scatter(torch.ones(0, 4), world=world).shape == (0, 4)

    ranks(main, 2)


@pytest.mark.parametrize(
    ("x", "keywords", "error", "words"),
    [
        (torch.ones(4, 8).t(), {}, ShapeError, r"x of shape \(8, 4\) has strides"),
        (torch.ones(4, 8), {"out": torch.ones(4, 8)}, ShapeError, r"the result is \(2, 8\)"),
        (torch.ones(4, 8).int(), {}, DtypeError, "dtype int32; it takes float16"),
        (torch.ones(4, 8), {"config": Config("tree")}, ConfigError, "transport='tree'"),
    ],
)
def test_what_does_not_fit(ranks, x, keywords, error, words):
    with pytest.raises(error, match=words):
        ranks(lambda: reduce_scatter(x, world=weft.init(), **keywords), 2)


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
def test_choices_are_checked_and_follow_nodes(target):
    problem = Problem(8192, 8192, 4)
    far, small = replace(problem, nodes=(3, 1)), replace(problem, m=16)
    for one, first in ((problem, "sm_push"), (far, "relay"), (small, "ll")):
        found = list(candidates(one, target))
        assert found[0].transport == first
        for config in found:
            config.check(one, target)


@pytest.mark.parametrize(("target", "every"), COMPILED)
def test_compiles_everywhere_and_keeps_its_waits(target, every):
    check_kernels(op, target, every, {"m": 4096, "n": 4096}, "bfloat16")
