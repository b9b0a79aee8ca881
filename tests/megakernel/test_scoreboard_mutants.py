"""Every signal of the persistent kernel is needed, in its tables and in its code."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import decoder
import pytest
import torch
from persistent_programs import tiled, tiled_mlp
from test_run import cache, of_rank

import weft
from weft.compiler import Partial, Shard, Tensor, all_gather, reduce_scatter
from weft.megakernel import Persistent
from weft.megakernel.check import check
from weft.megakernel.graph import build
from weft.megakernel.records import Bump, TaskGraph, TileTask
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, Run, WrongAnswer, search

assert cache  # a fixture
K = 16


def instead(graph: TaskGraph, task: TileTask, bumps: tuple[Bump, ...]) -> TaskGraph:
    ranks, tasks = list(graph.ranks), list(graph.ranks[task.rank].tasks)
    tasks[task.id] = replace(task, bumps=bumps)
    ranks[task.rank] = replace(ranks[task.rank], tasks=tuple(tasks))
    return replace(graph, ranks=tuple(ranks))


def bumps_mutated(graph: TaskGraph) -> Iterator[tuple[str, TaskGraph]]:
    """One bump less, one more than once, of another counter, on another rank."""
    for task in graph.tasks:
        for i, bump in enumerate(task.bumps):
            others = task.bumps[:i], task.bumps[i + 1 :]
            yield f"{task} drops {bump}", instead(graph, task, (*others[0], *others[1]))
            counters = len(graph.ranks[bump.rank].counters)
            changed = {"amount": bump.amount + 1, "counter": (bump.counter + 1) % counters}
            if graph.num_ranks > 1:
                changed["rank"] = (bump.rank + 1) % graph.num_ranks
            for name, value in changed.items():
                one = bump._replace(**{name: value})
                yield f"{task}: {one}", instead(graph, task, (*others[0], one, *others[1]))


@pytest.mark.parametrize("name", ["mlp", pytest.param("decoder", marks=pytest.mark.slow)])
def test_no_wrong_bump_reaches_the_device(name):
    """Before a kernel is launched its counters are checked."""
    program, sizes = tiled_mlp(), {"m": 37}
    if name == "decoder":
        program, sizes = decoder.compiled().tiled, {"b": 3}
    graph = replace(build(program, sizes, 2), num_workers=3)
    assert check(graph, ("signals",)) == []
    mutants = list(bumps_mutated(graph))
    missed = [told for told, mutant in mutants if not check(mutant, ("signals",))]
    assert len(mutants) > 100 and not missed


def exchange(x, y):
    """Tiles go to owners and to all; nothing else keeps a call from the next one's."""
    return reduce_scatter(x), all_gather(y)


EXCHANGE = tiled(
    exchange,
    {"x": Tensor("float32", ("m", K), Partial()), "y": Tensor("float32", ("m", K), Shard(0))},
)
# Two sizes: what one call leaves behind must not pass for the next one's.
CALLS = ((20, 0), (5, 1), (20, 2))


def run_of(how: Persistent, num_ranks: int) -> Run:
    """Calls back to back on one slot: only signals keep them apart."""
    given = []
    for m, seed in CALLS:
        generator = torch.Generator().manual_seed(seed)
        whole = {name: torch.randn(m, K, generator=generator) for name in "xy"}
        given.append((m, whole))

    def main():
        world = weft.init()
        results = []
        for m, whole in given:
            mine = {
                name: of_rank(EXCHANGE.task(name).type, one, {"m": m}, world.rank, num_ranks)
                for name, one in whole.items()
            }
            results.append(how.run_persistent(EXCHANGE, mine, {"m": m}, world=world))
        kind = EXCHANGE.task("scattered").type
        for (total, gathered), (m, whole) in zip(results, given):
            want = of_rank(kind, whole["x"], {"m": m}, world.rank, num_ranks)
            if not (torch.allclose(total, want, atol=1e-5) and torch.equal(gathered, whole["y"])):
                raise WrongAnswer
        world.close()

    def run(seed, rewrite):
        with weft.emulated(
            num_ranks, seed=seed, collect=True, rewrite=rewrite, chooser=chooser_of(seed)
        ) as session:
            session.run(main)
        return session.report

    return Run(f"{how.num_workers} workers", run)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_signal_of_the_kernel_is_needed(monkeypatch):
    monkeypatch.setenv("WEFT_SLOTS", "1")
    runs = [run_of(Persistent(num_workers=2), 2)]
    report = search(runs, Bounds(schedules=8, census=2, jobs=1), subject="persistent", ranks=2)
    print(report)
    assert report.ok and len(report.verdicts) >= 37, str(report)
