"""What the backend for NVIDIA GPUs does of which no GPU is needed to be sure."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from weft.language import triton_api
from weft.runtime.backends.cuda import CudaBackend


def test_no_stream_waits_for_a_token_of_launches_that_are_left_out(monkeypatch):
    queued: list[tuple] = []
    backend = CudaBackend.__new__(CudaBackend)
    backend._driver = SimpleNamespace(memory_operations=lambda *given: queued.append(given))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    word = torch.zeros(1, dtype=torch.int64)
    with triton_api.held_launches():
        backend.take_token(word)
    assert not queued
    backend.take_token(word)
    ((stream, count, _, flags),) = queued
    assert (stream, count, flags) == (7, 2, 0)
