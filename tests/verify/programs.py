"""The programs of wrong/ and right/: what such a file may say, and how the emulator runs it.

A program is a file with a `main(world)` that every rank runs. It may say on what: RANKS (2), NODES
(1), NUM_SMS (132), TRITON ("< 3.8": other versions are left out), and whether it is DETERMINISTIC:
then ranks return the same under every schedule. One of wrong/ says in FOUND the kind of finding
that is expected (in SAYS, what its text must contain), or in RAISES the error that its host gets;
the line that must be named ends in a comment that begins with BUG.
"""

from __future__ import annotations

import importlib.util
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import weft
from weft.base.errors import WeftError
from weft.base.report import Finding, Report
from weft.language.triton_api import TRITON_VERSION
from weft.verify.determinism import nondeterministic
from weft.verify.exploration.search import outcome_bytes

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Outcome:
    """What one schedule showed; `results` are what the ranks' `main` returned."""

    report: Report
    errors: list[BaseException]
    results: list[Any]


def programs(folder: str) -> list[Path]:
    return sorted(HERE.joinpath(folder).glob("*.py"))


def load(path: Path) -> ModuleType:
    """The program, or a skip where this Triton is not one it is about."""
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    if before := getattr(module, "TRITON", None):
        if TRITON_VERSION >= tuple(map(int, before.removeprefix("<").split("."))):
            pytest.skip(f"about Triton {before}")
    return module


def run(
    program: ModuleType, seed: int, known: dict[ModuleType, bytes] | None = None, **options: Any
) -> Outcome:
    """One schedule of the program; findings and errors are collected, not raised.

    Results are compared with what `known` holds of an earlier one; `options` are further ones of
    `weft.emulated`.
    """

    def main() -> Any:
        world = weft.init(heap_bytes=1 << 20)
        result = program.main(world)
        world.synchronize()
        world.close()
        return result

    nodes = getattr(program, "NODES", 1)
    with weft.emulated(
        ranks=getattr(program, "RANKS", 2) if nodes == 1 else None, nodes=nodes, seed=seed,
        num_sms=getattr(program, "NUM_SMS", 132), collect=True, name=program.__name__,
        **options,
    ) as session:  # fmt: skip
        try:
            session.run(main)
        except WeftError:
            assert session.errors, "the session raised what no rank did"
    report = session.report
    if known is not None and getattr(program, "DETERMINISTIC", False):
        outcome = outcome_bytes(session.results)
        if known.setdefault(program, outcome) != outcome:
            report.add(nondeterministic(report))
    return Outcome(report, list(session.errors.values()), session.results)


def marked_line(path: Path) -> int:
    lines = path.read_text().splitlines()
    marked = [number for number, line in enumerate(lines, 1) if "# BUG" in line]
    assert len(marked) == 1, f"{path.name} marks lines {marked}; one is to be named"
    return marked[0]


def names(finding: Finding, path: Path, line: int) -> bool:
    """Does a side of the finding have this line, in its user's own frame?"""
    return any(side.file == str(path) and side.line == line for side in finding.sides)


def raised_at(error: BaseException, path: Path, line: int) -> bool:
    """Did the error come up through this line?"""
    frames = traceback.extract_tb(error.__traceback__)
    return any((frame.filename, frame.lineno) == (str(path), line) for frame in frames)
