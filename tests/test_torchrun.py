"""What tests learn of scripts under torchrun; these need no GPU."""

from __future__ import annotations

import os
import time

import pytest
from torchrun import once, torchrun

SPEAKS = """
import os, sys
for i in range(200):
    print(f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}: {i} {' '.join(sys.argv[1:])}")
"""
FAILS = """
import os
print("rank", os.environ["RANK"], "said this")
assert os.environ["RANK"] == "0", "and raised that"
"""
HANGS = """
import os, pathlib, sys, time
print("this far")
pathlib.Path(sys.argv[1], os.environ["RANK"]).write_text(str(os.getpid()))
time.sleep(600)
"""


def written(folder, text):
    (folder / "script.py").write_text(text)
    return folder / "script.py"


@pytest.mark.slow
def test_each_rank_is_heard_alone(tmp_path):
    said = torchrun(written(tmp_path, SPEAKS), 2, "two", "words")
    for rank, one in enumerate(said):
        assert one.splitlines() == [f"rank {rank} of 2: {i} two words" for i in range(200)]
    assert once(said, r"rank (\d) of (\d): 7 .*") == [("0", "2"), ("1", "2")]
    for line in (r"rank 0 of 2: 7 .*", r"rank \d of 2: \d .*", r"rank \d of 2: 7"):
        with pytest.raises(AssertionError, match="each once"):
            once(said, line)


@pytest.mark.slow
def test_what_failed_is_told_with_what_was_said(tmp_path):
    with pytest.raises(AssertionError, match="(?s)rank 1: rank 1 said this.*and raised that"):
        torchrun(written(tmp_path, FAILS), 2)


@pytest.mark.slow
def test_ranks_that_hang_are_ended(tmp_path):
    said = "(?s)rank 0: this far.*rank 1: this far.*ended after 20 seconds"
    with pytest.raises(AssertionError, match=said):
        torchrun(written(tmp_path, HANGS), 2, str(tmp_path), timeout_s=20)
    for rank in range(2):
        there = int((tmp_path / str(rank)).read_text())
        for _ in range(50):
            if not is_alive(there):
                break
            time.sleep(0.1)
        assert not is_alive(there)


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True
