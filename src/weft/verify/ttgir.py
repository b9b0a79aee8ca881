"""A reader of TTIR and TTGIR text: operations with operands, regions, places and definitions.

It knows no dialect: an operation is a name, its SSA operands, its results and its regions, which
is all that the post-compile check needs and which holds on every Triton version.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from weft.verify.places import Loc, MlirLocations

_VALUE = r"%[A-Za-z0-9_$.\-]+"
_RESULTS = re.compile(rf"^({_VALUE}(?::\d+)?(?:, {_VALUE}(?::\d+)?)*) = (.*)$", re.DOTALL)
_FIRST_IS_BASE = ("tt.addptr", "tt.make_tensor_descriptor", "tt.make_tensor_ptr", "tt.advance",
                  "ttng.reinterpret_tensor_descriptor")  # fmt: skip
_ENDS_ADDRESS = ("tt.load", "tt.int_to_ptr", "tt.atomic_rmw", "tt.atomic_cas")
_USE = re.compile(rf"{_VALUE}(?:#\d+)?")
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_OPCODE = re.compile(r'^"?([A-Za-z_][\w.$]*)"?')
_TRAILING_LOC = re.compile(r" loc\((.*)\)$")
_BLOCK_ARGUMENT = re.compile(rf"({_VALUE}): ")
_ITER_ARGUMENT = re.compile(rf"({_VALUE}) = ({_VALUE}(?:#\d+)?)")
_FUNCTION = re.compile(r"tt\.func (?:public |private )?@(\"[^\"]*\"|[\w.$-]+)\(")
_CALLEE = re.compile(r'@("[^"]*"|[\w.$-]+)')
_FUNCTION_ARGUMENT = re.compile(rf"({_VALUE}): (!tt\.ptr<[^>]*>|![\w.]+<.*?>>|[\w.]+)([^%]*)")


@dataclass(eq=False)
class Block:
    """Operations in order; `label` is empty for a region's only block."""

    label: str
    arguments: list[str]
    operations: list[Operation] = field(default_factory=list)


@dataclass(eq=False)
class Operation:
    """One operation. `results` are SSA names, `name#i` for one of several; `text` is the
    header without place; `index` counts operations of the function in order."""

    name: str
    results: list[str]
    operands: list[str]
    text: str
    loc: Loc
    index: int
    parent: Operation | None
    regions: list[list[Block]] = field(default_factory=list)

    @property
    def result(self) -> str:
        return self.results[0] if self.results else ""

    def walk(self) -> Iterator[Operation]:
        """This operation and all inside it, in order."""
        yield self
        for region in self.regions:
            for block in region:
                for operation in block.operations:
                    yield from operation.walk()

    def ancestors(self) -> Iterator[Operation]:
        operation = self.parent
        while operation is not None:
            yield operation
            operation = operation.parent

    def attribute(self, name: str) -> str | None:
        """The text of attribute `name = value`, if there is one."""
        match = re.search(rf"\b{re.escape(name)} = ([^,}}]+)", self.text)
        return match[1].strip() if match else None


@dataclass(eq=False)
class Function:
    """One `tt.func`. `definitions` maps each SSA value to its operation, `sources` each block
    argument to the values that may flow into it."""

    name: str
    arguments: list[str]
    argument_types: list[str]
    argument_attributes: list[str]
    operation: Operation
    definitions: dict[str, Operation] = field(default_factory=dict)
    sources: dict[str, list[str]] = field(default_factory=dict)

    @property
    def blocks(self) -> list[Block]:
        return self.operation.regions[0] if self.operation.regions else []

    def walk(self) -> Iterator[Operation]:
        for block in self.blocks:
            for operation in block.operations:
                yield from operation.walk()

    def inputs_of(self, value: str) -> list[str]:
        """The values from which `value` is computed, one step back."""
        if value in self.sources:
            return self.sources[value]
        definition = self.definitions.get(value)
        return definition.operands if definition is not None else []

    def slice(self, *values: str) -> set[str]:
        """Everything from which `values` are computed, `values` included."""
        seen: set[str] = set()
        todo = list(values)
        while todo:
            value = todo.pop()
            if value not in seen:
                seen.add(value)
                todo.extend(self.inputs_of(value))
        return seen

    def bases(self, value: str) -> set[int]:
        """Which pointer arguments of the function the address `value` starts from."""
        seen: set[str] = set()
        todo = [value]
        while todo:
            current = todo.pop()
            if current in seen:
                continue
            seen.add(current)
            definition = self.definitions.get(current)
            if current in self.sources:
                todo.extend(self.sources[current])
            elif definition is not None and definition.name in _FIRST_IS_BASE:
                todo.extend(definition.operands[:1])
            elif definition is not None and definition.name not in _ENDS_ADDRESS:
                todo.extend(definition.operands)
        pointers = [kind.startswith("!tt.") for kind in self.argument_types]
        return {i for i, name in enumerate(self.arguments) if name in seen and pointers[i]}

    def roots(self, *values: str) -> set[int]:
        """Which arguments of the function `values` are computed from."""
        found = self.slice(*values)
        return {index for index, name in enumerate(self.arguments) if name in found}


