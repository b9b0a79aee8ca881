"""What the host does to signals between launches, and what it passes to recorded launches."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from weft.verify.lint.host import Launch, Step
from weft.verify.lint.problem import ERROR, WARNING
from weft.verify.lint.registry import Hit, Kernel, Program, at, pointer_text, rule, text_of
from weft.verify.lint.rules.counts import sets
from weft.verify.lint.values import Op


@rule(
    "host-reset",
    ERROR,
    "The host writes a signal word that peers raise, with no barrier between.",
    remedy="count up instead of resetting, or put world.barrier() before and after the reset",
)
def host_reset(program: Program) -> Iterator[Hit]:
    host = program.host
    for reset in host.steps:
        if reset.kind != "reset" or not _is_raised_by_peers(program, reset.origin):
            continue
        users = {id(launch) for launch, _ in host.signals[reset.origin].bound}
        steps = [step for step in host.steps if step.function == reset.function]
        launch = _next_launch(steps, reset, users)
        if launch is not None:
            name = host.signals[reset.origin].name
            message = f"{name} is written by the host, and a peer that is faster may have raised "
            message += f"it for the launch in line {_line(launch)} already"
            yield Hit(reset.place(), message)


def _is_raised_by_peers(program: Program, origin: str) -> bool:
    for launch, root in program.host.signals[origin].bound:
        kernel = program.kernel(launch.device.name) if launch.device else None
        for op in kernel.of("notify", "atomic", "put") if kernel else ():
            if op.pointer.remote and root in op.pointer.roots:
                return True
    return False


def _next_launch(steps: list[Step], reset: Step, users: set[int]) -> Step | None:
    """The next launch that uses the signal, unless a barrier comes first; round its loop too."""
    index = steps.index(reset)
    way = steps[index + 1 :]
    if reset.loops:
        inner = [step for step in steps if reset.loops[-1] in step.loops]
        index = inner.index(reset)
        way = inner[index + 1 :] + inner[:index]
    for step in way:
        if step.kind == "meet":
            return None
        if id(step) in users:
            return step
    return None


def _line(step: Step) -> int:
    return step.node.lineno  # type: ignore[attr-defined]


@rule(
    "frozen-epoch",
    ERROR,
    "A number of the host's that a recorded launch waits for, or sends: every replay has the same.",
    remedy="read the epoch on the device: wl.slot_epoch(slot), or a word that the kernel counts up",
)
def frozen_epoch(program: Program) -> Iterator[Hit]:
    for launch in program.host.launches:
        if not launch.recorded or launch.device is None:
            continue
        for name, line in _awaited(program, launch).items():
            value = launch.values.get(name)
            argument = launch.arguments.get(name)
            if value is None or argument is None or value.kind not in _FROZEN:
                continue
            message = f"{name}={text_of(argument)} is fixed when the launch is recorded, and line "
            message += f"{line} waits for it or sends it in every replay"
            yield Hit(launch.place(argument), message)


_FROZEN = {"number", "counter", "loop"}


def _awaited(program: Program, launch: Launch) -> dict[str, int]:
    """Parameters that reach a wait's target or a signal's value, and where."""
    assert launch.device is not None
    kernel = program.kernel(launch.device.name)
    found: dict[str, int] = {}
    for op in kernel.ops if kernel else ():
        if isinstance(op.node, ast.Call) and (op.waits or op.kind == "notify"):
            value = op.expected if op.waits else op.value
            for name in value.params & launch.arguments.keys():
                if value.roots <= {name}:
                    found.setdefault(name, op.node.lineno)
    return found


@rule(
    "epoch-not-advanced",
    WARNING,
    "A signal SET, or a packet flagged, with the same number in every launch of a loop.",
    remedy="pass a number that counts calls, or keep it on the device: wl.slot_epoch(slot)",
)
def epoch_not_advanced(program: Program) -> Iterator[Hit]:
    for launch in program.host.launches:
        kernel = program.kernel(launch.device.name) if launch.device else None
        if kernel is None or not (launch.loops or launch.recorded):
            continue
        for op in kernel.ops:
            if _is_fresh(launch, op):
                continue
            if op.name == "wl.put_packets":
                flag = op.options.get("flag")
                if flag is not None and isinstance(flag.number, int) and not op.loops():
                    yield at(op, f"every launch of {kernel.name} flags its packets with "
                                 f"{flag.number}: one of the launch before passes for "
                                 "new")  # fmt: skip
            elif op.kind == "notify" and sets(op) and isinstance(op.value.number, int):
                if _is_awaited(kernel, op) and not _is_reset(program, kernel, op):
                    yield at(op, f"every launch of {kernel.name} SETs {pointer_text(op)} to "
                                 f"{op.value.number}, and from the second one on nobody can tell "
                                 "it from the one before")  # fmt: skip


def _is_fresh(launch: Launch, op: Op) -> bool:
    """Is it another word in every turn of the loop around the launch?"""
    if not launch.loops:
        return False
    made = {
        node.id
        for node in ast.walk(launch.loops[-1])
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    for root in op.pointer.roots:
        argument = launch.arguments.get(root.split(".")[0].removesuffix("[]"))
        parts = list(ast.walk(argument)) if argument is not None else []
        if any(isinstance(one, ast.Call) for one in parts):
            return True
        if any(isinstance(one, ast.Name) and one.id in made for one in parts):
            return True
    return False


def _is_awaited(kernel: Kernel, op: Op) -> bool:
    return any(
        one.waits and one.pointer.roots & op.pointer.roots and one.expected.number is not None
        for one in kernel.ops
    )


def _is_reset(program: Program, kernel: Kernel, op: Op) -> bool:
    """By the kernel, or by the host."""
    for signal in program.host.signals.values():
        bound = {root for launch, root in signal.bound if launch.device is kernel.device}
        is_reset = signal.is_written or signal.takes or signal.escapes
        if bound & op.pointer.roots and is_reset:
            return True
    return any(
        one.kind in ("store", "atomic") and not one.waits and one.pointer.roots & op.pointer.roots
        for one in kernel.ops
    )
