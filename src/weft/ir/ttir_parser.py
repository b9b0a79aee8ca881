"""TTIR and TTGIR text, read into the tree of `ttir.py`.

Triton prints one statement per line, and a region starts at a line that ends with `{`; so the
parser reads lines, and only the inside of a statement is cut into tokens. Attributes that a later
Triton adds are kept by name and disturb nobody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from weft.base.errors import CompileError
from weft.base.place import UNKNOWN, Place
from weft.ir.ttir import Block, Function, Module, Op, Region, Type, Value, parse_type
from weft.ir.ttir_locations import ALIAS, Locations, commas, cut_location
from weft.ir.ttir_tokens import (
    closing_parenthesis,
    read_attribute,
    read_attributes,
    tokens_of,
    unescape,
)

_PARTITION = re.compile(r"(?:default|partition\d+\((.*)\) num_warps\((\d+)\)) ?\{$")
_LAYOUT = re.compile(r"(#\w+) = (#.*)")
_NUM_CTAS = re.compile(r'"ttg\.num-ctas" = (\d+)')
_NUM_WARPS = re.compile(r'"ttg\.num-warps" = (\d+)')


def parse(text: str) -> Module:
    """The module printed as `text`, of TTIR or of TTGIR.

    Raises  CompileError: text that is not as Triton prints it
    """
    return _Parser(text).module()


def parse_statements(text: str, values: Mapping[str, Value], place: Place) -> list[Op]:
    """Operations at `place`, spelled as in a function's body, on `values` by their names.

    Raises  CompileError: as parse, and a name that is neither in `values` nor defined before
    """
    parser = _Parser(text)
    parser.values = {f"%{name}": value for name, value in values.items()}
    ops = []
    while parser.cursor < len(parser.lines):
        op = parser.op()
        op.place = place
        ops.append(op)
    return ops


class _Parser:
    def __init__(self, text: str) -> None:
        aliases = {}
        self.lines: list[str] = []
        for line in text.splitlines():
            line = line.strip()
            if not line or line.startswith("//"):
                continue
            if match := ALIAS.match(line):
                aliases[match.group(1)] = match.group(2)
            else:
                self.lines.append(line)
        self.locations = Locations(aliases)
        self.cursor = 0
        self.values: dict[str, Value] = {}

    def module(self) -> Module:
        functions = {}
        while self.cursor < len(self.lines):
            line = self.lines[self.cursor]
            if line.startswith("tt.func"):
                function = self.function()
                functions[function.name] = function
            else:
                self.cursor += 1
        found = (_LAYOUT.match(line) for line in self.lines)
        layouts = {match[1]: match[2] for match in found if match}
        counts = self.count(_NUM_WARPS, 4), self.count(_NUM_CTAS, 1)
        module = Module(functions, *counts, layouts)
        if not any(function.is_public for function in functions.values()):
            raise CompileError("TTIR without a public tt.func")
        return module

    def count(self, pattern: re.Pattern[str], default: int) -> int:
        """An attribute of the module."""
        found = (pattern.search(line) for line in self.lines)
        return next((int(match[1]) for match in found if match), default)

    def function(self) -> Function:
        header = self.lines[self.cursor]
        self.cursor += 1
        self.values = {}
        symbol = re.search(r"@(\"[^\"]*\"|[\w$.-]+)", header)
        if symbol is None:
            raise CompileError(f"a TTIR function without a name: {header}")
        name = symbol.group(1).strip('"')
        start = header.index("(", symbol.end())
        end = closing_parenthesis(header, start)
        parameters = self.arguments(header[start + 1 : end])
        result_types = []
        rest = header[end + 1 :].split(" attributes ")[0]
        if "->" in rest:
            result_types = _types(tokens_of(rest.split("->", 1)[1].rstrip("{ ")))
        body, tail = self.region(parameters)
        place = self.locations.place(cut_location(tail)[1])
        for op in body.walk():
            if op.name == "ttg.warp_specialize":
                _without_caller(op, place)
        is_public = " private " not in header.split("@")[0]
        return Function(name, is_public, parameters, result_types, body, place)

    def arguments(self, text: str) -> list[Value]:
        """Block arguments spelled `%x: type {attributes} loc(...)`, separated by commas."""
        found = []
        for part in commas(text):
            name, rest = part.split(":", 1)
            rest = cut_location(rest)[0]
            kind = _types(tokens_of(rest))[0]
            found.append(self.define(name.strip(), kind))
        return found

    def define(self, name: str, kind: Type) -> Value:
        value = Value(name.lstrip("%").strip('"'), kind)
        self.values[name] = value
        return value

    def use(self, name: str, line: str) -> Value:
        value = self.values.get(name)
        if value is None:
            raise CompileError(f"TTIR uses {name} before it is defined: {line}")
        return value

    def region(self, args: list[Value]) -> tuple[Region, str]:
        """Read up to the closing brace; returns the region and the rest of that line."""
        blocks = [Block("", args)]
        while self.cursor < len(self.lines):
            line = self.lines[self.cursor]
            if line.startswith("}"):
                self.cursor += 1
                return Region(blocks), line[1:].strip()
            if line.startswith("^"):
                self.cursor += 1
                label, block_args = self.block_header(line)
                if len(blocks) == 1 and not blocks[0].ops and not blocks[0].label:
                    blocks[0] = Block(label, [*args, *block_args])
                else:
                    blocks.append(Block(label, block_args))
                continue
            if match := _PARTITION.match(line):
                self.cursor += 1
                self.partition(blocks[-1].ops[-1], match[1] or "", int(match[2] or 0))
                continue
            blocks[-1].ops.append(self.op())
        raise CompileError("TTIR ends inside a region")

    def partition(self, op: Op, args: str, num_warps: int) -> None:
        """A region of `ttg.warp_specialize`, which begins on a line of its own."""
        region, tail = self.region(self.arguments(args))
        op.regions.append(region)
        op.attributes.setdefault("num_warps", []).append(num_warps)
        if location := cut_location(tail)[1]:
            op.place, op.chain = self.locations.place(location), self.locations.chain(location)

    def block_header(self, line: str) -> tuple[str, list[Value]]:
        label, rest = re.split(r"(?<=[\w$.-])(?![\w$.-])", line, maxsplit=1)
        if not rest.startswith("("):
            return label, []
        return label, self.arguments(rest[1 : closing_parenthesis(rest, 0)])

    def op(self) -> Op:
        line = self.lines[self.cursor]
        self.cursor += 1
        names, body = _results(line)
        match = re.match(r'"?([\w.]+)"?', body)
        if match is None:
            raise CompileError(f"cannot read the TTIR statement {line}")
        name, rest = match.group(1), body[match.end() :]
        regions: list[Region] = []
        header = rest
        bindings: _Bindings | None = None
        if line.endswith("{"):
            header = rest[:-1]
            bindings = _Bindings(name, header)
            args = [self.define(arg, kind) for arg, kind in bindings.args]
            region, tail = self.region(args)
            regions.append(region)
            while tail.endswith("{"):
                region, tail = self.region([])
                regions.append(region)
            header = f"{header} {tail}"
        header, location = cut_location(header)
        place = self.locations.place(location) if location else UNKNOWN
        op = self.statement(name, header, bindings, place, line)
        op.chain = self.locations.chain(location)
        op.regions = regions
        op.results = self.define_results(names, op)
        return op

    def statement(self, name: str, header: str, bindings: Any, place: Place, line: str) -> Op:
        """Everything of an operation but its results and regions."""
        op = Op(name, [], [], [], [], {}, [], [], [], place, line)
        tokens = tokens_of(header)
        bound = set(bindings.names) if bindings else set()
        section, depth, i = "", 0, 0
        results: list[Type] = []
        while i < len(tokens):
            kind, word = tokens[i]
            following = tokens[i + 1][1] if i + 1 < len(tokens) else ""
            if word == "<" or (word == "{" and kind == "punctuation"):
                i = read_attributes(tokens, i + (word == "<"), op.attributes)
                if word == "<":
                    i += 1
                continue
            if kind == "value" and word not in bound:
                op.operands.append(self.use(word, line))
            elif kind == "string":
                op.strings.append(unescape(word[1:-1]))
            elif kind == "block":
                i = self.successor(tokens, i, op, line)
                continue
            elif kind in ("type", "scalar") and (section or kind == "type"):
                (results if section == "->" else op.types).append(_as_type(word))
            elif word == ":" and depth == 0:
                section = ":"
            elif kind == "arrow" or (word == "to" and section == ":"):
                section = "->"
            elif following == "=" and kind == "word" and depth == 0:
                i = read_attribute(tokens, i, op.attributes)
                continue
            elif kind in ("word", "number", "scalar", "symbol"):
                op.words.append(word)
            elif kind == "bracketed":
                op.attributes[word.split("<", 1)[0]] = word
            elif word in "([":
                depth += 1
            elif word in ")]":
                depth -= 1
            i += 1
        op.attributes["->"] = results
        return op

    def successor(self, tokens: list, i: int, op: Op, line: str) -> int:
        label, args = tokens[i][1], []
        i += 1
        if i < len(tokens) and tokens[i][1] == "(":
            while tokens[i][1] != ")":
                if tokens[i][0] == "value":
                    args.append(self.use(tokens[i][1], line))
                i += 1
            i += 1
        op.successors.append((label, args))
        return i

    def define_results(self, names: list[tuple[str, int]], op: Op) -> list[Value]:
        count = sum(number for _, number in names)
        types = op.attributes.pop("->") or _inferred(op)
        if count > 1 and len(types) == 1:
            types = types * count
        types += [parse_type("none")] * (count - len(types))  # an operation that spells none
        results: list[Value] = []
        for name, number in names:
            if number == 1:
                results.append(self.define(name, types[len(results)]))
                if len(names) == 1:
                    self.values[f"{name}#0"] = results[-1]
                continue
            for index in range(number):
                value = self.define(f"{name}#{index}", types[len(results)])
                results.append(value)
        return results


class _Bindings:
    """The names that a loop's header binds: `%i = %lower`, `iter_args(%x = %init)`."""

    def __init__(self, name: str, header: str) -> None:
        self.args: list[tuple[str, Type]] = []
        self.names: list[str] = []
        if name == "scf.for":
            pairs = re.findall(r"(%[\w$.-]+|%\"[^\"]*\") = ", header)
            tokens = tokens_of(header)
            arrow = next((i for i, (kind, _) in enumerate(tokens) if kind == "arrow"), None)
            types = _types(tokens[arrow:]) if arrow is not None else []
            # With results their types come first, the counter's last; without, only the latter.
            counter = types.pop() if len(types) == len(pairs) else _as_type("i32")
            if arrow is None:
                words = [word for kind, word in tokens if kind == "scalar"]
                counter = _as_type(words[-1] if words else "i32")
            self.names = pairs
            self.args = list(zip(pairs, [counter, *types], strict=False))
        elif name == "scf.while":
            pairs = re.findall(r"(%[\w$.-]+|%\"[^\"]*\") = ", header)
            before = tokens_of(header.split(" : ", 1)[1]) if " : " in header else []
            arrow = next((i for i, (kind, _) in enumerate(before) if kind == "arrow"), len(before))
            self.names = pairs
            self.args = list(zip(pairs, _types(before[:arrow]), strict=False))


