"""What CI asks of pytest: to end in time, and to begin elsewhere each turn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def pytest_of(*arguments: str) -> list[str]:
    """Lines that pytest prints of some quick tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist"]
    done = subprocess.run(
        [*command, *arguments, str(TESTS / "base")],
        cwd=TESTS.parent, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def test_no_test_begins_when_time_is_over():
    last = pytest_of("--seconds", "0")[-1]
    assert "skipped" in last and "passed" not in last
    assert "skipped" not in pytest_of("--seconds", "100")[-1]


def test_each_turn_begins_with_another_test():
    here, there = (
        [line for line in pytest_of("--collect-only", "--turn", turn) if "::" in line]
        for turn in ("0", "1")
    )
    assert here != there and sorted(here) == sorted(there)
