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


@pytest.mark.parametrize(
    "how", ["all to one", "one rank's to one", "few experts", "ties", "not numbers"]
)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_wherever_tokens_go(ranks, num_ranks, how):
    problem = Problem(41, 6, num_ranks, "float32", top_k=3, tile_m=8)
    route_once(ranks, problem, skewed(41, 6, how), Config(block=8, channels=2))


@pytest.mark.parametrize(
    ("num_ranks", "m", "n", "top_k", "tile_m"),
    [(4, 97, 24, 8, 4), (4, 1, 4, 2, 16), (4, 9, 5, 5, 1), (2, 2, 1, 1, 16), (3, 0, 4, 2, 16)],
)
def test_awkward_sizes(ranks, num_ranks, m, n, top_k, tile_m):
    problem = Problem(m, n, num_ranks, "float32", top_k=top_k, tile_m=tile_m)
    route_once(
        ranks, problem, torch.randn(m, n), replace(next(candidates(problem, EMU)), channels=3)
    )


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
        with pytest.raises(DtypeError, match="int32; it takes float16"):
            moe_route(torch.ones(3, 4).int(), 1, world=world)

    ranks(main, 2)
    problem = Problem(64, 8, 4)
    for config, words in [
        (Config(transport="ring"), "transport='ring'"),
        (Config(block=12), "block=12"),
        (Config(channels=132), "channels=132; .* cuda:90 takes 1 to 131"),
    ]:
        with pytest.raises(ConfigError, match=words):
            config.check(problem, TARGETS["cuda:90"])
    with pytest.raises(ShapeError, match="2000 experts; it takes 1 to 1024"):
        Problem(64, 2000, 4)


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
    problem = Problem(4096, experts, num_ranks, "bfloat16", top_k=8)
    for fn, record in op.kernels(problem, None, TARGETS[target]):
        binary = triton_api.compile_kernel(fn, record, TARGETS[target])
        report = compiled(binary, TARGETS[target])
        assert report.ok, "\n".join(map(str, report.findings))
        if TARGETS[target].backend == "cuda":
            assert "st.local" not in binary.asm["ptx"]
