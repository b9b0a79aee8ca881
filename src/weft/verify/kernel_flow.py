"""The flow graph of a kernel in TTIR or TTGIR: its waits, loads, stores and releases.

Constants are followed through the first round of each loop, since what is waited for may depend on
them.
"""

from __future__ import annotations

from weft.ir.ttir import Block, Op, Region, Value
from weft.verify import flow
from weft.verify.events import ATOMICS, LOADS, STORES, asm_writes, base_name, constant_of, is_asm
from weft.verify.places import key_of
from weft.verify.ttgir import Function, Module
from weft.verify.waits import GroupedWaits


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


Exits = list[tuple[int, tuple[Value, bool] | None]]


class _Builder:
    """Walks regions, leaving behind nodes; `exits` are the loose ends of what was built."""

    def __init__(self, module: Module, waits: GroupedWaits, precise: bool, at_looks: bool) -> None:
        self.module = module
        self.waits = waits
        self.at = waits.by_look if at_looks else waits.by_operation
        self.precise = precise
        self.graph = flow.Graph()
        self.constants: dict[Value, int | bool] = {}
        self.current: Function = module.kernel
        self.tracked = self._tracked_conditions() if precise else frozenset()

    def _tracked_conditions(self) -> frozenset[Value]:
        found = set()
        for operation in self.module.kernel.walk():
            if operation in self.waits.by_operation:
                for above in self.module.kernel.ancestors(operation):
                    if above.name == "scf.if" and above.operands:
                        found.add(above.operands[0])
        return frozenset(found)

    def emit(self, node: flow.Node, exits: Exits) -> Exits:
        index = self.graph.add(node)
        for start, assumption in exits:
            self.graph.connect(start, index, assumption)
        return [(index, None)]

    def joint(self, exits: Exits, forgets: frozenset[Value] = frozenset()) -> Exits:
        return self.emit(flow.Node(flow.JOINT, forgets=forgets), exits)

    def function(self, function: Function, exits: Exits, depth: int) -> Exits:
        """A function's body: blocks joined by branches."""
        before, self.current = self.current, function
        blocks = function.body.blocks
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
            last = block.ops[-1] if block.ops else None
            targets = [label for label, _ in last.successors] if last is not None else []
            for position, target in enumerate(targets):
                assumption = None
                asked = last.operands[0] if last is not None and last.operands else None
                if asked is not None and len(targets) == 2 and asked in self.tracked:
                    assumption = (asked, position == 0)
                for start, other in loose:
                    self.graph.connect(start, heads[target][0][0], assumption or other)
            if not targets:
                ends += loose
        self.current = before
        return ends

    def block(self, block: Block, exits: Exits, depth: int) -> Exits:
        for operation in block.ops:
            exits = self.operation(operation, exits, depth)
        return exits

    def region(self, region: Region, exits: Exits, depth: int) -> Exits:
        for block in region.blocks:
            exits = self.block(block, exits, depth)
        return exits

    def operation(self, operation: Op, exits: Exits, depth: int) -> Exits:
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
            if callee is not None:
                return self.function(callee, exits, depth + 1)
        if self.precise:
            self._evaluate(operation)
        return self._event(operation, exits)

    def _event(self, operation: Op, exits: Exits) -> Exits:
        group = self._group(operation)
        if group is not None and operation.name != "scf.condition":
            return self.emit(flow.Node(flow.WAIT, group, operation), exits)
        if operation in self.waits.polls and self.current is self.module.kernel:
            return exits
        key = key_of(operation.chain)
        name = base_name(operation)
        if name in LOADS:
            guards, is_dead = self._guards(operation)
            if is_dead:
                return exits
            return self.emit(flow.Node(flow.LOAD, key, operation, guards), exits)
        if name in STORES:
            return self.emit(flow.Node(flow.STORE, key, operation), exits)
        if name in ATOMICS or (is_asm(operation) and asm_writes(operation)):
            return self.emit(flow.Node(flow.RELEASE, key, operation), exits)
        return exits

    def _group(self, operation: Op) -> int | None:
        """The group of the wait that `operation` ends; indices are the kernel's own."""
        if self.current is not self.module.kernel:
            return None
        return self.at.get(operation)

    def _guards(self, operation: Op) -> tuple[frozenset[Value], bool]:
        """The tracked conditions under which a load is made; and is it known not to be made?"""
        if not self.precise:
            return frozenset(), False
        found: set[Value] = set()
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

    def _defined_in(self, operation: Op) -> frozenset[Value]:
        inner = (result for inside in operation.inside() for result in inside.results)
        return frozenset(self.tracked & set(inner)) if self.tracked else frozenset()

    def _for(self, operation: Op, exits: Exits, depth: int) -> Exits:
        body = operation.regions[0]
        has_events = any(map(self._matters, operation.inside()))
        if not has_events:
            return exits
        arguments = body.args
        forgets = self._defined_in(operation)
        before = list(exits)
        if not self.precise:
            head = self.joint(exits)
            ends = self.region(body, head, depth)
            for start, assumption in ends:
                self.graph.connect(start, head[0][0], assumption)
            return head
        outside = dict(self.constants)
        self._bind(arguments, [operation.operands[0], *operation.operands[3:]])
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

    def _bind(self, arguments: list[Value], values: list[Value]) -> None:
        for argument, value in zip(arguments, values, strict=False):
            if value in self.constants:
                self.constants[argument] = self.constants[value]
            else:
                self.constants.pop(argument, None)

    def _surely_runs(self, operation: Op) -> bool:
        lower, upper = (self.constants.get(value) for value in operation.operands[:2])
        return lower is not None and upper is not None and lower < upper

    def _matters(self, operation: Op) -> bool:
        name = base_name(operation)
        return (
            operation in self.waits.by_operation
            or name in LOADS
            or name in STORES
            or name in ATOMICS
            or is_asm(operation)
            or name == "call"
        )

    def _has_more_than_waits(self, operation: Op) -> bool:
        """A loop over signals that only waits is taken to run: zero signals guard nothing."""
        inside = list(operation.inside())
        if not any(one in self.waits.by_operation for one in inside):
            return True
        return any(
            (base_name(one) in LOADS and one not in self.waits.polls) or base_name(one) in STORES
            for one in inside
        )

    def _while(self, operation: Op, exits: Exits, depth: int) -> Exits:
        if len(operation.regions) != 2:
            return self.joint(exits)
        forgets = self._defined_in(operation)
        names = {argument for region in operation.regions for argument in region.args}
        for name in names:
            self.constants.pop(name, None)
        head = self.joint(exits, forgets)
        condition = self.region(operation.regions[0], head, depth)
        after = self.region(operation.regions[1], condition, depth)
        for start, assumption in after:
            self.graph.connect(start, head[0][0], assumption)
        last = operation.regions[0].blocks[-1].ops[-1]
        group = self._group(last)
        if group is not None:  # past the spin, not once a round
            return self.emit(flow.Node(flow.WAIT, group, last), condition)
        return condition

    def _if(self, operation: Op, exits: Exits, depth: int) -> Exits:
        condition = operation.operands[0]
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

    def _evaluate(self, operation: Op) -> None:
        """Follow integer constants: what the first round of a loop does depends on them."""
        if len(operation.results) != 1:
            return
        result = operation.results[0]
        self.constants.pop(result, None)
        if operation.name == "arith.constant":
            known = constant_of(operation)
            if known is not None:
                self.constants[result] = known
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


def _fold(operation: Op, values: list) -> int | bool | None:
    name = operation.name
    if name in ("tt.splat", "arith.extsi", "arith.extui", "arith.trunci", "arith.index_cast"):
        return values[0]
    if name == "arith.cmpi" and len(values) == 2:
        predicate = operation.words[0]
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
