"""TTIR text as a small tree of operations: what the code generator walks.

Triton prints one statement per line, and a region starts at a line that ends with `{`; so the
parser reads lines, and only the inside of a statement is cut into tokens. Attributes that a later
Triton adds are kept by name and disturb nobody.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from weft.base.errors import CompileError
from weft.base.place import UNKNOWN, Frame, Place

# ---------------------------------------------------------------------------------------------
# The tree


@dataclass(frozen=True)
class Type:
    """A TTIR type. `element` is MLIR's word ("f32", "i1"), "ptr" or "tensordesc".

    `shape` is () for scalars; `pointee` is what a pointer points to. A descriptor's `shape` is
    its block's and its `pointee` the block's element.
    """

    text: str
    shape: tuple[int, ...]
    element: str
    pointee: str = ""

    @property
    def is_pointer(self) -> bool:
        return self.element == "ptr"

    @property
    def is_tensor(self) -> bool:
        return self.text.startswith("tensor<")

    @property
    def size(self) -> int:
        total = 1
        for extent in self.shape:
            total *= extent
        return total

    def __str__(self) -> str:
        return self.text


@dataclass(eq=False)
class Value:
    """An SSA value: its name in the text (without %) and its type."""

    name: str
    type: Type


@dataclass(eq=False)
class Block:
    label: str
    args: list[Value]
    ops: list[Op] = field(default_factory=list)


@dataclass(eq=False)
class Region:
    blocks: list[Block]

    @property
    def args(self) -> list[Value]:
        return self.blocks[0].args

    @property
    def ops(self) -> list[Op]:
        return self.blocks[0].ops


@dataclass(eq=False)
class Op:
    """One operation.

    `words` are the bare words and literals before the types, in order ("slt", "acquire", "42");
    `attributes` everything spelled `name = value`; `strings` the quoted texts.
    """

    name: str
    results: list[Value]
    operands: list[Value]
    types: list[Type]
    words: list[str]
    attributes: dict[str, Any]
    strings: list[str]
    successors: list[tuple[str, list[Value]]]
    regions: list[Region]
    place: Place
    text: str

    @property
    def result(self) -> Value:
        return self.results[0]

    def integer(self, name: str, default: int | None = None) -> int:
        """The integer attribute `name`."""
        value = self.attributes.get(name, default)
        if value is None:
            raise CompileError(f"{self.name} without {name}: {self.text}", place=self.place)
        return int(str(value).split(":")[0])

    def flag(self, name: str) -> bool:
        return str(self.attributes.get(name, "false")).split(":")[0].strip() == "true"


@dataclass(eq=False)
class Function:
    """A `tt.func`. `parameters` are its entry block's arguments."""

    name: str
    is_public: bool
    parameters: list[Value]
    result_types: list[Type]
    body: Region
    place: Place


@dataclass(eq=False)
class Module:
    functions: dict[str, Function]

    @property
    def kernel(self) -> Function:
        """The public function."""
        return next(f for f in self.functions.values() if f.is_public)


# ---------------------------------------------------------------------------------------------
# Types

_SHAPED = re.compile(r"((?:\d+x)*)(.*)$", re.DOTALL)


@cache
def parse_type(text: str) -> Type:
    """The type spelled `text`: `i32`, `tensor<2x4x!tt.ptr<f32>>`, `!tt.tensordesc<...>`."""
    text = text.strip()
    if text.startswith("tensor<"):
        extents, element = _SHAPED.match(text[7:-1]).groups()
        element = parse_type(_before_encoding(element))
        return Type(text, _extents(extents), element.element, element.pointee)
    if text.startswith("!tt.ptr<"):
        return Type(text, (), "ptr", _before_encoding(text[8:-1]))
    if text.startswith("!tt.tensordesc<"):
        inner = text[15:-1].removeprefix("tensor<")
        extents, element = _SHAPED.match(inner).groups()
        return Type(text, _extents(extents), "tensordesc", _before_encoding(element).rstrip(">"))
    return Type(text, (), text)


