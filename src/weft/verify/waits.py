"""Waits in TTIR or TTGIR: loops that can only be left by what they read.

A *wait* is a `while` whose condition depends on an atomic, a volatile load, an ordered load in
inline assembly, or a plain load of a fixed address; or inline assembly that loops by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.ir.ttir import Op, Value
from weft.verify.events import (
    ATOMICS,
    STORES,
    asm_is_pure,
    asm_loops,
    asm_reads,
    asm_text,
    base_name,
    constant_of,
    is_asm,
    is_load,
    is_tile,
    order_of,
)
from weft.verify.places import Key, Loc, is_known, key_of
from weft.verify.ttgir import Function


@dataclass(eq=False)
class Wait:
    """A spin of one stage. `at` is the operation that every way past the spin goes through,
    `polls` the reads on which it depends, `keys` the places of its looks."""

    at: Op
    polls: list[Op]
    keys: frozenset[Key]
    loc: Loc
    ordered: bool

    @property
    def looks(self) -> list[Op]:
        """The polls by which the wait is recognised: the ordered ones, where there are any."""
        return [poll for poll in self.polls if _acquires(poll)] or self.polls


def find_waits(function: Function) -> list[Wait]:
    """Every wait of `function`, in order."""
    waits = []
    for operation in function.walk():
        if operation.name == "scf.while" and len(operation.regions) == 2:
            condition = operation.regions[0].blocks[-1].ops[-1]
            polls = _polls(function, operation, condition)
            if polls:
                waits.append(_wait(condition, polls))
        elif is_asm(operation) and asm_loops(operation):
            waits.append(_wait(operation, [operation]))
        elif base_name(operation) == "atomic_poll" or is_library_wait(operation):
            waits.append(_wait(operation, [operation]))
    return waits


def _wait(at: Op, polls: list[Op]) -> Wait:
    wait = Wait(at, polls, frozenset(), polls[0].chain, any(map(_acquires, polls)))
    wait.keys = frozenset(key_of(poll.chain) for poll in wait.looks if is_known(poll.chain))
    wait.loc = wait.looks[0].chain
    return wait


def is_library_wait(operation: Op) -> bool:
    is_call = base_name(operation) == "extern_elementwise"
    return is_call and "wait" in str(operation.attributes.get("symbol", ""))


def _acquires(poll: Op) -> bool:
    if ordered := order_of(poll):
        return ordered.order in ("acquire", "acq_rel")
    if is_asm(poll):
        text = asm_text(poll)
        return "acquire" in text or "acq_rel" in text or "buffer_inv" in text or "fence" in text
    return is_library_wait(poll)


def _polls(function: Function, loop: Op, condition: Op) -> list[Op]:
    """The reads that decide whether `loop` goes on; empty where it is no spin."""
    polls: dict[Op, None] = {}
    carried = {argument for region in loop.regions for argument in region.args}
    has_counter = False
    seen: set[Value] = set()
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
            polls[operation] = None
            continue
        inputs = function.inputs_of(value)
        if value in carried:
            makers = [function.definitions.get(source) for source in inputs]
            if not all(maker is not None and _may_poll(function, maker) for maker in makers):
                has_counter = True
        todo.extend(inputs)
    inside = set(loop.inside())
    spins = [poll for poll in polls if poll in inside]
    spins = [poll for poll in spins if _is_spin(function, loop, poll, has_counter)]
    if not spins:
        return []
    # The first look, before the loop, is one way past it.
    first = [
        poll
        for poll in polls
        if poll not in inside and (base_name(poll) != "load" or _is_volatile(poll))
    ]
    return spins + first


def _may_poll(function: Function, operation: Op) -> bool:
    name = base_name(operation)
    if name == "atomic_rmw":
        return _changes_nothing(function, operation)
    if name in ("atomic_cas", "atomic_load"):
        return True
    if name == "load":
        return not is_tile(operation) or _is_volatile(operation)
    return is_asm(operation) and not asm_is_pure(operation) and asm_reads(operation)


def _changes_nothing(function: Function, operation: Op) -> bool:
    """Can the atomic be a look: add 0, or 0, and the operations that repeat harmlessly?

    A work counter, `tile = atomic_add(next, 1)`, drives a loop too and is no wait.
    """
    if operation.words[0] not in ("add", "fadd", "or", "xor"):
        return True
    constant = function.definitions.get(operation.operands[1])
    if operation.words[0] == "fadd":
        return constant is not None and any(float(word) == 0 for word in constant.words[:1])
    return constant_of(constant) in (0, False)


def _is_volatile(operation: Op) -> bool:
    return operation.flag("isVolatile")


def _is_spin(function: Function, loop: Op, poll: Op, has_counter: bool) -> bool:
    """A plain load is polled only where nothing but another rank can change what it gives."""
    if base_name(poll) != "load" or _is_volatile(poll):
        return True
    if has_counter or any(base_name(operation) in STORES for operation in loop.inside()):
        return False
    return not function.slice(*poll.operands[:1]) & _variants(loop)


def _variants(loop: Op) -> set[Value]:
    """Values of `loop` that may differ from one round to the next."""
    variant = {argument for region in loop.regions for argument in region.args}
    for operation in loop.inside():
        reads = is_load(operation) or base_name(operation) in ATOMICS or is_asm(operation)
        if reads or any(operand in variant for operand in operation.operands):
            variant.update(operation.results)
    return variant


class GroupedWaits:
    """Waits of one stage by the group of the source wait they belong to."""

    def __init__(self, waits: list[Wait], groups: dict[Key, int]) -> None:
        self.groups = groups
        self.by_operation: dict[Op, int] = {}
        self.by_look: dict[Op, int] = {}
        self.polls: set[Op] = set()
        for wait in waits:
            self.polls.update(wait.polls)
            group = next((groups[key] for key in wait.keys if key in groups), None)
            if group is not None:
                self.by_operation[wait.at] = group
                self.by_look.update(dict.fromkeys(wait.looks, group))
