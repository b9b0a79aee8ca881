"""gemm_rs and gemm_ar of fp8: every transport with scales of rows, of blocks, and of tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from effort import slow_but
from multiplying import (
    EMU,
    WIDER_STACK_BYTES,
    call_every_way,
    check,
    check_products,
    config_for,
    scales_rows_on_a_cpu,
)
from test_sm90_emulated import on_hopper, runs_in_gluon

import weft
from weft.base.errors import CallOrderError, ConfigError, DtypeError, ShapeError
from weft.base.target import TARGETS
from weft.compiler.buckets import key_of
from weft.compiler.schedules import Config, predict, unfused_us
from weft.ops import card, cards

HOPPER = TARGETS["cuda:90"]
PLAIN_STACK_BYTES = 1 << 12
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def problem_for(name, m, n, k, num_ranks, dtype=E4M3, **fields):
    return card(name).problem(m, n, num_ranks, dtype, k=k, **fields)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "num_ranks", "m", "n", "k", "fields"), [
    ("gemm_rs", 3, 91, 70, 50, {}),
    ("gemm_rs", 2, 67, 150, 272, {"scaling": "blocks", "b_is_nk": True}),
    ("gemm_rs", 4, 9, 136, 144, {"scaling": "blocks", "dtype": E5M2}),
    ("gemm_ar", 3, 91, 70, 272, {"scaling": "blocks", "dtype": E5M2}),
    ("gemm_ar", 4, 9, 40, 50, {"b_is_nk": True, "out_dtype": "float16"}),
])  # fmt: skip
def test_every_way_of_calling(ranks, name, num_ranks, m, n, k, fields):
    op, problem = card(name), problem_for(name, m, n, k, num_ranks, **fields)
    ranks(lambda: call_every_way(op, problem, config_for(op, problem)), num_ranks)


@pytest.mark.few(1)
@pytest.mark.parametrize(("name", "transport", "seed", "fields"), slow_but(
    [("gemm_rs", "ce_push", 0, {"scaling": "blocks"}), ("gemm_rs", "ce_push", 1, {}),
     ("gemm_rs", "reduce_scatter", 0, {}), ("gemm_ar", "all_reduce", 0, {})],
    [(*way, seed, fields) for seed in range(2, 6) for fields in ({}, {"scaling": "blocks"})
     for way in (("gemm_rs", "ce_push"), ("gemm_rs", "sm_push"), ("gemm_ar", "sm_push"))],
))  # fmt: skip
def test_calls_with_other_scales_each_time(name, transport, seed, fields):
    op, problem = card(name), problem_for(name, 75, 160, 272, 3, b_is_nk=True, **fields)
    if transport == op.problem.unfused.op and not scales_rows_on_a_cpu():
        pytest.skip("this torch's CPU build has one scale for all rows")
    sets = [[op.make_inputs(problem, rank, seed=i) for rank in range(3)] for i in range(3)]
    config = next(c for c in op.candidates(problem, EMU) if c.transport == transport)

    def main():
        world = weft.init()
        mine = {name: torch.empty_like(one) for name, one in sets[0][world.rank].items()}
        for inputs in sets:
            for one, values in inputs[world.rank].items():
                mine[one].copy_(values)
            out = op.run(world, problem, mine, config)
            wanted = op.reference(problem, inputs)[world.rank]
            assert out.dtype == torch.bfloat16
            torch.testing.assert_close(out.float(), wanted, rtol=0.02, atol=0.01 * wanted.std())

    with weft.emulated(ranks=3, seed=seed) as ranks:
        ranks.run(main)


def test_shares_reach_other_nodes():
    op, problem = card("gemm_rs"), problem_for("gemm_rs", 56, 24, 144, 3, scaling="blocks")

    def main():
        world = weft.init()
        config = next(op.candidates(replace(problem, nodes=(2, 1)), world.target))
        assert config.transport == "relay"
        mine = op.make_inputs(problem, world.rank)
        check(op, op.run(world, problem, mine, config), problem, world.rank)

    with weft.emulated(ranks=3, nodes=(2, 1)) as ranks:
        ranks.run(main)


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", ["sm_push", "unfused"])
@pytest.mark.parametrize("name", ["gemm_rs", "gemm_ar"])
def test_each_rank_has_its_own_kind_of_scales(ranks, name, transport):
    """One number on rank 0; on rank 1 one for each row, which lie apart, and one number for B."""
    op, problem = card(name), problem_for(name, 32, 48, 32, 2, b_is_nk=True)
    if transport == "unfused" and not scales_rows_on_a_cpu():
        pytest.skip("this torch's CPU build has one scale for all rows")
    torch.manual_seed(0)
    a = [torch.randn(32, 32).to(torch.float8_e4m3fn) for _ in range(2)]
    b = [torch.randn(48, 32).to(torch.float8_e4m3fn).t() for _ in range(2)]
    of_a = [torch.tensor(1.5), torch.rand(32, 3)[:, 1:2] + 0.5]
    of_b = [torch.tensor([[0.5]]), torch.tensor([[2.0]])]
    total = sum((a[r].float() * of_a[r]) @ (b[r].float() * of_b[r]) for r in range(2))

    def main():
        world = weft.init()
        r, way = world.rank, op.problem.unfused.op if transport == "unfused" else transport
        config = next(c for c in op.candidates(problem, EMU) if c.transport == way)
        first, end = problem.result_rows(r)
        out = torch.empty(end - first, 48, dtype=torch.bfloat16)
        for _ in range(2):
            getattr(weft.ops, name)(a[r], b[r], world=world, config=config, out=out,
                                    scale_a=of_a[r], scale_b=of_b[r])  # fmt: skip
        torch.testing.assert_close(out.float(), total[first:end], rtol=0.02, atol=0.2)

    ranks(main, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["gemm_rs", "gemm_ar"])
def test_an_out_of_fp32_is_given_all_digits(ranks, name):
    """Shares travel in the result's dtype."""
    op = card(name)
    problem = problem_for(name, 24, 40, 64, 2, out_dtype="float32")
    ranks(lambda: call_every_way(op, problem, config_for(op, problem)), 2)


