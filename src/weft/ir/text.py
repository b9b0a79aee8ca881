"""The text of the three levels: one statement a line, in Python's grammar; read, never executed.

    g: bfloat16[m, 64] @ Replicate() = all_gather(x, dim=0)  # mlp.py:12 in mlp

A statement is a frozen dataclass. Its field `name`, where it has one, stands on the left, `type`
behind a colon, `place` in the comment; the others are arguments, those that have their default
left out. A string that is an identifier is written bare. `show` and `read` are inverse.
"""

from __future__ import annotations

import ast
import dataclasses
import io
import keyword
import re
import tokenize
import unicodedata
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar
from urllib.parse import quote, unquote

from weft.base.errors import UsageError
from weft.base.place import UNKNOWN, Frame, Place

# Of a statement these stand beside the arguments; `kind` is its word.
_BESIDE = ("name", "type", "kind", "place")
_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+)(?: in (?P<function>.*))?")


@dataclass(frozen=True)
class Header:
    """The first line of a program, the same at every level."""

    WORD: ClassVar[str] = "program"

    title: str
    mesh: str = ""
    stage: str = ""
    results: tuple[str, ...] = ()
    place: Place = UNKNOWN


def show(statements: Iterable[Any], *, places: bool = True) -> str:
    """The statements as text that `read` takes back; without places for a shorter page."""
    return "".join(f"{_statement(one, places)}\n" for one in statements)


def read(text: str, records: Mapping[str, type]) -> tuple[Header, tuple[Any, ...]]:
    """Header and statements of `text`; `records` says which word stands for which dataclass.

    Raises  UsageError: text that is no statement, with the line
    """
    try:
        tree = ast.parse(text)
        comments = _comments(text)
    except (SyntaxError, tokenize.TokenError) as error:
        raise UsageError(f"no IR text: {error}") from None
    found = [_read_statement(node, comments, records) for node in tree.body]
    if not found or not isinstance(found[0], Header):
        raise UsageError("no IR text: its first line is program(NAME, ...)")
    return found[0], tuple(found[1:])


def word(kind: type) -> str:
    """How a dataclass is spelled as a statement."""
    return getattr(kind, "WORD", kind.__name__.lower())


def words(*kinds: type) -> dict[str, type]:
    """`records` of these statements, their header included."""
    return {word(kind): kind for kind in (Header, *kinds)}


def value(item: Any) -> str:
    """One argument as text."""
    if isinstance(item, str):
        # Python reads a name in its normal form.
        is_name = item.isidentifier() and unicodedata.normalize("NFKC", item) == item
        return item if is_name and not keyword.iskeyword(item) else repr(item)
    if isinstance(item, tuple):
        return f"({', '.join(map(value, item))}{',' * (len(item) == 1)})"
    if hasattr(item, "as_text"):
        return item.as_text()
    if dataclasses.is_dataclass(item):
        return f"{type(item).__name__}({_arguments(item)})"
    return repr(item)


def _statement(one: Any, places: bool) -> str:
    # A task is spelled by its kind: there are many, of one record.
    spelled = getattr(one, "kind", "") or word(type(one))
    text = f"{spelled}({_arguments(one)})"
    if getattr(one, "name", ""):
        kind = getattr(one, "type", None)
        text = f"{one.name}{': ' + value(kind) if kind is not None else ''} = {text}"
    place = getattr(one, "place", UNKNOWN)
    return f"{text}  # {_place(place)}" if places and place.frames else text


def _arguments(record: Any) -> str:
    """What has no default by position, then the others by name."""
    parts = []
    for field in _argument_fields(type(record)):
        item = getattr(record, field.name)
        if field.metadata.get("spread"):
            parts += map(value, item)
        elif field.default is dataclasses.MISSING:
            parts.append(value(item))
        elif item != field.default:
            parts.append(f"{field.name}={value(item)}")
    return ", ".join(parts)


def _argument_fields(record: type) -> list[dataclasses.Field]:
    fields = dataclasses.fields(record)
    is_statement = any(field.name == "place" for field in fields)
    return [field for field in fields if not (is_statement and field.name in _BESIDE)]


