"""Signals follow from who touches what; those that order nothing new are left out."""

from __future__ import annotations

from dataclasses import replace

import operators
import pytest
from ir_reader import read
from operators import compiled

from weft.compiler.lower.overlapped import relays_late
from weft.compiler.passes.insert_signals import insert_signals
from weft.ir import device, device_rules
from weft.ir.device import After, Do, Launch, is_relay

DRAWN = """\
program(ag_gemm, mesh=tp, stage=drawn, results=(c,))
a = buffer(bfloat16, (Part(m), 64), role=input)
b = buffer(bfloat16, (64, 96), role=input)
gathered = buffer(bfloat16, (m, 64), role=symmetric)
c = buffer(bfloat16, (m, 96))
gathered_ready = channel(gathered, m, own=a)
launch(push, (a,), pushes=(gathered,), template=move)
launch(multiply, (a, gathered, b), writes=(c,), programs=resident)
"""


def signalled(text: str) -> list[str]:
    plan = insert_signals(read(device, text))
    assert device_rules.check(plan) == []
    return device.show(plan).splitlines()


def test_who_reads_waits_for_who_writes_and_the_slot_is_taken_and_given():
    push, multiply = signalled(DRAWN)[-2:]
    assert "announces=(gathered_ready,)" in push and "takes=True" in push
    assert "awaits=(gathered_ready,)" in multiply and multiply.endswith("gives=True)")
    assert "takes" not in multiply and "gives" not in push


def test_a_relay_begins_when_the_main_stream_has_come_to_it():
    """It holds SMs until a product has given it all: before, others may need them."""
    engines = {"gathered": "relay", "scattered": "relay"}
    plan = compiled(operators.mlp, nodes=(2, 2), engines=engines).plan
    steps = [one for one in plan.steps if isinstance(one, After | Launch)]
    relays = [i for i, one in enumerate(steps) if is_relay(one)]
    assert len(relays) == 2
    for i in relays:
        before = steps[i - 1]
        assert isinstance(before, After) and (before.stream, before.other) == ("relay", "main")
    without = replace(plan, statements=tuple(
        one for one in plan.statements if one is not steps[relays[1] - 1]
    ))  # fmt: skip
    found = [one.message for one in device_rules.check(without) if one.rule == "resident"]
    assert found and "may hold SMs while mlp_multiply asks for all" in found[0]
    whole = replace(plan, statements=tuple(
        replace(one, spare=0) if isinstance(one, Launch) and one.kernel == "mlp_multiply" else one
        for one in plan.statements
    ))  # fmt: skip
    found = [one.message for one in device_rules.check(whole) if one.rule == "resident"]
    assert found and "mlp_multiply leaves no SM to mlp_relay" in found[0]


def test_nothing_stands_between_a_relay_and_the_product_that_reads_its_rows():
    """A kernel that asks for all SMs might wait for one that waits for the relay."""
    relay = Launch("relay", ("x", "g"), pushes=("g",), stream="relay", body=(Do("relay", (), "g"),))
    rows = Launch("rows", ("y",), writes=("z",), programs="resident")
    product = Launch("product", ("x", "g", "z"), writes=("c",), programs="resident", spare=16)
    assert relays_late([relay, rows, product]) == [rows, relay, product]


def test_a_second_reader_on_the_stream_waits_for_nothing():
    again = "d = buffer(bfloat16, (m, 96))\n" + "launch(again, (a, gathered, b), writes=(d,))\n"
    text = DRAWN.replace("launch(push", again.splitlines()[0] + "\nlaunch(push")
    *_, first, second = signalled(text + again.splitlines()[1] + "\n")
    assert "awaits=(gathered_ready,)" in first
    assert "awaits" not in second and "gives=True" in second


def test_a_call_of_a_library_is_waited_for_on_the_stream():
    call = "d = buffer(bfloat16, (m, 64))\ncall(silu, (gathered,), (d,))\n"
    text = DRAWN.replace("launch(multiply, (a, gathered, b), writes=(c,), programs=resident)\n", "")
    text = text.replace("results=(c,)", "results=(d,)").replace("launch(push", "LAUNCH(push")
    d, silu = call.splitlines()
    text = text.replace("LAUNCH", d + "\nlaunch") + silu + "\n"
    plan = insert_signals(read(device, text))
    shown = device.show(plan).splitlines()
    assert shown[-2:] == ["wait(gathered_ready)", "call(silu, (gathered,), (d,))"]


@pytest.mark.parametrize("function", operators.PARAMETERS)
def test_nothing_is_left_that_nobody_needs(function):
    """A plan of which any signal is dropped is found illegal: each was needed."""
    plan = compiled(function).plan.bare
    dropped = 0
    for i, one in enumerate(plan.statements):
        fewer = []
        if isinstance(one, device.Launch):
            for name in ("awaits", "announces", "takes", "gives"):
                if given := getattr(one, name):
                    empty = () if isinstance(given, tuple) else False
                    fewer.append((replace(one, **{name: empty}),))
        if isinstance(one, device.Wait | device.After):
            fewer.append(())
        for instead in fewer:
            statements = (*plan.statements[:i], *instead, *plan.statements[i + 1 :])
            assert device_rules.check(replace(plan, statements=statements)), (one, instead)
            dropped += 1
    assert dropped >= 4
