"""Older values of signal words: the explorer finds what the axioms allow, and nothing else."""

from __future__ import annotations

import random

import pytest
from axiomatic import Access, Litmus, Thread, allowed_outcomes
from tiny_programs import explore

from weft.base.vocabulary import Order


def as_litmus(programs) -> Litmus:
    """The same programs, on one device, for the enumerator of the memory model."""
    threads, number = [], 0
    for program in programs:
        steps = []
        for name, word, value in program:
            what, _, order = name.partition(".")
            kind = {"set": "store", "read": "load", "ticket": "add", "wait": "wait"}[what]
            register = f"r{number}" if what in ("read", "ticket") else ""
            number += 1
            steps.append(Access(kind, f"x{word}", value, register, Order(order)))
        threads.append(Thread(0, tuple(steps)))
    return Litmus("tiny", tuple(threads))


def explored_outcomes(programs) -> set[tuple[int, ...]]:
    result, outcomes, _ = explore(programs)
    assert result.complete
    return {
        tuple(value for seen in registers for value in seen)
        for registers, _, is_stuck in outcomes
        if not is_stuck
    }


LITMUS = {
    "store buffer": [
        [("set.{w}", 0, 1), ("read.{r}", 1, 0)],
        [("set.{w}", 1, 1), ("read.{r}", 0, 0)],
    ],
    "message": [
        [("set.relaxed", 0, 1), ("set.{w}", 1, 1)],
        [("read.{r}", 1, 0), ("read.relaxed", 0, 0)],
    ],
    "message, waited for": [
        [("set.relaxed", 0, 1), ("set.{w}", 1, 1)],
        [("wait.{r}", 1, 1), ("read.relaxed", 0, 0)],
    ],
    "independent readers": [
        [("set.{w}", 0, 1)],
        [("set.{w}", 1, 1)],
        [("read.{r}", 0, 0), ("read.{r}", 1, 0)],
        [("read.{r}", 1, 0), ("read.{r}", 0, 0)],
    ],
    "through a third": [
        [("set.relaxed", 0, 1)],
        [("read.{r}", 0, 0), ("set.{w}", 1, 1)],
        [("read.{r}", 1, 0), ("read.relaxed", 0, 0)],
    ],
    "one word, read twice": [
        [("set.{w}", 0, 1), ("set.{w}", 0, 2)],
        [("read.{r}", 0, 0), ("read.{r}", 0, 0)],
    ],
}
WEAK = {
    "store buffer": ((0, 0), (True, True)),  # allowed when relaxed, and with release and acquire
    "message": ((1, 0), (True, False)),
    "message, waited for": ((0,), (True, False)),
    "independent readers": ((1, 0, 1, 0), (True, True)),
    "through a third": ((1, 1, 0), (True, False)),
    "one word, read twice": ((2, 1), (False, False)),
}


@pytest.mark.parametrize("name", LITMUS)
@pytest.mark.parametrize("is_ordered", [False, True], ids=["relaxed", "ordered"])
def test_litmus(name, is_ordered):
    w, r = ("release", "acquire") if is_ordered else ("relaxed", "relaxed")
    programs = [
        [(what.format(w=w, r=r), word, value) for what, word, value in program]
        for program in LITMUS[name]
    ]
    outcomes = explored_outcomes(programs)
    assert outcomes == allowed_outcomes(as_litmus(programs))
    weak, allowed = WEAK[name]
    assert (weak in outcomes) == allowed[is_ordered]


def random_litmus(seed: int):
    """Threads that store first and look then: what the explorer claims to cover in full."""
    draw = random.Random(seed)
    programs = []
    for number in range(draw.choice((2, 2, 3))):
        stores = [
            (f"set.{draw.choice(('relaxed', 'release'))}", draw.randrange(2), number + 1)
            for _ in range(draw.randint(0, 1))
        ]
        looks = [
            (f"read.{draw.choice(('relaxed', 'acquire'))}", draw.randrange(2), 0)
            for _ in range(draw.randint(1, 2))
        ]
        programs.append(stores + looks)
    return programs


@pytest.mark.few(5)
@pytest.mark.parametrize("seed", range(20))
def test_random_litmus(seed):
    programs = random_litmus(seed)
    assert explored_outcomes(programs) == allowed_outcomes(as_litmus(programs)), programs


@pytest.mark.parametrize("seed", range(20))
def test_nothing_beyond_the_axioms(seed):
    """Any order of stores, looks and updates: all that is shown is allowed."""
    draw = random.Random(1000 + seed)
    orders = {"set": ("relaxed", "release"), "read": ("relaxed", "acquire"), "ticket": ("acq_rel",)}
    programs = [
        [
            (f"{what}.{draw.choice(orders[what])}", draw.randrange(2), number + 1)
            for what in draw.choices(list(orders), weights=(2, 3, 1), k=draw.randint(1, 3))
        ]
        for number in range(2)
    ]
    assert explored_outcomes(programs) <= allowed_outcomes(as_litmus(programs)), programs


def test_additions_that_may_be_seen_in_any_order():
    programs = [
        [("add.relaxed", 0, 1), ("add.relaxed", 1, 1)],
        [("add.relaxed", 0, 10), ("add.relaxed", 1, 1)],
        [("wait.relaxed", 1, 2), ("read.relaxed", 0, 0)],
    ]
    assert explored_outcomes(programs) == {(0,), (1,), (10,), (11,)}


def test_a_relaxed_chain_orders_no_data():
    """The wait may pass on a value that is older than what the chain of steps suggests."""
    chain = [
        [("store", 0, 5), ("add.release", 0, 1), ("add.relaxed", 1, 1)],
        [("wait.relaxed", 1, 1), ("test.acquire", 0, 1), ("load", 0, 0)],
    ]
    result, _, found = explore(chain)
    assert result.complete and {key[0] for key in found} == {"race"}
    chain[0][2] = ("add.release", 1, 1)
    chain[1][0] = ("wait.acquire", 1, 1)
    result, _, found = explore(chain)
    assert result.complete and not found
