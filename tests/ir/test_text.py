"""Printed and read back, every level is what it was."""

from __future__ import annotations

import ir_programs as programs
import pytest
from hypothesis import given, settings
from ir_reader import read

from weft.base.place import Frame, Place
from weft.ir import core, device, task

LEVELS = {"task": (task, programs.TASKS), "tables": (task, programs.MOE),
          "device": (device, programs.PUSHED), "core": (core, programs.KERNEL)}  # fmt: skip


@pytest.mark.slow
@settings(max_examples=40)
@given(programs.tasks)
def test_tasks_survive(program):
    assert read(task, task.show(program)) == program


@settings(max_examples=40)
@given(programs.plans)
def test_plans_survive(plan):
    assert read(device, device.show(plan)) == plan


@settings(max_examples=40)
@given(programs.kernels)
def test_kernels_survive(kernel):
    assert read(core, core.show(kernel)) == kernel


@pytest.mark.parametrize("level", LEVELS)
def test_text_is_legal_and_prints_as_it_was(level: str):
    module, text = LEVELS[level]
    program = read(module, text)
    assert programs.rules_of(module).check(program) == []
    assert module.show(program) == text


def test_places_may_be_left_out():
    program = read(task, programs.TASKS)
    assert program.task("h").place == Place((Frame("mlp.py", 12, "mlp"),))
    assert "#" not in task.show(program, places=False)
