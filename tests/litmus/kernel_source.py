"""Litmus programs as Triton kernels: the text is made from the same record that is enumerated.

A launch holds many independent copies of the program ("lanes") on the same ranks. Each lane runs
`iterations` instances in turn: all its threads meet at a gate, wait a random moment, run their
instructions on fresh cells, and store their registers at rank 0.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import tempfile
from pathlib import Path
from typing import Any

from axiomatic import Access, Litmus

# Cells lie this many int32 words apart: a cache line each.
CELL_WORDS = 32

HEAD = '''"""{name}: made from a litmus program; do not edit."""

import triton
import triton.language as tl

import weft.language as wl


@triton.jit(do_not_specialize=["iterations", "first_seed", "max_delay", "version"])
def kernel(world, cells, gates, out, roles, noise, iterations, first_seed, max_delay, version):
    program = tl.program_id(0)
    role = tl.load(roles + program)
    lane = tl.load(roles + tl.num_programs(0) + program)
    seed = first_seed + program * 7919
    if role < 0:
        # Stress: plain traffic on everybody's noise buffer, so that latencies vary.
        for i in range(iterations * 2):
            seed = (seed * 1664525 + 1013904223) & 0x7FFFFFFF
            there = wl.at(world, noise + ((seed >> 8) & 0xFFFF) * 32, (seed >> 4) % world.num_ranks)
            at = there + tl.arange(0, 32)
            tl.store(at, tl.load(at) + 1)
    else:
        # All polls of the launch together are bounded: a lost rank must not hang the others.
        polls = 0
        for i in range(iterations):
            cell = cells + (lane * iterations + i) * {stride}
            row = wl.at(world, out + (lane * iterations + i) * {registers}, 0)
            gate = wl.at(world, gates + lane * 32, 0)
            wl.atomic_add(gate, 1, order=wl.Order.RELAXED)
            while (wl.load(gate) < {threads} * (i + 1)) & (polls < 2000000):
                polls += 1
            seed = (seed * 1664525 + 1013904223) & 0x7FFFFFFF
            mixed = seed
            for _ in range((seed >> 8) % max_delay):
                mixed = mixed * 1664525 + 1013904223
            tl.store(noise + 0x200000 + program * 32, mixed)
'''


def source_of(test: Litmus) -> str:
    """The kernel's text."""
    locations = sorted({step.location for t in test.threads for step in t.steps})
    registers = test.registers
    text = HEAD.format(
        name=test.name,
        stride=len(locations) * CELL_WORDS,
        registers=max(1, len(registers)),
        threads=len(test.threads),
    )
    indent = " " * 12
    for number, thread in enumerate(test.threads):
        text += f"{indent}{'if' if number == 0 else 'elif'} role == {number}:\n"
        stores = []
        for step in thread.steps:
            cell = f"cell + {locations.index(step.location) * CELL_WORDS}"
            home = test.homes[step.location]
            text += f"{indent}    {_statement(step, cell, home)}\n"
            if step.register:
                at = f"row + {registers.index(step.register)}"
                stores.append(f"{indent}    tl.store({at}, {step.register})\n")
        text += "".join(stores)
    return text


def _statement(step: Access, cell: str, home: int) -> str:
    there = f"wl.at(world, {cell}, {home})"
    how = ""
    if step.order is not None:
        how = f"order=wl.Order.{step.order.name}, scope=wl.Scope.{step.scope.name}"
    if step.kind == "wait":
        return f"wl.wait({cell}, 1, world=world, {how})"
    if step.kind == "load":
        value = f"wl.load({there}, {how})" if how else f"tl.load({there})"
        return f"{step.register} = {value}"
    if step.kind == "store":
        if not how:
            return f"tl.store({there}, {step.value})"
        return f"wl.store({there}, {step.value}, {how})"
    if step.kind == "exchange" and not step.register:
        return f"wl.notify(world, {cell}, {step.value}, to={home}, op=wl.SignalOp.SET, {how})"
    call = {"exchange": "atomic_exchange", "add": "atomic_add"}[step.kind]
    return f"{step.register} = wl.{call}({there}, {step.value}, {how})"


def kernel_of(test: Litmus, folder: Path | None = None) -> Any:
    """The compiled-on-launch Triton function of `test`; Triton wants its text in a file."""
    folder = folder or Path(tempfile.gettempdir()) / "weft_litmus"
    folder.mkdir(parents=True, exist_ok=True)
    text = source_of(test)
    name = "litmus_" + hashlib.sha256(text.encode()).hexdigest()[:12]
    path = folder / f"{name}.py"
    if not path.exists() or path.read_text() != text:
        partial = path.with_suffix(f".{id(test)}")
        partial.write_text(text)
        partial.replace(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module.kernel
