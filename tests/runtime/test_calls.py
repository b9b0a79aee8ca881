"""What is known of calls: the latest kinds, and those of a user's recordings."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from fake_machine import FakeRecording, run_ranks

from weft.runtime import call_log, calls
from weft.runtime.backend import RecordingLife
from weft.runtime.calls import Calls


class Machine:
    def __init__(self) -> None:
        self.recording: FakeRecording | None = None
        self.drained = 0

    def is_recording(self) -> bool:
        return self.recording is not None

    def recorded_life(self) -> RecordingLife:
        return RecordingLife(weakref.ref(self.recording))

    def drain(self) -> None:
        self.drained += 1


class Known:
    """What an operator keeps."""


MOST = 8


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(calls, "PART_AT_ONCE", 3)
    monkeypatch.setenv("WEFT_KEPT_CALLS", str(MOST))


def test_the_kinds_used_last_are_kept_and_the_device_is_waited_for_before_others_go(few):
    machine, forgotten = Machine(), []
    known = Calls(machine, forgotten.extend, MOST)
    for i in range(8):
        known[i] = f"call {i}"
    assert known.get(0) == "call 0" and known.get(9) is None and not machine.drained
    known[8] = "call 8"
    assert machine.drained == 1 and len(known) == 6
    assert forgotten == ["call 1", "call 2", "call 3"]
    assert [known.get(i) for i in (0, 1, 4, 8)] == ["call 0", None, "call 4", "call 8"]


def test_what_a_recording_was_made_with_stays_as_long_as_it(few):
    """Both what it found and what it made. While it is made nothing is waited for."""
    machine, forgotten = Machine(), []
    known = Calls(machine, forgotten.extend, MOST)
    for i in range(8):
        known[i] = Known()
    machine.recording = recording = FakeRecording()
    recorded = [known.get(2)]
    for i in ("first", "second"):
        known[i] = Known()
        recorded.append(known.get(i))
    assert not machine.drained
    machine.recording = None
    for i in range(100, 200):
        known[i] = Known()
    assert [known.get(i) for i in (2, "first", "second")] == recorded
    assert not any(one in forgotten for one in recorded)
    assert len(known) <= MOST + len(recorded)
    del recording
    assert len(known) <= MOST


def test_ranks_that_make_the_same_calls_forget_the_same(few):
    def main(world):
        for i in range(50):
            key = i * 7 % 13
            if world.calls.get(key) is None:
                world.calls[key] = key
        return [key for key in range(13) if world.calls.get(key) is not None]

    kept, other = run_ranks(main, 2)
    assert kept == other and len(kept) <= 8


def test_error_words_of_calls_that_are_forgotten_are_looked_at_no_more(few):
    """Unless one says something."""

    def main(world):
        words = []
        for i in range(8):
            word = world.calls[i] = world.error_word(lambda said, i=i: ValueError(f"{i}: {said}"))
            words.append(word)
        words[1].fill_(5)
        world.calls[8] = object()
        assert len(world._errors) == 6  # 3 .. 7, and 1
        with pytest.raises(ValueError, match="1: 5"):
            world.check()
        words[7].fill_(6)
        with pytest.raises(ValueError, match="7: 6"):
            world.check()
        return "fine"

    assert run_ranks(main, 1) == ["fine"]


def test_names_in_the_call_log_are_bounded(monkeypatch):
    monkeypatch.setattr(call_log, "MOST_TEXTS", 16)

    def main(world):
        for i in range(100):
            assert world.operator_call(f"x m={i}") == i
        return len(world._log._texts)

    assert all(count <= 16 for count in run_ranks(main, 2))


# ---- scratch memory


@pytest.mark.slow
def test_calls_of_all_sizes_share_scratch_memory():
    def main(world):
        first = world.scratch("p", 1000)
        assert first.dtype == torch.uint8 and first.numel() >= 1000
        assert world.scratch("p", 10).data_ptr() == first.data_ptr()
        assert world.scratch("q", 10).data_ptr() != first.data_ptr()
        gone = weakref.ref(first)
        del first
        larger = world.scratch("p", 5000)
        gc.collect()
        assert larger.numel() >= 5000 and gone() is None
        return "fine"

    assert run_ranks(main, 1) == ["fine"]


@pytest.mark.slow
def test_scratch_memory_of_a_recording_stays_and_is_not_made_by_one():
    def main(world):
        drained = []
        world.backend.drain = lambda: drained.append(0)
        first = world.scratch("p", 1000)
        with world.record():
            assert world.scratch("p", 500).data_ptr() == first.data_ptr()
            # The recording has it to itself: it is its own memory.
            own = world.scratch("p", 2000)
            assert own.numel() >= 2000 and world.scratch("p", 2000) is not own
        assert not drained
        kept, recorded = weakref.ref(first), weakref.ref(own)
        del first, own
        world.scratch("p", 3000)
        assert len(drained) == 1, "calls may still use what is dropped"
        gc.collect()
        return kept() is not None, recorded() is None

    assert run_ranks(main, 1) == [(True, True)]
