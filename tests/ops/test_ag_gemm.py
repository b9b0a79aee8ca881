"""ag_gemm: right in every way it can be called, on awkward shapes, by both transports."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from effort import slow_but
from hypothesis import given
from hypothesis import strategies as st
from multiplying import check_products

import weft
from weft.base.dtypes import tolerance
from weft.base.errors import CallOrderError, ConfigError, DtypeError, ShapeError
from weft.base.target import TARGETS
from weft.base.topology import text_of
from weft.compiler.gather_schedules import (
    LIBRARY,
    LL,
    RELAY,
    SM_PUSH,
    TRANSPORTS,
    UNFUSED,
    end_us,
    own_tiles,
    programs_on,
    unfused_us,
    ways_of,
)
from weft.compiler.schedules import head_of
from weft.language import triton_api
from weft.ops.ag_gemm import (
    Config,
    Problem,
    ag_gemm,
    candidates,
    choose,
    make_inputs,
    op,
    reference,
)
from weft.plan.gathered import problem_of
from weft.tiles import gemm_sm90
from weft.tune import presets
from weft.verify import compiled
from weft.verify.laggards import chooser_of

EMU = TARGETS["emu"]

AWKWARD = [
    pytest.param(4, 388, 32, 32, id="shards-of-97"),
    pytest.param(3, 291, 70, 50, id="nothing-divides"),
    pytest.param(2, 2, 64, 64, id="one-row-each"),
    pytest.param(1, 40, 48, 32, id="one-rank"),
    pytest.param(4, 1, 32, 32, id="empty-shards"),
    pytest.param(4, 9, 16, 16, id="last-shard-empty"),
    pytest.param(4, 64, 32, 48, id="more-ranks-than-tiles"),
    pytest.param(2, 256, 64, 64, id="tiles-divide", marks=pytest.mark.slow),
]


def config_for(problem: Problem, transport: str) -> Config:
    """Small tiles, so that there are several, and some straddle ranks."""
    found = list(candidates(problem, EMU))
    # On one rank there is nothing for engines to copy; they may be asked for nevertheless.
    other = replace(found[0], transport=transport)
    config = next((c for c in found if c.transport == transport), other)
    return replace(config, tile_m=32, tile_n=32, tile_k=32)


def check(out: torch.Tensor, problem: Problem, rank: int, seed: int = 0) -> None:
    inputs = [make_inputs(problem, r, seed) for r in range(problem.num_ranks)]
    expected = reference(problem, inputs)[rank]
    assert out.shape == expected.shape and not out.isnan().any()
    error = (out.float() - expected).norm() / expected.norm()
    assert error <= tolerance(problem.out_dtype, problem.k)


def call_every_way(problem: Problem, transport: str):
    """Eager, recorded and replayed, another shape in between, eager again; on one rank."""
    world = weft.init()
    rank = world.rank
    config = config_for(problem, transport)
    mine = make_inputs(problem, rank)
    check(op.run(world, problem, mine, config), problem, rank)
    with world.record() as recording:
        out = op.run(world, problem, mine, config)
    for _ in range(3):
        out.fill_(float("nan"))
        recording.replay()
        check(out.clone(), problem, rank)
    other = replace(problem, m=problem.m + 37, n=problem.n // 2 + 1)
    check(op.run(world, other, make_inputs(other, rank), None), other, rank)
    recording.replay()
    check(out.clone(), problem, rank)
    for _ in range(3):
        check(op.run(world, problem, mine, config), problem, rank)
    world.close()


# Of what knows no tiles of rows, these tell all.
FEWER = {LL: AWKWARD[1:5]}
WAYS = [
    pytest.param(transport, *shape.values, id=f"{shape.id}-{transport}", marks=shape.marks)
    for transport in TRANSPORTS
    for shape in FEWER.get(transport, AWKWARD)
]


@pytest.mark.few(4)
@pytest.mark.parametrize(("transport", "num_ranks", "m", "n", "k"), WAYS)
def test_every_way_of_calling(ranks, num_ranks, m, n, k, transport):
    problem = Problem(m, n, k, num_ranks, "float32")
    ranks(lambda: call_every_way(problem, transport), num_ranks)


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_half_precision_and_transposed_weights(ranks, dtype, transport):
    problem = Problem(100, 48, 64, 3, dtype, b_is_nk=True)
    ranks(lambda: call_every_way(problem, transport), 3)


@pytest.mark.parametrize("transport", ["ce_push", "sm_push"])
def test_all_rows_alike(ranks, transport):
    """Own rows are no group by themselves: all ranks' rows share columns from the start."""
    problem = Problem(4 * 64, 96, 64, 4, "float32")

    def main():
        world = weft.init()
        config = replace(config_for(problem, transport), own_first=False, group_m=8)
        assert head_of(problem.m, problem.rows, config.tile_m, False) == 8
        for seed in range(2):
            mine = make_inputs(problem, world.rank, seed)
            check(op.run(world, problem, mine, config), problem, world.rank, seed)

    ranks(main, 4)


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_schedule(ranks, transport, seed):
    problem = Problem(70, 48, 32, 4, "float32")

    def main():
        world = weft.init()
        mine = make_inputs(problem, world.rank)
        for _ in range(4):
            check(op.run(world, problem, mine, config_for(problem, transport)), problem, world.rank)

    ranks(main, 4, seed=seed)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_one_slot_for_two_shapes_in_turns(ranks, transport):
    """A chunk without rows for one shape holds rows of the other: its word must not come late."""
    problems = [Problem(9, 16, 16, 4, "float32"), Problem(12, 16, 16, 4, "float32")]

    def main():
        world = weft.init()
        largest = problems[1]
        mine = make_inputs(largest, world.rank)
        op.run(world, largest, mine, config_for(largest, transport))  # a recording cannot allocate
        recorded = []
        # Slots alternate: with three recordings the first and the last share one.
        for problem in (*problems, problems[1]):
            mine = make_inputs(problem, world.rank)
            with world.record() as recording:
                out = op.run(world, problem, mine, config_for(problem, transport))
            recorded.append((problem, recording, out))
        for problem, recording, out in (recorded[0], recorded[2]) * 4:
            out.fill_(float("nan"))
            recording.replay()
            check(out.clone(), problem, world.rank)

    ranks(main, 4)


