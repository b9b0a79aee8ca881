"""`lint`: files in, problems out. Rules look, allowances silence, and are themselves looked at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from weft.base.errors import UsageError
from weft.verify.lint.allow import Allowance, allowances
from weft.verify.lint.problem import ERROR, WARNING, Problem, Span
from weft.verify.lint.registry import Hit, Program, Rule
from weft.verify.lint.rules import RULES
from weft.verify.lint.source import Source

SKIPPED = {".git", ".venv", "__pycache__", "build", "dist", "node_modules"}
NO_REASON, UNUSED, UNREADABLE = "allow-without-reason", "unused-allow", "syntax-error"


@dataclass
class Result:
    """What was found in one file; `notes` say what was not looked at, and why."""

    file: str
    problems: list[Problem] = field(default_factory=list)
    kernels: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, object]:
        return {
            "file": self.file,
            "kernels": self.kernels,
            "findings": [problem.to_json() for problem in self.problems],
            "notes": self.notes,
            "ok": self.ok,
        }


def python_files(paths: Iterable[str]) -> Iterator[Path]:
    """The files that are named, and all `.py` files of the folders that are.

    Raises  UsageError: there is no such file or folder, or a file that is no Python
    """
    for path in map(Path, paths):
        if path.is_dir():
            yield from sorted(
                one for one in path.rglob("*.py")
                if not SKIPPED & set(one.relative_to(path).parts)
            )  # fmt: skip
        elif not path.is_file():
            raise UsageError(f"there is no file or folder {path}")
        elif path.suffix != ".py":
            raise UsageError(f"{path} is no Python file; lint reads .py files and folders of them")
        else:
            yield path


def lint_file(path: str | Path) -> Result:
    """Lint one file; nothing of it is run."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        return Result(str(path), [_unreadable(str(path), 1, f"it is not UTF-8: {error.reason}")])
    return lint_text(text, str(path))


def lint_text(text: str, path: str = "<text>") -> Result:
    """Lint the text of a file."""
    try:
        source = Source.parse(path, text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = getattr(error, "lineno", None) or 1
        return Result(path, [_unreadable(path, line, getattr(error, "msg", str(error)))])
    program = Program(source)
    result = Result(path, kernels=list(source.devices))
    if not source.devices and "weft" not in text:
        return result
    comments = allowances(source)
    found: dict[tuple, Problem] = {}
    try:
        for one, kernel in product(RULES.values(), program.kernels):
            for hit in one.check(kernel):
                _file(found, comments, _problem(source, one, hit))
    except RecursionError:
        result.notes.append("an expression is nested too deeply to be followed to its end")
    result.problems = sorted(found.values(), key=lambda p: (p.line, p.column, p.rule))
    result.problems += _comment_problems(source, comments)
    return result


def _file(found: dict[tuple, Problem], comments: list[Allowance], problem: Problem) -> None:
    for comment in comments:
        if comment.covers(problem.rule, problem.line):
            comment.used.add(problem.rule)
            return
    found.setdefault((problem.rule, problem.line, problem.column), problem)


def _problem(source: Source, one: Rule, hit: Hit) -> Problem:
    span = Span.of(hit.node)
    return Problem(
        one.name, one.severity, source.path, span.line, span.column, span.end_column,
        hit.message, one.remedy, source.line(span.line), hit.via,
    )  # fmt: skip


def _comment_problems(source: Source, comments: list[Allowance]) -> list[Problem]:
    found = []
    for comment in comments:
        span, line = comment.span, source.line(comment.span.line)
        place = (source.path, span.line, span.column, span.end_column)
        for message in comment.complaints():
            remedy = "write `# weft: allow RULE: why this is right here`"
            found.append(Problem(NO_REASON, ERROR, *place, message, remedy, line))
        for name in comment.unused():
            message = f"nothing here breaks {name}"
            found.append(Problem(UNUSED, WARNING, *place, message, "delete the comment", line))
    return found


def _unreadable(path: str, line: int, reason: str) -> Problem:
    message = f"this is no Python that lint can read: {reason}"
    return Problem(UNREADABLE, ERROR, path, line, 0, -1, message, "", "")
