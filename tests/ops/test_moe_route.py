"""moe_route: the tables of its reference, bit by bit, whatever tokens want and ranks have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.ops.moe_route import Config, Problem, Tables, candidates, moe_route, op
from weft.verify import compiled

EMU = TARGETS["emu"]
ELSEWHERE = ("cuda:80", "cuda:100", "hip:gfx942")


def check(got, problem, rank, logits):
    expected = op.reference(problem, [{"logits": one} for one in logits])[rank]
    for name, one, wanted in zip(Tables._fields, got, expected, strict=True):
        assert one.shape == wanted.shape and one.dtype == wanted.dtype, name
        if one.is_floating_point():
            torch.testing.assert_close(one, wanted, rtol=1e-6, atol=0, equal_nan=True)
        else:
            assert torch.equal(one, wanted), name


def shards(problem, logits):
    return [logits[slice(*problem.shard(rank))] for rank in range(problem.num_ranks)]


def route_once(ranks, problem, logits, config=None, **options):
    mine = shards(problem, logits)

    def main():
        world = weft.init()
        made = op.run(world, problem, {"logits": mine[world.rank]}, config)
        check(made, problem, world.rank, mine)
        return made

    return ranks(main, problem.num_ranks, **options)


def skewed(m, n, how):
    """Logits by which tokens go where it is awkward."""
    logits = torch.randn(m, n)
    if how == "all to one":
        logits[:, n // 2] = 9
    elif how == "one rank's to one":
        logits[: m // 3, 1] = 9
    elif how == "few experts":
        logits[:, 3:] -= 99
    elif how == "ties":
        logits = logits.round()
    elif how == "not numbers":
        logits[::3, 0] = torch.nan
        logits[::5] = -torch.inf
        logits[1::4, 2] = torch.inf
        logits[::2, 1] = -0.0
        logits[::2, 2] = 0.0
        logits[1::4, 2] = 80.0
        logits[::5, n - 1] = 0
    return logits


@pytest.mark.few(3)
@pytest.mark.parametrize(
    "how", ["all to one", "one rank's to one", "few experts", "ties", "not numbers"]
)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_wherever_tokens_go(ranks, num_ranks, how):
    problem = Problem(41, 6, num_ranks, "float32", top_k=3, tile_m=8)
    route_once(ranks, problem, skewed(41, 6, how), Config(block=8, channels=2))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "m", "n", "top_k", "tile_m"),
    [(4, 97, 24, 8, 4), (4, 1, 4, 2, 16), (4, 9, 5, 5, 1), (2, 2, 1, 1, 16), (3, 0, 4, 2, 16)],
)
def test_awkward_sizes(ranks, num_ranks, m, n, top_k, tile_m):
    problem = Problem(m, n, num_ranks, "float32", top_k=top_k, tile_m=tile_m)
    route_once(
        ranks, problem, torch.randn(m, n), replace(next(candidates(problem, EMU)), channels=3)
    )


@pytest.mark.slow
def test_every_tile_is_of_one_expert_and_every_slot_in_one_tile(ranks):
    problem = Problem(50, 7, 2, "bfloat16", top_k=2, tile_m=4)
    first, second = route_once(ranks, problem, torch.randn(50, 7).bfloat16())
    for made in (first, second):
        count = int(made.num_tiles)
        turns = made.turns[:count].tolist()
        assert sorted(turns) == list(range(count))
        late = [made.tiles[3:, turn].tolist() for turn in turns]
        own = [lo == hi == (made is second) for lo, hi in late]
        assert own == sorted(own, reverse=True) and any(own)
        slots = [s for _, a, b, *_ in made.tiles.t()[:count].tolist() for s in range(a, b)]
        assert slots == list(range(problem.num_slots))
    # What does not depend on the rank is the same everywhere.
    for name in ("token_of", "weight_of", "slot_of", "counts", "tiles", "num_tiles"):
        assert torch.equal(getattr(first, name), getattr(second, name))


@pytest.mark.slow
def test_weights_of_all_experts_and_of_those_chosen(ranks):
    logits = torch.randn(5, 9)

    def main():
        world = weft.init()
        whole = moe_route(logits, 3, world=world, renormalise=False).tables
        chosen = moe_route(logits, 3, world=world).tables
        share = logits.softmax(1).topk(3).values
        torch.testing.assert_close(whole.weights, share, rtol=1e-6, atol=0)
        torch.testing.assert_close(chosen.weights.sum(1), torch.ones(5))
        assert torch.equal(whole.ids, chosen.ids)

    ranks(main, 1)


BY_GROUPS = [
    {"score": "sigmoid"},
    {"score": "sigmoid", "renormalise": False, "scale": 1.5},
    {"score": "sigmoid", "biased": True, "groups": 4, "top_groups": 2, "scale": 2.5},
    {"groups": 4, "top_groups": 3, "group_best": 1, "renormalise": False},
    {"biased": True, "groups": 2, "top_groups": 1},
]


def of_groups(logits, top_k, bias, given):
    """Token by token, with Python's lists."""
    ids, weights = [], []
    size = logits.shape[1] // given.get("groups", 1)
    for row in logits.float():
        scores = row.sigmoid() if given.get("score") == "sigmoid" else row.softmax(0)
        rating = (scores if bias is None else scores + bias).tolist()
        groups = [range(g, g + size) for g in range(0, len(rating), size)]
        best = given.get("group_best", 2)
        groups.sort(key=lambda group: -sum(sorted((rating[e] for e in group), reverse=True)[:best]))
        may = sorted(e for group in groups[: given.get("top_groups", 1)] for e in group)
        ids.append(sorted(may, key=lambda e: -rating[e])[:top_k])
        taken = scores[ids[-1]]
        weights.append(taken / taken.sum() if given.get("renormalise", True) else taken)
    return torch.tensor(ids, dtype=torch.int32), torch.stack(weights) * given.get("scale", 1.0)


