"""The symmetric heap's bookkeeping, and that ranks which disagree are told so."""

import re

import pytest
import torch
from fake_machine import FakeBackend, run_ranks
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.base.errors import (
    AllocationOrderError,
    DtypeError,
    FarPointerError,
    NotSymmetricError,
    OutOfMemoryError,
    PeerError,
    UsageError,
)
from weft.runtime.heap import (
    ALIGNMENT_BYTES,
    GRANULE_BYTES,
    SIGNALS_PART,
    HeapAllocator,
    Wanted,
)


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(0, 3000), st.booleans(), st.booleans()), min_size=8, max_size=40)
)
def test_blocks_never_overlap_and_signals_are_never_reused(steps):
    heap = HeapAllocator(8 << 10)  # so small that the two ends meet
    live, signal_words = [], set()
    for number, (nbytes, is_signal, drop) in enumerate(steps):
        if drop and live:
            heap.free(live.pop(number % len(live)).offset)
            continue
        try:
            block = heap.allocate(nbytes, f"b{number}", is_signal=is_signal)
        except OutOfMemoryError:
            continue
        assert block.offset % ALIGNMENT_BYTES == 0 and block.end <= heap.capacity_bytes
        assert all(block.end <= b.offset or b.end <= block.offset for b in live)
        words = set(range(block.offset, block.end, ALIGNMENT_BYTES))
        assert not words & signal_words, "bytes that were a signal once were given out again"
        if is_signal:
            signal_words |= words
        live.append(block)
    assert sorted(live) == list(heap.blocks)


def test_freed_data_is_merged_and_used_again():
    heap = HeapAllocator(4096)
    blocks = [heap.allocate(1024, name) for name in "abc"]
    heap.free(blocks[0].offset)
    heap.free(blocks[1].offset)
    assert heap.allocate(2048, "ab").offset == 0
    with pytest.raises(OutOfMemoryError, match=r"big needs 4096 bytes.*1024 are free.*heap_bytes"):
        heap.allocate(4096, "big")


def test_data_leaves_room_for_signals():
    """Its bytes are no signals' later, so what it fills would be lost to them for good."""
    heap = HeapAllocator(64 << 10)
    sizes = iter(range(64 << 10, 0, -ALIGNMENT_BYTES))
    data = next(size for size in sizes if heap.has_room([Wanted(size, "x")]))
    heap.free(heap.allocate(data, "x").offset)
    words = (64 << 10) // SIGNALS_PART
    heap.allocate(words, "words", is_signal=True)
    assert data == (64 << 10) - words
    with pytest.raises(OutOfMemoryError, match=f"word needs 256 .*only {data} are free"):
        heap.allocate(8, "word", is_signal=True)
    assert heap.allocate(data, "again").offset == 0


def test_what_has_room_can_be_allocated_and_asking_changes_nothing():
    heap = HeapAllocator(8 << 10)
    heap.allocate(3000, "x")
    wanted = [Wanted(1000, "a"), Wanted(8, "b", is_signal=True), Wanted(3000, "c")]
    before = (heap.blocks, heap.free_bytes)
    assert heap.has_room(wanted) and not heap.has_room([*wanted, Wanted(3000, "d")])
    assert (heap.blocks, heap.free_bytes) == before
    for nbytes, name, is_signal in wanted:
        heap.allocate(nbytes, name, is_signal=is_signal)


def test_freeing_inside_a_block_names_it():
    heap = HeapAllocator(4096)
    heap.allocate(1024, "x")
    with pytest.raises(UsageError, match="inside 'x'"):
        heap.free(256)
    heap.free(0)
    with pytest.raises(UsageError, match="nothing was allocated at offset 0"):
        heap.free(0)


def test_what_is_freed_is_looked_at_before_ranks_agree():
    """A rank that frees a view learns it at once, and nothing has changed."""

    def main(world):
        x, empty = world.empty((4, 8), torch.float32, name="x"), world.empty((0, 8), torch.int32)
        steps, free = world._sequence, world.heap_free_bytes
        for view, said in [
            (x[1:], "shape (3, 8) is a view of bytes 32 to 128 of 'x', which has 128"),
            (x[:2], "shape (2, 8) is a view of bytes 0 to 64 of 'x', which has 128"),
            ("x", "world.free('x'): pass the tensor that is to be freed"),
        ]:
            with pytest.raises(UsageError, match=re.escape(said)):
                world.free(view)
        with pytest.raises(NotSymmetricError):
            world.free(torch.zeros(4))
        with world.record(), pytest.raises(UsageError, match="'x' cannot be freed while a record"):
            world.free(x)
        assert (world._sequence, world.heap_free_bytes) == (steps, free)
        assert world.peer(empty, 0).shape == (0, 8)
        world.free(x.view(8, 4).t())
        world.free(empty)
        assert world._sequence == steps + 2
        assert world.heap_free_bytes == free + 512
        with pytest.raises(NotSymmetricError):
            world.free(x)
        return "fine"

    assert run_ranks(main, 2) == ["fine"] * 2


