"""Allocations by address: what the table holds while owners go, at any moment."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

import pytest
import torch

import weft
from weft.emulator import memory as module
from weft.emulator.actors import address_of
from weft.emulator.context import current
from weft.emulator.memory import Memory

NBYTES = 64


class Owner:
    """Stands for a tensor's storage."""


def filled(count: int) -> tuple[Memory, list[Owner]]:
    """A table of `count` ranges with room between them, and who owns them."""
    memory, owners = Memory(), [Owner() for _ in range(count)]
    for i, owner in enumerate(owners):
        memory.register(2 * NBYTES * i, NBYTES, 4, 0, f"x{i}", owner=owner)
    return memory, owners


def at_line(number: int, action: Callable[[], None], call: Callable[[], object]) -> bool:
    """Do `action` before the `number`-th line that `call` reaches in memory.py; has it one?"""
    left = number

    def trace(frame, event, argument):
        nonlocal left
        if frame.f_code.co_filename != module.__file__:
            return None
        if event == "line":
            left -= 1
            if left == 0:
                action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return left <= 0


CALLS = {
    "register": lambda memory: memory.register(5 * NBYTES, NBYTES, 4, 0, "new"),
    "overlap": lambda memory: memory.register(4 * NBYTES, 3 * NBYTES, 4, 0, "new"),
    "find": lambda memory: memory.find(6 * NBYTES + 4),
    "nearest": lambda memory: memory.nearest(7 * NBYTES + 4),
    "forget": lambda memory: memory.forget(memory.find(8 * NBYTES)),
    "all": lambda memory: list(memory),
}


@pytest.mark.parametrize("gone", [0, 2, 3])
@pytest.mark.parametrize("call", CALLS)
def test_an_owner_may_go_at_any_line(call: str, gone: int) -> None:
    """As when garbage is collected there, or another thread drops a tensor."""
    number, reached = 0, True
    while reached:
        number += 1
        memory, owners = filled(5)
        owners[gone], lost = None, [owners[gone]]
        found: list[object] = []
        reached = at_line(number, lost.clear, lambda: found.append(CALLS[call](memory)))
        if call == "find" and gone != 3:
            assert found[0].name == "x3"
        lost.clear()
        there = {one.name for one in memory}
        assert f"x{gone}" not in there and "x1" in there
        for one in memory:
            assert memory.find(one.address) is one and memory.find(one.end - 1) is one
    assert number > 2


def test_the_bytes_around_a_range_are_not_its_own() -> None:
    memory, owners = filled(3)
    for one, _ in zip(list(memory), owners):
        assert memory.find(one.address) is memory.find(one.end - 1) is one
        assert memory.find(one.end) is None and memory.find(one.address - 1) is None


def test_what_has_gone_is_not_taken_for_what_comes_to_the_same_place() -> None:
    memory, owners = filled(3)
    before = memory.find(2 * NBYTES)
    owners.pop(1)
    after = memory.register(2 * NBYTES, NBYTES, 4, 0, "new")
    assert after is not before and memory.find(2 * NBYTES).name == "new"


def test_a_callback_of_an_owner_changes_nothing_by_itself() -> None:
    """It may run in the middle of anything: it runs no Python, and the table stays as it is."""
    memory, owners = filled(3)
    ran: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, argument: ran.append(event) if event == "call" else None)
    owners.clear()
    sys.setprofile(before)
    assert not ran
    assert [one.name for one in memory] == []


def test_a_forgotten_range_is_not_forgotten_twice() -> None:
    memory, owners = filled(1)
    memory.forget(memory.find(0))
    memory.register(0, NBYTES, 4, 0, "new", owner=(kept := Owner()))
    owners.clear()
    assert memory.find(0).name == "new" and kept is not None


@pytest.mark.slow
def test_a_tensor_in_a_cycle_is_forgotten_when_its_garbage_is_collected() -> None:
    def main() -> list[bool]:
        memory = current().machine.memory
        x = torch.empty(1024)
        cycle: list[object] = [x]
        cycle.append(cycle)
        address = address_of(x)
        seen = [memory.find(address) is not None]
        del x, cycle
        gc.collect()
        seen.append(memory.find(address) is not None)
        return seen

    with weft.emulated(ranks=1) as session:
        assert session.run(main) == [[True, False]]
