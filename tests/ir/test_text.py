"""Printed and parsed back, every level is what it was; what is no IR is refused with its line."""

from __future__ import annotations

import ir_programs as programs
import pytest
from hypothesis import given, settings

from weft.base.errors import UsageError
from weft.base.place import Frame, Place
from weft.ir import core, device, task

LEVELS = {"task": (task, programs.TASKS), "tables": (task, programs.MOE),
          "device": (device, programs.PUSHED), "core": (core, programs.KERNEL)}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=40)
@given(programs.tasks)
def test_tasks_survive(program):
    assert task.parse(task.show(program)) == program


@settings(max_examples=40)
@given(programs.plans)
def test_plans_survive(plan):
    assert device.parse(device.show(plan)) == plan


@settings(max_examples=40)
@given(programs.kernels)
def test_kernels_survive(kernel):
    assert core.parse(core.show(kernel)) == kernel


@pytest.mark.parametrize("level", LEVELS)
def test_text_is_legal_and_prints_as_it_was(level: str):
    module, text = LEVELS[level]
    program = module.parse(text)
    assert programs.rules_of(module).check(program) == []
    assert module.show(program) == text


def test_places_may_be_left_out():
    program = task.parse(programs.TASKS)
    assert program.task("h").place == Place((Frame("mlp.py", 12, "mlp"),))
    assert "#" not in task.show(program, places=False)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("program(p)\nx = ", "invalid syntax"),
        ("program(p)\nx = 3", "line 2 is no statement"),
        ("program(p)\nx = transpose(y)", "line 2: unknown word 'transpose'"),
        ("program(p)\nx = input(dims=3)", "line 2"),
        ("program(p)\nx: bfloat16[m, 1 + 2] = input()", "line 2: not understood: 1 . 2"),
        ("x = input()", "its first line is program"),
        ("program(p, q, r)", "line 1: too many arguments"),
    ],
)
def test_what_is_no_ir_is_refused(text: str, told: str):
    with pytest.raises(UsageError, match=told):
        task.parse(text)
