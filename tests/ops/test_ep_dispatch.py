"""ep_dispatch: rows and tables of its reference, bit by bit, wherever tokens go; errors said."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from weft.base.errors import CapacityError, ConfigError, DtypeError, ShapeError, UsageError
from weft.base.parts import full_part, part_of
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.ops import ep_combine, moe_route
from weft.ops.ep_dispatch import TABLES, Config, Problem, candidates, ep_dispatch, op
from weft.verify import compiled

EMU = TARGETS["emu"]
ELSEWHERE = ("cuda:100", "hip:gfx942")
SMALL = Config(channels=3, block=32, tokens=2, batch=4)


def check(got, problem, rank, inputs):
    expected = op.reference(problem, inputs)[rank]
    names = ("x", "scales") if problem.scale_bytes else ("x",)
    for name, one, wanted in zip((*names, *TABLES), got, expected, strict=True):
        assert one.shape == wanted.shape and one.dtype == wanted.dtype, name
        one, wanted = (part.reshape(-1).view(torch.uint8) for part in (one, wanted))
        assert torch.equal(one, wanted), name


def dispatch_once(ranks, problem, inputs, config=SMALL, **options):
    def main():
        world = weft.init()
        got = op.run(world, problem, inputs[world.rank], config)
        check(got, problem, world.rank, inputs)
        world.synchronize()
        return got

    return ranks(main, problem.num_ranks, **options)


def inputs_of(problem, ids, n=None):
    """Random rows and weights for these choices: one tensor for each rank."""
    found = []
    for one in ids:
        x = torch.randn(len(one), problem.n).to(problem.torch_dtype)
        weights = torch.rand(len(one), problem.top_k)
        found.append({"x": x, "ids": one.int(), "weights": weights})
    return found


def choices(counts, experts, top_k):
    return [torch.rand(count, experts).topk(top_k).indices for count in counts]


def awkward(how):
    """Three ranks with three experts each; what 14 tokens, at most, of each choose."""
    ids = choices((14, 14, 13), 9, 3)
    if how == "all to one rank":
        ids = [torch.rand(len(one), 3).topk(3).indices + 3 for one in ids]
    elif how == "one expert of each rank":
        ids = [one % 3 * 3 for one in choices((14, 14, 13), 3, 3)]
    elif how == "one rank sends nothing":
        ids[0] = ids[0][:0]
    elif how == "nobody sends":
        ids = [one[:0] for one in ids]
    elif how == "not all choices":
        for one in ids:
            one[torch.rand(one.shape) < 0.5] = -1
            one[3] = -1
    return ids


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "how",
    ["all to one rank", "one expert of each rank", "one rank sends nothing", "nobody sends",
     "not all choices"],
)  # fmt: skip
def test_wherever_tokens_go(ranks, how):
    problem = Problem(42, 20, 3, "float32", experts=9, top_k=3, tile_m=4)
    dispatch_once(ranks, problem, inputs_of(problem, awkward(how)))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("counts", "rows", "experts", "top_k", "tile_m"),
    [((5, 0, 9, 2), 9, 2, 1, 16), ((1, 3), 7, 5, 5, 1), ((6,), 6, 4, 2, 4), ((0, 1), 1, 1, 1, 2)],
    ids=str,
)
def test_ranks_that_have_not_as_many(ranks, counts, rows, experts, top_k, tile_m):
    """Ranks without tokens, and without experts."""
    sizes = {"experts": experts, "top_k": top_k, "tile_m": tile_m}
    problem = Problem(rows * len(counts), 8, len(counts), "float32", **sizes)
    ids = choices(counts, experts, top_k)
    dispatch_once(ranks, problem, inputs_of(problem, ids))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("dtype", "n", "scales"),
    [("bfloat16", 24, 0), ("float8_e4m3fn", 256, 2), ("float8_e4m3fn", 7, 1), ("float32", 0, 0)],
)  # fmt: skip
def test_rows_of_any_dtype_and_their_scales(ranks, dtype, n, scales):
    sizes = {"experts": 4, "top_k": 2, "tile_m": 4, "scale_bytes": 4 * scales}
    problem = Problem(10, n, 2, dtype, **sizes)
    inputs = [op.make_inputs(problem, rank) for rank in range(2)]
    dispatch_once(ranks, problem, inputs)


def test_another_row_goes_the_same_way(ranks):
    """Gradients, or scales: with the handle, whatever their width."""
    counts, top_k = (5, 3), 2
    ids = choices(counts, 6, top_k)

    def main():
        world = weft.init()
        own = ids[world.rank].int()
        x = torch.full((len(own), 4), 1.0 + world.rank)
        sizes = {"max_tokens": 5, "capacity": 16, "tile_m": 4, "clear": True}
        got, handle = ep_dispatch(x, own, torch.ones(own.shape), 6, world=world, **sizes)
        number = 100 * world.rank + torch.arange(len(own))
        again = ep_dispatch(
            number[:, None].repeat(1, 9), world=world, handle=handle, clear=True
        )  # fmt: skip
        assert again.handle.tables is handle.tables and again.x.shape == (16, 9)
        is_slot = handle.tables.token_of >= 0
        wanted = handle.tables.token_of // 5 * 100 + handle.tables.token_of % 5
        assert torch.equal(again.x[:, 8], torch.where(is_slot, wanted, 0).long())
        assert torch.equal(got[:, 0], torch.where(is_slot, handle.tables.token_of // 5 + 1.0, 0.0))
        with pytest.raises(ShapeError, match=r"x has 2 tokens but the handle is of \d"):
            ep_dispatch(x[:2], world=world, handle=handle)
        with pytest.raises(ShapeError, match="with a handle, ids, .* leave them out"):
            ep_dispatch(x, own, world=world, handle=handle)

    ranks(main, 2)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [(3,), pytest.param((2, 1), marks=pytest.mark.slow)], ids=str)
def test_called_in_turns_recorded_and_replayed_on_one_slot(ranks, nodes, monkeypatch):
    monkeypatch.setenv("WEFT_SLOTS", "1")
    problem = Problem(17, 10, 3, "float32", nodes, experts=5, top_k=2, tile_m=4)
    inputs = [[op.make_inputs(problem, rank, seed) for rank in range(3)] for seed in range(2)]
    other = replace(problem, m=30, n=5, top_k=3, capacity=-1)

    def main():
        world = weft.init()
        kept = {name: value.clone() for name, value in inputs[0][world.rank].items()}
        op.run(world, problem, kept, SMALL)  # memory cannot be taken in a recording
        with world.record() as recording:
            got = op.run(world, problem, kept, SMALL)
        for one in inputs:
            for name, value in one[world.rank].items():
                kept[name].copy_(value)
            for part in got:
                part.fill_(77)
            recording.replay()
            check([part.clone() for part in got], problem, world.rank, one)
            op.run(world, other, op.make_inputs(other, world.rank), SMALL)
        world.close()

    ranks(main, 3, nodes=nodes)


def test_more_than_there_is_room_for(ranks):
    """What fits is right, everybody learns who needed how much, and the world goes on."""
    counts = (4, 6)
    ids = choices(counts, 4, 2)
    needed = max(sum(int((one // 2 == r).sum()) for one in ids) for r in range(2))
    problem = Problem(12, 8, 2, "float32", experts=4, top_k=2, tile_m=4, capacity=needed)
    inputs = inputs_of(problem, ids)
    room = needed - 3

    def main():
        world = weft.init()
        whole = op.run(world, problem, inputs[world.rank], SMALL)
        tight = op.run(world, replace(problem, capacity=room), inputs[world.rank], SMALL)
        assert torch.equal(tight[0], whole[0][:room])
        with pytest.raises(CapacityError, match=rf"rank \d gets {needed} rows .* capacity={room}"):
            world.synchronize()
        tiles = tight[TABLES.index("tiles") + 1]
        assert tiles[2].max() <= room
        again = op.run(world, problem, inputs[world.rank], SMALL)
        assert torch.equal(again[0], whole[0])
        world.synchronize()
        return int(tiles[2].max())

    assert max(ranks(main, 2)) == room


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([3, 3], "choice 1 of token 2 of rank 1 is an expert that the token has already"),
        ([0, 5], "choice 1 of token 2 of rank 1 is no expert; .* 0 .. 4, and -1 is none"),
        ([-2, 1], "choice 0 of token 2 of rank 1 is no expert"),
    ],
    ids=["twice", "too high", "too low"],
)
def test_choices_that_are_wrong(ranks, wrong, words):
    problem = Problem(8, 8, 2, "float32", experts=5, top_k=2, tile_m=4)
    inputs = inputs_of(problem, choices((4, 3), 5, 2))
    asked = [{**one, "ids": one["ids"].clone()} for one in inputs]
    asked[1]["ids"][2] = torch.tensor(wrong)
    # What is wrong is as if it were none.
    first = wrong[0] < -1
    inputs[1]["ids"][2] = torch.tensor([-1, wrong[1]] if first else [wrong[0], -1])

    def main():
        world = weft.init()
        got = op.run(world, problem, asked[world.rank], SMALL)
        check(got, problem, world.rank, inputs)
        with pytest.raises(UsageError, match=words):
            world.synchronize()
        world.synchronize()

    ranks(main, 2)


def test_room_for_tokens_that_nobody_sends(ranks):
    """No tokens anywhere, but room: slots are nobody's, and rows zeros, whatever memory held."""

    def main():
        world = weft.init()
        torch.empty(6, 8).fill_(7)
        none = (torch.ones(0, 8), torch.zeros(0, 2).int(), torch.ones(0, 2), 4)
        there, handle = ep_dispatch(*none, world=world, capacity=6, clear=True)
        assert there.shape == (6, 8) and not there.any()
        assert (handle.tables.token_of == -1).all() and not handle.tables.weight_of.any()

    ranks(main, 2)


