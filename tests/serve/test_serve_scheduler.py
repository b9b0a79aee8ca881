"""Pages are never shared or lost, every request ends, and preemption changes no token."""

from __future__ import annotations

import random

import pytest
from engines import PageRunner, continued
from hypothesis import given
from hypothesis import strategies as st

from weft.base.errors import CapacityError, ConfigError
from weft.serve.scheduler import Request, Scheduler
from weft.serve.step import Sampling, Step

MOST_STEPS = 2000


def check(scheduler: Scheduler, step: Step) -> None:
    """What holds at any time: each page is free or one sequence's, each part has pages for all."""
    held = [page for one in scheduler.running for page in one.pages]
    assert sorted(scheduler.free + held) == list(range(scheduler.num_pages))
    assert not any(one.pages for one in scheduler.waiting)
    assert len(scheduler.running) <= scheduler.max_sequences
    assert sum(len(part.tokens) for part in step.parts) <= scheduler.max_tokens
    assert all(part.tokens for part in step.parts)
    for part in step.parts:
        end = part.first_position + len(part.tokens)
        assert end <= len(part.pages) * scheduler.page_size
    in_step = [page for part in step.parts for page in part.pages]
    assert len(in_step) == len(set(in_step))


SIZES = st.tuples(st.integers(1, 12), st.integers(1, 5), st.integers(1, 6), st.integers(0, 12))


@given(SIZES, st.integers(0, 2**32), st.integers(1, 14))
def test_requests_of_all_kinds_end_with_their_own_tokens(sizes, seed, count):
    """Requests come and are ended at random, also between a step and its tokens."""
    num_pages, page_size, max_sequences, spare = sizes
    draw = random.Random(seed)
    scheduler = Scheduler(num_pages, page_size, max_sequences, max_sequences + spare)
    runner = PageRunner(num_pages, page_size)
    requests, ended, got, finish = {}, set(), {}, {}

    def end_one() -> None:
        if requests and draw.random() < 0.1:
            id = draw.choice(list(requests))
            was_there = scheduler.end(id)
            assert was_there == (id not in finish and id not in ended)
            if was_there:
                ended.add(id)

    for turn in range(MOST_STEPS):
        if len(requests) < count and draw.random() < 0.4:
            prompt = tuple(draw.randrange(97) for _ in range(draw.randint(1, scheduler.capacity)))
            most = draw.randint(0, scheduler.capacity - len(prompt))
            if most:
                stop = frozenset(draw.sample(range(97), draw.choice((0, 0, 3))))
                one = Request(f"{turn}", prompt, most, Sampling(seed=draw.randrange(3)), stop)
                requests[one.id], got[one.id] = one, []
                scheduler.add(one)
            else:
                count -= 1
        end_one()
        step = scheduler.next_step()
        assert bool(step.parts) == scheduler.has_work
        check(scheduler, step)
        end_one()
        tokens = runner.run(step)
        end_one()
        for output in scheduler.take(tokens):
            assert output.id not in finish and output.id not in ended
            got[output.id].append(output.token)
            if output.finish:
                finish[output.id] = output.finish
        if len(requests) >= count and not scheduler.has_work:
            break
    assert finish.keys() | ended == requests.keys() and not finish.keys() & ended
    assert sorted(scheduler.free) == list(range(num_pages))
    for id, one in requests.items():
        alone = continued(one.prompt, one.max_tokens, one.sampling.seed)
        last = next((i for i, token in enumerate(alone) if token in one.stop_tokens), None)
        assert got[id] == alone[: len(got[id])]
        if id in finish:
            assert finish[id] == ("length" if last is None else "stop")
            assert len(got[id]) == (one.max_tokens if last is None else last + 1)


def run_all(scheduler: Scheduler, runner: PageRunner) -> list[Step]:
    steps = []
    while scheduler.has_work:
        steps.append(scheduler.next_step())
        scheduler.take(runner.run(steps[-1]))
    return steps


def test_a_long_prompt_comes_in_chunks_beside_what_is_being_continued():
    scheduler, runner = Scheduler(64, 4, 4, 8), PageRunner(64, 4)
    scheduler.add(Request("short", (1, 2), 12))
    scheduler.take(runner.run(scheduler.next_step()))
    scheduler.add(Request("long", tuple(range(20)), 2))
    steps = run_all(scheduler, runner)
    sizes = [[len(part.tokens) for part in step.parts] for step in steps]
    assert sizes[:4] == [[1, 7], [1, 7], [1, 6], [1, 1]]
    assert [part.wants_token for part in steps[0].parts] == [True, False]
    assert [part.wants_token for part in steps[2].parts] == [True, True]


def test_the_youngest_gives_way_and_comes_back():
    scheduler, runner = Scheduler(4, 2, 2, 8), PageRunner(4, 2)
    for id in ("old", "young"):
        scheduler.add(Request(id, (1, 2, 3), 5))
    ended = []
    while scheduler.has_work:
        step = scheduler.next_step()
        check(scheduler, step)
        ended += [one.id for one in scheduler.take(runner.run(step)) if one.finish]
    assert scheduler.num_preempted == 1 and ended == ["old", "young"]


def test_one_that_waits_is_not_overtaken():
    """A small request behind a large one would find pages at once; it must not starve the large."""
    scheduler, runner = Scheduler(4, 2, 4, 8), PageRunner(4, 2)
    scheduler.add(Request("runs", (1, 2, 3), 3))
    scheduler.take(runner.run(scheduler.next_step()))
    scheduler.add(Request("large", (1, 2, 3, 4), 2))
    scheduler.add(Request("small", (1,), 1))
    begun: list[str] = []
    while scheduler.has_work:
        step = scheduler.next_step()
        begun += [one.request.id for one in scheduler.running if one.request.id not in begun]
        scheduler.take(runner.run(step))
    assert begun == ["runs", "large", "small"]


@pytest.mark.parametrize("prompt, most", [((), 1), ((1,), 0), ((1,) * 8, 1), ((1,), 8)])
def test_what_never_fits_is_refused_at_once(prompt, most):
    with pytest.raises(CapacityError, match="the cache holds 8 tokens"):
        Scheduler(4, 2, 2, 2).add(Request("a", prompt, most))


def test_a_step_without_room_for_its_sequences_is_refused():
    with pytest.raises(ConfigError, match="lower --max-sequences"):
        Scheduler(4, 2, 3, 2)


def test_an_id_is_one_requests():
    scheduler = Scheduler(4, 2, 2, 2)
    scheduler.add(Request("a", (1,), 1))
    with pytest.raises(ConfigError, match="under way already"):
        scheduler.add(Request("a", (1,), 1))
