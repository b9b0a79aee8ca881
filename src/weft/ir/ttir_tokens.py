"""A statement of TTIR text cut into tokens, and what reads a few of them at a time."""

from __future__ import annotations

import re
from typing import Any

from weft.base.errors import CompileError

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


def tokens_of(text: str) -> list[tuple[str, str]]:
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


def closing_parenthesis(text: str, start: int) -> int:
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


def read_attributes(tokens: list, i: int, into: dict[str, Any]) -> int:
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
            key = unescape(word[1:-1]) if kind == "string" else word
        elif word == "=" and not value:
            pass
        else:
            value.append(unescape(word[1:-1]) if kind == "string" else word)
        i += 1
    return i


def read_attribute(tokens: list, i: int, into: dict[str, Any]) -> int:
    """Read `name = value` from tokens[i]; returns the position behind the value."""
    kind, word = tokens[i + 2]
    into[tokens[i][1]] = unescape(word[1:-1]) if kind == "string" else word
    return i + 3


def unescape(text: str) -> str:
    def character(match: re.Match) -> str:
        code = match.group(1)
        return {"n": "\n", "t": "\t"}.get(code) or (chr(int(code, 16)) if len(code) == 2 else code)

    return re.sub(r"\\([0-9A-Fa-f]{2}|.)", character, text) if "\\" in text else text
