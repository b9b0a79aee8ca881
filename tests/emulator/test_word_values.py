"""Which value of a word a wait counts with."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from weft.emulator.word_values import MOST_LOOKS, MOST_VALUES, WordValues


def agent(number: int, known: dict[int, int] | None = None) -> SimpleNamespace:
    """At its clock 0; it knows itself, and others up to a clock."""
    known = known or {}
    return SimpleNamespace(
        agent=number,
        clk=0,
        knows=lambda other, clock: other == number or known.get(other, -1) >= clock,
    )


def counted(values: WordValues, by: SimpleNamespace, to: int) -> None:
    """`by` adds 1 to the word, `to` times; each value publishes its number."""
    for k in range(to):
        values.stored(by, k, k + 1, {"told": k})
        by.clk += 1


def learnt(values: WordValues, by: SimpleNamespace, newest: int, at_least: int) -> int:
    return values.told(by, newest, {"told": newest}, lambda value: value >= at_least)["told"]


@pytest.mark.parametrize("at_least", [0, 1, 3, 9, 10])
def test_the_oldest_that_is_enough(at_least):
    values = WordValues()
    counted(values, agent(1), 10)
    assert learnt(values, agent(2), 10, at_least) == at_least


def test_what_happens_before_forbids_is_not_seen():
    """A store that one knows of, one's own look, and a look of somebody whom one knows."""
    values = WordValues()
    counted(values, agent(1), 10)
    assert learnt(values, agent(2, {1: 6}), 10, 3) == 7
    assert learnt(values, agent(3), 10, 8) == 8
    assert learnt(values, agent(3), 10, 3) == 8
    assert learnt(values, agent(4, {3: 0}), 10, 3) == 8
    assert learnt(values, agent(5), 10, 3) == 3


def test_all_later_values_must_be_enough_too():
    values = WordValues()
    by = agent(1)
    for before, after in ((0, 5), (5, 1), (1, 6)):
        values.stored(by, before, after, {"told": before})
    assert learnt(values, agent(2), 6, 3) == 6


def test_after_a_plain_store_the_word_tells_what_it_tells():
    values = WordValues()
    counted(values, agent(1), 4)
    assert learnt(values, agent(2), 9, 3) == 9
    values.stored(agent(1), 9, 10, {"told": 9})
    assert learnt(values, agent(2), 10, 3) == 9, "and what lay before that store is forgotten"


def test_values_and_looks_are_bounded_and_less_is_found_then():
    values = WordValues()
    counted(values, agent(1), 10 * MOST_VALUES)
    newest = 10 * MOST_VALUES
    assert newest - MOST_VALUES <= learnt(values, agent(2), newest, 1) < newest
    for number in range(2 * MOST_LOOKS):
        values.looked(agent(number + 3), newest)
    assert learnt(values, agent(2), newest, newest - 1) == newest