def test_more_chunks_in_every_other_call(ranks, monkeypatch):
    """A rank without rows has words to copy alone. One that an engine copied after its call was
    over would be the word of another chunk by then."""
    monkeypatch.setenv("WEFT_SLOTS", "1")
    problems = [Problem(m, 16, 16, 3, "float32") for m in (1, 56)]

    def main(rank):
        world = weft.init()
        for turn in range(6):
            problem = problems[turn % 2]
            config = replace(config_for(problem, "ce_push"), chunks=1 + turn % 2)
            inputs = make_inputs(problem, rank, turn)
            check(op.run(world, problem, inputs, config), problem, rank, turn)
        world.close()

    ranks(main, 3, chooser=chooser_of(0))


def test_out_in_fp32_and_without_m(ranks):
    problem = Problem(64, 32, 32, 2, "bfloat16", out_dtype="float32")

    def main():
        world = weft.init()
        mine = make_inputs(problem, world.rank)
        out = torch.empty(64, 32, dtype=torch.float32)
        assert ag_gemm(mine["a"], mine["b"], world=world, out=out) is out
        check(out, problem, world.rank)
        check(ag_gemm(mine["a"], mine["b"], world=world), replace(problem, out_dtype="bfloat16"),
              world.rank)  # fmt: skip

    ranks(main, 2)


@pytest.mark.parametrize("num_sms", [1, 2, 5])
def test_machines_with_few_sms(ranks, num_sms):
    problem = Problem(100, 64, 32, 2, "float32")

    def main():
        world = weft.init()
        mine = make_inputs(problem, world.rank)
        for config in candidates(problem, world.target):
            if config.transport == UNFUSED:  # a collective has an SM for each of its channels
                continue
            for _ in range(2):
                check(op.run(world, problem, mine, config), problem, world.rank)

    ranks(main, 2, num_sms=num_sms)


