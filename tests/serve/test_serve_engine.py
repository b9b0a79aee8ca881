"""The engine's loop in one process: answers, stop rules, aborts, and what ends it."""

from __future__ import annotations

import queue
import threading

import pytest
from engines import LETTERS, PageRunner, continued, running, until
from hypothesis import given
from hypothesis import strategies as st

from weft.serve.engine import Delta, Engine
from weft.serve.link import HEAD, numbers_of, step_of
from weft.serve.scheduler import Request, Scheduler
from weft.serve.step import Part, Sampling, Step

PROMPT = tuple(LETTERS.encode("once upon"))


def ask(engine: Engine, request: Request, stops=()) -> queue.Queue[Delta]:
    deltas: queue.Queue[Delta] = queue.Queue()
    engine.submit(request, deltas.put, stops)
    return deltas


def all_of(deltas: queue.Queue[Delta]) -> list[Delta]:
    found = [deltas.get(timeout=60)]
    while not found[-1].is_last:
        found.append(deltas.get(timeout=60))
    return found


def text_of(deltas: list[Delta]) -> str:
    return "".join(one.text for one in deltas)


@pytest.fixture
def scheduler():
    return Scheduler(16, 4, 4, 16)


def test_requests_are_answered_by_their_own_tokens(scheduler):
    with running(scheduler, PageRunner(16, 4)) as engine:
        requests = [Request(f"{i}", PROMPT[: i + 1], 10, Sampling(seed=i)) for i in range(8)]
        asked = [(one, ask(engine, one)) for one in requests]
        for one, deltas in asked:
            got = all_of(deltas)
            assert text_of(got) == LETTERS.decode(continued(one.prompt, 10, one.sampling.seed))
            assert got[-1] == Delta(got[-1].text, 10, "length")
    assert len(scheduler.free) == 16
    assert engine.ended == "the server was stopped"


def test_stop_rules(scheduler):
    expected = continued(PROMPT, 20)
    text = LETTERS.decode(expected)
    with running(scheduler, PageRunner(16, 4)) as engine:
        got = all_of(ask(engine, Request("a", PROMPT, 20), ["never there", text[5:8]]))
        assert text_of(got) == text[: text.index(text[5:8])] and got[-1].finish == "stop"
        stop = frozenset({expected[3]})
        got = all_of(ask(engine, Request("b", PROMPT, 20, stop_tokens=stop)))
        first = expected.index(expected[3])
        assert text_of(got) == text[:first] and got[-1] == Delta("", first + 1, "stop")
        got = all_of(ask(engine, Request("c", PROMPT, 5), [text[3:7]]))
        assert text_of(got) == text[:5] and got[-1].finish == "length"
    assert len(scheduler.free) == 16


def test_what_is_aborted_has_no_pages_in_the_next_step(scheduler):
    entered, go_on = threading.Semaphore(0), threading.Semaphore(0)

    def on_step(number: int) -> None:
        entered.release()
        go_on.acquire(timeout=60)

    with running(scheduler, PageRunner(16, 4, on_step)) as engine:
        deltas = ask(engine, Request("a", PROMPT, 40))
        for _ in range(3):
            assert entered.acquire(timeout=60)
            go_on.release()
        assert entered.acquire(timeout=60)
        engine.abort("a")
        other = ask(engine, Request("b", PROMPT, 1))
        go_on.release()
        assert entered.acquire(timeout=60)
        assert [one.request.id for one in scheduler.running] == ["b"]
        assert len(scheduler.free) == 16 - 3
        go_on.release()
        assert text_of(all_of(other)) == LETTERS.decode(continued(PROMPT, 1))
    assert not any(one.is_last for one in deltas.queue)
    assert engine.metrics.registry.get_sample_value("weft_requests_total", {"finish": "abort"}) == 1


def test_a_runner_that_raises_ends_all_requests_with_its_error(scheduler):
    def on_step(number: int) -> None:
        if number == 3:
            raise RuntimeError("rank 1 waits for rank 0")

    with running(scheduler, PageRunner(16, 4, on_step)) as engine:
        asked = [ask(engine, Request(f"{i}", PROMPT, 12)) for i in range(6)]
        for deltas in asked:
            assert all_of(deltas)[-1].error == "rank 1 waits for rank 0"
        late = ask(engine, Request("late", PROMPT, 1))
        assert all_of(late) == [Delta(error="rank 1 waits for rank 0")]
    assert not scheduler.has_work and len(scheduler.free) == 16


def test_what_the_cache_cannot_hold_is_an_error_of_its_request_alone(scheduler):
    with running(scheduler, PageRunner(16, 4)) as engine:
        large = ask(engine, Request("a", PROMPT, 60))
        assert "the cache holds 64 tokens" in all_of(large)[-1].error
        assert all_of(ask(engine, Request("b", PROMPT, 2)))[-1].finish == "length"


def test_an_idle_engine_shows_that_it_lives(scheduler, monkeypatch):
    monkeypatch.setattr("weft.serve.engine.BEAT_S", 0.01)
    engine, sent = Engine(scheduler, LETTERS.decode), []
    thread = threading.Thread(target=engine.run, args=(PageRunner(16, 4).run, sent.append))
    thread.start()
    until(lambda: len(sent) > 2)
    engine.close()
    thread.join(60)
    assert set(sent[:-1]) == {Step(())} and sent[-1] is None


SAMPLED = Sampling(0.7, 40, 0.95, 2**32 - 1)
PARTS = st.builds(
    Part, st.lists(st.integers(0, 2**31), min_size=1, max_size=4).map(tuple), st.integers(0, 99),
    st.lists(st.integers(0, 3), min_size=1, max_size=5).map(tuple), st.booleans(),
    st.sampled_from([Sampling(), SAMPLED]),
)  # fmt: skip


@given(st.lists(st.lists(PARTS, max_size=3), max_size=6))
def test_steps_survive_their_way(steps):
    """Of pages that the other end knows only the new ones are sent; those may be others again."""
    here, there = {}, {}
    for parts in steps:
        step = Step(tuple(parts))
        assert step_of(numbers_of(step, here), there) == step
        assert here == there
    assert step_of(numbers_of(None, here), there) is None


def test_a_step_with_many_pages_is_small():
    known, sizes = {}, []
    for number in range(3):
        parts = (Part((5,), number, tuple(range(i * 2000, (i + 1) * 2000))) for i in range(64))
        sizes.append(len(numbers_of(Step(tuple(parts)), known)))
    assert sizes[0] > 64 * 2000 and sizes[1] == sizes[2] < HEAD
