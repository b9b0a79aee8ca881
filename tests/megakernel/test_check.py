"""Every schedule of every graph passes the rules; each rule finds what breaks it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from persistent_programs import random_graph, tiled_mlp

from weft.base.errors import ConfigError, IllegalError
from weft.base.hardware import H200X4
from weft.compiler.passes.tile import Region
from weft.megakernel.check import RULES, Touch, check, require
from weft.megakernel.graph import build
from weft.megakernel.predicted import play, predict
from weft.megakernel.records import SCHEDULES, Access, Bump, RankTasks, TaskGraph, TileTask, Wait
from weft.megakernel.schedule import schedule


@pytest.mark.parametrize(
    "num_ranks", [1, 3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))]
)
def test_schedules_of_random_programs_are_sound(num_ranks: int):
    several = [random_graph(seed, num_ranks) for seed in range(40, 50)]
    for i, graph in enumerate(one for one in several if one is not None):
        for how in SCHEDULES:
            for num_workers in (1, 2 + i % 3):
                assert check(schedule(graph, how, num_workers)) == [], (graph.program, how)


@pytest.fixture(scope="module")
def graph() -> TaskGraph:
    """Where memory is used again, and rows are not the same number on both ranks."""
    return schedule(build(tiled_mlp(), {"m": 37}, 2, rest=0), "balanced", 3)


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
    """Two tasks of one worker, of which the second needs the first: the last and the first."""
    queues = list(graph.ranks[0].queues)
    queues[0] = queues[0][::-1]
    return on_rank(graph, 0, queues=tuple(queues))


def forget(graph: TaskGraph) -> TaskGraph:
    queues = graph.ranks[0].queues
    return on_rank(graph, 0, queues=(queues[0][1:], *queues[1:]))


def twice(graph: TaskGraph) -> TaskGraph:
    queues = graph.ranks[0].queues
    return on_rank(graph, 0, queues=(queues[0] + queues[0][-1:], *queues[1:]))


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
    ("queued", forget, r"is queued 0 times; it must be once"),
    ("queued", twice, r"is queued 2 times; it must be once"),
    ("queued", lambda one: replace(one, num_workers=4), r"rank 0 has 3 queues for 4 workers"),
    ("acyclic", swap, r"nobody can begin: .* waits for .*@0, .* is queued behind .*, queue 0"),
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
    assert all(one.place.frames for one in own if "workers" not in one.message)
    with pytest.raises(
        IllegalError, match=f"Tasks of mlp, balanced: .*\\[{rule}\\]".replace(": .*", "(.|\n)*")
    ) as error:
        require(breach(graph))
    assert "persistent_programs.py" in str(error.value)


def test_a_queue_orders_accesses_where_workers_keep_it_alone(graph: TaskGraph):
    """One worker does one task after the other: it need not wait for itself. Workers that take the
    next task must."""
    alone = build(tiled_mlp(), {"m": 16}, 1)
    bare = replace(
        alone,
        ranks=(
            replace(
                alone.ranks[0], counters=(),
                tasks=tuple(replace(one, waits=(), bumps=()) for one in alone.ranks[0].tasks),
            ),
        ),
    )  # fmt: skip
    assert check(schedule(bare, "round_robin", 1)) == []
    assert {one.rule for one in check(schedule(bare, "dynamic", 1))} >= {"made"}


def test_signals_are_checked_before_there_are_queues():
    graph = build(tiled_mlp(), {"m": 37}, 2, rest=0)
    assert require(graph) is graph
    assert {one.rule for one in check(drop_bump(graph))} == {"counted"}


def test_tiles_that_share_one_column_meet():
    """At their edge, and not where one begins behind the other's last."""

    def touch(first: int, end: int) -> Touch:
        return Touch(0, 8, True, Access("x", 0, Region(0, 4, first, end)), (0,))

    assert touch(0, 33).meets(touch(32, 64)) and touch(32, 64).meets(touch(0, 33))
    assert not touch(0, 32).meets(touch(32, 64)) and not touch(32, 64).meets(touch(0, 32))


def test_signals_between_ranks_take_time():
    """What waits for another rank begins later than what waits for its own, by a signal's way."""
    graph = schedule(build(tiled_mlp(f=128), {"m": 64}, 2), "balanced", 3)
    slow = replace(H200X4, signal_us=1000.0)
    ends = [max(turn.end_us for turn in play(graph, machine)) for machine in (H200X4, slow)]
    assert ends[1] > ends[0] + 1000.0 - H200X4.signal_us - 1e-6


def test_balanced_is_not_later_than_by_turns():
    """By its own reckoning; with one worker both take as long as all tasks together."""
    graph = build(tiled_mlp(f=256), {"m": 64}, 2)
    few, many = (max(turn.end_us for turn in predict(graph, n)) for n in (1, 8))
    assert many < few / 3
    turns = predict(graph, 8)
    assert sorted(turn.task for turn in turns) == list(range(len(graph.tasks)))
    for worker in range(8):
        mine = [one for one in turns if one.worker == worker and graph.tasks[one.task].rank == 0]
        assert all(one.end_us <= other.start_us for one, other in zip(mine, mine[1:]))


@pytest.mark.parametrize("how", SCHEDULES)
def test_queues_are_played_to_their_end(how: str):
    """In order, each when what it waits for is done; and `balanced` as it was predicted."""
    bare = build(tiled_mlp(f=128), {"m": 64}, 2)
    graph = schedule(bare, how, 3)
    turns = play(graph)
    assert sorted(turn.task for turn in turns) == list(range(len(graph.tasks)))
    ends = {turn.task: turn.end_us for turn in turns}
    makers: dict[tuple[int, int], list[int]] = {}
    for i, task in enumerate(graph.tasks):
        for bump in task.bumps:
            makers.setdefault((bump.rank, bump.counter), []).append(i)
    for turn in turns:
        task = graph.tasks[turn.task]
        assert turn.taken_us <= turn.start_us
        assert all(
            ends[i] < turn.start_us for w in task.waits for i in makers[task.rank, w.counter]
        )
    if how == "balanced":
        assert [one[:4] for one in turns] == [one[:4] for one in predict(bare, 3)]


def test_queues_that_stand_still_are_not_played_to_their_end(graph: TaskGraph):
    assert len(play(graph)) == len(graph.tasks) > len(play(swap(graph)))


def test_schedules_that_there_are_not():
    graph = build(tiled_mlp(), {"m": 4}, 1)
    with pytest.raises(ConfigError, match="schedule='greedy' for 2 workers; it is round_robin or"):
        schedule(graph, "greedy", 2)
    with pytest.raises(ConfigError, match="for 0 workers"):
        schedule(graph, "dynamic", 0)
