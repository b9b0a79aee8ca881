"""Packets of generated kernels: each statement, hook and primitive is needed, and both halves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import weft
import weft.ops
from weft.base.target import TARGETS
from weft.compiler import Facts, Partial, Replicate, Settings, Tensor, all_reduce, libraries
from weft.compiler.frontend import trace
from weft.compiler.lower import compose, kernels, source
from weft.compiler.passes.place import place
from weft.compiler.pipeline import overlap
from weft.emulator.rewriting import Rewrite
from weft.ir import core, core_rules
from weft.megakernel.loading import import_text
from weft.plan import run_plan
from weft.tiles import row_packets
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, Run, WrongAnswer, search
from weft.verify.mutants.core_ir import search_core_ir
from weft.verify.mutants.search import shows

RANKS, N = 2, 6
TYPES = {
    "x": Tensor("bfloat16", ("m", N), Partial()),
    "residual": Tensor("bfloat16", ("m", N), Replicate()),
}


def few(x, residual):
    return all_reduce(x) + residual


PLACED = place(trace(few, "tp", TYPES))
ENGINES = ("one_shot_ll", "two_shot_ll")
STAGES = {
    engine: overlap(
        PLACED, Facts({"m": 16}, RANKS, TARGETS["emu"]), Settings(engines={"reduced": engine})
    )
    for engine in ENGINES
}
KERNELS = {
    engine: next(iter(kernels.lower(stages.plan).values())) for engine, stages in STAGES.items()
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))


def run_of(engine: str, changed: core.Kernel | None = None) -> Run:
    """Three calls by an engine, with other numbers and other rows each time; its kernel may be
    another."""

    def main() -> None:
        world = weft.init()
        for seed, m in enumerate((3, 5, 2)):
            generator = torch.Generator().manual_seed(seed)
            whole = {
                name: torch.randn(m, N, generator=generator).bfloat16()
                for name in ("x", "residual")
            }
            # Halves are exact, so that the order of sums does not matter.
            mine = whole | {"x": whole["x"] / RANKS}
            results = run_plan(STAGES[engine], mine, {"m": m}, world=world)
            wanted = libraries.reference(PLACED, {k: v.float() for k, v in whole.items()})
            if not all(torch.equal(a, b.bfloat16()) for a, b in zip(results, wanted, strict=True)):
                raise WrongAnswer
        world.close()

    def run(seed: int, rewrite: Rewrite):
        with weft.emulated(
            RANKS, seed=seed, collect=True, rewrite=rewrite, chooser=chooser_of(seed)
        ) as session, source.replaced(KERNELS[engine], changed or KERNELS[engine]):  # fmt: skip
            session.run(main)
        return session.report

    return Run(engine, run)


BY_BOTH = pytest.mark.parametrize(
    "engine", ["one_shot_ll", pytest.param("two_shot_ll", marks=pytest.mark.slow)]
)


@pytest.mark.slow
@BY_BOTH
def test_every_mutant_of_the_ir_is_caught(engine):
    """The one that is left moves the call's number when every program has read it."""
    bounds = Bounds(schedules=8, census=2, jobs=1)
    report = search_core_ir(
        KERNELS[engine], lambda one: [run_of(engine, one)], bounds, subject="few", ranks=RANKS
    )
    assert report.ok and report.caught == 2 and len(report.verdicts) == 3, str(report)


@pytest.mark.parametrize(
    ("engine", "hook"),
    [(engine, hook) for engine in ENGINES for hook in KERNELS[engine].of(core.Hook)],
    ids=lambda one: one if isinstance(one, str) else f"{one.slot}-{one.function}",
)
def test_a_kernel_without_one_of_its_hooks_is_refused_or_seen(engine, hook):
    kernel = KERNELS[engine]
    changed = replace(kernel, statements=tuple(x for x in kernel.statements if x is not hook))
    if core_rules.check(changed):
        assert hook.function not in ("add_ahead", "rounded")
    elif hook.function != "rounded":  # it is rounded where it is stored, too
        assert shows(run_of(engine, changed), 0, Rewrite())


def test_one_half_would_not_do(tmp_path, monkeypatch):
    """Who is in the next call would overwrite packets that others have not read. Sums that come
    back say that they have been, but calls of both kinds share boxes."""
    text = Path(row_packets.__file__).read_text()
    assert text.count("+ e % 2") == 1
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    tiles = import_text("one_half", text.replace("+ e % 2", ""))
    for name, function in (("send_packets", tiles.send), ("add_packets", tiles.add_shares)):
        monkeypatch.setitem(compose.HOOKS, name, (function, *compose.HOOKS[name][1:]))
    kernel = replace(KERNELS["one_shot_ll"], name="one_half")
    assert any(shows(run_of("one_shot_ll", kernel), seed, Rewrite()) for seed in range(8))


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_every_primitive_is_needed(engine):
    bounds = Bounds(schedules=16, argued=1, jobs=1)
    report = search([run_of(engine)], bounds, subject="few", ranks=RANKS)
    assert report.ok and not report.unreached and len(report.verdicts) >= 12, str(report)
