"""What lint reports: one place in a file, the rule it breaks, why, and what to write instead."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

ERROR, WARNING = "error", "warning"


@dataclass(frozen=True)
class Span:
    """Where something stands: lines from 1, columns from 0, the end exclusive."""

    line: int
    column: int
    end_column: int

    @classmethod
    def of(cls, node: ast.AST) -> Span:
        """The first line of `node`."""
        first, end = node.lineno, node.end_lineno  # type: ignore[attr-defined]
        column = node.col_offset  # type: ignore[attr-defined]
        is_one_line = first == end
        return cls(first, column, node.end_col_offset if is_one_line else -1)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Problem:
    """One finding. `message` says in one sentence what is wrong, with the values.

    `source` is the line as written; `end_column` is -1 where the text goes on in the next line;
    `via` says through which calls a device function was reached.
    """

    rule: str
    severity: str
    file: str
    line: int
    column: int
    end_column: int
    message: str
    remedy: str
    source: str = ""
    via: str = ""

    def to_json(self) -> dict[str, object]:
        return {
            "rule": self.rule,
            "severity": self.severity,
            "file": self.file,
            "line": self.line,
            "column": self.column + 1,
            "message": self.message,
            "remedy": self.remedy,
            "source": self.source.strip(),
        }

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}:{self.column + 1}"

    def lines(self) -> tuple[str, str]:
        """The source line, and carets below what is meant; without the common indent."""
        text = self.source.rstrip()
        indent = len(text) - len(text.lstrip())
        end = len(text) if self.end_column < 0 else min(self.end_column, len(text))
        start = max(self.column, indent)
        return text[indent:], " " * (start - indent) + "^" * max(1, end - start)

    def __str__(self) -> str:
        return "".join(text for text, _ in self.parts()).rstrip()

    def parts(self) -> Iterator[tuple[str, str]]:
        """What is said of it, and the style of each part where there are colours."""
        colour = "bold red" if self.severity == ERROR else "bold yellow"
        yield from (
            (f"{self.place}: ", "bold"), (self.severity, colour), (f": {self.message} ", ""),
            (f"[{self.rule}]\n", "dim"),
        )  # fmt: skip
        text, carets = self.lines()
        if text:
            yield from ((f"    {text}\n", ""), (f"    {carets}\n", colour))
        if self.via:
            yield f"  reached {self.via}\n", "dim"
        if self.remedy:
            yield f"  remedy: {self.remedy}\n", "green"
