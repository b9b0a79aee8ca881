"""Copies by TMA, between tensors that descriptors describe and shared memory.

They are checked as asynchronous operations are (shared_access.py). A barrier counts a load's bytes;
a store has read its shared memory when it is waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from weft.emulator.plain_access import Descriptor
from weft.emulator.shared_access import AsyncRead, AsyncWrite, Completion, SharedAccess
from weft.emulator.shared_memory import View

COPY = "a copy by TMA to or from its shared memory"


class BulkCopies(SharedAccess):
    _stores: deque[int] | tuple[()] = ()

    def begin_block(self) -> None:
        super().begin_block()
        self._stores = deque()

    def tma_load(self, descriptor: Descriptor, where, view, barrier_view, predicate, loc):
        if predicate:
            self._load(view, barrier_view, loc, descriptor, *self.block(descriptor, where))

    def tma_gather(self, descriptor: Descriptor, rows, column, view, barrier_view, predicate, loc):
        """Rows that are named each, from one column on."""
        if predicate:
            places = self._rows(descriptor, rows, column, view)
            self._load(view, barrier_view, loc, descriptor, *places)

    def _load(self, view: View, barrier_view: View, loc, descriptor, pointers, mask) -> None:
        barrier = self._barrier(barrier_view, loc, modifies=True)
        agent, segment = self._begun(loc, view.memory)
        shape = np.shape(pointers) or descriptor.block
        values = self.load(
            pointers, mask, descriptor.outside, descriptor.dtype, shape, loc, segment=segment
        )
        self._touch(AsyncWrite, view, loc, segment)
        self.under_way[segment] = COPY, view.memory

        def arrive() -> None:
            view.put(values.reshape(view.shape))
            barrier.arriving.known.learn(agent, 0)
            self._arrive(barrier, barrier_view, 0, loc, view.data.nbytes)

        Completion(self, arrive)

    def _rows(self, descriptor: Descriptor, rows, column, view: View) -> tuple[Any, Any]:
        """Pointers to the elements of these rows, and which of them are in the tensor."""
        rows = np.asarray(rows, np.int64)[:, None]
        columns = int(column) + np.arange(view.shape[-1], dtype=np.int64)[None, :]
        (num_rows, num_columns), (down, across) = descriptor.sizes, descriptor.strides
        inside = (rows >= 0) & (rows < num_rows) & (columns >= 0) & (columns < num_columns)
        at = (rows * down + columns * across) * descriptor.dtype.itemsize
        return descriptor.base + at, inside

    def tma_store(self, descriptor: Descriptor, where, view, loc):
        self._store(view, loc, lambda values: self.descriptor_store(descriptor, where, values, loc))

    def tma_reduce(self, kind, descriptor: Descriptor, where, view, loc):
        self._store(
            view, loc, lambda values: self.descriptor_reduce(kind, descriptor, where, values, loc)
        )

    def tma_scatter(self, descriptor: Descriptor, rows, column, view, loc):
        pointers, inside = self._rows(descriptor, rows, column, view)
        segment = self.async_segment(loc)

        def write(values: np.ndarray) -> None:
            self.store(pointers, values, inside, descriptor.dtype, view.shape, loc, segment)

        self._store(view, loc, write)

    def _store(self, view: View, loc, write: Callable[[np.ndarray], None]) -> None:
        agent, segment = self._begun(loc, view.memory)
        self._touch(AsyncRead, view, loc, segment)
        write(view.values.copy())
        self._stores.append(agent)  # type: ignore[union-attr]
        self.under_way[segment] = COPY, view.memory

    def store_wait(self, pending, loc):
        """The stores have read: that others see what they have written, `complete_stores` says."""
        while len(self._stores) > pending:
            self._know(self._stores.popleft())  # type: ignore[union-attr]

    def complete_stores(self) -> None:
        super().complete_stores()
        self.store_wait(0, 0)
