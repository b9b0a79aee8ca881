"""Tokens of streams: who learns what, who waits, and what does not add up.

Whole programs with tokens are in tests/verify/right and tests/verify/wrong.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.emulator.observation import Recorder
from weft.tools.main import main as weft_cli

SCRIPT = Path(__file__).parent.parent / "runtime" / "scripts" / "tokens.py"
N = 16


@triton.jit
def produce(world, rows, tokens, value, size: tl.constexpr):
    i = tl.arange(0, size)
    tl.store(rows + i, i + value)
    wl.notify(world, tokens, 1, to=wl.rank(world), op="set")


@triton.jit
def produce_in_turn(world, rows, tokens, rounds, size: tl.constexpr):
    """Rows again and again, each time when the last ones have been taken: it sees the 0."""
    i = tl.arange(0, size)
    for turn in range(rounds):
        while wl.load(tokens) != 0:
            pass
        tl.store(rows + turn * size + i, i + turn)
        wl.notify(world, tokens, 1, to=wl.rank(world), op="set")


def report_of(main, seed: int = 0, ranks: int = 1, **options):
    with weft.emulated(ranks, seed=seed, collect=True, **options) as session:
        session.run(lambda: main(weft.init(heap_bytes=1 << 16)))
    return session.report


@pytest.mark.parametrize("seed", range(6))
def test_a_kernel_that_looks_for_the_0_sets_the_token_again(seed):
    def main(world):
        rows, there = torch.empty(3, N).long(), torch.zeros(3, N).long()
        token, copies = world.signals(1, torch.int64), world.stream("copies")
        copies.wait(world.current_stream())
        produce_in_turn[(1,)](world.arg, rows, token, 3, N)
        with copies:
            for turn in range(3):
                world.take_token(token)
                world.copy(there[turn], rows[turn])
        world.current_stream().wait(copies)
        assert torch.equal(there, torch.arange(N) + torch.arange(3)[:, None])

    assert report_of(main, seed).ok


@pytest.mark.parametrize("is_taken_between", [False, True])
def test_a_token_that_is_set_twice_before_it_is_taken(is_taken_between):
    def main(world):
        token = world.signals(1, torch.int64)
        for turn in range(2):
            produce[(1,)](world.arg, torch.empty(N).long(), token, turn, N)
            if is_taken_between or turn:
                world.take_token(token)

    report = report_of(main)
    if is_taken_between:
        assert report.ok
    else:
        assert [finding.kind for finding in report] == ["lost signal"]
        assert "is set to 1 where it is still 1" in str(report)


def test_a_token_behind_which_its_kernel_stands_is_a_deadlock():
    def main(world):
        token = world.signals(1, torch.int64, name="stored")
        world.take_token(token)
        produce[(1,)](world.arg, torch.empty(N).long(), token, 0, N)

    (finding,) = report_of(main)
    assert (finding.kind, finding.first.tensor) == ("deadlock", "stored@rank0")
    assert finding.first.kernel == "token (stream main)"
    assert finding.first.note == "sees 0, waits for the token 1 in"
    assert "stream main waits for stored@rank0[0] = 1, a token, which is 0" in str(finding)
    assert "could be signalled by rank 0 produce, which has not started" in str(finding)


def test_a_1_that_was_there_before_is_no_token():
    def main(world):
        before = world.zeros((1,), torch.int64)
        before.fill_(1)
        world.synchronize()
        world.free(before)
        world.take_token(world.empty((1,), torch.int64))

    assert [finding.kind for finding in report_of(main)] == ["stale signal"]


@pytest.mark.parametrize("seed", range(4))
def test_what_observers_hear(seed):
    def main(world):
        token, copies = world.signals(1, torch.int64, name="stored"), world.stream("copies")
        copies.wait(world.current_stream())
        with copies:
            world.take_token(token)
        produce[(1,)](world.arg, torch.empty(N).long(), token, 0, N)
        world.current_stream().wait(copies)

    recorder = Recorder()
    assert report_of(main, seed, observers=[recorder]).ok
    told = [event for event in recorder.events if event.word and event.word.tensor == "stored"]
    waits = [event for event in told if event.kind == "wait"]
    was_set, seen, reset = [event for event in told if event.kind != "wait"]
    assert len(waits) <= 1 and all((e.expected, e.before) == (1, 0) for e in waits)
    assert (was_set.kind, was_set.after, seen.kind, seen.causes) == (
        "signal", 1, "pass", (was_set.step,),
    )  # fmt: skip
    assert (reset.kind, reset.before, reset.after) == ("signal", 1, 0)
    assert {e.party.what for e in (*waits, seen, reset)} == {"token"}
    assert "token stored[0]" in [e.text for e in recorder.events if e.kind == "queue"]


def test_eager_recorded_and_replayed(capfd):
    assert weft_cli(["emulate", str(SCRIPT), "--ranks", "3"]) == 0
    said = re.findall(r"^rank (\d) of 3: tokens carried 7 calls$", capfd.readouterr().out, re.M)
    assert sorted(said) == ["0", "1", "2"]