@pytest.mark.few(1)
@pytest.mark.parametrize("nodes", [(2, 1), (1, 1, 1), (3, 1), (3, 2)], ids=text_of)
@pytest.mark.parametrize("m", [70, 5, 128])
def test_ranks_out_of_direct_reach(ranks, nodes, m):
    """Rows that nothing divides, fewer than there are chunks, and whole tiles alone."""
    problem = Problem(m, 32, 32, sum(nodes), "float32", nodes=nodes)
    ways = [one.transport for one in candidates(problem, EMU)]
    assert ways[0] == (RELAY if max(nodes) > 1 else SM_PUSH) and SM_PUSH in ways

    def main():
        world = weft.init()
        mine = make_inputs(problem, world.rank)
        for config in (None, None, *candidates(problem, world.target)):
            check(op.run(world, problem, mine, config), problem, world.rank)
        for transport in ("ce_push", LL):
            near = replace(problem, nodes=())
            with pytest.raises(ConfigError, match=f"transport='{transport}' on {len(nodes)} nodes"):
                op.run(world, problem, mine, config_for(near, transport))

    ranks(main, sum(nodes), nodes=nodes)


@pytest.mark.slow
def test_sizes_by_turns_whose_rows_are_relayed(ranks, monkeypatch):
    """On one slot: words of a chunk are those of other rows, or of none, in the next call."""
    monkeypatch.setenv("WEFT_SLOTS", "1")

    def main():
        world = weft.init()
        for m in (70, 3, 70, 128, 128, 3):
            problem = Problem(m, 32, 32, 4, "float32", nodes=(2, 2))
            mine = make_inputs(problem, world.rank)
            config = next(candidates(problem, EMU))
            for one in (config, replace(config, chunks=min(problem.rows, 5))):
                assert one.transport == RELAY
                check(op.run(world, problem, mine, one), problem, world.rank)

    for seed in range(3):
        ranks(main, 4, nodes=2, seed=seed)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_addresses_that_tma_cannot_take_between_calls_that_it_can(ranks, transport):
    problem = Problem(96, 32, 32, 2, "float32")

    def main():
        world = weft.init()
        mine = make_inputs(problem, world.rank)
        a = torch.empty(mine["a"].numel() + 1)[1:].view(mine["a"].shape).copy_(mine["a"])
        assert a.data_ptr() % 16 != 0 and a.is_contiguous()
        for inputs in (mine, {**mine, "a": a}, mine, {**mine, "a": a}):
            check(op.run(world, problem, inputs, config_for(problem, transport)), problem,
                  world.rank)  # fmt: skip

    ranks(main, 2)


@pytest.mark.parametrize("shape", [(0, 16, 16), (8, 0, 16), (8, 16, 0)], ids=str)
def test_nothing_to_do(ranks, shape):
    problem = Problem(*shape, 2, "float32")

    def main():
        world = weft.init()
        out = op.run(world, problem, make_inputs(problem, world.rank))
        assert out.shape == shape[:2] and not out.any()

    ranks(main, 2)


# ---- what it refuses


def fake_world(rank=0, num_ranks=4):
    return SimpleNamespace(
        rank=rank, num_ranks=num_ranks, device=torch.device("cpu"), target=EMU, name="fake",
        backend=SimpleNamespace(seats=SimpleNamespace(nodes=(0,) * num_ranks)),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b", "words"),
    [
        (torch.ones(4, 8), torch.ones(16, 8), r"a has k=8 but b has k=16; pass b as \[k, n\]"),
        (torch.ones(4), torch.ones(8, 4), r"a has shape \(4,\)"),
        (torch.ones(8, 4).t(), torch.ones(8, 4), r"a of shape \(4, 8\) has strides \(1, 4\)"),
        (torch.ones(4, 8), torch.ones(8, 8)[:, ::2], "b of shape .* contiguous"),
    ],
)
def test_shapes_that_do_not_fit(a, b, words):
    with pytest.raises(ShapeError, match=words):
        problem_of(fake_world(), a, b)


def test_rows_that_are_not_this_ranks():
    a, b = torch.ones(3, 8), torch.ones(8, 4)
    with pytest.raises(ShapeError, match="rank 3 of 4 passes a with 3 rows, but of m=9 it holds 0"):
        problem_of(fake_world(rank=3), a, b, m=9)
    with pytest.raises(ShapeError, match=r"out has shape \(12, 5\)"):
        problem_of(fake_world(), a, b, out=torch.ones(12, 5))


