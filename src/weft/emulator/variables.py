"""What the user calls what a line of host code makes: the variable that the call is assigned to."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Collection, Iterator
from functools import lru_cache
from typing import NamedTuple

from weft.base.place import Frame


class Made(NamedTuple):
    """`variable = something.maker(...)`, the call on the lines first .. last."""

    variable: str
    maker: str
    first: int
    last: int


def variable_at(frame: Frame, makers: Collection[str], turns: dict[tuple[str, int], int]) -> str:
    """The variable of the call of one of `makers` at this line; "" where that is not clear.

    Of several on one line (`a, b = w.signals(4), w.signals(4)`) Python calls the first one first:
    `turns`, of one rank, counts how often each line came here.
    """
    lines = linecache.getlines(frame.file)
    made = _made("".join(lines)) if lines else ()
    here = [one for one in made if one.maker in makers and one.first <= frame.line <= one.last]
    if not here:
        return ""
    key = (frame.file, frame.line)
    turn = turns.get(key, 0)
    turns[key] = turn + 1
    return here[turn % len(here)].variable


@lru_cache(maxsize=64)
def _made(source: str) -> tuple[Made, ...]:
    try:
        return tuple(_assigned(ast.parse(source)))
    except SyntaxError:
        return ()


def _assigned(tree: ast.AST) -> Iterator[Made]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target, value = node.targets[0], node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            target, value = node.target, node.value
        else:
            continue
        yield from _pairs(target, value)


def _pairs(target: ast.expr, value: ast.expr) -> Iterator[Made]:
    several = (ast.Tuple, ast.List)
    if isinstance(target, several) and isinstance(value, several):
        for one, made in zip(target.elts, value.elts, strict=False):
            yield from _pairs(one, made)
    elif isinstance(target, several) and isinstance(value, (ast.ListComp, ast.GeneratorExp)):
        for one in target.elts:
            yield from _pairs(one, value.elt)
    elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        last = value.end_lineno or value.lineno
        yield Made(ast.unparse(target), value.func.attr, value.lineno, last)
