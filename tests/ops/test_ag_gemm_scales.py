"""ag_gemm of fp8: every transport with scales of rows, of blocks, and of whole tensors."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from effort import slow_but
from launching import check_under_torchrun
from torchrun import on_two_and_four_gpus

import weft
from weft.base.dtypes import tolerance
from weft.base.errors import ConfigError, DtypeError, ShapeError
from weft.base.target import TARGETS
from weft.compiler.gather_schedules import end_us
from weft.language import triton_api
from weft.ops import cards
from weft.ops.ag_gemm import Config, Problem, ag_gemm, candidates
from weft.plan.scales import scaling_of
from weft.verify import compiled

op = cards()["ag_gemm"]


def check(problem: Problem, transport: str, seed: int = 0, calls: int = 3) -> None:
    """Calls with other inputs each time are right on every rank, whatever the schedule."""
    sets = [
        [op.make_inputs(problem, rank, seed=i) for rank in range(problem.num_ranks)]
        for i in range(calls)
    ]

    def main():
        world = weft.init()
        config = next(c for c in candidates(problem, world.target) if c.transport == transport)
        return [op.run(world, problem, inputs[world.rank], config) for inputs in sets]

    nodes = problem.nodes or 1
    with weft.emulated(ranks=problem.num_ranks, nodes=nodes, seed=seed) as ranks:
        found = ranks.run(main)
    for i, inputs in enumerate(sets):
        for result, wanted in zip(found, op.reference(problem, inputs), strict=True):
            assert result[i].dtype == torch.bfloat16
            error = (result[i].float() - wanted).norm() / wanted.norm()
            assert error <= tolerance("bfloat16", problem.k)


@pytest.mark.few(1)
@pytest.mark.parametrize("transport", ["sm_push", "ce_push"])
@pytest.mark.parametrize("scaling", ["rows", "blocks"])
def test_scales_travel_with_rows(transport, scaling):
    check(Problem(67, 150, 272, 2, "float8_e4m3fn", b_is_nk=True, scaling=scaling), transport)
    check(Problem(7, 24, 144, 3, "float8_e5m2", "bfloat16", scaling=scaling), transport)


@pytest.mark.slow
def test_scales_travel_between_nodes():
    check(Problem(56, 24, 144, 3, "float8_e4m3fn", nodes=(2, 1), scaling="blocks"), "sm_push")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 9))
def test_scales_travel_with_rows_on_any_schedule(seed):
    transport = ("sm_push", "ce_push")[seed % 2]
    problem = Problem(96, 150, 272, 3, "float8_e4m3fn", scaling=("rows", "blocks")[seed // 2 % 2])
    check(problem, transport, seed, calls=6)


def test_a_rank_may_have_one_scale_for_all_its_rows(ranks):
    torch.manual_seed(0)
    a = [torch.randn(16, 32).to(torch.float8_e4m3fn) for _ in range(2)]
    b = torch.randn(32, 24).to(torch.float8_e4m3fn)

    def main():
        world = weft.init()
        scale_a = torch.tensor([[1.5 + world.rank]])
        out = torch.empty(32, 24)
        ag_gemm(a[world.rank], b, world=world, out=out, scale_a=scale_a,
                scale_b=torch.tensor([[0.5]]))  # fmt: skip
        wanted = torch.cat([a[0].float() * 1.5, a[1].float() * 2.5]) @ b.float() * 0.5
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)

    ranks(main, 2)


def test_a_kernel_for_scales_at_16_bytes_is_not_launched_on_others(ranks, monkeypatch):
    """Triton specialises it by each address, and what is launched again is not looked at."""
    again, relaunch = [], triton_api.relaunch

    def launched(kernel, grid, *arguments):
        again.append(kernel)
        return relaunch(kernel, grid, *arguments)

    monkeypatch.setattr(triton_api, "relaunch", launched)
    problem = Problem(32, 32, 32, 1, "float8_e4m3fn", b_is_nk=True)

    def main():
        world = weft.init()
        mine = op.make_inputs(problem, 0)
        config = next(c for c in candidates(problem, world.target) if c.transport == "sm_push")
        out = torch.empty(32, 32, dtype=torch.bfloat16)
        memory = torch.empty(1, 36)
        counts = []
        for first in (0, 0, 1, 0):
            scale_b = memory[:, first : first + 32].copy_(mine["scale_b"])
            before = len(again)
            ag_gemm(
                mine["a"], mine["b"], world=world, config=config, out=out,
                scale_a=mine["scale_a"], scale_b=scale_b,
            )  # fmt: skip
            counts.append(len(again) - before)
        assert counts == [0, 2, 0, 2]  # of both launches

    ranks(main, 1)


A, B = torch.zeros(8, 256).to(torch.float8_e4m3fn), torch.zeros(256, 300).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("a", "b", "kind"), [
    ((8, 1), (1, 300), "rows"),
    ((1, 1), (1, 300), "rows"),
    ((), (), "rows"),
    ((8, 2), (2, 3), "blocks"),
])  # fmt: skip
def test_kinds_of_scales(a, b, kind):
    assert scaling_of("ag_gemm", A, B, (torch.ones(a), torch.ones(b))) == kind


@pytest.mark.parametrize(("a", "b", "scales", "error", "text"), [
    (A, B, (None, torch.ones(1, 300)), DtypeError, "scale_a is missing"),
    (A.bfloat16(), B, (torch.ones(8, 1), None), DtypeError, "leave them out"),
    (A, B, (torch.ones(7, 1), torch.ones(1, 300)), ShapeError, r"\(8, 1\) \(rows\)"),
    (A, B, (torch.ones(8, 1), torch.ones(2, 3)), ShapeError, "pass both of one kind"),
    (A, B, (torch.ones(8, 1).double(), torch.ones(1, 300)), DtypeError, "must be float32"),
])  # fmt: skip
def test_scales_that_do_not_fit(a, b, scales, error, text):
    with pytest.raises(error, match=text):
        scaling_of("ag_gemm", a, b, scales)


def test_configurations_that_fp8_cannot_have():
    hopper = TARGETS["cuda:90"]
    problem = Problem(4096, 2560, 8192, 4, "float8_e4m3fn", scaling="blocks")
    assert all(c.template == "plain" for c in candidates(problem, hopper)), "b is [k, n]"
    with pytest.raises(ConfigError, match=r"b as \[n, k\]"):
        Config(template="sm90").check(problem, hopper)
    with pytest.raises(ConfigError, match="both must divide"):
        Config(transport="sm_push").check(problem, hopper)
    with pytest.raises(ConfigError, match="capability 8.9"):
        Config(transport="sm_push", tile_n=128).check(problem, TARGETS["cuda:80"])
    with pytest.raises(DtypeError, match="out_dtype float8"):
        Problem(8, 8, 8, 1, "float8_e4m3fn", "float8_e4m3fn")
    nk = Problem(4096, 2560, 8192, 4, "float8_e4m3fn", b_is_nk=True, scaling="blocks")
    first = next(candidates(nk, hopper))
    assert (first.template, first.tile_n, first.tile_k) == ("sm90", 128, 128)


@pytest.mark.slow
@pytest.mark.parametrize(("target", "scaling"), slow_but(
    [("cuda:90", "rows")],
    [("cuda:90", "blocks"), ("hip:gfx942", "rows"), ("hip:gfx942", "blocks")],
))  # fmt: skip
def test_they_compile(target, scaling):
    problem = Problem(4096, 2560, 8192, 4, "float8_e4m3fn", b_is_nk=True, scaling=scaling)
    names = []
    for fn, record in op.kernels(problem, None, TARGETS[target]):
        names.append(record.name)
        binary = triton_api.compile_kernel(fn, record, TARGETS[target])
        report = compiled(binary, TARGETS[target])
        assert report.ok, str(report)
    assert names[0] == "push_scales" and names[-1].startswith("ag_gemm_multiply")


@pytest.mark.parametrize("m", [512, 4096])
def test_fp8_is_predicted_as_16_bits_of_half_the_depth(m):
    hopper = TARGETS["cuda:90"]
    deep = Problem(m, 7168, 8192, 4, "float8_e4m3fn", b_is_nk=True)
    config = next(candidates(deep, hopper))
    assert (config.template, config.tile_k) == ("sm90", 128)
    same = Problem(m, 7168, 4096, 4, b_is_nk=True)
    assert end_us(config, deep, hopper) == end_us(replace(config, tile_k=64), same, hopper)


@on_two_and_four_gpus
def test_every_scale_on_gpus(ranks):
    check_under_torchrun("every_scale.py", ranks)
