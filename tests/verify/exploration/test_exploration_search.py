"""The explorer against every order there is, on tiny programs, and on cases counted by hand."""

from __future__ import annotations

import pytest
from tiny_programs import explore, random_chain, random_programs, subject_of

from weft.verify.exploration import search as searching
from weft.verify.exploration.search import Bounds, Explorer, search
from weft.verify.exploration.words import passes

ADD, SET = [("add", 0, 1)], [("set", 0, 1)]

COUNTED = {
    "two writers of different words": ([ADD, [("add", 1, 1)]], 1),
    "two additions that nobody gets": ([ADD, ADD], 1),
    "two atomics of which nobody gets the old value": ([[("red", 0, 1)]] * 2, 1),
    "two that learn what the other did": ([[("red.acq_rel", 0, 1)]] * 2, 2),
    "a barrier of atomics": ([[("red.relaxed", 0, 1), ("wait.relaxed", 0, 3)]] * 3, 1),
    "two stores to one word": ([SET, [("set", 0, 2)]], 2),
    "three tickets": ([[("ticket", 0, 1)]] * 3, 6),
    "two tickets twice, of different words": ([[("ticket", 0, 1), ("ticket", 1, 1)]] * 2, 4),
    "a signal and its wait": ([ADD, [("wait", 0, 1)]], 1),
    "one of two signals is enough": ([ADD, ADD, [("wait", 0, 1)]], 2),
    "two of three signals are enough": ([ADD, ADD, ADD, [("wait", 0, 2)]], 3),
    "a wait needs all three": ([ADD, ADD, ADD, [("wait", 0, 3)]], 1),
    "two readers see one store or not": ([SET, [("read", 0, 0)], [("read", 0, 0)]], 4),
    "three readers of what nobody writes": ([[("read", 0, 0)]] * 3, 1),
    "a chain": ([ADD, [("wait", 0, 1), ("add", 1, 1)], [("wait", 1, 1)]], 1),
    "a barrier": ([[("add", 0, 1), ("wait", 0, 3)]] * 3, 1),
    "two barriers of one counter": ([[("add", 0, 1), ("wait", 0, 2)] * 2] * 2, None),
}


@pytest.mark.few(3)
@pytest.mark.parametrize("name", COUNTED)
def test_counted_by_hand(name):
    programs, expected = COUNTED[name]
    result, outcomes, findings = explore(programs)
    assert result.complete
    if expected is not None:
        assert result.executions == expected
    if sum(map(len, programs)) <= 3 or len(programs) == 2:
        every, all_outcomes, all_findings = explore(programs, reduce=False)
        assert every.complete and every.executions >= result.executions
        assert (outcomes, findings) == (all_outcomes, all_findings)


def agrees(programs, **options) -> None:
    result, outcomes, findings = explore(programs, **options)
    every, all_outcomes, all_findings = explore(programs, reduce=False, **options)
    assert result.complete and every.complete
    assert outcomes == all_outcomes, programs
    # One race may hide another of the same cell: which is told first depends on the order.
    assert findings <= all_findings, programs
    assert {key for key in findings if key[0] != "race"} == {
        key for key in all_findings if key[0] != "race"
    }, programs
    assert any(key[0] == "race" for key in findings) == any(
        key[0] == "race" for key in all_findings
    ), programs


@pytest.mark.few(4)
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed):
    parties = 3 if seed % 2 else 2
    agrees(random_programs(seed, parties=parties, length=5 - parties))


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(10))
def test_random_chains(seed):
    agrees(random_chain(seed))


def test_a_store_to_a_word_ends_what_its_releases_hand_on():
    """The value lets the wait pass before the third's store as behind it, and only before it is the
    data ordered: both orders are tried."""
    agrees([
        [("wait", 1, 1), ("load", 0, 0)],
        [("store", 0, 5), ("set", 1, 1)],
        [("wait.relaxed", 1, 1), ("set", 1, 1)],
    ])  # fmt: skip


@pytest.mark.parametrize("bits", [32, 64])
def test_a_wait_passes_modulo_its_word(bits):
    largest, smallest = 2 ** (bits - 1) - 1, -(2 ** (bits - 1))
    for seen, expected in ((3, 3), (4, 3), (smallest, largest), (smallest + 5, largest - 5)):
        assert passes(seen, expected)
    for seen, expected in ((2, 3), (largest, smallest), (None, 3), (3, None)):
        assert not passes(seen, expected)


TOKENS = {
    "set once and taken": ([[("store", 0, 5), ("set", 0, 1)]], [0], 1),
    "set before its data": ([[("set", 0, 1), ("store", 0, 5)]], [0], None),
    "set by one of two, each for both takes": ([SET, SET], [0, 0], None),
    "looked at": ([SET, [("read", 0, 0)]], [0], 3),
    "waited for by another one too": ([SET, [("wait", 0, 1)]], [0], None),
    "set to another value first": ([[("set", 0, 2)], SET], [0], None),
    "of two words": ([SET, [("set", 1, 1)]], [0, 1], 1),
    "in the other order": ([[("wait", 1, 1), *SET], [("set", 1, 1)]], [0, 1], None),
}


