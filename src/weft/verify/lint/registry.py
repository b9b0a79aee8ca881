"""The rules by name. A rule is a function from a `Kernel` to `Hit`s.

docs/lint_rules.md has, for each rule, code that it speaks about and the same code put right; the
tests run the rule on both.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from weft.verify.lint import calls, meanings
from weft.verify.lint.device import Walker
from weft.verify.lint.launches import Launch, given, launches_in
from weft.verify.lint.source import Device, Source
from weft.verify.lint.values import Frame, Op, Value

# Imported for what it registers: what calls mean.
MEANINGS = meanings.EFFECTS


def trace(device: Device, given: Mapping[str, Value], visited: set[str]) -> list[Op]:
    """What the kernel does; `given` says more of its parameters than their names do.

    The names of all device functions that were walked are added to `visited`.
    """
    walker = Walker(device.source, calls.call)
    ops = walker.enter(device, given)
    visited.update(walker.visited)
    return ops


@dataclass(eq=False)
class Kernel:
    """A device function that nobody in the file calls, what it does, and who launches it."""

    device: Device
    ops: list[Op]
    launches: list[Launch] = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.device.name

    def of(self, *kinds: str) -> list[Op]:
        return [op for op in self.ops if op.kind in kinds]


@dataclass(eq=False)
class Program:
    """A file, as rules see it."""

    source: Source

    @cached_property
    def launches(self) -> list[Launch]:
        return list(launches_in(self.source))

    @cached_property
    def kernels(self) -> list[Kernel]:
        """What is launched, and what no other device function calls."""
        devices = self.source.devices
        called = {name for device in devices.values() for name in device.calls}
        launched = {one.device.name for one in self.launches}
        roots = [d for name, d in devices.items() if name in launched or name not in called]
        visited: set[str] = set()
        found = []
        for one in roots:
            launches = [launch for launch in self.launches if launch.device is one]
            found.append(Kernel(one, trace(one, given(launches), visited), launches))
        # A hook of a template that lint does not see into is looked at by itself.
        for name, device in devices.items():
            if name not in visited:
                found.append(Kernel(device, trace(device, {}, visited)))
        return found


@dataclass(frozen=True)
class Hit:
    """A rule's finding: the node that it is about, and the sentence that says why."""

    node: ast.AST
    message: str
    path: tuple[Frame, ...] = field(default=())

    @property
    def via(self) -> str:
        """The calls through which the place is reached, the kernel's own first."""
        calls = [frame for frame in self.path if frame.kind == "call"]
        return ", ".join(f"by {one.call}() in line {one.node.lineno}" for one in calls)  # type: ignore[attr-defined]


Check = Callable[[Kernel], Iterable[Hit]]


@dataclass(frozen=True)
class Rule:
    """`name` is stable: it stands in comments that allow exceptions."""

    name: str
    severity: str
    summary: str
    remedy: str
    check: Check


RULES: dict[str, Rule] = {}


def rule(name: str, severity: str, summary: str, *, remedy: str) -> Callable[[Check], Check]:
    """Register a rule that looks at each kernel of a file.

    Raises  ValueError: the name is taken
    """

    def add(check: Check) -> Check:
        if name in RULES:
            raise ValueError(f"two rules are called {name}")
        RULES[name] = Rule(name, severity, summary, remedy, check)
        return check

    return add


def at(op: Op, message: str) -> Hit:
    """The finding that is about `op`; in this file, also where another file's function does it."""
    for depth, frame in enumerate(op.path):
        if frame.foreign:
            return Hit(frame.node, message, op.path[: depth + 1])
    return Hit(op.node, message, op.path)


def text_of(node: ast.AST | None, limit: int = 60) -> str:
    """An expression as written, on one line."""
    if node is None:
        return "?"
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."


def pointer_text(op: Op) -> str:
    """The address of an operation as written."""
    if isinstance(op.node, ast.Call):
        position = 1 if op.name.startswith("wl.notify") else 0
        for word in op.node.keywords:
            if word.arg in ("pointer", "signal", "ptr"):
                return text_of(word.value)
        if op.name.startswith("wl.put_signal") and len(op.node.args) > 3:
            return text_of(op.node.args[3])
        if len(op.node.args) > position:
            return text_of(op.node.args[position])
    return "the word"
