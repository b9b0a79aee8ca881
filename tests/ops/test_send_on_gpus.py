"""On GPUs: messages between two ranks, by every transport, eager, replayed and mixed."""

from __future__ import annotations

import pytest
from launching import SCRIPTS, check_under_torchrun
from torchrun import on_two_and_four_gpus

from weft.emulator.script import run_script


@on_two_and_four_gpus
def test_messages(ranks):
    check_under_torchrun("messages.py", ranks)


@pytest.mark.slow
def test_emulated():
    report = run_script(str(SCRIPTS / "messages.py"), [], ranks=2, nodes=1, seed=0)
    assert report.ok, str(report)