def _extents(text: str) -> tuple[int, ...]:
    return tuple(int(extent) for extent in text.split("x") if extent)


def _before_encoding(text: str) -> str:
    """`text` up to a comma outside brackets: layouts and address spaces are GPU matters."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character == "<") - (character == ">")
        if character == "," and depth == 0:
            return text[:position].strip()
    return text.strip()


# ---------------------------------------------------------------------------------------------
# Locations

_FILE = re.compile(r'^"((?:[^"\\]|\\.)*)":(\d+):(\d+)')
_NAMED = re.compile(r'^"(?:[^"\\]|\\.)*"(?:\((.*)\))?$', re.DOTALL)
_ALIAS = re.compile(r"^(#loc\d*) = loc\((.*)\)\s*$")


class Locations:
    """Resolves `loc(...)` texts to places, each alias once."""

    def __init__(self, aliases: dict[str, str]) -> None:
        self.aliases = aliases
        self.places: dict[str, Place] = {}

    def place(self, text: str) -> Place:
        if text not in self.places:
            self.places[text] = Place(tuple(self._frames(text.strip())))
        return self.places[text]

    def _frames(self, text: str) -> list[Frame]:
        """The chain of `text`, outermost call first."""
        if text.startswith("#loc"):
            return self._frames(self.aliases.get(text, "unknown"))
        if match := _FILE.match(text):
            file, line = match.group(1), int(match.group(2))
            return [Frame(file, line, enclosing_function(file, line))]
        if text.startswith("callsite("):
            callee, caller = _split(text[9:-1], " at ")
            callee_frames = self._frames(callee)
            # A callee of unknown place says nothing: the call is the best there is.
            return self._frames(caller) + callee_frames
        if text.startswith("fused"):
            inner = text[text.index("[") + 1 : text.rindex("]")]
            for part in _commas(inner):
                if frames := self._frames(part):
                    return frames
            return []
        if match := _NAMED.match(text):
            return self._frames(match.group(1).strip()) if match.group(1) else []
        return []


def _split(text: str, separator: str) -> tuple[str, str]:
    """Cut `text` at the first `separator` outside parentheses."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([<") - (character in ")]>")
        if depth == 0 and text.startswith(separator, position):
            return text[:position].strip(), text[position + len(separator) :].strip()
    return text, "unknown"


def _commas(text: str) -> Iterator[str]:
    while text:
        first, rest = _split(text, ",")
        yield first
        text = "" if rest == "unknown" else rest


_DEF = re.compile(r"^(\s*)(?:async\s+)?def\s+(\w+)")


@cache
def enclosing_function(file: str, line: int) -> str:
    """The name of the `def` around `line`, read from the source; empty where it is not there."""
    lines = linecache.getlines(file)
    if not 0 < line <= len(lines):
        return ""
    indent = 1 << 30
    for text in reversed(lines[:line]):
        if not text.strip():
            continue
        here = len(text) - len(text.lstrip())
        match = _DEF.match(text)
        if match and (here < indent or here == 0):
            return match.group(2)
        # Decorators and wrapped lines may stand anywhere; only a shallower statement counts.
        indent = min(indent, max(here, 1))
    return ""


# ---------------------------------------------------------------------------------------------
# Tokens

_TOKEN = re.compile(
    r"""
      (?P<space>\s+)
    | (?P<string>"(?:[^"\\]|\\.)*")
    | (?P<value>%(?:"[^"]*"|[\w$.-]+)(?:\#\d+)?)
    | (?P<block>\^[\w$.-]+)
    | (?P<symbol>@(?:"[^"]*"|[\w$.-]+))
    | (?P<arrow>->)
    | (?P<type>(?:tensor|memref|vector|![A-Za-z_][\w.]*)(?=<)|![A-Za-z_][\w.]*)
    | (?P<bracketed>(?:dense|dense_resource|array|opaque|fastmath|overflow|\#[\w.]+)(?=<))
    | (?P<alias>\#[\w.]+)
    | (?P<number>-?(?:0x[0-9A-Fa-f]+|\d+(?:\.\d*)?(?:[eE][+-]?\d+)?))
    | (?P<word>[A-Za-z_][\w.$]*)
    | (?P<punctuation>[{}()\[\]<>:,=*?/|+-])
    """,
    re.VERBOSE,
)