def test_ranks_that_round_otherwise_are_told(ranks):
    def main():
        world = weft.init()
        dtype = ("float16", "bfloat16")[world.rank]
        op, problem = card("gemm_rs"), problem_for("gemm_rs", 16, 16, 16, 2, out_dtype=dtype)
        op.run(world, problem, op.make_inputs(problem, world.rank), config_for(op, problem))

    with pytest.raises(CallOrderError, match="float8_e4m3fn to float16"):
        ranks(main, 2)


def test_what_is_compiled_gives_the_same_dtype(ranks):
    """torch.compile asks what a result is like without its values."""
    op, problem = card("gemm_rs"), problem_for("gemm_rs", 16, 16, 32, 1)
    mine = op.make_inputs(problem, 0)

    def main():
        world = weft.init()

        def call(a, b, scale_a, scale_b):
            return weft.ops.gemm_rs(a, b, world=world, scale_a=scale_a, scale_b=scale_b)

        out = torch.compile(call, backend="aot_eager", fullgraph=True)(**mine)
        assert out.dtype == torch.bfloat16 and torch.equal(out, call(**mine))

    ranks(main, 1)


# ---- what it refuses, and what it takes


A, B = torch.zeros(8, 256).to(torch.float8_e4m3fn), torch.zeros(256, 300).to(torch.float8_e4m3fn)
ONE = torch.ones(())


@pytest.mark.parametrize(("given", "error", "text"), [
    ({"scale_a": ONE}, DtypeError, "scale_b is missing; pass both"),
    ({"scale_a": torch.ones(7, 1), "scale_b": ONE}, ShapeError, r"\(8, 1\) \(rows\)"),
    ({"scale_a": torch.ones(8, 2), "scale_b": ONE}, ShapeError, "pass both of one kind"),
    ({"scale_a": ONE, "scale_b": ONE, "out": torch.empty(8, 300, dtype=torch.int16)}, DtypeError,
     "out is torch.int16; it may be float16"),
])  # fmt: skip
@pytest.mark.parametrize("name", ["gemm_rs", "gemm_ar"])
def test_scales_that_do_not_fit(ranks, name, given, error, text):
    def main():
        getattr(weft.ops, name)(A, B, world=weft.init(), **given)

    with pytest.raises(error, match=f"{name}: .*{text}"):
        ranks(main, 1)


def test_problems_that_there_are_not():
    with pytest.raises(DtypeError, match="out_dtype float32 of bfloat16 operands"):
        problem_for("gemm_rs", 8, 8, 8, 1, "bfloat16", out_dtype="float32")
    with pytest.raises(DtypeError, match="scaling='rows' of bfloat16 operands"):
        problem_for("gemm_ar", 8, 8, 8, 1, "bfloat16", scaling="rows")


def test_configurations_that_fp8_cannot_have():
    whole = problem_for("gemm_rs", 4096, 2560, 8192, 4, scaling="blocks")
    found = list(card("gemm_rs").candidates(whole, HOPPER))
    # B is [k, n], which neither the template for Hopper nor torch takes of fp8.
    ways = {(c.template, c.transport) for c in found}
    assert ways == {("plain", "sm_push"), ("plain", "ce_push")}
    for config in found:
        config.check(whole, HOPPER)
    for config, words in (
        (Config(template="sm90"), r"or fp8 with b as \[n, k\]"),
        (Config(transport="reduce_scatter"), "scaling='blocks', b_is_nk=False.*take transport='sm"),
        (Config(tile_n=256), "both must divide it"),
    ):
        with pytest.raises(ConfigError, match=words):
            config.check(whole, HOPPER)
    with pytest.raises(ConfigError, match="capability 8.9"):
        Config(tile_k=64).check(whole, TARGETS["cuda:80"])
    few = problem_for("gemm_ar", 8, 256, 512, 4)
    with pytest.raises(ConfigError, match="what packets carry has no scales: take transport='sm_p"):
        Config(transport="one_shot_ll").check(few, EMU)
    assert not any(c.is_by_packets for c in card("gemm_ar").candidates(few, HOPPER))