def test_dtypes_that_do_not_fit():
    with pytest.raises(DtypeError, match="a is torch.float16 but b is torch.float32"):
        problem_of(fake_world(), torch.ones(4, 8).half(), torch.ones(8, 4))
    with pytest.raises(DtypeError, match="int32; it takes float16"):
        problem_of(fake_world(), torch.ones(4, 8).int(), torch.ones(8, 4).int())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"transport": "ring"}, "transport='ring'; it must be one of ce_push, sm_push, ll"),
        ({"chunks": 0}, "chunks=0"),
        ({"group_m": 0}, "group_m=0"),
        ({"tile_m": 100}, "tile_m=100"),
        ({"transport": "sm_push", "pushers": 0}, "pushers=0"),
        (
            {"transport": "sm_push", "pushers": 132},
            "pushers=132; cuda:90 has 132 SMs, of which 1 is",
        ),
        ({"transport": "ll", "template": "sm90"}, "take template='plain'"),
        ({"num_stages": 6}, "bytes of shared memory"),
        ({"first_wave": 2}, "first_wave=2 for 80 tiles of own rows with template='plain'"),
        ({"first_wave": 2, "own_first": False}, "take own_first=True"),
    ],
)
def test_configurations_that_cannot_run(change, words):
    problem = Problem(4096, 2560, 8192, 4)
    with pytest.raises(ConfigError, match=words):
        replace(Config(), **change).check(problem, TARGETS["cuda:90"])


@pytest.mark.parametrize("transport", ["ce_push", "ll"])
def test_configurations_for_several_nodes(transport):
    """Whose ranks copy engines and packets do not reach."""
    problem = Problem(4096, 2560, 8192, 4, nodes=(2, 2))
    with pytest.raises(ConfigError, match=rf"transport='{transport}' on 2 nodes.*take .*'sm_push'"):
        Config(transport=transport).check(problem, TARGETS["cuda:90"])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"nodes": ()}, r"transport='relay' on ranks by nodes \(\); .* take .*'sm_push'"),
        ({"nodes": (1,) * 4}, "one of several ranks"),
        ({"dtype": "float8_e4m3fn"}, "float8_e4m3fn; scales are not relayed: take .*'sm_push'"),
    ],
)
def test_what_is_not_relayed(changed, words):
    problem = Problem(4096, 2560, 8192, 4, nodes=(2, 2))
    config = next(candidates(problem, TARGETS["cuda:90"]))
    assert (config.transport, config.template) == (RELAY, "sm90")
    with pytest.raises(ConfigError, match=words):
        replace(config, template="plain").check(replace(problem, **changed), TARGETS["cuda:90"])


def test_from_gluon_tiles_are_stored_to_no_other_node():
    problem = Problem(4096, 2560, 8192, 4, nodes=(2, 2))
    found = [one for one in candidates(problem, TARGETS["cuda:90"]) if one.is_fused]
    assert {(one.transport, one.template) for one in found} == {
        (RELAY, "sm90"), (RELAY, "plain"), (SM_PUSH, "plain"),
    }  # fmt: skip
    for config in found:
        config.check(problem, TARGETS["cuda:90"])
    with pytest.raises(ConfigError, match="template='plain', or 'relay'"):
        replace(found[0], transport=SM_PUSH, pushers=3).check(problem, TARGETS["cuda:90"])


@pytest.mark.parametrize(("m", "most"), [(512, 4), (2048, 3), (8192, 1)])
def test_programs_of_the_first_wave_run_at_once(m, most):
    """Programs that share a tile wait for each other."""
    problem, target = Problem(m, 2560, 8192, 4), TARGETS["cuda:90"]
    bases = [replace(one, first_wave=1, own_first=True) for one in candidates(problem, target)]
    ways = [replace(base, **way._asdict()) for base in bases if base.template == "sm90"
            for way in ways_of(base, problem, target)]  # fmt: skip
    found = [one for one in ways if one.first_wave > 1]
    assert max((one.first_wave for one in found), default=1) == most
    for one in found:
        with pytest.raises(ConfigError, match="'sm90' takes up to"):
            replace(one, first_wave=1 + programs_on(target) // own_tiles(problem, one)).check(
                problem, target
            )


def test_ranks_that_call_with_different_shapes(ranks):
    def main():
        world = weft.init()
        problem = Problem(8 + 8 * world.rank, 16, 16, 2, "float32")
        op.run(world, problem, make_inputs(problem, world.rank))

    with pytest.raises(CallOrderError, match="ag_gemm m=8.*|ag_gemm m=16.*"):
        ranks(main, 2)


# ---- problem, configuration, plan


