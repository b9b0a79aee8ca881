"""What a kernel's TTIR or TTGIR does that matters to other ranks: waits, loads, stores, releases.

A *wait* is a loop that can only be left by what it reads: a `while` whose condition depends on an
atomic, a volatile load, an ordered load in inline assembly, or a plain load of a fixed address;
or inline assembly that loops by itself. `graph_of` turns a function into a flow graph of these.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from weft.verify import flow
from weft.verify.places import Key, Loc, is_known, key_of
from weft.verify.ttgir import Block, Function, Module, Operation

DIALECTS = ("tt", "ttg", "ttng", "amdg", "amdgpu", "nvws", "ttag")
LOADS = {
    "load",
    "descriptor_load",
    "experimental_descriptor_load",
    "descriptor_gather",
    "async_copy_global_to_local",
    "async_tma_copy_global_to_local",
    "async_tma_gather",
    "async_tdm_copy_global_to_local",
    "buffer_load",
    "buffer_load_to_local",
}
STORES = {
    "store",
    "descriptor_store",
    "experimental_descriptor_store",
    "descriptor_reduce",
    "descriptor_scatter",
    "async_tma_copy_local_to_global",
    "async_tma_reduce",
    "async_tma_scatter",
    "async_tdm_copy_local_to_global",
    "buffer_store",
}
ATOMICS = {"atomic_rmw", "atomic_cas", "atomic_load", "atomic_store", "atomic_poll"}

_ASM_TEXT = re.compile(r'elementwise_inline_asm "((?:[^"\\]|\\.)*)"')
_ASM_READS = re.compile(
    r"\b(?:ld|atom|multimem\.ld_reduce)\.|\b(?:global|flat|buffer|s)_(?:load|atomic)"
)
_ASM_WRITES = re.compile(
    r"\b(?:st|red|atom|multimem\.(?:st|red))\.|\b(?:global|flat|buffer)_(?:store|atomic)"
)
_ASM_LABEL = re.compile(r"(?<![:\w$.])([A-Za-z_$.][\w$.]*)\s*:(?!:)")
_ASM_BRANCH = re.compile(r"\b(?:bra(?:\.uni)?|s_branch|s_cbranch_\w+)\s+([\w$.]+)")
_ASM_ORDER = re.compile(r"\b(acquire|release|acq_rel|relaxed|volatile)\b")
_ASM_MEMORY = re.compile(
    r"\b((?:ld|st|atom|red|multimem|fence|membar)\.[\w.:]+|(?:global|flat|buffer)_[a-z]\w*)"
)
_CONSTANT = re.compile(r"arith\.constant (?:dense<)?(true|false|-?\d+)\b(?!\.)")
_ATOMIC = re.compile(r"^tt\.atomic_rmw (\w+), (\w+), (\w+),")
_CAS = re.compile(r"^tt\.atomic_cas (\w+), (\w+),")
_ORDERED = re.compile(r"^tt\.atomic_(?:load|store|poll)\b.*?\b(\w+), (\w+),")


@dataclass(frozen=True)
class Ordered:
    """An access with an order and a scope, as the program states them."""

    order: str
    scope: str
    is_tile: bool


def base_name(operation: Operation) -> str:
    """The operation's name within Triton's dialects; empty for others."""
    dialect, _, name = operation.name.partition(".")
    return name if dialect in DIALECTS else ""


def is_load(operation: Operation) -> bool:
    return base_name(operation) in LOADS


def is_asm(operation: Operation) -> bool:
    return base_name(operation) == "elementwise_inline_asm"


def asm_text(operation: Operation) -> str:
    """The assembly of an inline asm operation, with its line ends."""
    match = _ASM_TEXT.search(operation.text)
    text = match[1] if match else ""
    text = text.replace("${:uid}", "_uid").replace("\\22", '"')
    return re.sub(r"\\0[Aa]|\\09|\\n|\\t", "\n", text)


def asm_is_pure(operation: Operation) -> bool:
    return "pure = true" in operation.text


def asm_reads(operation: Operation) -> bool:
    return bool(_ASM_READS.search(asm_text(operation)))


def asm_memory(operation: Operation) -> list[str]:
    """The memory instructions of an inline asm operation."""
    return _ASM_MEMORY.findall(asm_text(operation))


def asm_loops(operation: Operation) -> bool:
    """Does the assembly branch back to one of its own labels, and read memory?"""
    text = asm_text(operation)
    labels = {match[1]: match.start() for match in _ASM_LABEL.finditer(text)}
    back = any(
        labels.get(match[1], len(text)) < match.start() for match in _ASM_BRANCH.finditer(text)
    )
    return back and bool(_ASM_READS.search(text))


def order_of(operation: Operation) -> Ordered | None:
    """Order and scope of an atomic operation; None where the operation states none."""
    is_tile = "tensor<" in operation.text
    if match := _ATOMIC.match(operation.text):
        return Ordered(match[2], _scope(match[3]), is_tile)
    if match := _CAS.match(operation.text):
        return Ordered(match[1], _scope(match[2]), is_tile)
    if match := _ORDERED.match(operation.text):
        return Ordered(match[1], _scope(match[2]), is_tile)
    return None


def _scope(word: str) -> str:
    return {"cta": "cta", "gpu": "gpu", "sys": "sys", "system": "sys"}.get(word, word)


# ---------------------------------------------------------------------------------------------
# Waits


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
    match = _ATOMIC.match(operation.text)
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


# ---------------------------------------------------------------------------------------------
# The flow graph of a function


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


def graph_of(
    module: Module, waits: GroupedWaits, *, precise: bool, at_looks: bool = False
) -> flow.Graph:
    """The flow graph of the module's kernel.

    `precise` follows constants through the first round of each loop and tells apart the values
    of conditions that guard waits; without it, and with waits placed at their looks instead of
    at the end of their loops, the graph says no more than assembly can.
    """
    builder = _Builder(module, waits, precise, at_looks)
    start = builder.graph.add(flow.Node(flow.JOINT))
    builder.function(module.kernel, [(start, None)], 0)
    return builder.graph


Exits = list[tuple[int, tuple[str, bool] | None]]


class _Builder:
    """Walks regions, leaving behind nodes; `exits` are the loose ends of what was built."""

    def __init__(self, module: Module, waits: GroupedWaits, precise: bool, at_looks: bool) -> None:
        self.module = module
        self.waits = waits
        self.at = waits.by_look if at_looks else waits.by_operation
        self.precise = precise
        self.graph = flow.Graph()
        self.constants: dict[str, int | bool] = {}
        self.current: Function = module.kernel
        self.tracked = self._tracked_conditions() if precise else frozenset()

    def _tracked_conditions(self) -> frozenset[str]:
        found = set()
        for operation in self.module.kernel.walk():
            if operation.index in self.waits.by_operation:
                for above in operation.ancestors():
                    if above.name == "scf.if" and above.operands:
                        found.add(above.operands[0])
        return frozenset(found)

    def emit(self, node: flow.Node, exits: Exits) -> Exits:
        index = self.graph.add(node)
        for start, assumption in exits:
            self.graph.connect(start, index, assumption)
        return [(index, None)]

    def joint(self, exits: Exits, forgets: frozenset[str] = frozenset()) -> Exits:
        return self.emit(flow.Node(flow.JOINT, forgets=forgets), exits)

    def function(self, function: Function, exits: Exits, depth: int) -> Exits:
        """A function's body: blocks joined by branches."""
        before, self.current = self.current, function
        blocks = function.blocks
        if len(blocks) == 1:
            exits = self.block(blocks[0], exits, depth)
            self.current = before
            return exits
        heads = {block.label: self.joint([]) for block in blocks}
        for start, assumption in exits:
            self.graph.connect(start, heads[blocks[0].label][0][0], assumption)
        ends: Exits = []
        for block in blocks:
            loose = self.block(block, heads[block.label], depth)
            last = block.operations[-1] if block.operations else None
            targets = re.findall(r"\^[\w.$-]+", last.text) if last is not None else []
            for position, target in enumerate(targets):
                assumption = None
                asked = last.operands[0] if last is not None and last.operands else ""
                if len(targets) == 2 and asked in self.tracked:
                    assumption = (asked, position == 0)
                for start, other in loose:
                    self.graph.connect(start, heads[target][0][0], assumption or other)
            if not targets:
                ends += loose
        self.current = before
        return ends

    def block(self, block: Block, exits: Exits, depth: int) -> Exits:
        for operation in block.operations:
            exits = self.operation(operation, exits, depth)
        return exits

    def region(self, region: list[Block], exits: Exits, depth: int) -> Exits:
        for block in region:
            exits = self.block(block, exits, depth)
        return exits

    def operation(self, operation: Operation, exits: Exits, depth: int) -> Exits:
        name = operation.name
        if name == "scf.for":
            return self._for(operation, exits, depth)
        if name == "scf.while":
            return self._while(operation, exits, depth)
        if name == "scf.if":
            return self._if(operation, exits, depth)
        if name == "ttg.warp_specialize":
            ends: Exits = []
            for region in operation.regions:
                ends += self.region(region, exits, depth)
            return self.joint(ends or exits)
        if name == "tt.call" and depth < 8:
            callee = self.module.callee(operation)
            if callee is not None and callee.blocks:
                return self.function(callee, exits, depth + 1)
        if self.precise:
            self._evaluate(operation)
        return self._event(operation, exits)

    def _event(self, operation: Operation, exits: Exits) -> Exits:
        group = self._group(operation)
        if group is not None and operation.name != "scf.condition":
            return self.emit(flow.Node(flow.WAIT, group, operation), exits)
        if operation.index in self.waits.polls and self.current is self.module.kernel:
            return exits
        key = key_of(operation.loc)
        name = base_name(operation)
        if name in LOADS:
            guards, is_dead = self._guards(operation)
            if is_dead:
                return exits
            return self.emit(flow.Node(flow.LOAD, key, operation, guards), exits)
        if name in STORES:
            return self.emit(flow.Node(flow.STORE, key, operation), exits)
        if name in ATOMICS or (is_asm(operation) and _ASM_WRITES.search(asm_text(operation))):
            return self.emit(flow.Node(flow.RELEASE, key, operation), exits)
        return exits

    def _group(self, operation: Operation) -> int | None:
        """The group of the wait that `operation` ends; indices are the kernel's own."""
        if self.current is not self.module.kernel:
            return None
        return self.at.get(operation.index)

    def _guards(self, operation: Operation) -> tuple[frozenset[str], bool]:
        """The tracked conditions under which a load is made; and is it known not to be made?"""
        if not self.precise:
            return frozenset(), False
        found: set[str] = set()
        todo = list(operation.operands)
        while todo:
            value = todo.pop()
            if self.constants.get(value) is False:
                return frozenset(), True
            found.add(value)
            definition = self.current.definitions.get(value)
            if definition is not None and definition.name in (
                "tt.splat",
                "tt.broadcast",
                "tt.expand_dims",
                "ttg.convert_layout",
                "arith.andi",
            ):
                todo.extend(definition.operands)
        return frozenset(found & self.tracked), False

    def _defined_in(self, operation: Operation) -> frozenset[str]:
        inner = (result for inside in operation.walk() for result in inside.results)
        return frozenset(self.tracked & set(inner)) if self.tracked else frozenset()

    def _for(self, operation: Operation, exits: Exits, depth: int) -> Exits:
        body = operation.regions[0]
        has_events = any(self._matters(inside) for inside in operation.walk())
        if not has_events:
            return exits
        arguments = body[0].arguments
        forgets = self._defined_in(operation)
        before = list(exits)
        if not self.precise:
            head = self.joint(exits)
            ends = self.region(body, head, depth)
            for start, assumption in ends:
                self.graph.connect(start, head[0][0], assumption)
            return head
        outside = dict(self.constants)
        self._bind(arguments, [operation.operands[0], *self._initial(operation)])
        first = self.region(body, self.joint(exits, forgets), depth)
        self.constants = {
            name: value for name, value in outside.items() if name not in set(arguments)
        }
        head = self.joint(first, forgets)
        ends = self.region(body, head, depth)
        for start, assumption in ends:
            self.graph.connect(start, head[0][0], assumption)
        self.constants = outside
        runs = self._surely_runs(operation) or not self._has_more_than_waits(operation)
        return self.joint(head if runs else before + head)

    def _initial(self, operation: Operation) -> list[str]:
        arguments = operation.regions[0][0].arguments[1:]
        return [self.current.sources.get(argument, [""])[0] for argument in arguments]

    def _bind(self, arguments: list[str], values: list[str]) -> None:
        for argument, value in zip(arguments, values, strict=False):
            if value in self.constants:
                self.constants[argument] = self.constants[value]
            else:
                self.constants.pop(argument, None)

    def _surely_runs(self, operation: Operation) -> bool:
        lower, upper = (self.constants.get(value) for value in operation.operands[:2])
        return lower is not None and upper is not None and lower < upper

    def _matters(self, operation: Operation) -> bool:
        name = base_name(operation)
        return (
            operation.index in self.waits.by_operation
            or name in LOADS
            or name in STORES
            or name in ATOMICS
            or is_asm(operation)
            or name == "call"
        )

    def _has_more_than_waits(self, operation: Operation) -> bool:
        """A loop over signals that only waits is taken to run: zero signals guard nothing."""
        inside = list(operation.walk())
        if not any(one.index in self.waits.by_operation for one in inside):
            return True
        return any(
            (base_name(one) in LOADS and one.index not in self.waits.polls)
            or base_name(one) in STORES
            for one in inside
        )

    def _while(self, operation: Operation, exits: Exits, depth: int) -> Exits:
        if len(operation.regions) != 2:
            return self.joint(exits)
        forgets = self._defined_in(operation)
        names = {argument for region in operation.regions for argument in region[0].arguments}
        for name in names:
            self.constants.pop(name, None)
        head = self.joint(exits, forgets)
        condition = self.region(operation.regions[0], head, depth)
        after = self.region(operation.regions[1], condition, depth)
        for start, assumption in after:
            self.graph.connect(start, head[0][0], assumption)
        last = operation.regions[0][-1].operations[-1]
        group = self._group(last)
        if group is not None:  # past the spin, not once a round
            return self.emit(flow.Node(flow.WAIT, group, last), condition)
        return condition

    def _if(self, operation: Operation, exits: Exits, depth: int) -> Exits:
        condition = operation.operands[0] if operation.operands else ""
        known = self.constants.get(condition)
        regions = operation.regions
        if known is not None:
            if known:
                return self.region(regions[0], exits, depth)
            return self.region(regions[1], exits, depth) if len(regions) > 1 else exits
        start = self.joint(exits)[0][0]
        tracked = condition in self.tracked
        ends: Exits = []
        for position in (0, 1):
            assumption = (condition, position == 0) if tracked else None
            loose: Exits = [(start, assumption)]
            if position < len(regions):
                loose = self.region(regions[position], loose, depth)
            ends += loose
        return self.joint(ends)

    def _evaluate(self, operation: Operation) -> None:
        """Follow integer constants: what the first round of a loop does depends on them."""
        if len(operation.results) != 1:
            return
        result = operation.results[0]
        self.constants.pop(result, None)
        if operation.name == "arith.constant":
            match = _CONSTANT.match(operation.text)
            if match:
                word = match[1]
                self.constants[result] = word == "true" if word[0] in "tf" else int(word)
            return
        values = [self.constants.get(operand) for operand in operation.operands]
        if operation.name == "arith.andi" and False in values:
            self.constants[result] = False
            return
        if not values or any(value is None for value in values):
            if operation.name == "arith.select" and values and values[0] is not None:
                chosen = values[1] if values[0] else values[2]
                if chosen is not None:
                    self.constants[result] = chosen
            return
        folded = _fold(operation, values)
        if folded is not None:
            self.constants[result] = folded


