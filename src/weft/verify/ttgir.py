"""TTIR and TTGIR as the post-compile check asks of them: where values and addresses come from.

The emulator's parser reads both. Nothing here knows a dialect but for control flow: what flows
into a block's arguments and out of its operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from weft.ir import ttir, ttir_parser
from weft.ir.ttir import Op, Region, Value
from weft.verify.flow import reached

_FIRST_IS_BASE = ("tt.addptr", "tt.make_tensor_descriptor", "tt.make_tensor_ptr", "tt.advance",
                  "ttng.reinterpret_tensor_descriptor")  # fmt: skip
_ENDS_ADDRESS = ("tt.load", "tt.int_to_ptr", "tt.atomic_rmw", "tt.atomic_cas")


class Function:
    """One `tt.func`. `definitions` maps each SSA value to its operation, `sources` each block
    argument, and each result of control flow, to the values that may flow into it; `parents` an
    operation to the one that it stands in."""

    def __init__(self, function: ttir.Function) -> None:
        self.name = function.name
        self.arguments = function.parameters
        self.body = function.body
        self.definitions: dict[Value, Op] = {}
        self.sources: dict[Value, list[Value]] = {}
        self.parents: dict[Op, Op] = {}
        for op in self.walk():
            self.definitions.update(dict.fromkeys(op.results, op))
            for region in op.regions:
                self.parents.update((inner, op) for block in region.blocks for inner in block.ops)
        for op in self.walk():
            self._link(op)

    def walk(self) -> Iterator[Op]:
        return self.body.walk()

    def ancestors(self, op: Op) -> Iterator[Op]:
        while op in self.parents:
            op = self.parents[op]
            yield op

    def inputs_of(self, value: Value) -> list[Value]:
        """The values from which `value` is computed, one step back."""
        if value in self.sources:
            return self.sources[value]
        definition = self.definitions.get(value)
        return definition.operands if definition is not None else []

    def slice(self, *values: Value) -> set[Value]:
        """Everything from which `values` are computed, `values` included."""
        return reached(values, self.inputs_of)

    def bases(self, value: Value) -> set[int]:
        """Which pointer arguments of the function the address `value` starts from."""

        def above(current: Value) -> list[Value]:
            definition = self.definitions.get(current)
            if current in self.sources:
                return self.sources[current]
            if definition is None or definition.name in _ENDS_ADDRESS:
                return []
            is_base = definition.name in _FIRST_IS_BASE
            return definition.operands[:1] if is_base else definition.operands

        seen = reached([value], above)
        return {
            index
            for index, one in enumerate(self.arguments)
            if one in seen and one.type.text.startswith("!tt.")
        }

    def _link(self, op: Op) -> None:
        """Connect what `op` binds and gives to the values that flow there."""
        if op.name == "scf.for":
            arguments, yielded = op.regions[0].args, _terminator(op.regions[0])
            self.sources[arguments[0]] = op.operands[:3]
            for index, pair in enumerate(zip(op.operands[3:], yielded, strict=False)):
                self.sources[arguments[index + 1]] = list(pair)
                self._give(op, index, list(pair))
        elif op.name == "scf.while" and len(op.regions) == 2:
            before, after = op.regions
            passed = _terminator(before)[1:]
            for argument, *values in zip(before.args, op.operands, _terminator(after)):
                self.sources[argument] = values
            for index, value in enumerate(passed):
                self.sources[after.args[index]] = [value]
                self._give(op, index, [value])
        elif op.name == "scf.if":
            yields = [_terminator(region) for region in op.regions]
            for index in range(len(op.results)):
                values = [values[index] for values in yields if index < len(values)]
                self._give(op, index, [op.operands[0], *values])
        elif op.name == "ttng.tensormap_create":
            # The descriptor's memory: what is loaded through it comes from the base.
            scratch, base = op.operands[:2]
            definition = self.definitions.get(scratch)
            self.sources[scratch] = [base, *(definition.operands if definition else [])]
        elif op.name == "ttg.warp_specialize":
            for region in op.regions[1:]:
                captured = zip(region.args, op.operands, strict=False)
                self.sources.update({argument: [value] for argument, value in captured})

    def _give(self, op: Op, index: int, values: list[Value]) -> None:
        if index < len(op.results):
            self.sources[op.results[index]] = values


def _terminator(region: Region) -> list[Value]:
    """What a region hands on at its end."""
    ops = region.blocks[-1].ops
    return ops[-1].operands if ops else []


@dataclass(eq=False)
class Module:
    """All functions of one stage; the public one is the kernel."""

    functions: dict[str, Function]
    kernel: Function
    text: str

    def callee(self, op: Op) -> Function | None:
        names = [word[1:].strip('"') for word in op.words if word.startswith("@")]
        return self.functions.get(names[0]) if names else None


def parse(text: str) -> Module:
    """The module that `text` prints. Raises  CompileError: it cannot be read"""
    module = ttir_parser.parse(text)
    functions = {name: Function(one) for name, one in module.functions.items()}
    return Module(functions, functions[module.kernel.name], text)
