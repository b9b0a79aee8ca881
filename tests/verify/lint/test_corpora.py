"""No false alarms on what is right; and what of the wrong can be read off a file."""

from __future__ import annotations

from pathlib import Path

import pytest
from effort import calls_of

from weft.verify.lint import lint_file, python_files

ROOT = Path(__file__).parents[3]
RIGHT = (
    "examples",
    "src/weft",
    "tests/verify/right",
    "tests/emulator/kernels",
    "tests/emulator/scripts",
)

# Kernels with parts to leave out or to weaken, or that only compile: findings are planted there.
PLANTED = {
    "tests/emulator/scripts/foreign/plain_wait.py": {"plain-load-wait"},
    "tests/emulator/scripts/raw_ring.py": {"device-scope"},
    "tests/language/language_kernels.py": {"device-scope"},
    "tests/litmus/data_kernels.py": {
        "relaxed-signal",
        "spin-without-acquire",
        "unfinished-store",
    },
    "tests/verify/compiled_kernels.py": {
        "cas-across-gpus",
        "discarded-look",
        "pure-wait",
        "release-without-barrier",
        "unfinished-store",
        "volatile-wait",
        "wait-in-pipelined-loop",
    },
}

# Of tests/verify/wrong: what needs no run to be seen; the others need values, or a schedule.
SEEN = {
    "asynchronous_store_not_completed": "unfinished-store",
    "divergent_barrier": "divergent-barrier",
    "gpu_scoped_signal": "device-scope",
    "peer_out_of_range": "peer-unmasked",
    "plain_spin": "plain-load-wait",
    "relaxed_link_in_a_chain": "spin-without-acquire",
    "relaxed_notify": "relaxed-signal",
    "relaxed_wait": "spin-without-acquire",
    "spin_without_acquire": "spin-without-acquire",
    "volatile_wait": "volatile-wait",
}


def right_files() -> list[Path]:
    kernels = [p for p in (ROOT / "tests").rglob("*_kernels.py") if not p.stem.startswith("test")]
    files = [*python_files(str(ROOT / folder) for folder in RIGHT), *sorted(kernels)]
    return [path for path in files if path.relative_to(ROOT).as_posix() not in PLANTED]


@pytest.mark.parametrize("path", right_files(), ids=lambda p: str(p.relative_to(ROOT)))
def test_no_false_alarm(path: Path):
    alarms = [str(problem) for problem in lint_file(path).problems]
    assert not alarms, "\n\n".join(alarms)


@pytest.mark.parametrize("name", list(PLANTED))
def test_planted_faults_are_seen(name: str):
    found = {problem.rule for problem in lint_file(ROOT / name).problems}
    assert found >= PLANTED[name]


@pytest.mark.parametrize("name", list(SEEN))
def test_a_wrong_program_is_seen(name: str):
    path = ROOT / "tests" / "verify" / "wrong" / f"{name}.py"
    assert SEEN[name] in {problem.rule for problem in lint_file(path).problems}


def test_reading_is_fast():
    """Well under a second for the longest file: about 250 calls a line."""
    path = max(python_files([str(ROOT / "src" / "weft" / "ops")]), key=lambda p: p.stat().st_size)
    assert calls_of(lambda: lint_file(path)) < 600 * len(path.read_text().splitlines())
