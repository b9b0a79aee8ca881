"""ag_moe: right wherever tokens go, in every way it is called, behind moe_route and alone."""

from __future__ import annotations

import pytest
import torch
from by_experts import call_in_turns, check_kernel, problem_for, small

import weft
from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.target import TARGETS
from weft.compiler import schedules
from weft.compiler.passes import swizzle
from weft.ops.ag_moe import Config, Problem, ag_moe, candidates, op
from weft.ops.moe_route import moe_route

EMU = TARGETS["emu"]
ELSEWHERE = ("cuda:80", "cuda:100", "hip:gfx942")


@pytest.mark.few(1)
@pytest.mark.parametrize("how", ["all to one", "one rank's to one", "an expert has none"])
@pytest.mark.parametrize(("num_ranks", "m"), [(1, 33), (2, 33), (3, 41), (4, 9), (4, 1)])
def test_behind_the_router(ranks, num_ranks, m, how):
    """Both operators one after the other, by what the device alone knows."""
    problem = problem_for(op, num_ranks, m)
    inputs = [op.make_inputs(problem, rank) for rank in range(num_ranks)]
    tokens = torch.cat([one["x"] for one in inputs])
    logits = torch.randn(m, 5)
    if how == "an expert has none":
        logits[:, 1:3] -= 99
    else:
        logits[: m if how == "all to one" else m // num_ranks, 4] = 9
    share, ids = logits.softmax(1).topk(2)

    def main():
        world = weft.init()
        own, mine = slice(*problem.shard(world.rank)), inputs[world.rank]
        routing = moe_route(logits[own], 2, world=world, m=m, tile_m=16)
        config = small(op, problem, pushers=3)
        out = ag_moe(mine["x"], mine["b"], routing, world=world, config=config)
        return out, routing.tables

    for (out, tables), one in zip(ranks(main, num_ranks), inputs, strict=True):
        for k in range(2):
            got = out[tables.slot_of[:, k].long()]
            wanted = torch.einsum("mk,mkn->mn", tokens, one["b"][ids[:, k]])
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
            weights = tables.weight_of[tables.slot_of[:, k].long()]
            torch.testing.assert_close(weights, share[:, k] / share.sum(1), rtol=1e-5, atol=1e-6)


@pytest.fixture
def waiting_for_all(monkeypatch):
    """Tiles come expert by expert, as where matrices are what takes time; plans are not kept."""
    monkeypatch.setattr(swizzle, "is_read_once", lambda *_: True)
    for name in ("_planned", "_overlapped"):
        monkeypatch.setattr(schedules, name, getattr(schedules, name).__wrapped__)


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", ["sm_push", "ce_push"])
def test_expert_by_expert(ranks, waiting_for_all, transport):
    problem = problem_for(op, 3, 41)
    ranks(call_in_turns(op, problem, small(op, problem, transport=transport, pushers=3)), 3)
    config = small(op, problem, transport=transport)
    planned = schedules.planned(problem.traced(), config, problem, EMU)
    assert "by_expert" in [one.order for one in planned.program.tasks]


def test_large_matrices_are_read_once():
    """DeepSeek-V3's of 8192 tokens, and not mixtral's, which have many rows each; nor those of few
    tokens where half of the experts have a second tile, or where waiting is next to nothing."""
    sizes = {"num_ranks": 2, "dtype": "bfloat16"}
    many, few = {"m": 8192, "tile_m": 128}, {"m": 256, "tile_m": 16}
    for more, order in (
        ({**many, "n": 1024, "k": 7168, "experts": 256, "top_k": 8}, "by_expert"),
        ({**many, "n": 7168, "k": 4096, "experts": 8, "top_k": 2}, "in_turn"),
        ({**few, "n": 768, "k": 2048, "experts": 128, "top_k": 8}, "by_expert"),
        ({**few, "n": 768, "k": 2048, "experts": 128, "top_k": 8, "tile_m": 32}, "in_turn"),
        ({**few, "n": 2048, "k": 7168, "experts": 256, "top_k": 8, "tile_m": 32}, "by_expert"),
    ):
        problem, target = Problem(**sizes, **more), TARGETS["cuda:90"]
        stages = schedules.planned(
            problem.traced(), next(candidates(problem, target)), problem, target
        )
        assert order in [one.order for one in stages.program.tasks]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("transport", "nodes"),
    [("sm_push", (3,)), ("sm_push", (2, 1)), ("ce_push", (3,)), ("relay", (2, 1))],
    ids=str,
)
def test_called_in_turns_recorded_and_replayed_on_one_slot(ranks, transport, nodes, monkeypatch):
    monkeypatch.setenv("WEFT_SLOTS", "1")
    problem = problem_for(op, 3, 41, nodes=nodes)
    main = call_in_turns(op, problem, small(op, problem, transport=transport, pushers=3))
    outs = [ranks(main, 3, nodes=nodes, seed=seed) for seed in range(2)]
    # The order of sums is fixed.
    assert all(map(torch.equal, *outs))