def test_what_does_not_fit(ranks):
    def main():
        world = weft.init()
        x, ids, weights = torch.ones(3, 8), torch.zeros(3, 1).int(), torch.ones(3, 1)
        with pytest.raises(ShapeError, match="weights, experts missing; pass them, or a handle"):
            ep_dispatch(x, ids, world=world)
        with pytest.raises(ShapeError, match=r"ids has shape .* tokens=3 as in x"):
            ep_dispatch(x, ids[:2], weights, 4, world=world)
        with pytest.raises(ShapeError, match=r"weights has shape .* top_k=1 as in ids"):
            ep_dispatch(x, ids, torch.ones(3, 2), 4, world=world)
        with pytest.raises(DtypeError, match=r"pass ids.to\(torch.int32\)"):
            ep_dispatch(x, ids.long(), weights, 4, world=world)
        with pytest.raises(ShapeError, match="passes 3 tokens but max_tokens=2"):
            ep_dispatch(x, ids, weights, 4, world=world, max_tokens=2)
        with pytest.raises(ShapeError, match="top_k=1 of 0 experts|0 experts on 2 ranks"):
            ep_dispatch(x, ids, weights, 0, world=world)
        with pytest.raises(ShapeError, match=r"scales has shape \(2, 1\); .* tokens=3 as in x"):
            ep_dispatch((x, x[:2, :1].contiguous()), ids, weights, 4, world=world)

    ranks(main, 2)
    problem = Problem(64, 3, 4, experts=8, top_k=2)
    for config, words in [
        (Config(tokens=3), "tokens=3; it must be a power of two"),
        (Config(channels=0), "channels=0"),
    ]:
        with pytest.raises(ConfigError, match=words):
            config.check(problem, TARGETS["cuda:90"])


