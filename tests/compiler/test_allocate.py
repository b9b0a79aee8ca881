"""Memory by liveness: who shares, who must not, and where a call's buffers lie."""

from __future__ import annotations

from itertools import combinations

import operators
import pytest
from ir_reader import read
from operators import compiled
from random_programs import random_layers

from weft.base.target import parse_target
from weft.compiler.facts import Facts
from weft.compiler.passes.allocate import allocate, bytes_of, layout
from weft.compiler.pipeline import overlap
from weft.ir import device, device_rules

CHAIN = """\
program(p, mesh=tp, stage=signalled, results=(y,))
x = buffer(float32, (m, 64), role=input)
h = buffer(float32, (m, 64))
g = buffer(float32, (m, 64))
y = buffer(float32, (m, 64))
z = buffer(float32, (m, 32))
call(silu, (x,), (h,))
call(silu, (h,), (g,))
call(silu_mul, (g,), (z,))
call(matmul, (z, g), (y,))
"""


def test_what_is_over_makes_room():
    plan = allocate(read(device, CHAIN))
    shares = {one.name: one.shares for one in plan.of(device.Buffer) if one.shares}
    assert shares == {"z": "h"}  # g is read with z; y is the caller's
    assert plan.lifetimes["g"] == (2, 4)
    assert plan.lifetimes["y"] == (4, 5)  # the caller reads it when the last step is over


def test_of_three_that_share_all_are_asked():
    """z lies where h lay; what comes while z is in use may lie beside it only."""
    text = (
        CHAIN.replace("call(matmul, (z, g), (y,))\n", "").replace(
            "z = buffer(float32, (m, 32))\n",
            "z = buffer(float32, (m, 32))\nw = buffer(float32, (m, 32))\n",
        )
        + "call(silu, (z,), (w,))\ncall(matmul, (w, z), (y,))\n"
    )
    plan = allocate(read(device, text))
    shares = {one.name: one.shares for one in plan.of(device.Buffer) if one.shares}
    assert shares == {"z": "h", "w": "g"}
    assert device_rules.check(plan) == []


def test_shared_memory_is_as_large_as_the_largest_needs():
    """Of which the first need not be one."""
    text = CHAIN.replace("h = buffer(float32, (m, 64))", "h = buffer(float32, (m, 8))")
    found = layout(allocate(read(device, text)), {"m": 100}, 2)
    assert found["z"].offset == found["h"].offset and found["z"].num_bytes > found["h"].num_bytes
    assert not range(
        max(found["z"].offset, found["g"].offset),
        min(one.offset + one.num_bytes for one in (found["z"], found["g"])),
    )


def test_results_share_nothing():
    plan = allocate(read(device, CHAIN.replace("results=(y,)", "results=(h, y)")))
    assert not any(one.shares for one in plan.of(device.Buffer))


def test_where_a_call_lies():
    plan = allocate(read(device, CHAIN))
    found = layout(plan, {"m": 100}, 2)
    assert found["h"].offset == found["z"].offset == 0
    assert found["h"].num_bytes == 100 * 64 * 4 and found["z"].num_bytes == 100 * 32 * 4
    assert found["g"].offset >= found["h"].num_bytes


def test_parts_are_reckoned_as_if_they_were_full():
    partials = device.Buffer("p", "bfloat16", ("num_ranks", device.Part("m"), 8), "symmetric")
    assert bytes_of(partials, {"m": 10}, 4) == 4 * 3 * 8 * 2


def test_what_peers_still_read_is_not_overwritten():
    """Of the mlp one rank's second product may push while another is in its first."""
    plan = compiled(operators.mlp).plan
    assert not any(one.shares for one in plan.of(device.Buffer))
    text = device.show(plan, places=False)
    (partials,) = [one for one in text.splitlines() if one.startswith("partials = ")]
    shared = text.replace(partials, f"{partials[:-1]}, shares=gathered)")
    told = [one.message for one in device_rules.check(read(device, shared)) if one.rule == "shared"]
    assert told and "gathered and partials share memory and are in use at once" in told[0]


@pytest.mark.parametrize("seed", range(12))
def test_of_two_layers_the_second_lies_where_the_first_lay(seed: int):
    """What shares memory is never in use at once, on any rank: by the rules, and by numbers."""
    facts = Facts({"m": 37}, 3, parse_target("emu"))
    plan = overlap(random_layers(seed, 3).stages.tasks["place"], facts).plan
    found = layout(plan, {"m": 37}, 3)
    for one, other in combinations(found.values(), 2):
        if one.role != other.role:
            continue
        meet = max(one.offset, other.offset) < min(
            one.offset + one.num_bytes, other.offset + other.num_bytes
        )
        lives = max(one.first_step, other.first_step) <= min(one.last_step, other.last_step)
        assert not (meet and lives), (one, other)


def test_layers_do_share():
    facts = Facts({"m": 37}, 3, parse_target("emu"))
    plans = [overlap(random_layers(s, 3).stages.tasks["place"], facts).plan for s in range(12)]
    roles = {one.role for plan in plans for one in plan.of(device.Buffer) if one.shares}
    assert roles == {"local", "symmetric"}
