"""What is legal of packets: on the plan and the kernel of few rows that every rank sums."""

from __future__ import annotations

import ir_programs as programs
import pytest
from ir_reader import read

from weft.ir import core, device, device_rules

PLAN = """\
program(few, mesh=tp, results=(total,))
x = buffer(bfloat16, (m, 64), role=input)
r = buffer(bfloat16, (m, 64), role=input)
boxes = buffer(bfloat16, (num_ranks, m, 64), role=packets)
total = buffer(bfloat16, (m, 64))
boxes_ready = channel(boxes, m, chunks=tiles, cuts=each, by=packet)
launch(few_reduce, (x, r, boxes), writes=(total,), pushes=(boxes,), awaits=(boxes_ready,), \
announces=(boxes_ready,), template=rows, body=(Do(all_reduce, (x,), sums), \
Do(add, (sums, r), total)), tile=(1, 64), programs=resident, gives=True)
"""
KERNEL = """\
program(few_reduce)
x = param(operand)
r = param(pointer)
total = param(pointer)
boxes = param(packets, by=kernel)
slot = param(slot, to=kernel)
world = param(world)
parts = mapping(static, (x,), cuts=each)
template(every_row, (1, 64))
hook(order, in_rows, (parts,))
hook(ready, read_owned, (x, parts))
hook(emit, send_packets, (boxes, x, parts))
hook(combine, ahead, (r, parts))
hook(combine, add_packets, (boxes, x, parts))
hook(combine, add_ahead, (r,))
hook(combine, rounded, (total,))
hook(result, store_rows, (total, parts))
advance(end, slot)
"""
LAUNCH = PLAN.splitlines()[-1] + "\n"
BREACHES = [
    (device, "role=packets", "role=symmetric", "packets", "boxes has role=symmetric and is announ"),
    (device, ", by=packet", "", "packets", "boxes has role=packets and is announced by=word"),
    (device, "cuts=each", "cuts=whole", "packets", "packets need both, of rows that each rank has"),
    (device, "by=packet", "to=owner, by=packet", "packets", "of rows that each rank has a share"),
    # Their flag is the call's number: one launch of a call has them.
    (device, LAUNCH, LAUNCH + LAUNCH.replace("few_reduce", "again"), "ordered",
     "the writing by launch and the writing by launch of boxes are not ordered"),
    (device, ", awaits=(boxes_ready,)", "", "inside", "must announce and await a channel of boxes"),
    (device, ", gives=True", "", "credits", "gives its slot back 0 times; once is right"),
    (core, "hook(emit, send_packets, (boxes, x, parts))\n", "", "packets",
     "boxes are for add_packets; who sends them"),
    (core, "hook(combine, add_packets, (boxes, x, parts))\n", "", "packets",
     "boxes are for send_packets; who sends them"),
    (core, "hook(combine, ahead, (r, parts))\n", "", "packets", "r, which nothing loads ahead of"),
    (core, "cuts=each", "cuts=part", "packets", "every_row has a mapping that cuts part"),
    (core, "advance(end", "advance(emit", "places", "advance at hook emit"),
    (core, "slot, to=kernel", "slot, by=take, to=kernel", "finished",
     "advance tells no rank that the call on slot is over, and take waits for their credits"),
    (core, "advance(end, slot)\n", "", "finished", "every rank waits for ever in its next call"),
]  # fmt: skip
TEXTS = {device: PLAN, core: KERNEL}


def test_both_are_legal_and_read_back():
    for level, text in TEXTS.items():
        program = programs.rules_of(level).require(read(level, text))
        assert level.show(program, places=False) == text


@pytest.mark.parametrize(
    ("level", "old", "new", "rule", "told"),
    [pytest.param(*row, id=f"{i}-{row[3]}") for i, row in enumerate(BREACHES)],
)
def test_each_breach_is_found(level, old: str, new: str, rule: str, told: str):
    assert old in TEXTS[level]
    found = programs.rules_of(level).check(read(level, TEXTS[level].replace(old, new)))
    assert any(one.rule == rule and told in one.message for one in found), found


BEFORE = """\
rows = buffer(bfloat16, (m, 64), role=symmetric)
last = buffer(bfloat16, (m, 64))
rows_ready = channel(rows, m)
"""
PUSH = """\
launch(push, (x,), pushes=(rows,), announces=(rows_ready,), template=move, \
body=(Do(all_gather, (x,), rows),), programs=pieces, takes=True)
"""
BEHIND = """\
launch(read, (rows,), writes=(last,), awaits=(rows_ready,), template=rows, \
body=(Do(silu, (rows,), last),), programs=resident, gives=True)
"""


def test_packets_order_nothing_but_themselves():
    """Rows that were pushed before them need not have come when they have: those have words."""
    text = PLAN.replace("boxes_ready", BEFORE + "boxes_ready", 1).replace("(total,)", "(last,)", 1)
    text = text.replace(LAUNCH, PUSH + LAUNCH.replace(", gives=True", ""))
    device_rules.require(read(device, text + BEHIND))
    # Somebody waits, but not before they are read.
    late = text + BEHIND.replace(" awaits=(rows_ready,),", "") + "wait(rows_ready)\n"
    assert {one.rule for one in device_rules.check(read(device, late))} == {"ordered"}