@dataclass(eq=False)
class Module:
    """All functions of one stage; the public one is the kernel."""

    functions: dict[str, Function]
    kernel: Function
    text: str

    def callee(self, operation: Operation) -> Function | None:
        match = _CALLEE.search(operation.text)
        return self.functions.get(match[1].strip('"')) if match else None


def parse(text: str) -> Module:
    """The module that `text` prints."""
    locations = MlirLocations(text)
    functions: dict[str, Function] = {}
    kernel: Function | None = None
    reader: _FunctionReader | None = None
    for line in text.splitlines():
        stripped = line.strip()
        if reader is None:
            if match := _FUNCTION.search(stripped):
                reader = _FunctionReader(match[1].strip('"'), stripped, locations)
                if not stripped_of_loc(stripped)[0].endswith("{"):
                    reader = None  # a declaration
            continue
        if reader.take(stripped):
            function = reader.finish()
            functions[function.name] = function
            if "public" in function.operation.text.split("@", 1)[0]:
                kernel = kernel or function
            reader = None
    if kernel is None:
        kernel = next(iter(functions.values()), None) or _empty_function()
    return Module(functions, kernel, text)


def stripped_of_loc(line: str) -> tuple[str, str]:
    """`line` without its trailing `loc(...)`, and what stood inside."""
    match = _TRAILING_LOC.search(line)
    if match is None:
        return line, ""
    # The last " loc(" that closes at the end of the line: arguments have places of their own.
    start = line.rindex(" loc(")
    return line[:start].rstrip(), line[start + len(" loc(") : -1]


class _FunctionReader:
    """Takes a function's lines one by one."""

    def __init__(self, name: str, header: str, locations: MlirLocations) -> None:
        self.locations = locations
        self.count = 0
        head, where = stripped_of_loc(header)
        self.operation = Operation("tt.func", [], [], head, NO_LOC, 0, None)
        arguments = _FUNCTION_ARGUMENT.findall(_signature(header))
        self.function = Function(
            name,
            [argument for argument, _, _ in arguments],
            [kind for _, kind, _ in arguments],
            [attributes for _, _, attributes in arguments],
            self.operation,
        )
        # (operation, block that is being filled)
        self.stack: list[tuple[Operation, Block]] = []
        # Printed names are unique along a path of nested regions only; siblings repeat them.
        self.scopes: list[dict[str, str]] = []
        self.taken: set[str] = set()
        self._open(self.operation, self.function.arguments)

    def _define(self, name: str) -> str:
        """A name for a new value that no other value of the function has."""
        unique, count = name, 1
        while unique in self.taken:
            count += 1
            base, hash_, index = name.partition("#")
            unique = f"{base}!{count}{hash_}{index}"
        self.taken.add(unique)
        self.scopes[-1][name] = unique
        return unique

    def _use(self, name: str) -> str:
        for scope in reversed(self.scopes):
            if name in scope:
                return scope[name]
        return name

    def take(self, line: str) -> bool:
        """Read one line; True when the function is closed."""
        if not line or line.startswith("//"):
            return False
        if line.startswith("^"):
            self._block(line)
        elif line.startswith("}"):
            return self._close(line)
        elif re.match(r"^(default|partition\d+\b.*) ?\{$", line):
            block = self.stack[-1][1]
            self._open(block.operations[-1], _BLOCK_ARGUMENT.findall(line))
        else:
            self._operation(line)
        return False

    def _open(self, operation: Operation, arguments: list[str]) -> None:
        self.scopes.append({})
        block = Block("", [self._define(argument) for argument in arguments])
        operation.regions.append([block])
        self.stack.append((operation, block))

    def _block(self, line: str) -> None:
        label = re.match(r"^\^[\w.$-]+", line)
        assert label is not None, f"no block begins like this: {line}"
        arguments = [self._define(name) for name in _BLOCK_ARGUMENT.findall(line)]
        operation, current = self.stack[-1]
        region = operation.regions[-1]
        if not current.operations and not current.label and len(region) == 1:
            current.label = label[0]
            current.arguments = arguments or current.arguments
            return
        block = Block(label[0], arguments)
        region.append(block)
        self.stack[-1] = (operation, block)

    def _close(self, line: str) -> bool:
        operation, _ = self.stack.pop()
        self.scopes.pop()
        text, where = stripped_of_loc(line)
        if text.endswith("{"):
            self._open(operation, [])
        else:
            operation.text += " " + text.lstrip("}) ")
            if where:
                operation.loc = self.locations.resolve(where)
        return not self.stack

    def _operation(self, line: str) -> None:
        text, where = stripped_of_loc(line)
        opens = text.endswith("{")
        results: list[str] = []
        body = text
        if match := _RESULTS.match(text):
            results, body = _result_names(match[1]), match[2]
        opcode = _OPCODE.match(body)
        name = opcode[1] if opcode else body.split(" ", 1)[0]
        header = _STRING.sub('""', body)
        own, pairs = _header_arguments(name, header)
        declared = {*own, *(argument for argument, _ in pairs)}
        uses = [self._use(use) for use in _USE.findall(header) if use not in declared]
        self.count += 1
        parent = self.stack[-1][0]
        loc = self.locations.resolve(where) if where else NO_LOC
        results = [self._define(result) for result in results]
        operation = Operation(name, results, uses, body, loc, self.count, parent)
        self.stack[-1][1].operations.append(operation)
        for result in results:
            self.function.definitions[result] = operation
        if opens:
            initial = [self._use(value) for _, value in pairs]
            self._open(operation, [*own, *(argument for argument, _ in pairs)])
            arguments = self.stack[-1][1].arguments[len(own) :]
            for argument, value in zip(arguments, initial, strict=True):
                self.function.sources[argument] = [value]

    def finish(self) -> Function:
        """Connect block arguments and results of structured control flow to their values."""
        sources = self.function.sources
        for operation in self.function.walk():
            if operation.name == "scf.for":
                arguments = operation.regions[0][0].arguments
                yielded = _terminator(operation.regions[0]).operands
                sources[arguments[0]] = operation.operands[:3]
                for index, (argument, value) in enumerate(
                    zip(arguments[1:], yielded, strict=False)
                ):
                    sources[argument] = [*sources.get(argument, []), value]
                    initial = sources[argument][0]
                    _link(sources, operation, index, [initial, value])
            elif operation.name == "scf.while" and len(operation.regions) == 2:
                before, after = operation.regions
                condition, yielded = _terminator(before), _terminator(after)
                for argument, value in zip(before[0].arguments, yielded.operands, strict=False):
                    sources[argument] = [*sources.get(argument, []), value]
                passed = condition.operands[1:]
                for argument, value in zip(after[0].arguments, passed, strict=False):
                    sources[argument] = [value]
                for index, value in enumerate(passed):
                    _link(sources, operation, index, [value])
            elif operation.name == "scf.if":
                yields = [_terminator(region).operands for region in operation.regions]
                for index in range(len(operation.results)):
                    values = [list_[index] for list_ in yields if index < len(list_)]
                    _link(sources, operation, index, [operation.operands[0], *values])
            elif operation.name == "ttng.tensormap_create":
                # The descriptor's memory: what is loaded through it comes from the base.
                scratch, base = operation.operands[:2]
                definition = self.function.definitions.get(scratch)
                sources[scratch] = [base, *(definition.operands if definition else [])]
            elif operation.name == "ttg.warp_specialize":
                for region in operation.regions[1:]:
                    captured = zip(region[0].arguments, operation.operands, strict=False)
                    sources.update({argument: [value] for argument, value in captured})
        return self.function


