"""Every graph passes the rules; each rule finds what breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from persistent_programs import random_graph, tiled_mlp

from weft.base.errors import IllegalError
from weft.compiler.passes.tile import Region
from weft.megakernel.check import RULES, Order, Touch, check, require
from weft.megakernel.graph import build
from weft.megakernel.records import Access, Bump, RankTasks, TaskGraph, TileTask, Wait


@pytest.mark.parametrize(
    "num_ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_graphs_of_random_programs_are_sound(num_ranks: int):
    several = [random_graph(seed, num_ranks) for seed in range(40, 50)]
    for i, graph in enumerate(one for one in several if one is not None):
        for num_workers in (1, 2 + i % 3, len(graph.tasks) + 1):
            assert check(replace(graph, num_workers=num_workers)) == [], graph.program


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    """Where memory is used again, and rows are not the same number on both ranks."""
    return replace(build(tiled_mlp(), {"m": 37}, 2, rest=0), num_workers=3)


def on_rank(graph: TaskGraph, rank: int, **fields) -> TaskGraph:
    ranks = list(graph.ranks)
    ranks[rank] = replace(ranks[rank], **fields)
    return replace(graph, ranks=tuple(ranks))


def with_task(graph: TaskGraph, task: TileTask, **fields) -> TaskGraph:
    tasks = list(graph.ranks[task.rank].tasks)
    tasks[task.id] = replace(task, **fields)
    return on_rank(graph, task.rank, tasks=tuple(tasks))


def named(graph: TaskGraph, name: str) -> TileTask:
    return next(task for task in graph.tasks if str(task) == name)


def drop_wait(graph: TaskGraph, name: str, which: int = 0) -> TaskGraph:
    task = named(graph, name)
    return with_task(graph, task, waits=task.waits[:which] + task.waits[which + 1 :])


def drop_bump(graph: TaskGraph) -> TaskGraph:
    task = named(graph, "gated[0, 0]@1")
    return with_task(graph, task, bumps=())


def bump_nobody(graph: TaskGraph) -> TaskGraph:
    """A counter more, of which only the bumping side knows."""
    task, rank = named(graph, "gated[0, 0]@1"), graph.ranks[1]
    more = on_rank(graph, 1, counters=(*rank.counters, 1))
    return with_task(more, task, bumps=(*task.bumps, Bump(len(rank.counters), 1)))


def ask_for_more(graph: TaskGraph) -> TaskGraph:
    task = named(graph, "product[0, 0]@0")
    (wait,) = task.waits
    return with_task(graph, task, waits=(Wait(wait.counter, wait.at_least + 1),))


def ask_for_less(graph: TaskGraph) -> TaskGraph:
    task = named(graph, "product[0, 0]@0")
    (wait,) = task.waits
    return with_task(graph, task, waits=(Wait(wait.counter, wait.at_least - 1),))


def swap(graph: TaskGraph) -> TaskGraph:
    """The last task comes first, the first one last."""
    tasks = enumerate(reversed(graph.ranks[0].tasks))
    return on_rank(graph, 0, tasks=tuple(replace(task, id=i) for i, task in tasks))


def moved(graph: TaskGraph, name: str, offset: int) -> TaskGraph:
    """A buffer somewhere else, on all ranks."""

    def there(rank: RankTasks) -> RankTasks:
        buffers = (replace(one, offset=offset) if one.name == name else one for one in rank.buffers)
        return replace(rank, buffers=tuple(buffers))

    return replace(graph, ranks=tuple(map(there, graph.ranks)))


def reuse_early(graph: TaskGraph) -> TaskGraph:
    """What `gated` is made of lies where `gated` lies."""
    return moved(graph, "gated", graph.ranks[0].buffer("product").offset)


def forget_peers_readers(graph: TaskGraph) -> TaskGraph:
    """Who sends does not ask whether the receiver still reads what lies there."""
    for task in graph.tasks:
        if task.kind == "send":
            own = {bump.counter for one in graph.tasks if one.op == "product_2"
                   for bump in one.bumps if bump.rank == task.rank}  # fmt: skip
            graph = with_task(graph, task, waits=tuple(w for w in task.waits if w.counter in own))
    return unawaited(graph)


def unawaited(graph: TaskGraph) -> TaskGraph:
    """Without counters for which nobody waits any more."""
    waited = {(task.rank, one.counter) for task in graph.tasks for one in task.waits}
    for task in graph.tasks:
        kept = tuple(one for one in task.bumps if (one.rank, one.counter) in waited)
        graph = with_task(graph, task, bumps=kept)
    for rank in graph.ranks:
        totals = tuple(
            total if (rank.rank, i) in waited else 0 for i, total in enumerate(rank.counters)
        )
        graph = on_rank(graph, rank.rank, counters=totals)
    return graph


def make_twice(graph: TaskGraph) -> TaskGraph:
    """A tile of the product is stored where another is."""
    other = named(graph, "product[1, 1]@1")
    return with_task(graph, named(graph, "product[1, 0]@1"), writes=other.writes)


def make_less(graph: TaskGraph) -> TaskGraph:
    """A tile of the product lacks its last row: what is read there nobody has made."""
    task = named(graph, "product[1, 0]@1")
    (access,) = task.writes
    region = access.region._replace(end_row=access.region.end_row - 1)
    return with_task(graph, task, writes=(access._replace(region=region),))


BREACHES: tuple[tuple[str, Callable[[TaskGraph], TaskGraph], str], ...] = (
    ("counted", drop_bump, r"counter \d+ of rank 1 is said to come to 2, but is bumped by 1:"),
    ("counted", ask_for_more, r"product\[0, 0\]@0 waits until counter \d+ has come to 3, but all"),
    ("counted", ask_for_less, r"product\[0, 0\]@0 waits until counter \d+ has come to 1, but all"),
    ("awaited", bump_nobody, r"gated\[0, 0\]@1 bumps counter \d+ of rank 1, for which nobody"),
    ("acyclic", swap, r"nobody can begin: (?=.* waits for ).*@0 is behind .*@0 of worker \d"),
    ("made", lambda one: unawaited(drop_wait(one, "product[0, 0]@0")),
     r"product\[0, 0\]@0 reads gathered, and does not wait for gathered gather\[0, .\]@0, which"),
    ("made", make_less, r"of the 512 elements of product that gated\[1, 0\]@1 reads 496 are made"),
    ("made", make_twice, r"product\[1, .\]@1 and product\[1, .\]@1 both make elements of product"),
    ("ordered", forget_peers_readers,
     r"product\[1, 0\]@0 reads gathered .* scattered send\[.*\] of 0@1 writes scattered_partials"),
    ("kept", reuse_early, r"gated\[0, 0\]@0 reads product .*: neither buffer is over before"),
)  # fmt: skip


def test_every_rule_has_a_breach():
    assert {rule.name for rule in RULES} == {rule for rule, *_ in BREACHES}


@pytest.mark.parametrize(
    "rule, breach, told", BREACHES, ids=lambda one: getattr(one, "__name__", one)
)
def test_breaches_are_found(graph: TaskGraph, rule: str, breach: Callable, told: str):
    assert check(graph) == []
    found = check(breach(graph))
    own = [one for one in found if one.rule == rule]
    assert any(re.search(told, one.message) for one in own), "\n".join(map(str, found))
    assert all(one.place.frames for one in own)
    with pytest.raises(IllegalError, match=f"Tasks of mlp: (.|\n)*\\[{rule}\\]") as error:
        require(breach(graph))
    assert "persistent_programs.py" in str(error.value)


def test_a_worker_need_not_wait_for_itself():
    """Where one does all tasks, one after the other; several must wait."""
    alone = build(tiled_mlp(), {"m": 16}, 1)
    bare = [replace(one, waits=(), bumps=()) for one in alone.ranks[0].tasks]
    graph = on_rank(alone, 0, counters=(), tasks=tuple(bare))
    assert check(graph) == []
    several = replace(graph, num_workers=2)
    assert {one.rule for one in check(several)} >= {"made"}
    order = Order(several)
    assert order.is_before(0, 2) and not order.is_before(1, 2)


def test_tiles_that_share_one_column_meet():
    """At their edge, and not where one begins behind the other's last."""

    def touch(first: int, end: int) -> Touch:
        return Touch(0, 8, True, Access("x", 0, Region(0, 4, first, end)), (0,))

    assert touch(0, 33).meets(touch(32, 64)) and touch(32, 64).meets(touch(0, 33))
    assert not touch(0, 32).meets(touch(32, 64)) and not touch(32, 64).meets(touch(0, 32))
