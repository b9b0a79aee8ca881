"""Each wait of a graph is needed: without it the rules find what is wrong, and the emulator, too,
which knows nothing of tasks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from persistent_programs import random_graph, tiled_mlp
from test_run import K, cache, mlp_of, of_rank

import weft
from weft.megakernel import Persistent, run
from weft.megakernel.check import check
from weft.megakernel.graph import build
from weft.megakernel.records import TaskGraph, TileTask

assert cache  # a fixture
M = 37


def without_wait(graph: TaskGraph, task: TileTask, which: int) -> TaskGraph:
    """The counter is still bumped, and bases move as before."""
    ranks, tasks = list(graph.ranks), list(graph.ranks[task.rank].tasks)
    tasks[task.id] = replace(task, waits=task.waits[:which] + task.waits[which + 1 :])
    ranks[task.rank] = replace(ranks[task.rank], tasks=tuple(tasks))
    return replace(graph, ranks=tuple(ranks))


def of_many_workers(graph: TaskGraph) -> TaskGraph:
    return replace(graph, num_workers=len(graph.tasks))


def whole(sizes) -> torch.Tensor:
    return torch.linspace(-1, 1, sizes[0] * sizes[1]).reshape(sizes)


def waits_of(graph: TaskGraph) -> list[tuple[TileTask, int]]:
    return [(task, which) for task in graph.tasks for which in range(len(task.waits))]


@pytest.mark.parametrize("num_ranks, m", [(1, 21), (2, 21), (3, 16)])
def test_no_wait_of_the_mlp_is_idle(num_ranks: int, m: int):
    """A worker for each task: nothing but waits orders them."""
    graph = of_many_workers(build(tiled_mlp(), {"m": m}, num_ranks, rest=0))
    assert check(graph) == [] and len(waits_of(graph)) > 20
    idle = [task for task, which in waits_of(graph) if not in_memory(graph, task, which)]
    assert not idle


def in_memory(graph: TaskGraph, task: TileTask, which: int) -> list:
    """What the rules of memory tell without a wait."""
    return check(without_wait(graph, task, which), ("memory",))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 110))
def test_few_waits_of_random_programs_are_idle(seed: int):
    """What follows from others is left out by whole operations, so a few may stay."""
    graph = random_graph(seed, 2)
    if graph is None or len(graph.tasks) > 150:
        pytest.skip("no tasks, or many")
    graph = of_many_workers(graph)
    idle = [task for task, which in waits_of(graph) if not in_memory(graph, task, which)]
    assert len(idle) <= len(waits_of(graph)) // 4


@pytest.mark.slow
def test_the_emulator_finds_all_of_them_too(ranks, monkeypatch):
    """One by one. There is a worker for each task."""
    made = mlp_of()
    placed = made.stages.tasks["place"]
    inputs = {task.name: task.type for task in placed.tasks if task.kind == "input"}
    how = Persistent(num_workers=64)
    graphs: list[TaskGraph] = []
    monkeypatch.setattr(run, "build", lambda *given, **more: build(*given, **{**more, "rest": 0}))

    def main():
        world = weft.init()
        given = [
            of_rank(kind, whole([M, K] if name == "x" else kind.sizes), {"m": M}, world.rank, 2)
            for name, kind in inputs.items()
        ]
        made.options(lowering=how)(*given, world=world, m=M)
        world.synchronize()

    def found_without(task: TileTask | None, which: int = 0) -> bool:
        def require(graph: TaskGraph) -> TaskGraph:
            graphs.append(graph)
            return graph if task is None else without_wait(graph, task, which)

        monkeypatch.setattr(run, "require", require)
        seeds = range(1 if task is None else 5)
        return any(not ranks(main, 2, collect=True, seed=seed).ok for seed in seeds)

    assert not found_without(None)
    waits = waits_of(graphs[0])
    assert graphs[0].num_workers == max(len(one.tasks) for one in graphs[0].ranks)
    assert len(waits) > 30
    assert [task for task, which in waits if not found_without(task, which)] == []
