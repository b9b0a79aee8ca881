"""From dependencies to counters: which ones a task waits for, and which ones it bumps.

A counter stands for tasks that are all needed by each of those that wait for it: {gated[0, 0],
gated[0, 1], ...} -> {product_2[0, 0], product_2[0, 1], ...} is one counter, since every tile of a
product needs the whole row of tiles. It is full when all of the former are done. So nothing is lost
by counting: nobody waits for a task that it does not need. What can be chosen is how tasks of two
stages that need each other are covered by such pairs of groups:

    by need       a counter for each set of tasks that is needed: one wait, many bumps
    by maker      a counter for each set of tasks that the same ones need: one bump, many waits

Where tiles of both stages are the same rows both give the same. A narrow tile behind a wide one
is cheap by maker, a wide one behind narrow ones by need: stage by stage it is the cheaper one. Then
counters that the same tasks wait for become one. Whatever follows from other needs is left out,
stage by stage again, so that what is left stays regular.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from weft.megakernel.records import Bump, TileTask, Wait
from weft.megakernel.tiles import Dependency, Stage

# A bump is a release and an atomic, on a peer as a rule; a wait that is over is a load.
BUMP, WAIT = 3, 1


def stages_of(stages: Sequence[Stage]) -> list[int]:
    """The stage of each task by its number."""
    return [i for i, stage in enumerate(stages) for _ in range(stage.first, stage.end)]


def split(needs: Iterable[Dependency], stage_of: Sequence[int]) -> list[Dependency]:
    """The same with one stage on either side, those before by the latest stage first."""
    found: dict[tuple[int, ...], set[int]] = {}
    for need in needs:
        behind: dict[int, set[int]] = {}
        for i in need.after:
            behind.setdefault(stage_of[i], set()).add(i)
        for _, before in groupby(need.before, stage_of.__getitem__):
            tasks = tuple(before)
            for after in behind.values():
                found.setdefault((stage_of[min(after)], *tasks), set()).update(after)
    parts = [Dependency(tasks[1:], tuple(sorted(after))) for tasks, after in found.items()]
    return sorted(
        parts, key=lambda one: (stage_of[one.after[0]], -stage_of[one.before[0]], one.after)
    )


def without_implied(needs: Iterable[Dependency], stage_of: Sequence[int]) -> list[Dependency]:
    """Those of two stages, unless all of them follow from others over stages between.

    What is done before a task that has been waited for is known to be done: signals carry it on.
    """
    kept: list[Dependency] = []
    # By number, as bits: all that is before a task; most tasks share theirs with others.
    before: dict[int, int] = {}
    for _, group in groupby(
        split(needs, stage_of), lambda one: (stage_of[one.after[0]], stage_of[one.before[0]])
    ):
        pairs = [*group]
        asked = [sum(1 << i for i in one.before) for one in pairs]
        if all(
            bits & before.get(i, 0) == bits for bits, one in zip(asked, pairs) for i in one.after
        ):
            continue
        kept += pairs
        for bits, one in zip(asked, pairs):
            behind = bits
            for i in one.before:
                behind |= before.get(i, 0)
            known: dict[int, int] = {}
            for i in one.after:
                had = before.get(i, 0)
                before[i] = known.setdefault(had, had | behind)
    return kept


def groups(needs: Iterable[Dependency], stage_of: Sequence[int]) -> list[Dependency]:
    """What becomes of needs between the same two stages: by need or by maker, what costs less."""
    found: list[Dependency] = []
    for _, group in groupby(needs, lambda one: (stage_of[one.after[0]], stage_of[one.before[0]])):
        by_need = [*group]
        by_maker = _by_maker(by_need)
        found += min(by_need, by_maker, key=_cost)
    return found


def _by_maker(needs: Sequence[Dependency]) -> list[Dependency]:
    users: dict[int, list[int]] = {}
    for n, need in enumerate(needs):
        for i in need.before:
            users.setdefault(i, []).append(n)
    alike: dict[tuple[int, ...], list[int]] = {}
    for i, which in users.items():
        alike.setdefault(tuple(which), []).append(i)
    return [
        Dependency(tuple(sorted(before)), tuple(sorted({i for n in which for i in needs[n].after})))
        for which, before in alike.items()
    ]


def _cost(needs: Iterable[Dependency]) -> int:
    return sum(BUMP * len(one.before) + WAIT * len(one.after) for one in needs)


def count(
    needs: Iterable[Dependency], tasks: Sequence[TileTask], num_ranks: int
) -> tuple[list[list[Wait]], list[list[Bump]], list[list[int]]]:
    """Waits and bumps of each task by number, and of each rank what its counters come to.

    A counter is on the rank of those that wait for it, as others can only tell it there.
    """
    joined: dict[tuple[int, ...], set[int]] = {}
    for need in needs:
        for rank in range(num_ranks):
            after = tuple(i for i in need.after if tasks[i].rank == rank)
            if after:
                joined.setdefault(after, set()).update(need.before)
    waits: list[list[Wait]] = [[] for _ in tasks]
    bumps: list[list[Bump]] = [[] for _ in tasks]
    totals: list[list[int]] = [[] for _ in range(num_ranks)]
    for after, before in sorted(joined.items()):
        rank = tasks[after[0]].rank
        counter = len(totals[rank])
        totals[rank].append(len(before))
        for i in after:
            waits[i].append(Wait(counter, len(before)))
        for i in sorted(before):
            bumps[i].append(Bump(counter, rank))
    return waits, bumps, totals
