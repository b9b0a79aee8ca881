"""Scripts of operators' tests under torchrun on GPUs: every rank ends by counting what it tried."""

from __future__ import annotations

from pathlib import Path

from torchrun import once, torchrun

SCRIPTS = Path(__file__).parent / "scripts"


def check_under_torchrun(script: str, ranks: int, counted: str = "cases") -> None:
    """Run tests/ops/scripts/`script` on so many ranks; all must say `rank R of N: C counted`."""
    said = once(torchrun(SCRIPTS / script, ranks), rf"rank (\d) of (\d): [1-9]\d* {counted}")
    assert said == [(str(rank), str(ranks)) for rank in range(ranks)]
