"""Each signal that the compiler puts into a kernel is needed: without it something is seen."""

from __future__ import annotations

import pytest
import torch
from generated_kernels import kernel_of
from test_source import gather_and_multiply, multiply_and_scatter

import weft
from weft.base.dtypes import tolerance
from weft.compiler.lower import source
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, Run, WrongAnswer
from weft.verify.mutants.woven import mutations, search_woven

RANKS = 3
BOUNDS = Bounds(schedules=8, census=2, jobs=1)


@pytest.fixture(autouse=True)
def one_slot(tmp_path, monkeypatch):
    """Only credits keep a call from the one before it."""
    monkeypatch.setenv("WEFT_SLOTS", "1")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))


def run_of(main) -> Run:
    def run(seed, rewrite):
        with weft.emulated(
            RANKS, seed=seed, collect=True, rewrite=rewrite, chooser=chooser_of(seed)
        ) as session:
            session.run(main)
        return session.report

    return Run("push", run)


def expect(c: torch.Tensor, expected: torch.Tensor, k: int) -> None:
    if not (c - expected).norm() <= tolerance("float32", k) * expected.norm():
        raise WrongAnswer


def gathers(kernel):
    """ag_gemm, three times, with other numbers each time."""
    multiply, (m, n, k) = source.load(kernel).plain, (40, 16, 16)
    whole, b = torch.randn(m, k), torch.randn(k, n)

    def main():
        world = weft.init()
        rows = -(-m // RANKS)
        first, outs = world.rank * rows, []
        for turn in range(3):
            a = (whole * (turn + 1))[first : first + rows].contiguous()
            outs.append(
                gather_and_multiply(world, a, b, m, 2, tma=False, programs=2, kernel=multiply)
            )
        for turn, c in enumerate(outs):
            expect(c, (whole * (turn + 1)) @ b, k)
        world.close()

    return [run_of(main)]


def scatters(kernel):
    """gemm_rs, the same."""
    multiply, (m, n, k) = source.load(kernel).plain, (40, 20, 16)
    lefts = [torch.randn(m, k) for _ in range(RANKS)]
    b = torch.randn(k, n)

    def main():
        world = weft.init()
        outs = [
            multiply_and_scatter(
                world, lefts[world.rank] * (turn + 1), b, programs=2, kernel=multiply
            )
            for turn in range(3)
        ]
        for turn, (first, c) in enumerate(outs):
            expect(c, (sum(lefts) * (turn + 1) @ b)[first : first + c.shape[0]], k * RANKS)
        world.close()

    return [run_of(main)]


@pytest.mark.parametrize(
    ("plan", "runs_of", "kinds"), [("ag_gemm_push", gathers, 7), ("gemm_rs", scatters, 13)]
)
def test_every_mutant_of_the_ir_is_caught(plan, runs_of, kinds):
    kernel = kernel_of(plan)
    assert len(list(mutations(kernel))) == kinds
    report = search_woven(kernel, runs_of, BOUNDS, subject=plan, ranks=RANKS)
    assert report.ok and report.caught == kinds, str(report)
