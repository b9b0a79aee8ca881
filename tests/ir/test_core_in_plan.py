"""What a kernel says of its signals and slot is what the plan says: each rule, with a breach."""

from __future__ import annotations

from dataclasses import replace

import ir_programs as programs
import pytest
from ir_reader import read

from weft.base.errors import IllegalError
from weft.ir import core, core_in_plan, core_rules, device, device_rules

PLAN = """\
program(gemm_rs, mesh=tp, results=(c,))
a = buffer(bfloat16, (m, Part(64)), role=input)
b = buffer(bfloat16, (Part(64), 96), role=input)
partials = buffer(bfloat16, (num_ranks, Part(m), 96), role=symmetric)
c = buffer(bfloat16, (Part(m), 96))
ready = channel(partials, m, chunks=tiles, push_rows=128, tile_rows=128, cuts=part, to=owner)
launch(multiply, (a, b, partials), writes=(c,), pushes=(partials,), awaits=(ready,), \
announces=(ready,), template=gemm, tile=(128, 128, 64), order=scatter, programs=resident, \
takes=True, gives=True)
"""

# (what is replaced in the kernel's text, by what, the rule that finds it, part of what it says)
BREACHES = [
    ("ready = param(signals, by=kernel", "ready = param(signals, by=engine", "ends",
     "ready of multiply has by=engine, to=kernel; in plan gemm_rs it is by=kernel, to=kernel"),
    ("slot = param(slot, by=kernel", "slot = param(slot, by=take", "ends",
     "slot of multiply has by=take, to=kernel; in plan gemm_rs it is by=kernel, to=kernel"),
    ("announces=(partials,)", "announces=(c,)", "announced",
     "ready of multiply announces c; in plan gemm_rs it announces partials"),
    ("ready", "other", "complete", "multiply waits for and announces ready in plan gemm_rs, and "
     "its kernel has no parameter ready"),
    ("ready", "other", "complete", "multiply notifies or awaits other, which is no channel of"),
]  # fmt: skip


def fitted(kernel: str, plan: str = PLAN) -> tuple[device.Plan, device.Launch, core.Kernel]:
    planned = device_rules.require(read(device, plan))
    return planned, planned.of(device.Launch)[-1], read(core, kernel)


def test_a_kernel_fits_into_its_plan():
    fit = fitted(programs.PUSHING)
    assert core_in_plan.require(*fit) is fit[-1]


@pytest.mark.parametrize(("old", "new", "rule", "told"), BREACHES)
def test_each_breach_is_found(old: str, new: str, rule: str, told: str):
    fit = fitted(programs.PUSHING.replace(old, new))
    found = [one.message for one in core_in_plan.check(*fit) if one.rule == rule]
    assert any(told in one for one in found), found
    with pytest.raises(IllegalError, match="Core IR of multiply in plan gemm_rs"):
        core_in_plan.require(*fit)


def test_rows_that_nobody_has_waited_for_are_not_read():
    """A kernel that does not wait for gathered rows names the step before that has."""
    pushed = read(device, programs.PUSHED)
    (first,) = pushed.of(device.Launch)
    second = replace(first, kernel="again", awaits=(), gives=False)
    plan = replace(pushed, statements=(*pushed.statements, second))
    text = programs.KERNEL.replace("ag_gemm_multiply", "again")
    text = "".join(f"{one}\n" for one in text.splitlines() if "rows_ready" not in one)
    text = text.replace("finish(done, slot)\n", "").replace("by=take, to=kernel", "by=take, "
                        "to=ag_gemm_multiply")  # fmt: skip
    named = text.replace(
        "gathered = param(operand", "gathered = param(operand, by=ag_gemm_multiply"
    )
    kernel = core_rules.require(read(core, named))
    assert core_in_plan.check(plan, second, kernel) == []
    wrong = core_rules.require(read(core, named.replace("by=ag_gemm_multiply", "by=copy")))
    (told,) = core_in_plan.check(plan, second, wrong)
    assert "gathered, which copy is to have waited for" in told.message
    assert "before again that was ag_gemm_multiply" in told.message
