"""`weft lint FILE.py ..`: what can be seen in kernels and their host code without running them."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.tools import console, options
from weft.verify.lint import Result, lint_file, python_files
from weft.verify.lint.rules import RULES


def lint(
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="FILE.py..", help="Python files, or folders of them"),
    ] = None,
    rules: Annotated[bool, options.flag("list the rules, and do no more", "--rules")] = False,
    json: options.AsJson = False,
) -> int:
    """Find synchronisation mistakes in kernels by reading files; nothing is run."""
    if rules:
        return show_rules(json)
    if not files:
        raise UsageError("weft lint needs a file or a folder; --rules lists what it looks for")
    paths = list(python_files(files))
    if not paths:
        raise UsageError(f"there is no Python file in {', '.join(files)}")
    results = []
    with console.bar("lint", len(paths)) as bar:
        for path in paths:
            results.append(lint_file(path))
            bar.advance()
    ok = all(result.ok for result in results)
    if json:
        console.print_json({"files": [result.to_json() for result in results], "ok": ok})
    else:
        show(results)
    return console.FINE if ok else console.PROBLEM


def show(results: list[Result]) -> None:
    out = console.results()
    for result in results:
        for note in result.notes:
            console.notes().print(Text(f"{result.file}: note: {note}", style="dim"))
    problems = [problem for result in results for problem in result.problems]
    for problem in problems:
        out.print(Text.assemble(*problem.parts()))
    kernels = sum(len(result.kernels) for result in results)
    what = f"{counted(len(results), 'file')}, {counted(kernels, 'kernel')}"
    verdict = counted(len(problems), "finding") if problems else "nothing found"
    out.print(Text(f"{what}: {verdict}", style="bold red" if problems else "bold green"))


def show_rules(json: bool) -> int:
    if json:
        rows = [
            {"rule": r.name, "severity": r.severity, "summary": r.summary, "remedy": r.remedy}
            for r in RULES.values()
        ]
        console.print_json({"rules": rows})
    else:
        console.print_table(
            [(r.name, r.severity, r.summary) for r in RULES.values()], "rule", "severity", "finds"
        )
    return console.FINE