@pytest.mark.few(1)
@pytest.mark.parametrize("given", BY_GROUPS, ids=str)
@pytest.mark.parametrize("n", [8, 12])
def test_scores_groups_and_a_bias(ranks, given, n):
    problem = Problem(23, n, 2, top_k=3, tile_m=4, **given)
    inputs = [op.make_inputs(problem, rank) for rank in range(2)]
    bias = inputs[0].get("bias")
    wanted = of_groups(torch.cat([one["logits"] for one in inputs]), 3, bias, given)

    def main():
        with weft.init() as world:
            made = op.run(world, problem, inputs[world.rank])
            mine = slice(*problem.shard(world.rank))
            assert torch.equal(made.ids, wanted[0][mine])
            torch.testing.assert_close(made.weights, wanted[1][mine], rtol=1e-6, atol=0)
            expected = op.reference(problem, inputs)[world.rank]
            for name in ("token_of", "slot_of", "counts", "tiles", "num_tiles"):
                assert torch.equal(getattr(made, name), getattr(expected, name)), name

    ranks(main, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("given", BY_GROUPS, ids=str)
def test_gradients_of_scores(ranks, given):
    problem = Problem(10, 8, 2, top_k=3, tile_m=4, **given)
    inputs = [op.make_inputs(problem, rank) for rank in range(2)]
    scoring = {**problem.scoring._asdict(), "bias": inputs[0].get("bias")}

    def main():
        with weft.init() as world:
            alone = inputs[world.rank]["logits"].float().requires_grad_()
            scores = alone.sigmoid() if problem.score == "sigmoid" else alone.softmax(1)
            logits = inputs[world.rank]["logits"].float().requires_grad_()
            tables = moe_route(logits, 3, world=world, tile_m=4, **scoring).tables
            weights = scores.gather(1, tables.ids.long())
            weights = weights / weights.sum(1, keepdim=True) if problem.renormalise else weights
            given = torch.arange(15.0).view(5, 3)
            (weights * problem.scale * given).sum().backward()
            (tables.weights * given).sum().backward()
            torch.testing.assert_close(logits.grad, alone.grad)

    ranks(main, 2)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(3,), (2, 1)], ids=str)