NO_LOC: Loc = ()


def _header_arguments(name: str, header: str) -> tuple[list[str], list[tuple[str, str]]]:
    """What a loop's header declares: the induction variable, and (argument, initial value)."""
    own: list[str] = []
    if name == "scf.for" and (match := re.match(rf"^scf\.for (?:unsigned )?({_VALUE}) = ", header)):
        own = [match[1]]
    if name not in ("scf.for", "scf.while"):
        return own, []
    inside = re.search(r"(?:iter_args|scf\.while )\(([^)]*)\)", header)
    return own, _ITER_ARGUMENT.findall(inside[1]) if inside else []


def _empty_function() -> Function:
    operation = Operation("tt.func", [], [], "", NO_LOC, 0, None, [[Block("", [])]])
    return Function("", [], [], [], operation)


def _terminator(region: list[Block]) -> Operation:
    operations = region[-1].operations
    if operations:
        return operations[-1]
    return Operation("", [], [], "", NO_LOC, 0, None)


def _link(sources: dict[str, list[str]], operation: Operation, index: int, values: list[str]):
    if index < len(operation.results):
        sources[operation.results[index]] = values


def _result_names(text: str) -> list[str]:
    """`%a:3` is %a#0, %a#1, %a#2."""
    names: list[str] = []
    for part in text.split(", "):
        name, _, count = part.partition(":")
        names += [f"{name}#{index}" for index in range(int(count))] if count else [name]
    return names


def _signature(header: str) -> str:
    """The arguments of a function header, without the places inside it."""
    start = header.index("(")
    inside = header[start + 1 :]
    inside = re.sub(r' loc\("(?:[^"\\]|\\.)*"\(#loc\d*\)\)', "", inside)
    inside = re.sub(r" loc\([^)]*\)+", "", inside)
    end = inside.rfind(") attributes")
    return inside[: end if end >= 0 else len(inside)]