@pytest.mark.parametrize("name", TOKENS)
def test_tokens_that_a_stream_takes(name):
    programs, takes, executions = TOKENS[name]
    agrees(programs, takes=takes)
    if executions is not None:
        assert explore(programs, takes=takes)[0].executions == executions


@pytest.mark.parametrize("seed", range(200, 212))
def test_random_programs_and_a_stream_that_takes(seed):
    agrees(random_programs(seed, parties=2, length=2), takes=[seed % 2])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 170))
def test_more_random_programs(seed):
    parties = 3 if seed % 3 else 2
    agrees(random_programs(seed, parties=parties, length=5 - parties))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 160))
def test_more_random_chains(seed):
    agrees(random_chain(seed))


def signature(execution) -> frozenset:
    """The execution up to the order of steps that commute."""
    steps, count, places = execution.trace.steps, {}, []
    for step in steps:
        count[step.process] = count.get(step.process, 0) + 1
        places.append(count[step.process])
    return frozenset(
        (
            step.process,
            place,
            frozenset((process, places[number]) for process, number in step.past.items()),
            tuple(taken for taken, _ in step.choices),
        )
        for step, place in zip(steps, places, strict=True)
    )


@pytest.mark.parametrize("seed", range(40, 60))
def test_no_two_executions_are_alike(seed):
    record: list = []
    programs = random_programs(seed, parties=3, length=3)
    search(subject_of(programs, record=record), Bounds(executions=400))
    signatures = [signature(execution) for _, _, execution in record]
    assert len(set(signatures)) == len(signatures), programs


def test_a_bound_that_is_reached_is_told(monkeypatch):
    programs = [[("ticket", 0, 1)] * 2] * 4
    few = search(subject_of(programs), Bounds(executions=10))
    assert (few.executions, few.bound, few.complete) == (10, "10 executions", False)
    assert not few.report.complete
    short = search(subject_of(programs), Bounds(seconds=0))
    assert short.bound == "0 seconds" and short.executions == 1
    held = iter([500.0, 500.5, 501.0])
    monkeypatch.setattr(searching, "megabytes", lambda: next(held))
    small = search(subject_of(programs), Bounds(megabytes=1))
    assert small.bound == "1 MB of memory" and small.executions == 2


def test_a_result_that_depends_on_the_schedule():
    programs = [[("ticket", 0, 1)], [("ticket", 0, 1)]]
    result = search(subject_of(programs), deterministic=True)
    assert [finding.kind for finding in result.report] == ["nondeterministic result"]
    assert len(result.outcomes) == 2 and result.complete
    assert search(subject_of([ADD, ADD]), deterministic=True).report.ok


def test_what_runs_when_not_all_programs_fit():
    """Of three programs two are resident; the last two wait for the first: whichever come first."""
    programs = [ADD, [("wait", 0, 1)], [("wait", 0, 1)]]
    fits, _, nothing = explore(programs, num_sms=3)
    assert fits.complete and not nothing
    tight, _, found = explore(programs, num_sms=2)
    assert tight.complete and {key[0] for key in found} == {"residency"}
    _, _, in_any_order = explore([ADD, ADD, [("wait", 0, 2)]], num_sms=1)
    assert {key[0] for key in in_any_order} == {"residency"}
    harmless, _, nothing = explore([ADD, ADD, ADD], num_sms=1)
    assert harmless.complete and not nothing


def test_which_of_two_kernels_takes_the_room():
    """Nothing says which stream's kernel begins first: one that waits for the other may fill it."""
    programs = [[("wait", 0, 1)], [("wait", 0, 1)], ADD]
    _, _, found = explore(programs, kernels=[2, 1], num_sms=2)
    assert {key[0] for key in found} == {"residency"}
    _, _, found = explore(programs[::-1], kernels=[1, 2], num_sms=2)
    assert {key[0] for key in found} == {"residency"}
    fits, _, nothing = explore(programs, kernels=[2, 1], num_sms=3)
    assert fits.complete and not nothing


def test_the_same_choices_lead_to_the_same_place():
    turn = [0]

    def subject(execution):
        turn[0] += 1
        programs = [ADD, SET] if turn[0] == 1 else [ADD]
        return subject_of(programs)(execution)

    result = search(subject)
    assert "does not do the same twice" in result.bound and not result.complete


def test_without_a_reduction_every_step_is_a_choice():
    explorer = Explorer(subject_of([ADD, ADD]), reduce=False)
    explorer.run_once()
    assert [len(node.owed) for node in explorer.nodes][-4:] == [2, 2, 1, 1] or any(
        len(node.owed) == 2 for node in explorer.nodes
    )