@given(m=st.integers(0, 500), num_ranks=st.integers(1, 9))
def test_shards_are_those_of_torch_chunk(m, num_ranks):
    problem = Problem(m, 1, 1, num_ranks)
    expected = [list(part) for part in torch.arange(m).chunk(num_ranks)] if m else []
    shards = [list(range(*problem.shard(rank))) for rank in range(num_ranks)]
    assert [part for part in shards if part] == [list(map(int, part)) for part in expected]
    assert sum(shards, []) == list(range(m))


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
@pytest.mark.parametrize("shape", [(8192, 2560, 8192), (64, 2560, 8192), (291, 70, 50), (1, 8, 8)])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_every_candidate_passes_its_own_check(target, shape, num_ranks):
    problem = Problem(*shape, num_ranks)
    found = list(candidates(problem, target))
    assert choose(problem, target) in found and choose(problem, target, True) in found
    transports = {"ce_push", "sm_push"} if num_ranks > 1 else {"sm_push"}
    assert {config.transport for config in found} - {LIBRARY, UNFUSED, LL} == transports
    assert len(found) <= 8
    for config in found:
        config.check(problem, target)
        assert config.pushers <= programs_on(target)


def test_where_nothing_fused_is_faster_nothing_is_fused():
    """Few rows are fused, as the readings of few rows have it; not 64 to 512, whose gather by
    itself takes less than what the fused way loses."""
    target = TARGETS["cuda:90"]
    decode = Problem(16, 14336, 8192, 4, "bfloat16", b_is_nk=True)
    assert choose(decode, target, is_recorded=True).transport == LL
    for m in (63, 64, 128, 256, 512):
        some = choose(replace(decode, m=m), target, is_recorded=True)
        assert some.transport == UNFUSED
    many = Problem(256, 26624, 16384, 4, "bfloat16", b_is_nk=True)
    assert choose(many, target, is_recorded=True).transport == UNFUSED
    prefill = Problem(8192, 14336, 8192, 4, "bfloat16", b_is_nk=True)
    assert choose(prefill, target, is_recorded=True).template == "sm90"
    uneven = replace(decode, m=63)
    with pytest.raises(ConfigError, match="shards of one size"):
        Config(transport=LIBRARY).check(uneven, target)
    with pytest.raises(ConfigError, match="NVIDIA GPUs"):
        Config(transport=LIBRARY).check(decode, EMU)


@pytest.mark.parametrize("m", [1, 16, 64, 256, 512, 1024, 2048, 8192])
@pytest.mark.parametrize("layer", presets.GATHERED_LAYERS.values(), ids=str)
def test_what_is_chosen_is_not_predicted_to_be_slower_than_what_is_not_fused(m, layer):
    target, problem = TARGETS["cuda:90"], Problem(m, *layer, 4, "bfloat16", b_is_nk=True)
    most_us = 0.98 * unfused_us(problem, target, UNFUSED)
    config = choose(problem, target, is_recorded=True)
    assert config.transport == UNFUSED or end_us(config, problem, target) < most_us


LARGE, SMALL = (4096, 2560, 8192), (64, 2560, 8192)
COMPILED = slow_but(
    [("cuda:90", "ce_push", LARGE), ("cuda:90", LL, SMALL), ("hip:gfx942", "sm_push", LARGE)],
    [
        *((target, way, LARGE) for target in TARGETS for way in ("ce_push", "sm_push")),
        *((target, LL, SMALL) for target in TARGETS),
        # Element by element, where nothing begins at 16 bytes: one of each family is enough.
        *((target, "sm_push", (291, 70, 50)) for target in ("cuda:90", "hip:gfx942")),
    ],
)


@pytest.mark.few(1)
@pytest.mark.parametrize(("target", "transport", "shape"), COMPILED, ids=str)
def test_compiles_everywhere_and_keeps_its_waits(target, transport, shape):
    target = TARGETS[target]
    problem = Problem(*shape, 4, "bfloat16")
    config = next(c for c in candidates(problem, target) if c.transport == transport)
    for fn, record in op.kernels(problem, config, target):
        binary = triton_api.compile_kernel(fn, record, target)
        if target.backend == "emu":
            continue
        report = compiled(fn, target, record)
        assert report.ok, "\n".join(map(str, report.findings))
        if target.backend == "cuda":
            assert "ld.local" not in binary.asm["ptx"] and "st.local" not in binary.asm["ptx"]
        else:
            assert re.search(r"\.vgpr_spill_count:\s*0\b", binary.asm["amdgcn"])


