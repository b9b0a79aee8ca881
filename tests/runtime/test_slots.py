"""Slots: who gets which memory, when a workspace grows, and what may not be asked."""

import pytest
import torch
from fake_machine import run_ranks

from weft.base.errors import DtypeError, ShapeError, UsageError


def ask(world, m, n=4):
    return world.workspace(
        "ag", {"gathered": ((m, 8), torch.bfloat16)}, {"rows_ready": (n, torch.int64)}
    )


def test_slots_alternate_and_are_the_same_memory_again():
    def main(world):
        first, second, third = (ask(world, 16) for _ in range(3))
        assert first.gathered.data_ptr() != second.gathered.data_ptr()
        assert first is third and first.arg is third.arg
        assert first.gathered.shape == (16, 8) and first.rows_ready.tolist() == [0] * 4
        assert first.arg.epoch.item() == 0 and first.arg.slot_free.shape == (world.num_ranks,)
        return first.gathered.data_ptr() - world._base

    offsets = run_ranks(main, 2)
    assert offsets[0] == offsets[1]


def test_how_many_there_are_is_a_setting(monkeypatch):
    def main(world):
        return ask(world, 16).gathered.data_ptr() == ask(world, 16).gathered.data_ptr()

    monkeypatch.setenv("WEFT_SLOTS", "1")
    assert run_ranks(main, 2) == [True, True]
    monkeypatch.setenv("WEFT_SLOTS", "0")
    (error,) = run_ranks(main, 1)
    assert "WEFT_SLOTS is 0; it must be 1 or more" in str(error)


def test_a_smaller_call_uses_the_same_slot_and_its_epoch():
    def main(world):
        large, _ = ask(world, 16), ask(world, 16)
        large.arg.epoch.fill_(5)
        small = ask(world, 3, n=2)
        assert small.gathered.data_ptr() == large.gathered.data_ptr()
        assert small.gathered.shape == (3, 8) and small.rows_ready.numel() == 2
        assert small.arg.epoch.item() == 5, "the epoch belongs to the slot, not to the shape"
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


def test_words_of_another_size_are_other_words():
    def main(world):
        for _ in range(2):
            for dtype in (torch.int32, torch.int64):
                slot = world.workspace("w", {}, {"ready": (4, dtype)})
                assert slot.ready.dtype == dtype and slot.ready.tolist() == [0] * 4
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


def test_growing_keeps_what_a_recording_may_still_use():
    def main(world):
        before, _ = ask(world, 4), ask(world, 4)
        before.gathered.fill_(7)
        after, _ = ask(world, 4000), ask(world, 4000)
        assert after.gathered.shape == (4000, 8)
        assert (before.gathered == 7).all()
        blocks = {block.offset for block in world._heap.blocks}
        assert before.gathered.data_ptr() - world._base in blocks, "outgrown slots stay allocated"
        assert ask(world, 4).gathered.data_ptr() == after.gathered.data_ptr(), "it never shrinks"
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


def test_sizes_that_rise_call_by_call_leave_little_behind():
    """64 rows more each time: 64 KB at last, 32 times as much if each size had its own."""

    def main(world):
        before, slots = world.heap_free_bytes, world.settings.slots
        for m in range(64, 4097, 64):
            assert ask(world, m).gathered.shape[0] == m
        used, last = before - world.heap_free_bytes, slots * 4096 * 8 * 2
        assert last <= used < 5 * last
        return used

    assert len(set(run_ranks(main, 2))) == 1


def test_where_the_heap_is_full_a_workspace_grows_by_what_it_must():
    def main(world):
        slots, row = world.settings.slots, 8 * 2
        rows = world.heap_free_bytes // slots // row
        ask(world, rows // 4)
        held = ask(world, rows // 2)
        assert held.gathered.shape[0] == rows // 2
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


def test_a_recording_cannot_grow_a_workspace():
    def main(world):
        ask(world, 4)
        with world.record():
            ask(world, 4)
            with pytest.raises(UsageError, match="run the call once with these sizes before"):
                ask(world, 4000)
        return "fine"

    assert run_ranks(main, 1) == ["fine"]


@pytest.mark.parametrize(
    ("buffers", "signals", "said"),
    [
        (
            {"x": ((2.5, 4), torch.int32)},
            {},
            r"'x': dimension 0 of the shape \(2.5, 4\) is 2.5",
        ),
        ({"x": ((4, -1), torch.int32)}, {}, r"'x': dimension 1 of the shape \(4, -1\) is -1; it"),
        ({"x": ([4, 4], torch.int32)}, {}, r"'x' has the shape \[4, 4\]; pass a tuple"),
        ({"x": (4, torch.int32)}, {}, r"'x' has the shape 4; pass a tuple"),
        ({"x": ((4,), "int32")}, {}, r"'x' has the dtype 'int32'; pass one as torch.int64 is"),
        ({"x": torch.int32}, {}, r"'x' is torch.int32; it takes a pair, e.g. \(\(4, 8\), torch"),
        ({}, {"n": (2.5, torch.int64)}, "'n', its number of words, is 2.5, not a whole number"),
        ({}, {"n": (-1, torch.int64)}, "'n', its number of words, is -1; it must be 0 or more"),
        ({}, {"n": 4}, r"'n' is 4; it takes a pair, e.g. \(4, torch.int64\)"),
        ({}, {"n": (4, torch.float32)}, "signals are int32 or int64 words"),
    ],
)
def test_requests_that_name_no_memory_are_refused_whatever_is_there(buffers, signals, said):
    def main(world):
        free = world.heap_free_bytes
        for key in ("fresh", "there"):
            if key == "there":
                world.workspace(key, {"x": ((64,), torch.int64)}, {"n": (64, torch.int64)})
                free = world.heap_free_bytes
            with pytest.raises((ShapeError, DtypeError, UsageError), match=said):
                world.workspace(key, buffers, signals)
            if "float32" not in str(signals):
                assert world.heap_free_bytes == free
        for count, why in ((0, "is 0; it must be 1"), (1.5, "is 1.5, not a whole")):
            with pytest.raises(UsageError, match=f"'w': num_slots {why}"):
                world.workspace("w", num_slots=count)
        return "fine"

    assert run_ranks(main, 1) == ["fine"]


def test_names_that_cannot_be_attributes_are_refused():
    def main(world):
        with pytest.raises(UsageError, match="part named 'arg'"):
            world.workspace("w", {"arg": ((4,), torch.int32)})
        with pytest.raises(UsageError, match="'x' as a buffer and as a signal"):
            world.workspace("w", {"x": ((4,), torch.int32)}, {"x": (1, torch.int64)})
        with pytest.raises(AttributeError, match="has no 'typo'; it was asked for gathered, rows"):
            _ = ask(world, 4).typo
        return "fine"

    assert run_ranks(main, 1) == ["fine"]
