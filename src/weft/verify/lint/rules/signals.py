"""Signals of which the file shows one half only."""

from __future__ import annotations

from collections.abc import Iterator

from weft.verify.lint.host import Signal
from weft.verify.lint.problem import WARNING
from weft.verify.lint.registry import Hit, Kernel, Program, at, rule
from weft.verify.lint.values import Op


@rule(
    "never-waited",
    WARNING,
    "A signal that is raised and that nobody in the file waits for.",
    remedy="wait for it before what it announces is used, or delete it",
)
def never_waited(program: Program) -> Iterator[Hit]:
    for signal, ops in whole_signals(program):
        raised = [op for op in ops if _raises(op)]
        if raised and not signal.takes and not any(_looks(op) for op in ops):
            yield at(raised[0], f"{signal.name} is raised here, and nothing in this file waits for "
                                "it or looks at it")  # fmt: skip


@rule(
    "never-notified",
    WARNING,
    "A wait for a signal that nobody in the file raises.",
    remedy="notify where what it announces is done, or delete the wait",
)
def never_notified(program: Program) -> Iterator[Hit]:
    for signal, ops in whole_signals(program):
        waits = [op for op in ops if op.waits]
        if signal.is_written or any(_raises(op) for op in ops):
            continue
        message = f"this waits for {signal.name}, and nothing in this file raises it"
        if waits:
            yield at(waits[0], message)
        elif signal.takes:
            yield Hit(signal.takes[0], message)


def whole_signals(program: Program) -> Iterator[tuple[Signal, list[Op]]]:
    """Signals of which every use is in sight, and what the kernels do with them."""
    for signal in program.host.signals.values():
        if signal.escapes or not signal.bound:
            continue
        ops: list[Op] = []
        for launch, root in signal.bound:
            kernel = program.kernel(launch.device.name) if launch.device else None
            found = None if kernel is None else _of_root(kernel, root)
            if found is None:
                break
            ops += found
        else:
            yield signal, ops


def _of_root(kernel: Kernel, root: str) -> list[Op] | None:
    """What a kernel does with a parameter; None where it is given to what lint does not know."""
    ops = [op for op in kernel.ops if root in op.pointer.roots]
    if any(op.kind == "opaque" for op in ops):
        return None
    return ops


def _raises(op: Op) -> bool:
    if op.kind in ("notify", "put", "store", "barrier"):
        return True
    return op.kind == "atomic" and op.poll is None and op.name not in ("wl.load", "tl.atomic_load")


def _looks(op: Op) -> bool:
    reads = op.kind in ("wait", "test", "load", "get", "barrier")
    return reads or op.waits or (op.kind == "atomic" and op.used)
