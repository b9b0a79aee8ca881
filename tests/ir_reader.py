"""Reads the text that `show` of an IR's level prints: tests write programs so, and ask of what is
printed whether it says all. Text that is no IR ends in any error."""

from __future__ import annotations

import ast
import dataclasses
import re
from types import ModuleType
from typing import Any
from urllib.parse import unquote

from weft.base.place import UNKNOWN, Frame, Place
from weft.ir import core, device, task, tensor, text
from weft.ir.choice import Choice
from weft.ir.kinds import KINDS, All, Along, ByTable, Need

_FRAME = re.compile(r"(?P<file>.*):(?P<line>\d+)(?: in (?P<function>.*))?")


def read(level: ModuleType, source: str) -> Any:
    """The program of `weft.ir.task`, plan of `device` or kernel of `core` that `source` shows."""
    lines, records = source.split("\n"), _RECORDS[level]
    header, *statements = (_statement(node, lines, records) for node in ast.parse(source).body)
    if level is core:
        return core.Kernel(header.title, tuple(statements), header.place)
    about = header.results, header.stage, header.place
    if level is device:
        return device.Plan(header.title, header.mesh, tuple(statements), *about)
    tasks = tuple(one for one in statements if isinstance(one, task.Task))
    choices = tuple(one for one in statements if isinstance(one, Choice))
    return task.Program(header.title, header.mesh, tasks, *about, choices)


def _statement(node: Any, lines: list[str], records: dict[str, type]) -> Any:
    """`name: type = word(arguments)  # place`, of which name and type may be missing."""
    call, target = node.value, getattr(node, "target", None)
    if isinstance(node, ast.Assign):
        (target,) = node.targets
    annotation, behind = getattr(node, "annotation", None), lines[node.end_lineno - 1].encode()
    beside = {
        "name": "" if target is None else ast.unparse(target),
        "type": None if annotation is None else _value(annotation, records),
        "kind": call.func.id,
        "place": _place(behind[node.end_col_offset :].decode().lstrip(" #")),
    }
    return _record(call, beside, records)


def _record(call: Any, beside: dict[str, Any], records: dict[str, type]) -> Any:
    record = records[call.func.id]
    fields = {field.name for field in dataclasses.fields(record)}
    given = {name: one for name, one in beside.items() if name in fields}
    items = [_value(one, records) for one in call.args]
    for field in text._argument_fields(record):
        if field.metadata.get("spread"):
            given[field.name], items = tuple(items), []
        elif items and field.default is dataclasses.MISSING:
            given[field.name] = items.pop(0)
    assert not items, f"too many arguments: {ast.unparse(call)}"
    given |= {one.arg: _value(one.value, records) for one in call.keywords}
    return record(**given)


def _value(node: Any, records: dict[str, type]) -> Any:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Tuple):
        return tuple(_value(one, records) for one in node.elts)
    if isinstance(node, ast.Call):
        return _record(node, {}, records)
    # bfloat16[m, 64] @ Shard(0): the one record that has a form of its own.
    if isinstance(node, ast.BinOp):
        return dataclasses.replace(
            _value(node.left, records), placement=_value(node.right, records)
        )
    if isinstance(node, ast.Subscript):
        element, sizes = _value(node.value, records), _value(node.slice, records)
        return tensor.Type(element, sizes if isinstance(sizes, tuple) else (sizes,))
    return ast.literal_eval(node)


def _place(comment: str) -> Place:
    frames = [_FRAME.fullmatch(part) for part in comment.split(" via ")]
    if None in frames:
        return UNKNOWN  # none, or an ordinary comment
    return Place(tuple(
        Frame(unquote(one["file"]), int(one["line"]), unquote(one["function"] or ""))
        for one in frames
    ))  # fmt: skip


def _words(*statements: type) -> dict[str, type]:
    return {text.word(one): one for one in (text.Header, *statements)}


def _names(*values: type) -> dict[str, type]:
    return {one.__name__: one for one in values}


# What a word stands for: levels have words in common.
_RECORDS: dict[ModuleType, dict[str, type]] = {
    task: _words(Choice) | dict.fromkeys(KINDS, task.Task) | _names(
        tensor.Shard, tensor.Halves, tensor.Pieces, tensor.Replicate, tensor.Partial,
        tensor.ByExpert, tensor.Times, tensor.Type, Along, All, ByTable, Need,
    ),
    device: _words(
        device.Buffer, device.Channel, device.Call, device.Copy, device.Launch, device.Wait,
        device.Take, device.After, Choice,
    ) | _names(device.Part, device.Tiles, tensor.Times, device.Do),
    core: _words(core.Param, core.Mapping, core.Template, *core.FUSED),
}  # fmt: skip
