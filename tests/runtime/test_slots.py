"""Slots: who gets which memory, when a workspace grows, and what may not be asked."""

import pytest
import torch
from fake_machine import run_ranks

from weft.base.errors import (
    AllocationOrderError,
    DtypeError,
    OutOfMemoryError,
    ShapeError,
    UsageError,
)
from weft.language.wait_report import WaitReport
from weft.runtime.heap import HeapAllocator, Wanted


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


def test_ranks_meet_once_for_all_that_a_request_takes():
    def main(world):
        steps = world._sequence
        ask(world, 16)
        first = world._sequence - steps
        ask(world, 16)
        ask(world, 64)
        return first, world._sequence - steps

    assert run_ranks(main, 2) == [(1, 2)] * 2


def test_the_first_allocation_that_ranks_do_not_share_is_named():
    def main(world):
        signals = {"rows_ready": (4 + world.rank, torch.int64)}
        world.workspace("ag_gemm", {"gathered": ((16,), torch.int64)}, signals)

    for error in run_ranks(main, 2):
        assert isinstance(error, AllocationOrderError)
        assert "signals 'ag_gemm[0].rows_ready' torch.int64[4]" in str(error)
        assert "signals 'ag_gemm[0].rows_ready' torch.int64[5]" in str(error)


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
        assert before.is_outgrown and not after.is_outgrown
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


# ---- what is outgrown

ROW_BYTES = 8 * 2


def fill(world, part, *, till=8):
    """Sizes that double call by call; the last takes this part of the heap."""
    last = int(part * world._heap.capacity_bytes) // ROW_BYTES // world.settings.slots
    for halvings in reversed(range(till)):
        assert ask(world, last >> halvings).gathered.shape[0] == last >> halvings
    return last


def test_outgrown_slots_make_room_where_the_heap_has_none():
    """All sizes together are more than the heap."""

    def main(world):
        last = fill(world, 0.6)
        assert not world._workspaces["ag"]._outgrown
        small, _ = ask(world, 4), ask(world, 4)
        assert ask(world, last).gathered.data_ptr() == small.gathered.data_ptr()
        del small, _
        # Also where a user's tensor needs it.
        kept = world.heap_free_bytes
        fill(world, 0.7, till=2)
        assert world.heap_free_bytes < kept
        return [(block.name, block.offset) for block in world._heap.blocks]

    blocks = run_ranks(main, 3)
    assert isinstance(blocks[0], list), blocks[0]
    assert blocks[0] == blocks[1] == blocks[2]


def test_outgrown_slots_make_room_for_tensors():
    def main(world):
        fill(world, 0.45)
        assert world._workspaces["ag"]._outgrown
        size = int(0.35 * world._heap.capacity_bytes)
        assert not world._heap.has_room([Wanted(size, "x")])
        assert world.empty((size,), torch.uint8).numel() == size
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


def test_a_slot_stays_as_long_as_a_recording_that_was_made_with_it():
    def main(world):
        ask(world, 8)
        with world.record() as recording:
            recorded = ask(world, 8)
        recorded.gathered.fill_(7)
        address = recorded.gathered.data_ptr()
        there = world._heaps[world.rank][address - world._base :][: 8 * ROW_BYTES]
        before = there.tolist()
        del recorded
        fill(world, 0.6)
        (outgrown,) = world._workspaces["ag"]._outgrown.values()
        assert address in [one.buffers["gathered"].data_ptr() for one in outgrown]
        for block in world._heap.blocks:
            if block.nbytes > 8 * ROW_BYTES:
                world._view(world.rank, block).fill_(1)
        assert there.tolist() == before, "nothing else was given its memory"
        del recording
        fill(world, 0.8, till=1)
        assert not world._workspaces["ag"]._outgrown
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


@pytest.mark.parametrize("holds", ["slot", "tensor"])
def test_a_slot_that_one_rank_holds_stays_on_all(holds):
    def main(world):
        kept = ask(world, 8) if world.rank == 1 else ask(world, 8) and None
        kept = kept.gathered if kept and holds == "tensor" else kept
        fill(world, 0.6)
        offsets = [
            storage.buffers["gathered"].data_ptr() - world._base
            for storages in world._workspaces["ag"]._outgrown.values()
            for storage in storages
        ]
        assert len(offsets) == world.settings.slots
        # It is freed when nobody holds it any more, and its room is needed.
        del kept
        fill(world, 0.8, till=1)
        assert not world._workspaces["ag"]._outgrown
        return offsets

    offsets = run_ranks(main, 2)
    assert isinstance(offsets[0], list), offsets
    assert offsets[0] == offsets[1]


def test_words_of_freed_slots_are_never_signals_again(monkeypatch):
    """Nor does what is allocated for data reach into words of slots that are still used."""
    words, allocate = {}, HeapAllocator.allocate

    def allocate_and_look(self, nbytes, name, *, is_signal=False):
        block = allocate(self, nbytes, name, is_signal=is_signal)
        if is_signal and (known := words.get(id(self))) is not None:
            assert not any(block.offset < end and first < block.end for first, end in known)
            known.append((block.offset, block.end))
        return block

    monkeypatch.setattr(HeapAllocator, "allocate", allocate_and_look)

    def main(world):
        words[id(world._heap)] = known = []
        last = fill(world, 0.5)
        for n in (8, 64, 512):  # more words, of as many rows
            assert ask(world, last, n).rows_ready.tolist() == [0] * n
        live = [block for block in world._heap.blocks if block.is_signal]
        assert len(live) < len(known), "some were freed"
        lowest = min(first for first, _ in known)
        assert all(block.end <= lowest for block in world._heap.blocks if not block.is_signal)
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


