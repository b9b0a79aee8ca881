"""Calls of weft that cannot be meant."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator

from weft.verify.lint.launches import passed
from weft.verify.lint.problem import ERROR, WARNING
from weft.verify.lint.registry import Hit, Program, file_rule, text_of
from weft.verify.lint.signatures import exported, signatures
from weft.verify.lint.values import RANK


@file_rule(
    "world-not-arg",
    ERROR,
    "A kernel that is given the world instead of world.arg.",
    remedy="pass world.arg",
)
def world_not_arg(program: Program) -> Iterator[Hit]:
    for launch in program.launches:
        for name, argument in launch.arguments.items():
            made = launch.made(name)
            maker = program.source.spelling(made.func) if isinstance(made, ast.Call) else ""
            is_world = maker == "weft.init" or maker.endswith(".world")
            if is_world or text_of(made) in ("world", "self.world"):
                message = f"{text_of(argument)} is the host's object; kernels take its table, rank "
                yield Hit(argument, message + "count and version as one argument")


@file_rule(
    "rank-as-constexpr",
    WARNING,
    "The rank as a compile-time constant: one binary for each rank.",
    remedy="take it from wl.rank(world), or drop the tl.constexpr",
)
def rank_as_constexpr(program: Program) -> Iterator[Hit]:
    for launch in program.launches:
        for name, argument in launch.arguments.items():
            is_rank = passed(launch, name).form == RANK
            if is_rank and launch.device.is_constexpr(name):
                message = f"{name} of {launch.device.name} is a constexpr, so every rank compiles "
                yield Hit(argument, message + "a kernel of its own")


@file_rule(
    "unknown-name",
    ERROR,
    "A name that weft.language does not have.",
    remedy="docs/language.md lists what there is",
)
def unknown_name(program: Program) -> Iterator[Hit]:
    spelling = program.source.spelling
    for node in program.source.nodes:
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if program.source.imports.get(node.value.id) == "weft.language":
                if spelling(node).startswith("wl.") and not _exists(node.attr):
                    yield Hit(node, f"{ast.unparse(node)} does not exist{_near(node.attr)}")
        elif isinstance(node, ast.ImportFrom) and node.module == "weft.language":
            for alias in node.names:
                if alias.name != "*" and not _exists(alias.name):
                    message = f"weft.language has no {alias.name}{_near(alias.name)}"
                    yield Hit(alias, message)


def _exists(name: str) -> bool:
    return name in exported() or name.startswith("_")


def _near(name: str) -> str:
    found = difflib.get_close_matches(name, exported(), n=1)
    return f"; there is {found[0]}" if found else ""


@file_rule(
    "wrong-call",
    ERROR,
    "A call of a primitive that its declaration does not take.",
    remedy="docs/language.md has the signatures; peers go by name: to=, source=",
)
def wrong_call(program: Program) -> Iterator[Hit]:
    for device in program.source.devices.values():
        for node in ast.walk(device.node):
            if not isinstance(node, ast.Call):
                continue
            name = program.source.spelling(node.func)
            declared = signatures().get(name[3:]) if name.startswith("wl.") else None
            complaint = declared.complaint(node) if declared else ""
            if complaint:
                yield Hit(node, f"wl.{name[3:]} {complaint}")