def _fold(operation: Operation, values: list) -> int | bool | None:
    name = operation.name
    if name in ("tt.splat", "arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast"):
        return values[0]
    if name == "arith.cmpi" and len(values) == 2:
        predicate = operation.text.split()[1].rstrip(",")
        left, right = values
        return {
            "eq": left == right,
            "ne": left != right,
            "slt": left < right,
            "sle": left <= right,
            "sgt": left > right,
            "sge": left >= right,
        }.get(predicate)
    if name == "arith.select" and len(values) == 3:
        return values[1] if values[0] else values[2]
    if len(values) != 2 or isinstance(values[0], bool):
        if name == "arith.andi":
            return bool(values[0] and values[1])
        if name == "arith.ori":
            return bool(values[0] or values[1])
        return None
    left, right = values
    return {
        "arith.addi": lambda: left + right,
        "arith.subi": lambda: left - right,
        "arith.muli": lambda: left * right,
        "arith.maxsi": lambda: max(left, right),
        "arith.minsi": lambda: min(left, right),
        "arith.andi": lambda: left & right,
        "arith.ori": lambda: left | right,
        "arith.xori": lambda: left ^ right,
        "arith.divsi": lambda: int(left / right) if right else None,
        "arith.remsi": lambda: left - int(left / right) * right if right else None,
    }.get(name, lambda: None)()


def loads_of(function: Function, waits: GroupedWaits) -> Iterator[Operation]:
    """The loads of a function that are not polls."""
    for operation in function.walk():
        if is_load(operation) and operation.index not in waits.polls:
            yield operation
