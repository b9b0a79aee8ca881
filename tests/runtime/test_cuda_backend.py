"""What the backend for NVIDIA GPUs does of which no GPU is needed to be sure."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from weft.language import triton_api
from weft.runtime.backends.cuda import CudaBackend, CudaRecording


def test_no_stream_waits_for_a_token_of_launches_that_are_left_out(monkeypatch):
    queued: list[tuple] = []
    backend = CudaBackend.__new__(CudaBackend)
    backend._driver = SimpleNamespace(memory_operations=lambda *given: queued.append(given))
    backend._recording = None
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    word = torch.zeros(1, dtype=torch.int64)
    with triton_api.held_launches():
        backend.take_token(word)
    assert not queued
    backend.take_token(word)
    ((stream, count, _, flags),) = queued
    assert (stream, count, flags) == (7, 2, 0)


def test_a_recording_is_of_the_allocations_that_its_copies_name(monkeypatch):
    """Not of the heap's, which stay; what has no number is taken for another one each time."""
    heap, mine, other = (torch.zeros(64) for _ in range(3))
    numbers = {mine.data_ptr(): 5, other.data_ptr(): 0}
    backend = CudaBackend.__new__(CudaBackend)
    backend._heaps = [None, heap]
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    backend._recording = recording = CudaRecording(lambda address: numbers[address])
    backend.copy(heap[8:16], mine[:8])
    assert recording.copied == {5: mine.data_ptr()} and recording.is_current
    numbers[mine.data_ptr()] = 6
    assert not recording.is_current
    numbers[mine.data_ptr()] = 5
    backend.copy(other, heap)
    assert not recording.is_current
    capturing[0] = False
    for queue in (backend.copy, backend.copy_word):
        with pytest.raises(RuntimeError, match="on a stream that is not recorded"):
            queue(other, heap)