SIZES = {"experts": 256, "top_k": 8}
PLAIN = Problem(4096, 7168, 4, "bfloat16", **SIZES)
SCALED = Problem(4096, 7168, 4, "float8_e4m3fn", **SIZES, scale_bytes=4 * 56)
FEW = replace(PLAIN, m=128)


def check_kernel(fn, record, target):
    binary = triton_api.compile_kernel(fn, record, target)
    report = compiled(binary, target)
    assert report.ok, "\n".join(map(str, report.findings))
    if target.backend == "cuda":
        assert "st.local" not in binary.asm["ptx"]
    return binary


@pytest.mark.few(1)
@pytest.mark.parametrize("problem", [PLAIN, SCALED, FEW], ids=["plain", "scaled", "few"])
@pytest.mark.parametrize(
    "target",
    ["cuda:90", *(pytest.param(one, marks=pytest.mark.slow) for one in ELSEWHERE)],
)
def test_rows_compile_and_keep_their_waits(target, problem):
    _, (fn, record) = op.kernels(problem, None, TARGETS[target])
    binary = check_kernel(fn, record, TARGETS[target])
    if TARGETS[target].backend == "cuda":
        assert "st.global.v2.b64" in binary.asm["ptx"]  # 16 bytes at a time


@pytest.mark.parametrize(
    ("m", "tokens", "channels"), [(256, 1, 128), (2048, 8, 128), (8192, 8, 256)]
)
def test_few_tokens_each_have_a_lane_and_many_share_an_sm(m, tokens, channels):
    problem = Problem(m, 7168, 2, "bfloat16", **SIZES)
    (config,) = candidates(problem, TARGETS["cuda:90"])
    config.check(problem, TARGETS["cuda:90"])
    assert (config.tokens, config.grid(problem)) == (tokens, channels)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:90", *ELSEWHERE])
def test_tables_compile_and_keep_their_waits(target):
    for problem in (PLAIN, FEW):
        (fn, record), _ = op.kernels(problem, None, TARGETS[target])
        check_kernel(fn, record, TARGETS[target])


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "m"), [(3, 7), (2, 8), (3, 2), (1, 5)])
def test_by_a_routers_tables_of_own_experts(ranks, num_ranks, m):
    """The same rows, tables and sums as by a dispatch of its choices."""
    logits = torch.randn(m, 6, generator=torch.Generator().manual_seed(m))

    def main():
        with weft.init() as world:
            own = slice(*part_of(m, world.rank, num_ranks))
            x = torch.arange(40.0).repeat(m, 1)[own] + own.start
            routing = moe_route(logits[own], 2, world=world, m=m, tile_m=16, split_experts=True)
            got, handle = ep_dispatch(x, handle=routing, world=world, clear=True)
            made, rows = routing.tables, full_part(m, num_ranks)
            wanted, other = ep_dispatch(
                x, made.ids, made.weights, 6, world=world, max_tokens=rows, tile_m=16, clear=True
            )
            count = int(made.counts.sum())
            assert torch.equal(got[:count], wanted[:count]) and not got[count:].any()
            assert not wanted[count:].any()
            for name in ("slot_of", "counts", "ids", "weights"):
                assert torch.equal(getattr(handle.tables, name), getattr(other.tables, name)), name
            for by_choice in (False, True):
                sums = [
                    ep_combine(one, how, world=world, by_choice=by_choice)
                    for one, how in ((got, handle), (wanted, other))
                ]
                assert torch.equal(*sums)
            of_all = moe_route(logits[own], 2, world=world, m=m)
            with pytest.raises(ShapeError, match="call moe_route with split_experts=True"):
                ep_dispatch(x, handle=of_all, world=world)

    ranks(main, num_ranks)
