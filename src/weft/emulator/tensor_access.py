"""What a program of sm_100 does with its tensor memory and its tensor cores.

What a partition asks of tensor cores (products, copies of scales) is done in the order in which it
asked, by an agent of its own; it goes on meanwhile. A commit arrives at its barrier when all that
was asked before it is done, and whoever waits there then knows of it, and of what the asker knew.
Threads read and write tensor memory themselves, and have done so when they go on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from weft.base.errors import UnsupportedError
from weft.emulator import numerics
from weft.emulator.accesses import Read, Write
from weft.emulator.bulk_copies import BulkCopies
from weft.emulator.shared_access import AsyncMoved, AsyncRead, Completion, product
from weft.emulator.shared_memory import Past, View
from weft.emulator.tensor_memory import (
    MatrixLayout,
    ScalesLayout,
    TensorMemory,
    TensorView,
    num_columns,
)

E8M0_BIAS = 127


class _InOrder:
    """An access of tensor memory by tensor cores: behind all that they were asked before."""

    __slots__ = ()

    def __init__(self, by: TensorAccess, *where: Any) -> None:
        super().__init__(by, *where)  # type: ignore[call-arg]
        self.owns = by.precedes_product


class TensorRead(_InOrder, Read):
    __slots__ = ()


class TensorWrite(_InOrder, Write):
    __slots__ = ()


class TensorAccess(BulkCopies):
    """`_asked` is what tensor cores have still to do, in order; an arrival ends a part of it."""

    _tensor_agent = -1
    _tensor_clk = 0
    _tensor_past: Past | None = None  # what was known when the last operation was asked for

    def begin_block(self) -> None:
        super().begin_block()
        self._asked: deque[tuple[bool, Callable[[], None]]] = deque()

    def precedes_product(self, segment: int) -> bool:
        return self.owns(segment) or self.agents.segment_agent[segment] == self._tensor_agent

    # ------------------------------------------------------------------------------------------
    # By threads

    def allocate_tensor(self, name, shape, dtype, layout: MatrixLayout | ScalesLayout, values, loc):
        if self.scheduler.explores:
            raise UnsupportedError(
                "the explorer does not know tensor cores that are waited for at barriers yet: run"
                " kernels with tensor memory on seeds of the emulator",
                place=self.locations[loc],
            )
        self.enter_block()
        memory = TensorMemory(num_columns(shape, dtype, layout), dtype, self.rank, name)
        view = TensorView.over(memory, 0, shape, dtype, layout)
        if values is not None:
            self.tensor_store(view, values, True, loc)
        return view

    def tensor_load(self, view: TensorView, loc):
        self.touch_window(Read, view.window(), loc)
        return view.values

    def tensor_store(self, view: TensorView, values, predicate, loc):
        if predicate:
            self.touch_window(Write, view.window(), loc)
            view.put(values)

    def tensor_slice(self, view: TensorView, first, extent, loc):
        part = view.slice(first, extent)
        if part is None:
            raise UnsupportedError(
                f"columns {first} to {first + extent - 1} of {view.memory.name} do not lie in even"
                " steps of its tensor memory",
                place=self.locations[loc],
            )
        return part

    def tensor_reinterpret(self, view: TensorView, dtype, shape, layout, loc):
        other = TensorView.over(view.memory, view.start, shape, dtype, layout)
        if other.window() is None:
            raise UnsupportedError(
                f"{dtype} elements of shape {shape} reach beyond the columns of {view.memory.name}",
                place=self.locations[loc],
            )
        return other

    # ------------------------------------------------------------------------------------------
    # By tensor cores

    def tensor_copy(self, source: View, target: TensorView, barriers, loc):
        segment = self._ask(loc, source, kind=AsyncMoved)
        self.touch_window(TensorWrite, target.window(), loc, segment)
        self._do(segment, lambda: target.put(source.values))
        self._commit_to(barriers, loc)

    def tensor_multiply(self, a, b, d, use, predicate, barriers, scales, loc):
        """`barriers` are pairs of a barrier and whether it is arrived at; `scales`, where there are
        any, are pairs for a and b of tensor memory and of the kind of float that it scales."""
        if not predicate:
            return
        segment = self._ask(loc, a, b)
        for one in (a, b, *(scale for scale, _ in scales), *([d] if use else [])):
            if isinstance(one, TensorView):
                self.touch_window(TensorRead, one.window(), loc, segment)
        self.touch_window(TensorWrite, d.window(), loc, segment)
        self._do(segment, partial(_multiply, a, b, d, bool(use), scales))
        self._commit_to(barriers, loc)

    def _ask(self, loc, *operands: Any, kind: type = AsyncRead) -> int:
        """The segment of an operation, which reads those of its operands in shared memory."""
        if self._tensor_agent < 0:
            self._tensor_agent = self.new_agent()
        self._tensor_clk += 1
        self._tensor_past = self.past()
        place = self.locations[loc]
        segment = self.agents.segment(self._tensor_agent, self._tensor_clk, place)
        for view in operands:
            if isinstance(view, View):
                view.memory.asynchronous.add(self._tensor_agent)
                self._touch(kind, view, loc, segment)
        return segment

    def _do(self, segment: int, operation: Callable[[], None]) -> None:
        self.under_way[segment] = "a tensor core's work on its memory", None

        def done() -> None:
            with np.errstate(all="ignore"):
                operation()

        self._asked.append((False, done))

    def tensor_commit(self, barrier_view: View, predicate, loc):
        if predicate:
            self.enter_block()
            barrier = self._barrier(barrier_view, loc, modifies=True)
            past, agent, clk = self._tensor_past, self._tensor_agent, self._tensor_clk

            def arrive() -> None:
                if past is not None:
                    barrier.arriving.join(past)
                    barrier.arriving.known.learn(agent, clk)
                self._arrive(barrier, barrier_view, 1, loc)

            self._asked.append((True, arrive))
            Completion(self, self._go_on)

    def _commit_to(self, barriers, loc) -> None:
        for view, predicate in barriers:
            self.tensor_commit(view, predicate, loc)

    def _go_on(self) -> None:
        """Tensor cores come to the next arrival."""
        is_arrival = False
        while not is_arrival:
            is_arrival, step = self._asked.popleft()
            step()


def _multiply(a, b, d: TensorView, use: bool, scales) -> None:
    left, right, sums = a.values, b.values, np.empty(d.shape, d.dtype)
    if scales:
        left = _scaled(left, *scales[0])
        right = _scaled(right.T, *scales[1]).T
    product(left, right, d.values if use else sums, use, sums)
    d.put(sums)


def _scaled(values: np.ndarray, scale: TensorView, kind: str) -> np.ndarray:
    """Rows of narrow floats, each group of columns times its scale."""
    if kind == "e2m1":
        values = numerics.from_fp4(values, 1)
    factors = scale.values
    if factors.dtype.kind in "iu":
        exponents = factors.view(np.uint8).astype(np.float64)
        factors = np.where(exponents == 255, np.nan, np.exp2(exponents - E8M0_BIAS))
    group = values.shape[1] // factors.shape[1]
    return values.astype(numerics.f64) * np.repeat(factors.astype(numerics.f64), group, axis=1)