@pytest.mark.slow
@pytest.mark.parametrize(("tile_n", "stages", "b_is_nk"), slow_but(
    [(320, 3, True)],
    ((*one, is_nk) for one in ((320, 3), (160, 5), (192, 4)) for is_nk in (True, False)),
))  # fmt: skip
def test_columns_that_are_no_power_of_two(tile_n, stages, b_is_nk):
    target, problem = TARGETS["cuda:90"], Problem(2048, 2560, 8192, 4, "bfloat16", b_is_nk=b_is_nk)
    config = next(c for c in candidates(problem, target) if c.template == "sm90")
    config = replace(config, tile_n=tile_n, num_stages=stages, first_wave=1)
    *_, (fn, record) = op.kernels(problem, config, target)
    width = gemm_sm90.block_columns(tile_n)
    block = (width, 64) if b_is_nk else (64, width)
    assert f"bf16{list(block)}" in record.signature["operand_2"]
    check_products([(fn, record)], target)
    with pytest.raises(ConfigError, match=f"tile_n={tile_n}; it must be a power of two"):
        replace(config, template="plain").check(problem, target)


@pytest.mark.parametrize(("shape", "num_ranks", "tile_n"), [
    # Own tiles are one round: 128 of 131 programs have one while rows of the other rank come.
    ((2048, 2560, 8192), 2, 160),
    ((4096, 2560, 8192), 2, 128),
    ((2048, 7168, 4096), 2, 256),
    ((2048, 14336, 8192), 4, 256),
])  # fmt: skip
def test_tiles_of_160_columns_are_taken_where_they_spare_a_round(shape, num_ranks, tile_n):
    problem = Problem(*shape, num_ranks, "bfloat16", b_is_nk=True)
    config = choose(problem, TARGETS["cuda:90"])
    assert (config.template, config.tile_n) == ("sm90", tile_n)


def test_inputs_are_the_same_everywhere_and_differ_by_rank_and_seed():
    problem = Problem(8, 4, 4, 2, "float32")
    first, again = make_inputs(problem, 0, 3), make_inputs(problem, 0, 3)
    assert torch.equal(first["a"], again["a"])
    assert not torch.equal(first["a"], make_inputs(problem, 1, 3)["a"])
    assert not torch.equal(first["a"], make_inputs(problem, 0, 4)["a"])


def test_is_found_by_its_name():
    assert weft.ops.ag_gemm is ag_gemm
    assert weft.ops.cards()["ag_gemm"] is op
    with pytest.raises(AttributeError, match="weft.ops has no 'ag_gem'; there are .*ag_gemm"):
        _ = weft.ops.ag_gem


def test_a_rank_without_rows_must_say_m():
    """Shards 1, 1, 0: the ranks mean m = 3, 3 and 0, which is told and not waited for."""

    def main(rank):
        world = weft.init()
        a = torch.zeros(1 if rank < 2 else 0, 16)
        return weft.ops.ag_gemm(a, torch.zeros(16, 16), world=world)

    with pytest.raises((CallOrderError, ShapeError)) as caught, weft.emulated(ranks=3) as ranks:
        ranks.run(main)
    assert "m=" in str(caught.value)


@pytest.mark.slow
def test_what_a_recorded_call_leaves_to_the_gather_is_there_when_it_is_recorded(ranks, monkeypatch):
    """Calls that launch a fused product may be recorded as a gather and the library's product."""
    module = sys.modules["weft.ops.ag_gemm"]
    problem = Problem(96, 64, 32, 3, "float32")
    ways = {False: "sm_push", True: "all_gather"}

    def chosen(world, problem, config, is_recorded=False):
        return Config(transport=ways[is_recorded], tile_m=32, tile_n=16)

    monkeypatch.setattr(module, "given_or_chosen", chosen)

    def main():
        world = weft.init()
        for one in (problem, replace(problem, m=120)):  # memory alone is had for other m
            everyone = [op.make_inputs(one, rank) for rank in range(3)]
            mine, right = everyone[world.rank], op.reference(one, everyone)[world.rank]
            torch.testing.assert_close(ag_gemm(mine["a"], mine["b"], world=world), right)
            with world.record() as recording:
                out = ag_gemm(mine["a"], mine["b"], world=world)
            for _ in range(3):
                recording.replay()
                torch.testing.assert_close(out, right)
                torch.testing.assert_close(ag_gemm(mine["a"], mine["b"], world=world), right)

    ranks(main, 3)
