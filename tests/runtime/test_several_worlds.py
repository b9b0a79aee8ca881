"""Several worlds in one process, sub-groups among them: emulated, and under torchrun on GPUs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import triton
import triton.language as tl
from torchrun import environment, on_two_and_four_gpus, once, torchrun

import weft
import weft.language as wl

SCRIPT = Path(__file__).parent / "scripts" / "several_worlds.py"
SAID = r"rank (\d of \d), process \d+: 3 worlds"


@pytest.mark.slow
def test_emulated():
    command = [sys.executable, "-m", "weft", "emulate", str(SCRIPT), "--ranks", "3"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=600)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = re.findall(f"^{SAID}$", done.stdout, re.MULTILINE)
    assert sorted(said) == [f"{rank} of 3" for rank in range(3)]


@on_two_and_four_gpus
def test_under_torchrun(ranks):
    said = once(torchrun(SCRIPT, ranks, timeout_s=600), SAID)
    assert said == [f"{rank} of {ranks}" for rank in range(ranks)]


@triton.jit
def meet(words, world):
    word = words + tl.program_id(0)
    wl.notify(world, word, to=1 - wl.rank(world))
    wl.wait(word, 1, world=world)


def meeting_twice(num_programs: int, *, is_ordered: bool) -> weft.Report:
    """Two worlds of two ranks, each on a stream of its own; the ranks begin with another one."""

    def main(rank: int) -> None:
        worlds = [weft.init(), weft.init()]
        streams = [world.stream(f"stream {i}") for i, world in enumerate(worlds)]
        words = [world.signals(num_programs) for world in worlds]
        turns = [0, 1] if rank == 0 or is_ordered else [1, 0]
        for i in turns:
            if is_ordered and i:
                streams[1].wait(streams[0])
            with streams[i]:
                meet[(num_programs,)](words[i], worlds[i].arg)
        for world in worlds:
            world.synchronize()

    with weft.emulated(ranks=2, num_sms=4, collect=True) as session:
        session.run(main)
    return session.report


def test_two_worlds_that_starve_each_other_are_told_with_the_remedy():
    """On one rank the first world's programs leave no room, on the other one the second's."""
    report = meeting_twice(4, is_ordered=False)
    assert {one.kind for one in report.findings} == {"residency"}
    remedy = report.findings[0].remedy
    assert "nothing orders the kernels of streams stream 0 and stream 1 on rank" in remedy
    assert meeting_twice(4, is_ordered=True).ok
    assert meeting_twice(2, is_ordered=False).ok