@pytest.mark.parametrize("m", [64, 512, 4096])
@pytest.mark.parametrize("name", ["gemm_rs", "gemm_ar"])
def test_what_is_taken_can_be_done(name, m):
    """Recorded too, of every kind of scales and operands, on every target that has fp8."""
    op = card(name)
    for target in (one for one in TARGETS.values() if one.name != "cuda:80"):
        for scaling in ("rows", "blocks"):
            for b_is_nk, dtype in ((True, E4M3), (False, E4M3), (True, E5M2)):
                problem = problem_for(name, m, 2560, 8192, 4, dtype, scaling=scaling,
                                      b_is_nk=b_is_nk)  # fmt: skip
                for is_recorded in (False, True):
                    op.choose(problem, target, is_recorded).check(problem, target)
                found = list(op.candidates(problem, target))
                assert len(found) <= 8
                for config in found:
                    config.check(problem, target)


def test_fp8_is_predicted_as_16_bits_of_half_the_depth():
    deep = problem_for("gemm_rs", 4096, 7168, 8192, 4, b_is_nk=True)
    same = problem_for("gemm_rs", 4096, 7168, 4096, 4, "bfloat16", b_is_nk=True)
    assert unfused_us(deep, HOPPER, "reduce_scatter") == unfused_us(same, HOPPER, "reduce_scatter")
    found = [c for c in card("gemm_rs").candidates(deep, HOPPER) if c.is_fused]
    assert {(c.template, c.tile) for c in found} == {("sm90", (128, 128, 128))}
    for config in found:
        assert predict(deep, HOPPER, config) == predict(same, HOPPER, replace(config, tile_k=64))


@pytest.mark.parametrize("name", ["gemm_rs", "gemm_ar"])
def test_choices_of_16_bits_keep_their_keys(name):
    """Files of measured choices of before there was fp8 are still found."""
    assert key_of(problem_for(name, 64, 32, 16, 2, "bfloat16")) == (
        "m=64 n=32 dtype=bfloat16 nodes=() in_place=False k=16"
    )
    assert "scaling=blocks" in key_of(problem_for(name, 64, 32, 16, 2, scaling="blocks"))


# ---- code


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target", "scaling", "b_is_nk"), slow_but(
    [("gemm_rs", "cuda:90", "rows", True), ("gemm_ar", "cuda:90", "blocks", True),
     ("gemm_rs", "hip:gfx942", "blocks", True)],
    [(name, target, scaling, b_is_nk) for name in ("gemm_rs", "gemm_ar")
     for target in ("cuda:90", "cuda:100", "hip:gfx942") for scaling in ("rows", "blocks")
     for b_is_nk in (True, False)],
))  # fmt: skip
def test_they_compile_and_keep_their_waits(name, target, scaling, b_is_nk):
    problem = problem_for(name, 4096, 2560, 8192, 4, scaling=scaling, b_is_nk=b_is_nk)
    target = TARGETS[target]
    found = [c for c in cards()[name].candidates(problem, target) if c.is_fused]
    for config in {c.transport: c for c in reversed(found)}.values():
        kernels = list(card(name).kernels(problem, config, target))
        assert kernels
        is_fitted = config.template == "sm90"  # the plain template's tiles are to no registers
        check_products(kernels, target, WIDER_STACK_BYTES if is_fitted else PLAIN_STACK_BYTES)


@pytest.mark.slow
def test_a_rank_whose_rows_begin_at_no_16_bytes_has_the_same_words():
    """The plain template on rank 0 signals both halves of a tile, which consumers of others share
    on Hopper: of fp8 in tiles of 128 columns too."""
    op, problem = card("gemm_rs"), problem_for("gemm_rs", 300, 144, 144, 2, b_is_nk=True)
    config = Config(template="sm90", tile_k=128, num_stages=3, num_warps=4)

    def main():
        world = weft.init()
        mine = op.make_inputs(problem, world.rank)
        a = torch.empty(mine["a"].numel() + 1, dtype=torch.float8_e4m3fn)[1:]
        moved = {**mine, "a": a.view(mine["a"].shape).copy_(mine["a"])}
        for inputs in (mine, mine if world.rank else moved, mine):
            check(op, op.run(world, problem, inputs, config), problem, world.rank)

    assert runs_in_gluon(on_hopper(main))
