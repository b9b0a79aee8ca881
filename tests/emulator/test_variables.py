"""Findings and waits name words as the script does, however it assigns them."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.base.place import Frame
from weft.emulator.variables import variable_at


def name_of(signals) -> str:
    from weft.emulator.actors import address_of
    from weft.emulator.context import current

    return current().machine.memory.find(address_of(signals)).name


def test_words_are_called_what_the_script_calls_them(ranks):
    def main(rank):
        world = weft.init(heap_bytes=1 << 20)
        ready, taken = world.signals(2), world.signals(2)
        [full, free] = (
            world.signals(1),
            world.signals(1),
        )
        (one, (two, three)) = world.signals(1), (world.signals(1), world.zeros(4, torch.float32))
        first = world.signals(
            4
        )  # fmt: skip
        for _ in range(2):
            left, right = world.signals(1), world.signals(1)
        p, q, r = [world.zeros((4,), torch.float32) for _ in range(3)]
        s, t = (world.signals(1) for _ in "ab")
        lone: object = world.signals(1)
        named = world.signals(1, name="mine")
        made = (ready, taken, full, free, one, two, three, first, left, right, p, q, r, s, t, lone,
                named)  # fmt: skip
        return [name_of(words) for words in made]

    wanted = "ready taken full free one two three first left right p q r s t lone mine".split()
    assert ranks(main, 2) == [wanted, wanted]


def test_what_is_assigned_to_nothing_keeps_its_number(ranks):
    def main(rank):
        world = weft.init(heap_bytes=1 << 20)
        return name_of([world.signals(1)][0])

    (name,) = ranks(main, 1)
    assert name.startswith("signals")


@pytest.mark.parametrize("frame", [Frame("no such file.py", 3), Frame(__file__, 100_000)])
def test_a_line_that_is_not_there(frame):
    assert variable_at(frame, ("signals",), {}) == ""
