"""Waits in TTIR or TTGIR: loops that can only be left by what they read.

A *wait* is a `while` whose condition depends on an atomic, a volatile load, an ordered load in
inline assembly, or a plain load of a fixed address; or inline assembly that loops by itself.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from weft.verify.events import (
    ATOMIC_RMW,
    ATOMICS,
    STORES,
    asm_is_pure,
    asm_loops,
    asm_reads,
    asm_text,
    base_name,
    is_asm,
    is_load,
    order_of,
)
from weft.verify.places import Key, Loc, is_known, key_of
from weft.verify.ttgir import Function, Operation


@dataclass(eq=False)
class Wait:
    """A spin of one stage. `at` is the operation that every way past the spin goes through,
    `polls` the reads on which it depends, `keys` the places of its looks."""

    at: Operation
    polls: list[Operation]
    keys: frozenset[Key]
    loc: Loc
    ordered: bool

    @property
    def looks(self) -> list[Operation]:
        """The polls by which the wait is recognised: the ordered ones, where there are any."""
        return [poll for poll in self.polls if _acquires(poll)] or self.polls


def find_waits(function: Function) -> list[Wait]:
    """Every wait of `function`, in order."""
    waits = []
    for operation in function.walk():
        if operation.name == "scf.while" and len(operation.regions) == 2:
            condition = operation.regions[0][-1].operations[-1]
            polls = _polls(function, operation, condition)
            if polls:
                waits.append(_wait(condition, polls))
        elif is_asm(operation) and asm_loops(operation):
            waits.append(_wait(operation, [operation]))
        elif base_name(operation) == "atomic_poll" or is_library_wait(operation):
            waits.append(_wait(operation, [operation]))
    return waits


def _wait(at: Operation, polls: list[Operation]) -> Wait:
    wait = Wait(at, polls, frozenset(), polls[0].loc, any(map(_acquires, polls)))
    wait.keys = frozenset(key_of(poll.loc) for poll in wait.looks if is_known(poll.loc))
    wait.loc = wait.looks[0].loc
    return wait


def is_library_wait(operation: Operation) -> bool:
    return base_name(operation) == "extern_elementwise" and bool(
        re.search(r'symbol = "[^"]*wait[^"]*"', operation.text)
    )


def _acquires(poll: Operation) -> bool:
    if ordered := order_of(poll):
        return ordered.order in ("acquire", "acq_rel")
    if is_asm(poll):
        text = asm_text(poll)
        return "acquire" in text or "acq_rel" in text or "buffer_inv" in text or "fence" in text
    return is_library_wait(poll)


def _polls(function: Function, loop: Operation, condition: Operation) -> list[Operation]:
    """The reads that decide whether `loop` goes on; empty where it is no spin."""
    polls: dict[int, Operation] = {}
    carried = {argument for region in loop.regions for argument in region[0].arguments}
    has_counter = False
    seen: set[str] = set()
    todo = condition.operands[:1]
    while todo:
        value = todo.pop()
        if value in seen:
            continue
        seen.add(value)
        operation = function.definitions.get(value)
        if operation is None or value in function.sources:
            pass  # an argument, or what control flow hands on
        elif _may_poll(function, operation):
            polls[operation.index] = operation
            continue
        inputs = function.inputs_of(value)
        if value in carried:
            makers = [function.definitions.get(source) for source in inputs]
            if not all(maker is not None and _may_poll(function, maker) for maker in makers):
                has_counter = True
        todo.extend(inputs)
    inside = {operation.index for operation in loop.walk()}
    spins = [poll for poll in polls.values() if poll.index in inside]
    spins = [poll for poll in spins if _is_spin(function, loop, poll, has_counter)]
    if not spins:
        return []
    # The first look, before the loop, is one way past it.
    first = [
        poll
        for poll in polls.values()
        if poll.index not in inside and (base_name(poll) != "load" or _is_volatile(poll))
    ]
    return spins + first


def _may_poll(function: Function, operation: Operation) -> bool:
    name = base_name(operation)
    if name == "atomic_rmw":
        return _changes_nothing(function, operation)
    if name in ("atomic_cas", "atomic_load"):
        return True
    if name == "load":
        return "tensor<" not in operation.text or _is_volatile(operation)
    return is_asm(operation) and not asm_is_pure(operation) and asm_reads(operation)


def _changes_nothing(function: Function, operation: Operation) -> bool:
    """Can the atomic be a look: add 0, or 0, and the operations that repeat harmlessly?

    A work counter, `tile = atomic_add(next, 1)`, drives a loop too and is no wait.
    """
    match = ATOMIC_RMW.match(operation.text)
    if match is None or match[1] not in ("add", "fadd", "or", "xor"):
        return match is not None
    constant = function.definitions.get(operation.operands[1])
    return constant is not None and bool(
        re.match(r"arith\.constant (?:dense<)?(?:0\b|0\.0+e|false)", constant.text)
    )


def _is_volatile(operation: Operation) -> bool:
    return "isVolatile = true" in operation.text


def _is_spin(function: Function, loop: Operation, poll: Operation, has_counter: bool) -> bool:
    """A plain load is polled only where nothing but another rank can change what it gives."""
    if base_name(poll) != "load" or _is_volatile(poll):
        return True
    if has_counter or any(base_name(operation) in STORES for operation in loop.walk()):
        return False
    return not function.slice(*poll.operands[:1]) & _variants(loop)


def _variants(loop: Operation) -> set[str]:
    """Values of `loop` that may differ from one round to the next."""
    variant = {argument for region in loop.regions for argument in region[0].arguments}
    for operation in loop.walk():
        reads = is_load(operation) or base_name(operation) in ATOMICS or is_asm(operation)
        if reads or any(operand in variant for operand in operation.operands):
            variant.update(operation.results)
    return variant


class GroupedWaits:
    """Waits of one stage by the group of the source wait they belong to."""

    def __init__(self, waits: list[Wait], groups: dict[Key, int]) -> None:
        self.groups = groups
        self.by_operation: dict[int, int] = {}
        self.by_look: dict[int, int] = {}
        self.polls: set[int] = set()
        for wait in waits:
            self.polls.update(poll.index for poll in wait.polls)
            group = next((groups[key] for key in wait.keys if key in groups), None)
            if group is not None:
                self.by_operation[wait.at.index] = group
                self.by_look.update((look.index, group) for look in wait.looks)
