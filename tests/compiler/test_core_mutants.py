"""Each signal that the compiler puts into a kernel is needed: without it something is seen."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from composed_kernels import kernel_of
from test_compose import gather_and_multiply

import weft
from weft.base.dtypes import tolerance
from weft.base.report import Report
from weft.base.target import TARGETS
from weft.compiler import gather_schedules, schedules
from weft.compiler.lower import kernels, source
from weft.compiler.schedules import Config
from weft.emulator.rewriting import Rewrite
from weft.ops.ag_wgrad import Config as ConfigOfSums
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, Run, WrongAnswer
from weft.verify.mutants.core_ir import mutations, search_core_ir
from weft.verify.mutants.search import LEAST_STEPS, PATIENCE

RANKS = 3
BOUNDS = Bounds(schedules=8, census=2, jobs=1)


@pytest.fixture(autouse=True)
def one_slot(tmp_path, monkeypatch):
    """Only credits keep a call from the one before it."""
    monkeypatch.setenv("WEFT_SLOTS", "1")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))


def run_of(main, nodes: int = 1) -> Run:
    def run(seed, rewrite):
        with weft.emulated(
            RANKS, nodes, seed=seed, collect=True, rewrite=rewrite, chooser=chooser_of(seed)
        ) as session:
            session.run(main)
        return session.report

    return Run("push", run)


def expect(c: torch.Tensor, expected: torch.Tensor, k: int) -> None:
    if not (c - expected).norm() <= tolerance("float32", k) * expected.norm():
        raise WrongAnswer


def gathers(kernel, nodes: int = 1):
    """ag_gemm, three times, with other numbers each time."""
    multiply, (m, n, k) = source.load(kernel), (40, 16, 16)
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

    return [run_of(main, nodes)]


PRODUCTS = ("gemm_rs", "gemm_ar")
SMALL = Config(tile_m=16, tile_n=16, tile_k=16, num_warps=4)
GATHERED = {"tile_m": 16, "tile_n": 16, "tile_k": 16, "num_warps": 4, "pushers": 2}
PUSHED = gather_schedules.Config(transport="sm_push", **GATHERED)
# A chunk is whole steps of tile_k; 40 rows are 14 of each of three ranks.
SUMMED = ConfigOfSums(transport="sm_push", split_k=2, chunks=1, **GATHERED)
OF_GATHERED = {"ag_gemm": PUSHED, "ag_wgrad": SUMMED}


def problem_of(name: str, nodes: int = 1, m: int = 40):
    """That of gemm_rs or gemm_ar which runs are of."""
    sizes = (2, 1) if nodes > 1 else (RANKS,)
    op = importlib.import_module(f"weft.ops.{name}").op
    return op.make_problem(RANKS, {"m": m, "n": 20, "k": 16}, "float32", sizes)


def shipped(name: str, nodes: int = 1):
    """The kernel of an operator."""
    if name in OF_GATHERED:
        problem, op = problem_of(name, m=40), importlib.import_module(f"weft.ops.{name}").op
        config = OF_GATHERED[name]
        stages = gather_schedules.planned(op.program(problem), config, problem, TARGETS["emu"])
        return kernels.lower(stages.plan)[f"{name}_multiply"]
    is_product = name in PRODUCTS
    problem, config = (problem_of(name, nodes), SMALL) if is_product else by_experts(name)
    stages = schedules.planned(problem.traced(), config, problem, TARGETS["emu"])
    *_, kernel = kernels.lower(stages.plan).values()  # of several the one that sums over ranks
    return kernel


def by_experts(name: str, m: int = 9):
    """The problem of ag_moe, moe_rs or moe_ar which runs are of, and how one is done."""
    module = importlib.import_module(f"weft.ops.{name}")
    shape = {"m": m, "n": 20, "k": 16, "experts": 2, "top_k": 2}
    problem = module.op.make_problem(RANKS, shape, "float32")
    config = next(iter(module.candidates(problem, TARGETS["emu"])))
    return problem, replace(config, transport="sm_push", tile_n=16, tile_k=16)


def of_experts(name: str):
    """ag_moe, moe_rs or moe_ar, the same; tokens go elsewhere each time. Few tokens lie among
    moe_ar's, as in gemm_ar."""
    rows = (9, 9, 1, 1, 9, 1, 9) if name == "moe_ar" else (9, 9, 9)
    return operator(name, [by_experts(name, m)[0] for m in rows], by_experts(name)[1])


def product(name: str, nodes: int = 1):
    """gemm_rs or gemm_ar with its kernel generated from what is given, the same.

    Calls of gemm_ar with one row lie among them: they use the slot of 40 rows otherwise, so that
    nothing but a credit keeps the next call of 40 from writing what a rank still reads.
    """
    rows = (40, 40, 1, 1, 40, 1, 40) if name == "gemm_ar" else (40, 40, 40)
    return operator(name, [problem_of(name, nodes, m) for m in rows],
                    OF_GATHERED.get(name, SMALL), nodes)  # fmt: skip