def test_after_a_call_that_is_too_large_smaller_ones_go_on():
    def main(world):
        fill(world, 0.5)
        before, _ = ask(world, 16).gathered.data_ptr(), ask(world, 16)
        free_bytes = world.heap_free_bytes
        for _ in range(3):
            with pytest.raises(OutOfMemoryError, match="ag.0..gathered needs"):
                ask(world, world._heap.capacity_bytes)
            assert ask(world, 16).gathered.data_ptr() == before, "what they had"
            ask(world, 16)
        assert world.heap_free_bytes == free_bytes
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


def test_a_full_heap_says_what_holds_it_and_what_can_be_done():
    def main(world):
        world.zeros((1000, 100), torch.uint8, name="kv_cache")
        world.workspace("gemm_rs", {"partials": ((50_000,), torch.uint8)})
        with world.record() as recording:
            world.workspace("gemm_rs", {"partials": ((50_000,), torch.uint8)})
        world.workspace("gemm_rs", {"partials": ((60_000,), torch.uint8)})
        world.free(world.signals(100))
        held = ask(world, 2000)
        ask(world, 2001)
        for i in range(12):
            world.empty((100,), torch.uint8, name=f"small {i}")
        with pytest.raises(OutOfMemoryError) as found:
            ask(world, 40_000)
        assert held.index in (0, 1) and recording is not None
        return str(found.value)

    text, other = run_ranks(main, 2)
    assert text == other
    lines = text.splitlines()
    assert "ag[0].gathered needs 640000 bytes, but of 1048576 bytes only" in lines[0]
    assert "it is one of 10 parts of " in lines[0]
    holders = [line.split(None, 1)[1] for line in lines if line.startswith("  ")]
    sizes = [int(line.split()[0].replace(",", "")) for line in lines if line.startswith("  ")]
    assert sizes[:-1] == sorted(sizes[:-1], reverse=True) and len(holders) == 9
    assert "workspace 'gemm_rs', 2 in use" in holders
    (recorded,) = [one for one in holders if "recorded" in one]
    assert recorded.startswith("workspace 'gemm_rs', 2 outgrown, kept for what was recorded at ")
    assert "test_slots.py:" in recorded
    assert "workspace 'ag', 2 outgrown, kept because a Slot, or a tensor of one, is still held" in (
        holders
    )
    assert "tensor 'kv_cache'" in holders
    assert "words of freed signals, which are never used again" in holders
    assert holders[-1].endswith(" others")
    total = 1 << 20
    free = int(lines[0].split("bytes only ")[1].split()[0])
    assert sum(sizes) == total - free
    assert lines[1].startswith(f"What holds {total - free:,} bytes")
    assert "heap_bytes" in lines[-1] and "world.free()" in lines[-1]


TWO_CHUNKS = (("from rank", 4), ("chunk", 2))


def test_the_table_of_waits_says_what_signals_stand_for():
    """By the call that took the slot last: one with other chunks has other names."""

    def main(world):
        signals = {"ready": (16, torch.int64)}
        kinds = [{"ready": TWO_CHUNKS}, {"ready": TWO_CHUNKS[:1]}]
        slots = []
        texts = []
        for turn in (2, 3):
            axes = kinds[turn % 2]
            slots.append(world.workspace("program gather", {}, signals, num_slots=1, axes=axes))
            for part in (slots[-1].ready, slots[-1].arg.slot_free):
                address = world.peer(part, 1)[3:].data_ptr() if part.numel() > 3 else 0
                if address:
                    report = WaitReport(1, "gemm", 77, (5, 0, 0), address, 3, 2, True)
                    texts.append(world._name_of(report))
        return texts

    first, *_, last = [one for one in run_ranks(main, 4)[0] if "ready" in one]
    assert (first, last) == ("gather[0].ready[chunk 1 from rank 1]", "gather[0].ready[from rank 3]")


def test_memory_says_who_holds_what_as_a_record_and_as_a_table():
    def main(world):
        world.zeros((1000, 100), torch.uint8, name="kv_cache")
        held = ask(world, 16)
        ask(world, 64)
        world.free(world.signals(100))
        world.scratch("between", 5000)
        found = world.memory()
        assert sum(found.by_kind().values()) + found.free_bytes == found.heap_bytes == 1 << 20
        assert set(found.by_kind()) == {"slots", "outgrown", "tensor", "freed signals"}
        assert [one.nbytes for one in found.held] == sorted(
            (one.nbytes for one in found.held), reverse=True
        )
        assert 0 < found.largest_free_bytes <= found.free_bytes and found.scratch_bytes == 5000
        assert found.calls == (0, 1024) and found.recordings == (0, 1024) and held.index in (0, 1)
        return str(found)

    text, other = run_ranks(main, 2)
    assert text == other
    for said in ("tensor 'kv_cache'", "workspace 'ag', 2 in use", "0 of 1024 kinds", "scratch"):
        assert said in text, text