def _without_caller(op: Op, function: Place) -> None:
    """Partitions say that they are called where their kernel begins: nobody calls them there."""
    for region in op.regions[1:]:
        for inner in region.walk():
            frames = inner.place.frames
            if len(frames) > 1 and frames[:1] == function.frames:
                inner.place, inner.chain = Place(frames[1:]), inner.chain[:-1]


def _results(line: str) -> tuple[list[tuple[str, int]], str]:
    """The names left of ` = ` with their counts, and the rest of the line."""
    if not line.startswith("%"):
        return [], line
    left, right = line.split(" = ", 1)
    names = []
    for part in left.split(", "):
        name, _, count = part.partition(":")
        names.append((name, int(count or 1)))
    return names, right


def _as_type(word: str) -> Type:
    return parse_type(word)


def _types(tokens: list[tuple[str, str]]) -> list[Type]:
    return [_as_type(word) for kind, word in tokens if kind in ("type", "scalar")]


def _inferred(op: Op) -> list[Type]:
    """Result types of the operations whose text does not spell them."""
    if op.name in ("arith.cmpi", "arith.cmpf"):
        return [_with_element(op.types[-1], "i1")]
    if op.name == "tt.addptr":
        return [op.types[0]]
    if op.name == "ttng.warp_group_dot_wait":
        return [value.type for value in op.operands]
    if op.name == "tt.load":
        return [_with_element(op.types[0], op.types[0].pointee)]
    if op.name == "tt.make_tensor_descriptor":
        text = op.types[-1].text
        return [parse_type(text if text.startswith("!") else f"!tt.tensordesc{text}")]
    if op.types:
        return [op.types[-1]]
    if op.name == "arith.constant":
        return [parse_type("i1")]
    if op.operands:
        return [op.operands[0].type]
    return []


def _with_element(kind: Type, element: str) -> Type:
    if not kind.shape and not kind.is_tensor:
        return parse_type(element)
    return parse_type(f"tensor<{''.join(f'{extent}x' for extent in kind.shape)}{element}>")