def operator(name: str, problems, config, nodes: int = 1):
    """An operator with another kernel in the place of its own, called with each of `problems`."""
    module = importlib.import_module(f"weft.ops.{name}")
    turns = [
        (problem, [module.op.make_inputs(problem, rank, seed) for rank in range(RANKS)])
        for seed, problem in enumerate(problems)
    ]
    expected = [module.op.reference(problem, given) for problem, given in turns]

    def runs_of(kernel):
        def main():
            world = weft.init()
            outs = [
                module.op.run(world, problem, given[world.rank], config) for problem, given in turns
            ]
            for out, everyones in zip(outs, expected):
                expect(out, everyones[world.rank], 32 * RANKS)
            world.close()

        def run(seed, rewrite):
            with source.replaced(shipped(name, nodes), kernel):
                return run_of(main, nodes).run(seed, rewrite)

        return [Run("push", run)]

    return runs_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "runs_of", "caught"),
    [
        ("ag_gemm_nodes", lambda: partial(gathers, nodes=2), 7),
        ("gemm_rs", lambda: product("gemm_rs", nodes=2), 13),
    ],
)
def test_every_mutant_is_caught_where_tiles_go_node_by_node(plan, runs_of, caught):
    """Ranks 0 and 1 are on one node, rank 2 on another."""
    kernel = kernel_of(plan) if plan.endswith("nodes") else shipped(plan, nodes=2)
    assert len(list(mutations(kernel))) == caught
    report = search_core_ir(kernel, runs_of(), BOUNDS, subject=plan, ranks=RANKS)
    assert report.ok and report.caught == caught, str(report)


@pytest.mark.parametrize(
    ("plan", "runs_of", "caught", "equivalent"),
    [
        ("ag_gemm_push", lambda: gathers, 7, 0),
        pytest.param("ag_gemm", lambda: product("ag_gemm"), 13, 0, marks=pytest.mark.slow),
        pytest.param("ag_wgrad", lambda: product("ag_wgrad"), 13, 0, marks=pytest.mark.slow),
        pytest.param("gemm_rs", lambda: product("gemm_rs"), 13, 0, marks=pytest.mark.slow),
        pytest.param("gemm_ar", lambda: product("gemm_ar"), 21, 0, marks=pytest.mark.slow),
        pytest.param("ag_moe", lambda: of_experts("ag_moe"), 13, 0, marks=pytest.mark.slow),
        pytest.param("moe_rs", lambda: of_experts("moe_rs"), 13, 0, marks=pytest.mark.slow),
        pytest.param("moe_ar", lambda: of_experts("moe_ar"), 21, 0, marks=pytest.mark.slow),
    ],
)
def test_every_mutant_of_the_ir_is_caught(plan, runs_of, caught, equivalent):
    kernel = kernel_of(plan) if plan == "ag_gemm_push" else shipped(plan)
    assert len(list(mutations(kernel))) == caught + equivalent
    report = search_core_ir(kernel, runs_of(), BOUNDS, subject=plan, ranks=RANKS)
    assert report.ok and report.caught == caught, str(report)


def test_several_processes_come_to_the_same_verdicts():
    kernel, bounds = kernel_of("ag_gemm_push"), replace(BOUNDS, schedules=1)
    alone, together = (
        search_core_ir(kernel, gathers, replace(bounds, jobs=jobs), subject="it", ranks=RANKS)
        for jobs in (1, 2)
    )
    outcomes = [(one.mutant, one.outcome, one.by) for one in together.verdicts]
    assert outcomes == [(one.mutant, one.outcome, one.by) for one in alone.verdicts]
    assert len(outcomes) == 7


@pytest.mark.parametrize("census", [0, 3])
def test_a_mutant_has_so_many_steps_by_what_one_seed_took(census):
    """Without a census it has the least there is."""
    allowed = []

    def run(seed: int, rewrite: Rewrite) -> Report:
        allowed.append(rewrite.most_steps)
        rewrite.steps += LEAST_STEPS
        return Report("it", 1)

    bounds = Bounds(schedules=1, census=census, jobs=1)
    kernel = kernel_of("ag_gemm_push")
    search_core_ir(kernel, lambda mutant: [Run("it", run)], bounds, subject="it", ranks=1)
    assert allowed[:census] == [math.inf] * census
    of_mutants = PATIENCE * LEAST_STEPS if census else LEAST_STEPS
    assert len(allowed) > census and set(allowed[census:]) == {of_mutants}
