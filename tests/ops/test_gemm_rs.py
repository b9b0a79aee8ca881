"""gemm_rs: right in every way it can be called, on awkward shapes, fused and not."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from effort import slow_but
from multiplying import (
    AWKWARD,
    EMU,
    WIDER_STACK_BYTES,
    any_schedule,
    call_every_way,
    check_products,
    config_for,
    problem_for,
)

import weft
from weft.base.errors import CallOrderError, ConfigError, DtypeError, ShapeError, UsageError
from weft.base.target import TARGETS
from weft.compiler import schedules
from weft.compiler.schedules import LIBRARY
from weft.ops.gemm_rs import Config, Problem, candidates, choose, gemm_rs, op
from weft.plan.summed import problem_of
from weft.tiles import gemm_sm90


@pytest.mark.few(1)
@pytest.mark.parametrize(("num_ranks", "m", "n", "k"), AWKWARD)
def test_every_way_of_calling(ranks, num_ranks, m, n, k):
    problem = problem_for(op, num_ranks, m, n, k)
    ranks(lambda: call_every_way(op, problem, config_for(op, problem)), num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_half_precision_and_transposed_weights(ranks, dtype):
    problem = problem_for(op, 3, 140, 48, 64, dtype, b_is_nk=True)
    ranks(lambda: call_every_way(op, problem, config_for(op, problem)), 3)


@pytest.mark.slow
def test_nothing_fused_is_right_too(ranks):
    problem = problem_for(op, 3, 70, 40, 32)
    ranks(lambda: call_every_way(op, problem, Config(transport="reduce_scatter")), 3)


@pytest.mark.slow
def test_any_schedule_gives_the_same_bits(ranks, monkeypatch):
    """The order of sums is fixed; with one slot only credits keep calls apart."""
    monkeypatch.setenv("WEFT_SLOTS", "1")
    for first, *others in any_schedule(op, problem_for(op, 4, 70, 48, 32), ranks):
        assert all(torch.equal(first, other) for other in others)


# ---- what it refuses


def fake_world(rank=0, num_ranks=4):
    return SimpleNamespace(
        rank=rank, num_ranks=num_ranks, device=torch.device("cpu"), target=EMU,
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
        problem_of(Problem, fake_world(), a, b)


def test_results_that_do_not_fit():
    a, b = torch.ones(9, 8), torch.ones(8, 4)
    with pytest.raises(ShapeError, match=r"out has shape \(3, 4\); the result is \(0, 4\)"):
        problem_of(Problem, fake_world(rank=3), a, b, torch.ones(3, 4))
    with pytest.raises(DtypeError, match="a is torch.float16 but b is torch.float32"):
        problem_of(Problem, fake_world(), a.half(), b)
    with pytest.raises(DtypeError, match="int32; it takes float16"):
        problem_of(Problem, fake_world(), a.int(), b.int())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"transport": "ring"},
            "transport='ring'; it must be one of sm_push, relay, ce_push, ce_parts, "
            "reduce_scatter, nccl",
        ),
        ({"transport": "ce_push", "chunks": 3}, "chunks=3 of n=2560 columns in tiles of 128"),
        ({"transport": "ce_push", "chunks": 0}, "chunks=0"),
        ({"template": "blue"}, "template='blue'"),
        ({"last": 0}, "last=0"),
        ({"group_m": 0}, "group_m=0"),
        ({"tile_m": 100}, "tile_m=100"),
        ({"num_stages": 8, "tile_n": 256}, "bytes of shared memory"),
    ],
)
def test_configurations_that_cannot_run(change, words):
    problem = problem_for(op, 4, 4096, 2560, 8192, "bfloat16")
    with pytest.raises(ConfigError, match=words):
        replace(Config(), **change).check(problem, TARGETS["cuda:90"])


def test_hoppers_template_reaches_near_ranks_only():
    """Which pass sums on; where a node has one rank, there is nobody to pass them on to."""
    target = TARGETS["cuda:90"]
    problem = problem_for(op, 4, 4096, 2560, 8192, "bfloat16", nodes=(2, 2))
    with pytest.raises(ConfigError, match="on 2 nodes; .* take template='plain', or 'relay'"):
        Config(template="sm90", num_warps=4).check(problem, target)
    with pytest.raises(ConfigError, match="by_tma with transport='relay'; .* take False"):
        Config("relay", "sm90", num_warps=4, by_tma=True).check(problem, target)
    found = list(candidates(problem, target))
    assert {one.transport for one in found if one.template == "sm90"} == {"relay"}
    for one in found:
        one.check(problem, target)
    alone = replace(problem, num_ranks=2, nodes=(1, 1))
    with pytest.raises(ConfigError, match=r"'relay' on ranks by nodes \(1, 1\)"):
        Config("relay").check(alone, target)
    with pytest.raises(ConfigError, match="copy engines reach the ranks of one node only"):
        Config(transport="ce_push").check(problem, TARGETS["emu"])
    uneven = problem_for(op, 4, 4097, 2560, 8192, "bfloat16")
    with pytest.raises(ConfigError, match="shards of one size"):
        Config(transport=LIBRARY).check(uneven, TARGETS["cuda:90"])


def test_ranks_that_call_with_different_shapes(ranks):
    def main():
        world = weft.init()
        problem = problem_for(op, 2, 8 + 8 * world.rank, 16, 16)
        op.run(world, problem, op.make_inputs(problem, world.rank))

    with pytest.raises(CallOrderError, match="gemm_rs m=8.*|gemm_rs m=16.*"):
        ranks(main, 2)


# ---- configuration and code


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
@pytest.mark.parametrize("shape", [(8192, 2560, 8192), (64, 2560, 8192), (291, 70, 50), (1, 8, 8)])
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_every_candidate_passes_its_own_check(target, shape, num_ranks):
    problem = problem_for(op, num_ranks, *shape, "bfloat16")
    found = list(candidates(problem, target))
    assert {"sm_push", "reduce_scatter"} <= {config.transport for config in found}
    for config in found:
        config.check(problem, target)
    assert len(found) <= 8


LARGE, ODD = (4096, 2560, 8192), (291, 70, 50)
COMPILED = slow_but(
    [("emu", LARGE, True), ("cuda:90", LARGE, True), ("hip:gfx942", ODD, False)],
    [("cuda:80", LARGE, True), ("hip:gfx942", LARGE, True), ("cuda:90", ODD, False)],
)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "shape", "b_is_nk"), COMPILED, ids=str)
def test_compiles_everywhere_and_keeps_its_waits(target, shape, b_is_nk):
    target = TARGETS[target]
    problem = problem_for(op, 4, *shape, "bfloat16", b_is_nk=b_is_nk)
    check_products(op.kernels(problem, None, target), target)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["sm_push", "ce_push"])
def test_hoppers_tiles_in_turns_keep_their_sums_in_registers(transport):
    """What is spilled are a few sizes, once in a launch: nothing of a tile."""
    target = TARGETS["cuda:90"]
    problem = problem_for(op, 4, 2048, 8192, 2048, "bfloat16", b_is_nk=True)
    found = [c for c in candidates(problem, target) if c.template == "sm90" and c.tile_n == 128]
    config = next(one for one in found if one.transport == transport)
    check_products(op.kernels(problem, config, target), target)


PIECES = slow_but(
    [("cuda:90", 256)],
    [("cuda:90", 128), ("cuda:90", 256), ("cuda:100", 128), ("hip:gfx942", 128)],
)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "tile_n"), PIECES, ids=str)
def test_launches_in_parts_compile_and_all_chunks_have_one_kernel(target, tile_n):
    target, template = TARGETS[target], "sm90" if target == "cuda:90" else "plain"
    problem = problem_for(op, 4, 2048, 8192, 2048, "bfloat16", b_is_nk=True)
    config = Config("ce_parts", template, tile_n=tile_n, num_warps=4, chunks=4)
    _, *pieces, own = op.kernels(problem, config, target)
    assert len(pieces) == 4 and all(one == pieces[0] for one in pieces)
    check_products([pieces[0], own], target)


@pytest.mark.slow  # `make test` has one of gemm_ar, which is stored and unpacked
@pytest.mark.parametrize(("transport", "by_tma", "tile_n", "stages"), [
    ("ce_push", False, 160, 5),
    ("sm_push", True, 320, 3),
    ("ce_push", False, 320, 3),
    ("sm_push", True, 160, 5),
    ("sm_push", False, 160, 5),
    ("sm_push", False, 320, 3),
    ("sm_push", True, 192, 4),
])  # fmt: skip
def test_columns_that_are_no_power_of_two(transport, by_tma, tile_n, stages):
    target = TARGETS["cuda:90"]
    problem = problem_for(op, 4, 2048, 7680, 2048, "bfloat16", b_is_nk=True)
    config = Config(transport, "sm90", tile_n=tile_n, num_warps=4, num_stages=stages, by_tma=by_tma)
    ((fn, record),) = op.kernels(problem, config, target)
    b = "operand_2" if transport == "ce_push" else "operand_1"  # behind a, and tiles that are kept
    assert f"bf16[{gemm_sm90.block_columns(tile_n)}, 64]" in record.signature[b]
    check_products([(fn, record)], target, WIDER_STACK_BYTES)


def test_the_generic_variant_has_a_power_of_two_of_columns():
    problem = problem_for(op, 4, 2048, 7680, 2048, "bfloat16")
    config = Config(template="sm90", tile_n=320, num_warps=4, num_stages=3)
    with pytest.raises(ConfigError, match="tile_n=320; it must be a power of two"):
        replace(config, template="plain").check(problem, TARGETS["cuda:90"])


@pytest.mark.parametrize(("shape", "transport", "tile_n"), [
    ((512, 4096, 3584), "sm_push", 128),
    ((4096, 4096, 3584), "ce_push", 128),
    ((8192, 8192, 2048), "ce_push", 128),
    ((2048, 8192, 7168), "ce_push", 256),
    ((8192, 8192, 7168), "ce_push", 256),
])  # fmt: skip
def test_what_is_taken_on_four_ranks_is_what_was_fastest(shape, transport, tile_n):
    """Of what was read on 4 x H200: benchmarks/results/gemm_rs_variants_h200x4.json."""
    problem = problem_for(op, 4, *shape, "bfloat16", b_is_nk=True)
    config = choose(problem, TARGETS["cuda:90"])
    assert (config.template, config.transport, config.tile_n) == ("sm90", transport, tile_n)
    # A graph might begin with the engine's wait. Of m 512 the fused way took 55.0 us, cuBLAS and
    # weft's reduce_scatter of 1 MB took 26.9 and 22.7 (reduce_scatter_h200x4.json).
    recorded = "reduce_scatter" if shape[0] == 512 else "ce_parts"
    assert choose(problem, TARGETS["cuda:90"], is_recorded=True).transport == recorded


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_launches_in_parts_are_recorded_behind_calls_by_engines_alone(num_ranks):
    """These have the memory and the kernels of a recorded call; where SMs push, or nothing is
    fused, a recording could get neither."""
    others, parts = set(), 0
    for n, k in ((4096, 4096), (8192, 28672), (7168, 2048), (2560, 8192)):
        for m in (256, 768, 1536, 2048, 6144, 16384):
            problem = problem_for(op, num_ranks, m, n, k // num_ranks, "bfloat16", b_is_nk=True)
            eager, recorded = (choose(problem, TARGETS["cuda:90"], one) for one in (False, True))
            assert op.records_as(eager, recorded) or recorded.transport == "reduce_scatter"
            parts += recorded.transport == "ce_parts"
            others |= {eager.transport} - {"ce_push"}
    assert parts and others


def test_what_engines_carry_is_not_recorded(ranks):
    problem = problem_for(op, 2, 64, 32, 32)

    def main():
        world = weft.init()
        inputs = op.make_inputs(problem, world.rank)
        with pytest.raises(UsageError, match="transport='ce_push' cannot be recorded"):
            with world.record():
                op.run(world, problem, inputs, Config(transport="ce_push", tile_m=32, tile_n=16))

    ranks(main, 2)


@pytest.mark.slow
@pytest.mark.parametrize("other", ["sm_push", "ce_parts", "reduce_scatter"])
def test_a_recorded_call_takes_another_way_for_which_all_is_there(ranks, monkeypatch, other):
    module = sys.modules["weft.ops.gemm_rs"]
    problem = problem_for(op, 3, 96, 64, 32)
    ways = {False: "ce_push", True: other}

    def chosen(world, problem, config, is_recorded=False):
        return Config(transport=ways[is_recorded], tile_m=32, tile_n=16)

    monkeypatch.setattr(module, "given_or_chosen", chosen)

    def main():
        world = weft.init()
        taken, take = [], world.backend.take_token
        world.backend.take_token = lambda word: taken.append(word) or take(word)
        # Memory alone is had for other m; of 12 rows another mailbox.
        for one in (problem, replace(problem, m=120), replace(problem, m=12)):
            everyone = [op.make_inputs(one, rank) for rank in range(3)]
            mine, right = everyone[world.rank], op.reference(one, everyone)[world.rank]
            taken.clear()
            torch.testing.assert_close(gemm_rs(mine["a"], mine["b"], world=world), right)
            assert len(taken) == 2
            with world.record() as recording:
                out = gemm_rs(mine["a"], mine["b"], world=world)
            assert len(taken) == 2
            for _ in range(3):
                recording.replay()
                torch.testing.assert_close(gemm_rs(mine["a"], mine["b"], world=world), right)
                torch.testing.assert_close(out, right)

    ranks(main, 3)


def test_all_of_a_call_is_queued_before_any_of_it_is_recorded(ranks):
    """The device may have to come to rest for a recording; a product that has been launched waits
    for what engines are to carry."""
    problem = problem_for(op, 3, 96, 64, 32)
    config = Config(transport="ce_push", tile_m=32, tile_n=16, chunks=2)

    def main():
        world = weft.init()
        taken, recorded, take = [], [], world.backend.take_token
        world.backend.take_token = lambda word: taken.append(word) or take(word)
        world.backend.record_launches = lambda launch: recorded.append(len(taken))
        inputs = op.make_inputs(problem, world.rank)
        out = torch.empty(32, 64)
        for _ in range(8):
            gemm_rs(inputs["a"], inputs["b"], world=world, config=config, out=out)
        tokens = (world.num_ranks - 1) * config.chunks
        assert recorded and not any(count % tokens for count in recorded), recorded

    ranks(main, 3)


@pytest.mark.parametrize(("shape", "tile_n", "by_tma"), [
    ((2048, 8192, 2048), 128, False),
    ((8192, 8192, 2048), 128, False),
    ((2048, 4096, 3584), 128, False),
    ((4096, 8192, 7168), 256, True),
])  # fmt: skip
def test_what_is_taken_is_what_was_fastest(shape, tile_n, by_tma):
    """Of pushes, as read on 2 x H200: benchmarks/results/gemm_rs_variants_h200x2.json."""
    problem = problem_for(op, 2, *shape, "bfloat16", b_is_nk=True)
    found = candidates(problem, TARGETS["cuda:90"])
    config = next(one for one in found if one.transport == "sm_push")
    assert (config.template, config.tile_n, config.by_tma) == ("sm90", tile_n, by_tma)


@pytest.mark.parametrize("name", ["gemm_rs", "gemm_ar"])
@pytest.mark.parametrize("nodes", [(2, 2), (8, 8), (3, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("shape", [(64, 4096, 4096), (2048, 8192, 2048), (8192, 8192, 8192)])
def test_sums_are_relayed_where_that_is_predicted_to_end_first(shape, nodes, name):
    relayed, target = weft.ops.card(name), TARGETS["cuda:90"]
    problem = problem_for(relayed, sum(nodes), *shape, "bfloat16", nodes=nodes)
    chosen = relayed.choose(problem, target, is_recorded=True)
    ways = [one for one in relayed.candidates(problem, target) if one.transport == "relay"]
    us = [schedules.predict(problem, target, one) for one in ways]
    unfused_us = schedules.unfused_us(problem, target, problem.unfused.op)
    if chosen.transport == "relay":
        assert chosen == ways[0] and us[0] == min(us) <= schedules.MARGIN * unfused_us
    else:
        is_small = problem.rows < 256
        assert not ways or is_small or us[0] > schedules.MARGIN * unfused_us
        assert chosen.transport == problem.unfused.op
    # Of what nothing is predicted, float32 on Hopper, nothing is fused.
    plain = replace(problem, dtype="float32", out_dtype="float32")
    assert not relayed.choose(plain, target).is_fused


def test_is_found_by_its_name():
    assert weft.ops.gemm_rs is gemm_rs
    assert weft.ops.cards()["gemm_rs"] is op