def test_called_in_turns_recorded_and_replayed_on_one_slot(ranks, nodes, monkeypatch):
    monkeypatch.setenv("WEFT_SLOTS", "1")
    problem = Problem(29, 5, 3, "float32", nodes, top_k=2, tile_m=8)
    inputs = [shards(problem, torch.randn(29, 5)) for _ in range(3)]
    other = replace(problem, m=40, n=7)

    def main():
        world = weft.init()
        kept = inputs[0][world.rank].clone()
        op.run(world, problem, {"logits": kept})  # memory cannot be taken in a recording
        with world.record() as recording:
            made = op.run(world, problem, {"logits": kept})
        for logits in inputs:
            kept.copy_(logits[world.rank])
            for one in made:
                one.fill_(77)
            recording.replay()
            check([one.clone() for one in made], problem, world.rank, logits)
            mine = op.make_inputs(other, world.rank)
            op.run(world, other, mine)
        world.close()

    for seed in range(2):
        ranks(main, 3, nodes=nodes, seed=seed)


def test_what_does_not_fit(ranks):
    def main():
        world = weft.init()
        with pytest.raises(ShapeError, match="top_k=5 of 4 experts; it must be between 1 and 4"):
            moe_route(torch.ones(3, 4), 5, world=world)
        with pytest.raises(ShapeError, match=r"passes logits with 3 rows, but of m=9 it holds"):
            moe_route(torch.ones(3, 4), 2, world=world, m=9)
        with pytest.raises(ShapeError, match=r"logits has shape \(3,\)"):
            moe_route(torch.ones(3), 1, world=world)
        with pytest.raises(ShapeError, match="tile_m=12; it must be a power of two"):
            moe_route(torch.ones(3, 4), 1, world=world, tile_m=12)
        for given, words in [
            ({"groups": 3}, "groups=3, top_groups=1, group_best=2: groups must divide 4 experts"),
            ({"groups": 2, "top_groups": 3}, "1 to 2 groups can be taken"),
            ({"groups": 4}, "top_k=2 of 1 groups of 1 experts"),
            (
                {"bias": torch.zeros(3)},
                r"bias is torch.float32 of shape \(3,\); it must be .* \(4,\)",
            ),
        ]:
            with pytest.raises(ShapeError, match=words):
                moe_route(torch.ones(3, 4), 2, world=world, **given)
        with pytest.raises(ConfigError, match="score='tanh'; it must be one of 'softmax', 'sigm"):
            moe_route(torch.ones(3, 4), 2, world=world, score="tanh")
        with pytest.raises(DtypeError, match="int32; it takes float16"):
            moe_route(torch.ones(3, 4).int(), 1, world=world)

    ranks(main, 2)
    problem = Problem(64, 8, 4)
    for config, words in [
        (Config(block=12), "block=12"),
        (Config(channels=1000), "channels=1000; .* cuda:90 takes 1 to 524"),
    ]:
        with pytest.raises(ConfigError, match=words):
            config.check(problem, TARGETS["cuda:90"])
    with pytest.raises(ShapeError, match="2000 experts; it takes 1 to 1024"):
        Problem(64, 2000, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    ["cuda:90", *(pytest.param(one, marks=pytest.mark.slow) for one in ELSEWHERE)],
)
@pytest.mark.parametrize(
    ("num_ranks", "experts"),
    [
        (4, 128),
        pytest.param(2, 256, marks=pytest.mark.slow),
        pytest.param(1, 8, marks=pytest.mark.slow),
    ],
)
def test_compiles_and_keeps_its_waits(target, num_ranks, experts):
    # The largest as DeepSeek-V3 routes.
    v3 = (
        {"score": "sigmoid", "biased": True, "groups": 8, "top_groups": 4} if experts == 256 else {}
    )
    problem = Problem(4096, experts, num_ranks, "bfloat16", top_k=8, **v3)
    for fn, record in op.kernels(problem, None, TARGETS[target]):
        binary = triton_api.compile_kernel(fn, record, TARGETS[target])
        report = compiled(binary, TARGETS[target])
        assert report.ok, "\n".join(map(str, report.findings))
        if TARGETS[target].backend == "cuda":
            assert "st.local" not in binary.asm["ptx"]