_SCALAR_TYPE = re.compile(r"^(?:[su]?i\d+|bf16|tf32|f\d\w*|index|none)$")


def _tokens(text: str) -> list[tuple[str, str]]:
    """(kind, text) pairs; `tensor<...>`, `dense<...>` and shorthand `<...>` are one token each."""
    found = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise CompileError(f"cannot read TTIR at {text[position : position + 40]!r} in {text}")
        kind, word = match.lastgroup or "", match.group()
        position = match.end()
        if kind == "space":
            continue
        opens = position < len(text) and text[position] == "<"
        if kind in ("type", "bracketed") and opens:
            end = _closing(text, position)
            word, position = word + text[position:end], end
        elif word == "<" and not text.startswith("{", position):
            end = _closing(text, position - 1)
            kind, word, position = "type", text[position - 1 : end], end
        elif kind == "word" and _SCALAR_TYPE.match(word):
            kind = "scalar"
        found.append((kind, word))
    return found


def _closing(text: str, start: int) -> int:
    """The position after the `>` that closes the `<` at `start`."""
    depth, position = 0, start
    while position < len(text):
        character = text[position]
        if character == '"':
            position = text.index('"', position + 1)
        elif character == "<":
            depth += 1
        elif character == ">" and text[position - 1] != "-":
            depth -= 1
            if depth == 0:
                return position + 1
        position += 1
    raise CompileError(f"unclosed < in TTIR: {text[start : start + 60]}")


# ---------------------------------------------------------------------------------------------
# The parser


