"""Models of layers, unchanged ones by the pass, and attention of long sequences, by their scripts:
on GPUs under torchrun, and emulated. With WEFT_SHARE_GPUS=1 one GPU is enough."""

from __future__ import annotations

from pathlib import Path

import pytest
from torchrun import on_two_and_four_gpus, once, torchrun

from weft.emulator.script import run_script

SCRIPTS = Path(__file__).parent / "scripts"
each_script = pytest.mark.parametrize(
    "script", ["whole_model.py", "unchanged_model.py", "long_sequences.py", "stages.py"]
)


@on_two_and_four_gpus
@each_script
def test_on_gpus(script, ranks):
    # Every way of compiling a model takes its time.
    said = torchrun(SCRIPTS / script, ranks, timeout_s=390)
    said = once(said, r"rank (\d) of (\d): [1-9]\d* cases")
    assert said == [(str(rank), str(ranks)) for rank in range(ranks)]


@pytest.mark.slow
@each_script
def test_emulated(script):
    report = run_script(str(SCRIPTS / script), [], ranks=2, nodes=1, seed=0)
    assert report.ok, str(report)
