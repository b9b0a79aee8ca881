"""Sums of few rows, which every rank makes for itself, and what is folded into them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from persistent_programs import tiled
from test_run import cache, of_rank
from test_scoreboard_mutants import bumps_mutated

import weft
from weft.base.dtypes import tolerance
from weft.compiler import Partial, Replicate, Shard, Tensor, all_reduce, reduce_scatter
from weft.compiler.libraries import reference
from weft.megakernel import Persistent
from weft.megakernel.check import check
from weft.megakernel.folding import fold
from weft.megakernel.graph import build
from weft.megakernel.tiles import ONE_SHOT
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, Run, WrongAnswer, search

assert cache  # a fixture
K, N = 24, 40


def total(x, w, before):
    return all_reduce(x @ w) + before


def layer(x, w, before, y):
    """A sum that all ranks make beside one whose rows have owners."""
    made = total(x, w, before)
    return made, made * made, reduce_scatter(y)


def types_of(dtype: str) -> dict[str, Tensor]:
    return {
        "x": Tensor(dtype, ("m", K), Shard(1)),
        "w": Tensor(dtype, (K, N), Shard(0)),
        "before": Tensor(dtype, ("m", N), Replicate()),
        "y": Tensor(dtype, ("m", N), Partial()),
    }


def tensors_of(dtype: str, m: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"x": (m, K), "w": (K, N), "before": (m, N), "y": (m, N)}
    return {
        name: torch.randn(*shape, generator=generator).to(getattr(torch, dtype))
        for name, shape in shapes.items()
    }


def part(program, name: str, whole, num_ranks: int, rank: int) -> torch.Tensor:
    return of_rank(program.task(name).type, whole, {"m": len(whole)}, rank, num_ranks)


def calls(program, given, how: Persistent, num_ranks: int) -> list[list[torch.Tensor]]:
    """What calls give that follow each other on one slot, on this rank, beside what they mean."""
    world = weft.init()
    found = []
    for whole in given:
        sizes = {"m": len(whole["x"])}
        mine = {
            name: of_rank(program.task(name).type, one, sizes, world.rank, num_ranks)
            for name, one in whole.items()
        }
        results = how.run_persistent(program, mine, sizes, world=world)
        wanted = [
            part(program, name, one, num_ranks, world.rank)
            for name, one in zip(program.results, reference(program, whole), strict=True)
        ]
        found.append([*zip(results, wanted, strict=True)])
    world.close()
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "dtype"), [(2, "bfloat16"), (3, "float32"), (4, "bfloat16")])
def test_all_ranks_get_the_same_bits(ranks, monkeypatch, num_ranks, dtype):
    """Of few rows and of many, in turns: at 33 rows four ranks send parts of them to each other."""
    monkeypatch.setenv("WEFT_SLOTS", "1")
    program = tiled(layer, types_of(dtype))
    given = [tensors_of(dtype, m, seed) for seed, m in enumerate((1, 33, 5, 16, 17))]
    engines = {m: {one.engine for one in fold(program, {"m": m}, num_ranks).tasks} for m in (1, 33)}
    assert ONE_SHOT in engines[1] and (ONE_SHOT in engines[33]) == (num_ranks < 3)
    how = Persistent(num_workers=2)
    found = ranks(lambda: calls(program, given, how, num_ranks), num_ranks)
    for call in range(len(given)):
        for rank in range(num_ranks):
            for one, other in zip(found[rank][call][:2], found[0][call]):
                assert torch.equal(one[0], other[0])
            for result, want in found[rank][call]:
                assert (result.float() - want).norm() <= 4 * tolerance(dtype, K) * want.norm()


def test_no_wrong_bump_reaches_the_device():
    program = fold(tiled(layer, types_of("float32")), {"m": 5}, 3)
    assert [one.engine for one in program.tasks].count(ONE_SHOT) == 2
    graph = replace(build(program, {"m": 5}, 3), num_workers=2)
    assert check(graph) == []
    mutants = list(bumps_mutated(graph))
    assert len(mutants) > 20
    assert not [told for told, mutant in mutants if not check(mutant, ("signals",))]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_signal_of_the_kernel_is_needed(monkeypatch):
    """But that a sum which all ranks make tells them in another order: they are told alike."""
    monkeypatch.setenv("WEFT_SLOTS", "1")
    program = tiled(total, {name: types_of("float32")[name] for name in ("x", "w", "before")})
    given = [tensors_of("float32", m, seed) for seed, m in enumerate((20, 5, 20, 5, 5))]
    given = [{name: whole[name] for name in ("x", "w", "before")} for whole in given]

    def main():
        for call in calls(program, given, Persistent(num_workers=2), 2):
            if not all(torch.allclose(*pair, atol=1e-4) for pair in call):
                raise WrongAnswer

    def run(seed, rewrite):
        with weft.emulated(
            2, seed=seed, collect=True, rewrite=rewrite, chooser=chooser_of(seed)
        ) as session:
            session.run(main)
        return session.report

    runs, bounds = [Run("one shot", run)], Bounds(schedules=8, census=2, jobs=1)
    report = search(runs, bounds, subject="one_shot", ranks=2)
    print(report)
    missed = [one for one in report.missed if "peer+1 of signal_at" not in str(one.mutant)]
    assert not missed and not report.mistakes and report.caught >= 30, str(report)
