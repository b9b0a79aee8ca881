"""What a kernel may still do from a line on, and for which arrays."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from weft.base.place import Frame, Place
from weft.emulator.memory import Memory
from weft.emulator.reachable import lines_ahead, signals_of, wait_places

SOURCE = """\
def k(rt, world, ready, done, n):
    peer = rt.load(world, None, None, i64, (), 0)
    if peer > n:
        theirs = rt.extern('weft.translate', (ready, world, peer), i64, (), 1)
        rt.extern('weft.notify:add.release.sys', (theirs, c1), i32, (), 2)
    else:
        rt.extern('weft.wait:acquire.sys', (ready, c1, c1), i32, (), 3)
        for i in range(n):
            rt.atomic_rmw('add', 'relaxed', 'sys', done + i, c1, None, i32, (), 4)
            rt.extern('weft.wait:acquire.sys', (done, c1, c1), i32, (), 5)
    base = rt.load(world + 64, None, None, i64, (), 6)
    rt.extern('weft.store:release.sys', (base, c1), i32, (), 7)
"""


@dataclass(eq=False)
class Kernel:
    source: str = SOURCE
    name: str = "k"
    parameters: tuple = ()
    locations: list = field(
        default_factory=lambda: [Place((Frame("user.py", line, "k"),)) for line in range(9)]
    )


@dataclass
class Name:
    name: str


def lines(places: list[Place]) -> list[int]:
    return [place.frames[0].line for place in places]


def test_where_it_looks():
    assert sorted(lines(wait_places(Kernel()))) == [3, 4, 5]


@pytest.mark.parametrize(
    "line, ahead",
    [
        (5, {11, 12}),  # the other branch is behind it for good
        (7, {8, 9, 10, 11, 12}),
        (10, {8, 9, 10, 11, 12}),  # round the loop again
        (11, {12}),
        (12, set()),
    ],
)
def test_what_lies_ahead_of_a_line(line, ahead):
    assert lines_ahead(Kernel(), line) == ahead


def test_what_a_signal_may_be_for():
    kernel = Kernel(parameters=tuple(map(Name, ("world", "ready", "done", "n"))))
    memory, heap = Memory(), np.zeros(64, np.int64)
    address = int(heap.ctypes.data)

    def words(place: int, name: str, offset: int | None):
        return memory.register(address + place, 64, 8, 0, name, heap_offset=offset, heap="w")

    table, ready, done = words(0, "world_table", None), words(64, "r", 64), words(128, "d", 128)
    other, arrivals = words(192, "o", 192), words(256, "barrier_arrivals", 256)
    args = (table.address, ready.address, done.address, 3)
    asked = {
        a.name: lines(signals_of(kernel, args, a, memory)) for a in (ready, done, other, arrivals)
    }
    assert asked == {"r": [2], "d": [4], "o": [], "barrier_arrivals": [7]}


def test_names_that_come_again_in_another_block_and_what_memory_leads_to():
    kernel = Kernel(
        source="""\
def k(rt, world, ready, done, counter):
    for i in range(4):
        _1 = ready + i * c8
        rt.extern('weft.wait:acquire.sys', (_1, c1, c1), i32, (), 1)
    t = rt.atomic_rmw('add', 'relaxed', 'gpu', counter, c1, None, i32, (), 2)
    word = done
    for i in range(4):
        _1 = rt.extern('weft.translate', (word, world, i), i64, (), 3)
        rt.extern('weft.notify:add.release.sys', (_1, c1), i32, (), 4)
        word = word + t * c8
""",
        parameters=tuple(map(Name, ("world", "ready", "done", "counter"))),
    )
    memory, heap = Memory(), np.zeros(64, np.int64)

    def words(place: int, name: str, offset: int | None):
        address = int(heap.ctypes.data) + place
        return memory.register(address, 64, 8, 0, name, heap_offset=offset, heap="w")

    table, ready, done = words(0, "world_table", None), words(64, "r", 64), words(128, "d", 128)
    counter = words(192, "counter", None)
    args = tuple(one.address for one in (table, ready, done, counter))
    asked = {a.name: lines(signals_of(kernel, args, a, memory)) for a in (ready, done, counter)}
    assert asked == {"r": [], "d": [4], "counter": [2]}