@pytest.mark.parametrize("sizes", [{"m": 0}, {"m": 8, "k": 0}], ids=str)
def test_nothing_to_do(ranks, sizes):
    problem = problem_for(op, 2, **sizes)

    def main():
        world = weft.init()
        return op.run(world, problem, op.make_inputs(problem, world.rank))

    for out in ranks(main, 2):
        assert out.shape == (problem.num_slots, 40) and not out.any()


def test_what_does_not_fit(ranks):
    def main():
        world = weft.init()
        x, b = torch.ones(4, 8), torch.ones(3, 8, 6)
        routing = moe_route(torch.randn(4, 3), 2, world=world, tile_m=16)
        with pytest.raises(ShapeError, match="b has shape .* with k=8 as in x"):
            ag_moe(x, torch.ones(3, 6, 8), routing, world=world)
        with pytest.raises(ShapeError, match="counts .* with experts=4 as in b"):
            ag_moe(x, torch.ones(4, 8, 6), routing, world=world)
        with pytest.raises(ShapeError, match="x with 5 rows, but m=8 tokens .* takes 4 rows"):
            ag_moe(torch.ones(5, 8), b, routing, world=world)
        with pytest.raises(ShapeError, match=r"b has shape \(8, 6\); it must be \[experts"):
            ag_moe(x, b[0], routing, world=world)
        with pytest.raises(DtypeError, match="x is torch.float16 and b torch.float32"):
            ag_moe(x.half(), b, routing, world=world)
        with pytest.raises(ShapeError, match=r"out has shape \(8, 6\); the result is \(16, 6\)"):
            ag_moe(x, b, routing, world=world, out=torch.ones(8, 6))
        turned = routing._replace(
            tables=routing.tables._replace(tiles=torch.ones(9, 5, dtype=torch.int32).t())
        )
        with pytest.raises(ShapeError, match="tiles of shape .* contiguous"):
            ag_moe(x, b, turned, world=world)

    ranks(main, 2)
    with pytest.raises(ShapeError, match="tile_m=8; a product's tiles have 16 rows"):
        problem_for(op, 2, 8, tile_m=8)
    for config, words in [
        (Config(transport="ring"), "transport='ring'; it must be one of sm_push, ce_push"),
        (Config(template="sm91"), "template='sm91'; it must be one of plain, sm90"),
        (Config(template="sm90"), "template='sm90' with float32, k=24 and tables of tile_m=16"),
        (Config(pushers=0), "pushers=0; it must be from 1 to 132"),
        (Config(group_m=0), "group_m=0"),
        (Config(tile_n=100), "tile_n=100"),
    ]:
        with pytest.raises(ConfigError, match=words):
            config.check(problem_for(op, 2, 64), TARGETS["cuda:90"])


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
@pytest.mark.parametrize("tile_m", [16, 64, 128])
def test_choices_are_checked(target, tile_m):
    for dtype in op.dtypes:
        problem = Problem(4096, 384, 4, dtype, k=2048, experts=128, top_k=8, tile_m=tile_m)
        found = list(candidates(problem, target))
        assert len(found) <= 8
        for config in found:
            config.check(problem, target)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    ["cuda:90", *(pytest.param(one, marks=pytest.mark.slow) for one in ELSEWHERE)],
)
def test_compiles_and_keeps_its_waits(target):
    problem = Problem(4096, 384, 4, k=2048, experts=128, top_k=8, b_is_nk=True)
    check_kernel(op, problem, target)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:90", *ELSEWHERE])
def test_kernels_that_relay_compile_and_keep_their_waits(target):
    sizes = {"k": 2048, "experts": 128, "top_k": 8, "b_is_nk": True}
    problem = Problem(4096, 384, 4, nodes=(2, 2), **sizes)
    assert next(candidates(problem, TARGETS[target])).transport == "relay"
    check_kernel(op, problem, target)
