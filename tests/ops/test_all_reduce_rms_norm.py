"""all_reduce_rms_norm: right in every way it can be called, the same bits on every rank."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from weft.base.dtypes import tolerance
from weft.base.errors import CallOrderError, ConfigError, DtypeError, ShapeError
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.ops.all_reduce_rms_norm import Config, all_reduce_rms_norm, candidates, op
from weft.verify import compiled

EMU = TARGETS["emu"]


def check(outs, problem, rank):
    inputs = [op.make_inputs(problem, other) for other in range(problem.num_ranks)]
    for out, expected in zip(outs, op.reference(problem, inputs)[rank], strict=True):
        assert out.shape == expected.shape and out.dtype == expected.dtype
        if expected.numel():
            error = (out.double() - expected.double()).norm() / expected.double().norm()
            assert error <= tolerance(problem.dtype, problem.num_ranks)


def call_every_way(problem, config):
    """Eager, recorded and replayed, another shape in between, eager again; on one rank."""
    world = weft.init()
    mine = op.make_inputs(problem, world.rank)
    first = op.run(world, problem, mine, config)
    check(first, problem, world.rank)
    with world.record() as recording:
        outs = op.run(world, problem, mine, config)
    for _ in range(2):
        for out in outs:
            out.fill_(float("nan"))
        recording.replay()
        check([out.clone() for out in outs], problem, world.rank)
    other = replace(problem, m=problem.m + 5, n=problem.n // 2 + 1)
    check(op.run(world, other, op.make_inputs(other, world.rank)), other, world.rank)
    for _ in range(2):
        check(op.run(world, problem, mine, config), problem, world.rank)
    world.close()
    return first


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("nodes", "shape"),
    [((1,), (14, 24)), ((3,), (14, 24)), ((4,), (9, 16)), ((4,), (1, 7)), ((2, 1), (5, 7))],
    ids=str,
)
def test_every_way_of_calling(ranks, nodes, shape, monkeypatch):
    monkeypatch.setenv("WEFT_SLOTS", "1")
    m, n = shape
    problem = op.make_problem(sum(nodes), {"m": m, "n": n}, "float32", nodes)
    layout = {"nodes": len(nodes)} if len(nodes) > 1 else {}
    for config in candidates(problem, EMU):
        found = ranks(lambda config=config: call_every_way(problem, config), sum(nodes), **layout)
        for outs in found[1:]:
            assert all(map(torch.equal, found[0], outs))


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_half_precision(ranks, dtype):
    problem = op.make_problem(3, {"m": 20, "n": 40}, dtype)
    ranks(lambda: call_every_way(problem, None), 3)


@pytest.mark.parametrize("n", [1, 2])
def test_a_row_is_one_packet(ranks, n):
    problem = op.make_problem(2, {"m": 4, "n": n}, "bfloat16")
    ranks(lambda: call_every_way(problem, None), 2)


@pytest.mark.parametrize("shape", [(0, 16), (4, 0)], ids=str)
def test_nothing_to_do(ranks, shape):
    problem = op.make_problem(2, dict(zip("mn", shape, strict=True)), "float32")
    outs = ranks(lambda: op.run(weft.init(), problem, op.make_inputs(problem, 0)), 2)
    assert all(out.shape == shape for pair in outs for out in pair)


def test_what_does_not_fit(ranks):
    def main():
        world = weft.init()
        x = torch.zeros(4, 8)
        with pytest.raises(ShapeError, match=r"residual has shape \(4, 7\); it must be \[m, n\]"):
            all_reduce_rms_norm(x, torch.zeros(4, 7), torch.ones(8), world=world)
        with pytest.raises(DtypeError, match="x is torch.float32 and weight torch.float16"):
            all_reduce_rms_norm(x, x, torch.ones(8).half(), world=world)

    ranks(main, 1)
    problem = op.make_problem(2, {"m": 4, "n": 1 << 17}, "float32")
    with pytest.raises(ConfigError, match="a row is one tile, of up to 32768 columns"):
        Config().check(problem, EMU)
    assert [config.transport for config in candidates(problem, EMU)] == ["all_reduce"]
    with pytest.raises(
        ConfigError, match="transport='ring'; it must be one of sm_push, one_shot_ll"
    ):
        Config("ring").check(op.make_problem(2, {"m": 4, "n": 8}, "float32"), EMU)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("target", "transport", "shape"),
    [
        pytest.param("cuda:80", "sm_push", (4096, 5120), marks=pytest.mark.slow),
        ("cuda:90", "sm_push", (2048, 16384)),
        ("cuda:90", "one_shot_ll", (4, 8192)),
        pytest.param("cuda:100", "two_shot_ll", (16, 16384), marks=pytest.mark.slow),
        ("hip:gfx942", "sm_push", (4096, 8192)),
        pytest.param("hip:gfx942", "two_shot_ll", (64, 4096), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_compiles_and_keeps_its_waits(target, transport, shape):
    target, (m, n) = TARGETS[target], shape
    problem = op.make_problem(4, {"m": m, "n": n}, "bfloat16")
    config = next(one for one in candidates(problem, target) if one.transport == transport)
    ((fn, record),) = op.kernels(problem, config, target)
    binary = triton_api.compile_kernel(fn, record, target)
    report = compiled(binary, target)
    assert report.ok, "\n".join(map(str, report.findings))
    if target.backend == "cuda":
        assert "ld.local" not in binary.asm["ptx"] and "st.local" not in binary.asm["ptx"]


def test_few_rows_go_by_packets():
    """At all_reduce's sizes, where all ranks are near."""

    def first(m, nodes=(4,)):
        problem = op.make_problem(4, {"m": m, "n": 8192}, "bfloat16", nodes)
        return next(candidates(problem, TARGETS["cuda:90"])).transport

    assert [first(m) for m in (1, 8, 9, 128, 129)] == ["one_shot_ll"] * 2 + ["two_shot_ll"] * 2 + [
        "sm_push"
    ]
    assert first(1, (2, 2)) == "sm_push"


def test_eps_is_a_part_of_the_call(ranks):
    """Ranks of another eps would have other results; and what is kept of a call has its own."""
    problem = op.make_problem(2, {"m": 4, "n": 16}, "float32")

    def main():
        world = weft.init()
        x, residual, weight = op.make_inputs(problem, world.rank).values()
        many, _ = all_reduce_rms_norm(x, residual, weight, world=world, eps=1e6)
        few, _ = all_reduce_rms_norm(x, residual, weight, world=world, eps=0.0)
        assert many.abs().max() < 0.1 < few.abs().max()
        world.synchronize()
        all_reduce_rms_norm(x, residual, weight, world=world, eps=1e-5 * (1 + world.rank))

    with pytest.raises(CallOrderError, match=r"eps=1e-05 .* but rank 1 calls .* eps=2e-05 "):
        ranks(main, 2)
