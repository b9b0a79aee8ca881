"""gemm_ar: right in every way it can be called, the same bits on every rank, fused and not."""

from __future__ import annotations

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
from weft.base.errors import ConfigError
from weft.base.target import TARGETS
from weft.ops.gemm_ar import Config, candidates, gemm_ar, op

TRANSPORTS = ("sm_push", "one_shot_ll", "two_shot_ll")


# Packets know no parts of rows, so fewer shapes are awkward for them.
# Parts of rows are those of gemm_rs, which has all of AWKWARD.
CASES = [("sm_push", *case.values) for case in (AWKWARD[1], AWKWARD[4])]
CASES += [(way, *shape) for way in TRANSPORTS[1:] for shape in ((3, 91, 70, 50), (4, 1, 32, 32))]


@pytest.mark.few(1)
@pytest.mark.parametrize(("transport", "num_ranks", "m", "n", "k"), CASES)
def test_every_way_of_calling(ranks, num_ranks, m, n, k, transport):
    problem = problem_for(op, num_ranks, m, n, k)
    ranks(lambda: call_every_way(op, problem, config_for(op, problem, transport)), num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_half_precision_and_transposed_weights(ranks, transport):
    """bfloat16: what numpy has not, unlike float16."""
    problem = problem_for(op, 3, 76, 48, 64, "bfloat16", b_is_nk=True)
    ranks(lambda: call_every_way(op, problem, config_for(op, problem, transport)), 3)


@pytest.mark.slow
def test_nothing_fused_is_right_too(ranks):
    problem = problem_for(op, 3, 70, 40, 32)
    ranks(lambda: call_every_way(op, problem, Config(transport="all_reduce")), 3)


@pytest.mark.slow
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_any_schedule_gives_the_same_bits(ranks, monkeypatch, transport):
    """On all ranks; with one slot only credits keep calls apart."""
    monkeypatch.setenv("WEFT_SLOTS", "1")
    by_rank = any_schedule(op, problem_for(op, 4, 70, 48, 32), ranks, transport)
    first, *others = [out for outs in by_rank for out in outs]
    assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
@pytest.mark.parametrize("shape", [(8192, 2560, 8192), (64, 2560, 8192), (291, 70, 50), (1, 8, 8)])
def test_every_candidate_passes_its_own_check(target, shape):
    problem = problem_for(op, 4, *shape, "bfloat16")
    found = list(candidates(problem, target))
    assert {"sm_push", "all_reduce"} <= {config.transport for config in found}
    assert len(found) <= 8
    for config in found:
        config.check(problem, target)


LARGE = (4096, 2560, 8192)
COMPILED = slow_but(
    [("emu", LARGE, True)],
    [("cuda:90", LARGE, True), ("hip:gfx942", LARGE, True), ("cuda:90", (291, 70, 50), False)],
)


@pytest.mark.parametrize(("target", "shape", "b_is_nk"), COMPILED, ids=str)
def test_compiles_everywhere_and_keeps_its_waits(target, shape, b_is_nk):
    target = TARGETS[target]
    problem = problem_for(op, 4, *shape, "bfloat16", b_is_nk=b_is_nk)
    check_products(op.kernels(problem, None, target), target)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tile_n", "stages"), [pytest.param(320, 3, marks=pytest.mark.slow), (160, 5)]
)
def test_columns_that_are_no_power_of_two(tile_n, stages):
    """What has come from other ranks is unpacked in blocks of columns that are."""
    problem = problem_for(op, 4, 2048, 7680, 2048, "bfloat16", b_is_nk=True)
    cut = {"tile_n": tile_n, "num_stages": stages, "num_warps": 4}
    config = Config(template="sm90", by_tma=True, **cut)
    target = TARGETS["cuda:90"]
    check_products(op.kernels(problem, config, target), target, WIDER_STACK_BYTES)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["cuda:90", pytest.param("hip:gfx942", marks=pytest.mark.slow)])
@pytest.mark.parametrize("transport", ["one_shot_ll", "two_shot_ll"])
def test_packets_compile_for_few_rows(target, transport):
    problem = problem_for(op, 4, 9, 70, 50, "bfloat16")
    found = candidates(problem, TARGETS[target])
    config = next(config for config in found if config.transport == transport)
    check_products(op.kernels(problem, config, TARGETS[target]), TARGETS[target])


def test_packets_do_not_reach_other_nodes():
    problem = problem_for(op, 4, 16, 64, 64, nodes=(2, 2))
    with pytest.raises(ConfigError, match="packets reach the ranks of one node only"):
        Config(transport="one_shot_ll").check(problem, TARGETS["cuda:90"])
    assert not any(config.is_by_packets for config in candidates(problem, EMU))


def test_is_found_by_its_name():
    assert weft.ops.gemm_ar is gemm_ar
    assert weft.ops.cards()["gemm_ar"] is op