def _read_statement(node: ast.stmt, comments: Mapping[int, str], records: Mapping[str, type]):
    name, kind, call = "", None, None
    if isinstance(node, ast.Expr):
        call = node.value
    elif isinstance(node, ast.Assign) and len(node.targets) == 1:
        name, call = ast.unparse(node.targets[0]), node.value
    elif isinstance(node, ast.AnnAssign):
        name, kind, call = ast.unparse(node.target), node.annotation, node.value
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise UsageError(f"line {node.lineno} is no statement of the IR: {ast.unparse(node)}")
    if call.func.id not in records:
        known = ", ".join(sorted(records))
        raise UsageError(f"line {node.lineno}: unknown word {call.func.id!r}; there are {known}")
    record = records[call.func.id]
    fields = {field.name: field for field in dataclasses.fields(record)}
    given: dict[str, Any] = {"place": _read_place(comments.get(node.lineno, ""))}
    if "name" in fields:
        given["name"] = name
    if "type" in fields:
        given["type"] = None if kind is None else _read_value(kind, records)
    if "kind" in fields:
        given["kind"] = call.func.id
    given.update(_read_arguments(call, record, records))
    return _make(record, given, node.lineno)


def _read_arguments(call: ast.Call, record: type, records: Mapping[str, type]) -> dict[str, Any]:
    given: dict[str, Any] = {}
    items = [_read_value(item, records) for item in call.args]
    for field in _argument_fields(record):
        if field.metadata.get("spread"):
            given[field.name], items = tuple(items), []
        elif items and field.default is dataclasses.MISSING:
            given[field.name] = items.pop(0)
    if items:
        raise UsageError(f"line {call.lineno}: too many arguments: {ast.unparse(call)}")
    for one in call.keywords:
        given[str(one.arg)] = _read_value(one.value, records)
    return given


def _read_value(node: ast.AST, records: Mapping[str, type]) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_read_value(node.operand, records)
    if isinstance(node, ast.Tuple):
        return tuple(_read_value(item, records) for item in node.elts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in records:
        record = records[node.func.id]
        return _make(record, _read_arguments(node, record, records), node.lineno)
    # bfloat16[m, 64] @ Shard(0): the one record that has a form of its own.
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        return dataclasses.replace(
            _read_value(node.left, records), placement=_read_value(node.right, records)
        )
    if isinstance(node, ast.Subscript) and "Type" in records:
        sizes = _read_value(node.slice, records)
        sizes = sizes if isinstance(sizes, tuple) else (sizes,)
        return records["Type"](_read_value(node.value, records), sizes)
    raise UsageError(f"line {getattr(node, 'lineno', 0)}: not understood: {ast.unparse(node)}")


def _make(record: type, given: Mapping[str, Any], line: int) -> Any:
    try:
        return record(**given)
    except TypeError as error:
        raise UsageError(f"line {line}: {error}") from None


def _place(place: Place) -> str:
    """Frames, the user's outermost first; what a name may hold beside letters is quoted."""
    frames = []
    for frame in place.frames:
        where = f"{quote(frame.file, safe='/:._-')}:{frame.line}"
        inside = f" in {quote(frame.function, safe='<>._')}" if frame.function else ""
        frames.append(where + inside)
    return " via ".join(frames)


def _read_place(text: str) -> Place:
    frames = []
    for part in text.split(" via ") if text else ():
        if not (found := _FRAME.fullmatch(part)):
            return UNKNOWN  # an ordinary comment
        function = unquote(found["function"] or "")
        frames.append(Frame(unquote(found["file"]), int(found["line"]), function))
    return Place(tuple(frames))


def _comments(text: str) -> dict[int, str]:
    """Comments by line."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {t.start[0]: t.string[1:].strip() for t in tokens if t.type == tokenize.COMMENT}


def untaken(name: str, taken: Collection[str]) -> str:
    """A name that nothing else has: this one, or with as many underscores as that takes."""
    while name in taken:
        name += "_"
    return name
