"""Ordinary memory of one rank that calls use one after the other, whatever their sizes are."""

from __future__ import annotations

import torch

from weft.runtime.backend import Backend
from weft.runtime.recorded import Recorded


class Scratch:
    """By key, one piece of memory: as much as was asked for at most.

    What a recording of the user's was made with stays as long as it does: its replays write there.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._latest: dict[str, torch.Tensor] = {}
        self._recorded = Recorded(backend)

    def take(self, key: str, nbytes: int) -> torch.Tensor:
        """uint8, `nbytes` or more. What earlier calls left there means nothing; they are queued on
        the current stream, or it has waited for theirs."""
        memory, is_recording = self._latest.get(key), self._backend.is_recording()
        if memory is None or memory.numel() < nbytes:
            if not is_recording and memory is not None:
                self._backend.drain()  # calls on any stream may still use it
            memory = torch.empty(nbytes, dtype=torch.uint8, device=self._backend.device)
            if is_recording:
                return memory  # of the recording's own memory
            self._latest[key] = memory
        if is_recording:
            self._recorded.keep(memory.data_ptr(), memory)
        return memory

    @property
    def num_bytes(self) -> int:
        kept = dict(self._recorded.items())
        kept.update((one.data_ptr(), one) for one in self._latest.values())
        return sum(one.numel() for one in kept.values())

    def clear(self) -> None:
        self._latest.clear()
        self._recorded.clear()