def test_an_object_has_one_offset_on_every_rank():
    def main(world):
        x = world.empty((3, 5), torch.bfloat16, name="x")
        flags = world.signals(4)
        assert x.shape == (3, 5) and flags.dtype == torch.int32 and not flags.any()
        x.fill_(world.rank)
        world._agree("written")
        for peer in range(world.num_ranks):
            assert (world.peer(x, peer) == peer).all()
            assert (world.peer(x[1:, ::2], peer) == peer).all()
        assert world.pointers(x)[world.rank] == x.data_ptr()
        world.free(x)
        y = world.zeros((3, 5), torch.bfloat16)
        assert y.data_ptr() == x.data_ptr(), "freed data is used again"
        with pytest.raises(PeerError, match="rank 3 is outside 0 .. 2"):
            world.peer(y, 3)
        with pytest.raises(NotSymmetricError, match=r"world.empty\(\)"):
            world.peer(torch.zeros(3), 0)
        with pytest.raises(DtypeError, match="int32 or int64"):
            world.signals(1, torch.float32)
        with pytest.raises(UsageError, match="first how many words"):
            world.signals("ready", 1)
        with pytest.raises(DtypeError, match="a symmetric tensor of 'float32': pass a dtype"):
            world.empty((4,), "float32")
        world.close()
        return "fine"

    assert run_ranks(main, 3) == ["fine"] * 3


@pytest.mark.parametrize("kind", ["shape", "dtype", "kind", "name"])
def test_ranks_that_allocate_differently_get_an_error(kind):
    def main(world):
        odd = world.rank == 1
        if kind == "kind" and odd:
            return world.signals(8)
        shape = (9,) if kind == "shape" and odd else (8,)
        dtype = torch.int64 if kind == "dtype" and odd else torch.int32
        return world.empty(shape, dtype, name="y" if kind == "name" and odd else "x")

    errors = run_ranks(main, 2)
    assert all(isinstance(error, AllocationOrderError) for error in errors), errors
    assert "rank 0 has tensor 'x'" in str(errors[0]) and "rank 1 has" in str(errors[0])


def test_far_peers_cannot_be_addressed():
    def main(world):
        x = world.empty(4, torch.int32)
        assert world.peer(x, world.rank ^ 1).data_ptr() != x.data_ptr()
        far = (world.rank + 2) % 4
        assert world.pointers(x)[far] == 0
        with pytest.raises(FarPointerError, match=r"rank \d \(node \d\).*put, get or put_signal"):
            world.peer(x, far)
        return world.table[16 + 4 :].tolist()

    tables = run_ranks(main, 4, nodes=(0, 0, 1, 1))
    assert tables == [[0, 0, 1, 1, 10, 11, 12, 13]] * 4


# ---- heaps that grow


def test_a_heap_that_grows_lays_nothing_across_its_segments():
    heap = HeapAllocator(1 << 20, limit_bytes=16 << 20)
    small = heap.allocate(1 << 19, "small")
    wanted = [Wanted(3 << 20, "large"), Wanted(4096, "words", is_signal=True)]
    assert not heap.has_room(wanted)
    offset, nbytes = heap.next_segment(wanted)
    assert offset % GRANULE_BYTES == 0 and offset >= heap.end + GRANULE_BYTES
    assert nbytes % GRANULE_BYTES == 0 and nbytes >= 3 << 20
    assert offset + nbytes <= heap.span_bytes
    heap.grow(offset, nbytes)
    assert heap.has_room(wanted) and heap.capacity_bytes == (1 << 20) + nbytes
    large = heap.allocate(3 << 20, "large")
    assert offset <= large.offset and large.end <= offset + nbytes
    assert heap.allocate(1024, "fits below").offset < 1 << 20, "the first segment is used on"
    heap.free(large.offset)
    assert heap.find(large.offset) is None and heap.find(small.offset) is small
    assert heap.allocate(3 << 20, "again").offset == large.offset


@pytest.mark.parametrize("nbytes", [1, 100_000, (1 << 20) + 1, 5 << 20, 16 << 20])
@pytest.mark.parametrize("is_signal", [False, True])
def test_a_segment_has_room_for_what_it_was_made_for(nbytes, is_signal):
    heap = HeapAllocator(1 << 20, limit_bytes=64 << 20)
    wanted = [Wanted(nbytes, "x", is_signal), Wanted(nbytes, "y"), Wanted(8, "word", True)]
    heap.grow(*heap.next_segment(wanted))
    assert heap.has_room(wanted)


def test_a_heap_grows_up_to_its_limit():
    heap = HeapAllocator(1 << 20, limit_bytes=7 << 20)
    heap.grow(*heap.next_segment([Wanted(3 << 20, "x")]))
    assert heap.next_segment([Wanted(3 << 20, "x")]) is None
    offset, nbytes = heap.next_segment([Wanted(1 << 20, "x")])
    heap.grow(offset, nbytes)
    assert heap.capacity_bytes <= 7 << 20 and heap.end <= heap.span_bytes
    assert HeapAllocator(1 << 20).next_segment([Wanted(1, "x")]) is None


@pytest.mark.parametrize("refuses", [None, 1])
def test_all_ranks_grow_or_none(refuses, monkeypatch):
    """A GPU without memory left is one rank's."""
    monkeypatch.setattr(
        FakeBackend, "grow_heap", lambda self, offset, nbytes: self.seats.rank != refuses
    )

    def main(world):
        try:
            return world.offset(world.empty((3 << 20,), torch.uint8))
        except OutOfMemoryError:
            return world.offset(world.empty((1 << 10,), torch.uint8))

    offsets = run_ranks(main, 2, heap_bytes=1 << 20, heap_limit=8 << 20)
    assert offsets[0] == offsets[1] and (offsets[0] > 1 << 20) == (refuses is None), offsets
