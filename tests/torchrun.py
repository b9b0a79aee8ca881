"""Scripts under torchrun, as users start them: what each rank said, kept apart."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
# Of each output, what a failure shows.
TAIL = 3000

on_two_and_four_gpus = pytest.mark.parametrize(
    "ranks", [pytest.param(n, marks=pytest.mark.gpu(n=n)) for n in (2, 4)]
)


def torchrun(script: Path | str, ranks: int, *words: str, timeout_s: float = 280) -> list[str]:
    """What each rank of `script words...` wrote to stdout, by rank.

    Each has a file of its own: torchrun runs ranks unbuffered, and `print` then writes a line and
    its end apart, so that on one pipe another rank's line comes between.

    Raises  AssertionError: a rank failed, or took too long; with what all of them said last
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *f"-m torch.distributed.run --standalone --nproc-per-node {ranks}".split(),
            *f"--redirects 1 --log-dir {folder}".split(), str(script), *words,
        ]  # fmt: skip
        rc, errors = _end_of([sys.executable, *command], timeout_s)
        logs = sorted(Path(folder).rglob("stdout.log"), key=lambda log: int(log.parent.name))
        said = [log.read_text(errors="replace") for log in logs]
    assert rc == 0, "\n".join(
        [f"{script} ended with {rc}", *(f"rank {i}: {one[-TAIL:]}" for i, one in enumerate(said))]
        + [_without_launchers(errors)[-TAIL:]]
    )
    assert len(said) == ranks, f"{script} on {ranks} ranks: {len(said)} files of what they said"
    return said


def _without_launchers(errors: str) -> str:
    """What ranks said, where they said something: torchrun's own account comes behind it."""
    own = re.split(r"^\S* *\d.*torch/distributed/elastic/", errors, maxsplit=1, flags=re.MULTILINE)
    return own[0] if own[0].strip() else errors


def environment(**more: str) -> dict[str, str]:
    """This process's, and the source before what else is on its path."""
    path = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **more}


def _end_of(command: Sequence[str], timeout_s: float) -> tuple[int, str]:
    """Exit status and stderr."""
    started = subprocess.Popen(
        command, cwd=ROOT, env=environment(), text=True, errors="replace",
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    with started:
        # Asked to, torchrun ends its ranks; killed, it would leave them, and their GPUs in use.
        try:
            _, errors = started.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            started.terminate()
            errors = f"{started.communicate()[1]}\nended after {timeout_s} seconds"
        finally:
            if started.poll() is None:
                started.terminate()
    return started.returncode, errors


def once(said: Sequence[str], line: str) -> list[Any]:
    """What the groups of `line`, a pattern, have matched in what each rank said: in one line of
    each, whole. Libraries may say other things beside."""
    found = [re.findall(f"^{line}$", one, re.MULTILINE) for one in said]
    assert [len(one) for one in found] == [1] * len(said), f"each once: {line}\n{said}"
    return [one[0] for one in found]