def parse(text: str) -> Module:
    """The module printed as `text`.

    Raises  CompileError: text that is not TTIR as Triton prints it
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
            if match := _ALIAS.match(line):
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
        module = Module(functions)
        if not any(function.is_public for function in functions.values()):
            raise CompileError("TTIR without a public tt.func")
        return module

    def function(self) -> Function:
        header = self.lines[self.cursor]
        self.cursor += 1
        self.values = {}
        symbol = re.search(r"@(\"[^\"]*\"|[\w$.-]+)", header)
        name = symbol.group(1).strip('"')
        start = header.index("(", symbol.end())
        end = _matching(header, start)
        parameters = self.arguments(header[start + 1 : end])
        result_types = []
        rest = header[end + 1 :].split(" attributes ")[0]
        if "->" in rest:
            result_types = _types(_tokens(rest.split("->", 1)[1].rstrip("{ ")))
        body, tail = self.region(parameters)
        return Function(
            name,
            " private " not in header.split("@")[0],
            parameters,
            result_types,
            body,
            self.locations.place(_location(tail)[1]),
        )

    def arguments(self, text: str) -> list[Value]:
        """Block arguments spelled `%x: type {attributes} loc(...)`, separated by commas."""
        found = []
        for part in _commas(text):
            name, rest = part.split(":", 1)
            rest = _location(rest)[0]
            kind = _types(_tokens(rest))[0]
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
            blocks[-1].ops.append(self.op())
        raise CompileError("TTIR ends inside a region")

    def block_header(self, line: str) -> tuple[str, list[Value]]:
        label = re.match(r"\^[\w$.-]+", line).group()
        rest = line[len(label) :]
        if not rest.startswith("("):
            return label, []
        return label, self.arguments(rest[1 : _matching(rest, 0)])

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
        header, location = _location(header)
        place = self.locations.place(location) if location else UNKNOWN
        op = self.statement(name, header, bindings, place, line)
        op.regions = regions
        op.results = self.define_results(names, op)
        return op

    def statement(self, name: str, header: str, bindings: Any, place: Place, line: str) -> Op:
        """Everything of an operation but its results and regions."""
        op = Op(name, [], [], [], [], {}, [], [], [], place, line)
        tokens = _tokens(header)
        bound = set(bindings.names) if bindings else set()
        section, depth, i = "", 0, 0
        results: list[Type] = []
        while i < len(tokens):
            kind, word = tokens[i]
            following = tokens[i + 1][1] if i + 1 < len(tokens) else ""
            if word == "<" or (word == "{" and kind == "punctuation"):
                i = _attributes(tokens, i + (word == "<"), op.attributes)
                if word == "<":
                    i += 1
                continue
            if kind == "value" and word not in bound:
                op.operands.append(self.use(word, line))
            elif kind == "string":
                op.strings.append(_unescape(word[1:-1]))
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
                i = _attributes_value(tokens, i, op.attributes)
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
        if count > len(types):
            raise CompileError(f"no result type in {op.text}", place=op.place)
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
            tokens = _tokens(header)
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
            before = _tokens(header.split(" : ", 1)[1]) if " : " in header else []
            arrow = next((i for i, (kind, _) in enumerate(before) if kind == "arrow"), len(before))
            self.names = pairs
            self.args = list(zip(pairs, _types(before[:arrow]), strict=False))


# ---------------------------------------------------------------------------------------------
# Pieces of a statement


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


def _location(text: str) -> tuple[str, str]:
    """`text` without its trailing `loc(...)`, and what stands in it."""
    text = text.rstrip()
    position = text.rfind("loc(")
    while position > 0 and text[position - 1] not in " ":
        position = text.rfind("loc(", 0, position)
    if position < 0 or not text.endswith(")"):
        return text, ""
    return text[:position].rstrip(), text[position + 4 : -1]


def _matching(text: str, start: int) -> int:
    """The position of the `)` that closes the `(` at `start`, strings skipped."""
    depth, quoted = 0, False
    for position in range(start, len(text)):
        character = text[position]
        if character == '"' and text[position - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return position
    raise CompileError(f"unclosed ( in TTIR: {text}")


def _as_type(word: str) -> Type:
    return parse_type(word)


def _types(tokens: list[tuple[str, str]]) -> list[Type]:
    return [_as_type(word) for kind, word in tokens if kind in ("type", "scalar")]


def _attributes(tokens: list, i: int, into: dict[str, Any]) -> int:
    """Read `{a = 1 : i32, b}` from tokens[i]; returns the position behind the brace."""
    depth, i = 1, i + 1
    key, value = "", []

    def finish() -> None:
        if key:
            into[key] = " ".join(value).strip() if value else "true"

    while i < len(tokens):
        kind, word = tokens[i]
        if word in "{[(" and kind == "punctuation":
            depth += 1
        elif word in "}])" and kind == "punctuation":
            depth -= 1
            if depth == 0:
                finish()
                return i + 1
        if word == "," and depth == 1:
            finish()
            key, value = "", []
        elif not key:
            key = _unescape(word[1:-1]) if kind == "string" else word
        elif word == "=" and not value:
            pass
        else:
            value.append(_unescape(word[1:-1]) if kind == "string" else word)
        i += 1
    return i


def _attributes_value(tokens: list, i: int, into: dict[str, Any]) -> int:
    """Read `name = value` from tokens[i]; returns the position behind the value."""
    kind, word = tokens[i + 2]
    into[tokens[i][1]] = _unescape(word[1:-1]) if kind == "string" else word
    return i + 3


def _unescape(text: str) -> str:
    def character(match: re.Match) -> str:
        code = match.group(1)
        return {"n": "\n", "t": "\t"}.get(code) or (chr(int(code, 16)) if len(code) == 2 else code)

    return re.sub(r"\\([0-9A-Fa-f]{2}|.)", character, text) if "\\" in text else text


def _inferred(op: Op) -> list[Type]:
    """Result types of the operations whose text does not spell them."""
    if op.name in ("arith.cmpi", "arith.cmpf"):
        return [_with_element(op.types[-1], "i1")]
    if op.name == "tt.addptr":
        return [op.types[0]]
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
