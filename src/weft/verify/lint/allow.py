"""Comments that allow an exception: `# weft: allow RULE: reason`, on the line or above it."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from dataclasses import dataclass

from weft.verify.lint.problem import Span
from weft.verify.lint.registry import RULES
from weft.verify.lint.source import Source

PATTERN = re.compile(r"#\s*weft:\s*allow\b\s*(?P<rules>[\w\-, ]*?)\s*(?::\s*(?P<reason>.*))?$")


@dataclass(eq=False)
class Allowance:
    """`lines` are those that it speaks for: its statement's, or that of the code below it."""

    rules: tuple[str, ...]
    reason: str
    span: Span
    lines: frozenset[int]
    used: set[str]

    def covers(self, rule: str, line: int) -> bool:
        return rule in self.rules and line in self.lines

    def complaints(self) -> list[str]:
        """What is wrong with the comment itself."""
        if not self.rules:
            return ["this allows no rule by name"]
        found = [f"there is no rule {name!r} to allow" for name in self.rules if name not in RULES]
        if not self.reason.strip():
            found.append(f"{', '.join(self.rules)} is allowed here without a reason")
        return found

    def unused(self) -> list[str]:
        return [name for name in self.rules if name in RULES and name not in self.used]


def allowances(source: Source) -> list[Allowance]:
    """Every such comment of the file, in order."""
    found: list[Allowance] = []
    if "weft:" not in source.text:
        return found
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type != tokenize.COMMENT or not (match := PATTERN.match(token.string)):
            continue
        line, column = token.start
        rules = tuple(name for name in re.split(r"[,\s]+", match["rules"]) if name)
        span = Span(line, column, column + len(token.string))
        stands_alone = source.line(line).lstrip().startswith("#")
        lines = {line, *_statement(source, _next_code(source, line) if stands_alone else line)}
        found.append(Allowance(rules, match["reason"] or "", span, frozenset(lines), set()))
    return found


def _statement(source: Source, line: int) -> range:
    """The lines of the statement that `line` is part of; of one with a body, its head."""
    found = range(line, line + 1)
    for node in source.nodes:
        if isinstance(node, ast.stmt) and node.lineno <= line:
            body = getattr(node, "body", None)
            last = body[0].lineno - 1 if body else node.end_lineno or node.lineno
            if line <= last and last - node.lineno >= len(found):
                found = range(node.lineno, last + 1)
    return found


def _next_code(source: Source, line: int) -> int:
    """The first line below that holds more than a comment."""
    for number in range(line + 1, len(source.lines) + 1):
        text = source.line(number).strip()
        if text and not text.startswith("#"):
            return number
    return line
