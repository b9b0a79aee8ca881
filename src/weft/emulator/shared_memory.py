"""The shared memory of a block: its cells and their views, and the mbarriers that lie in it.

What happens-before means there has two sides, a `Past`. Threads access memory by the generic proxy;
TMA and tensor cores by the asynchronous one, which sees what threads have written only where a
fence stands between. So beside what is known, a past has what of it was known at a fence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from weft.base.counts import counted
from weft.emulator.affine import shadow_of
from weft.emulator.clocks import Agents, Clock
from weft.emulator.memory import Allocation


class Past(NamedTuple):
    """What is known, and of that what a fence lets the asynchronous proxy see."""

    known: Clock
    fenced: Clock

    @classmethod
    def nothing(cls) -> Past:
        return cls(Clock(), Clock())

    def join(self, other: Past) -> None:
        self.known.join(other.known)
        self.fenced.join(other.fenced)


class Barrier:
    """An mbarrier: phases of `count` arrivals and of the bytes that are expected meanwhile.

    A phase ends when nothing is left to come of either. `past` is what those who came to phases
    that have ended knew then, `arriving` the same of the phase that is on. `word` names it, the
    same in every run.
    """

    def __init__(self, count: int, word: tuple[object, ...]) -> None:
        self.word = word
        self.count = self.pending = count
        self.bytes = 0
        self.ended = 0  # phases
        self.past, self.arriving = Past.nothing(), Past.nothing()

    @property
    def is_in_use(self) -> bool:
        """Has something come in the phase that is on, or is it expected?"""
        return self.pending != self.count or self.bytes != 0

    def ends_phase(self) -> bool:
        """Has the phase that is on come to its end? The next one then begins."""
        if self.pending or self.bytes:
            return False
        self.ended += 1
        self.pending = self.count
        self.past.join(self.arriving)
        return True

    def __str__(self) -> str:
        arrived = self.count - self.pending
        text = f"{arrived} of {counted(self.count, 'arrival')}"
        return f"{text}, {counted(self.bytes, 'byte')} to come" if self.bytes else text


class SharedMemory(Allocation):
    """What one gl.allocate_shared_memory gives a program; `barriers` by cell.

    Nothing has been written at first: floats are NaN. `asynchronous` are the agents of the
    asynchronous proxy that have accessed it.
    """

    __slots__ = ("array", "asynchronous", "barriers", "kinds", "lying")

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, rank: int, name: str) -> None:
        self.array = np.full(int(np.prod(shape)) * dtype.itemsize, 0xFF, np.uint8)
        super().__init__(
            self.array.ctypes.data, self.array.nbytes, dtype.itemsize, rank, name,
            heap_offset=None, heap=None, initialised=False, shape=shape,
        )  # fmt: skip
        self.dtype = dtype
        self.barriers: dict[int, Barrier] = {}
        self.asynchronous: set[int] = set()
        # Once it is seen as other elements: how the elements at each byte lie, as a number.
        self.kinds: np.ndarray | None = None
        self.lying: dict[str, int] = {}

    def whole(self) -> View:
        return View(self, self.array.view(self.dtype).reshape(self.shape))

    def unfenced(self, writer: int, agents: Agents, fenced: Clock) -> bool:
        """Has a thread written in this segment, and no fence come behind it?"""
        if writer <= Agents.BEFORE or agents.segment_agent[writer] in self.asynchronous:
            return False
        return not agents.known(writer, fenced)


class View(NamedTuple):
    """A memory descriptor: some cells of shared memory in some order.

    `merged` is its shape where that is not the shape of `data`: axes put together of which the
    elements do not lie in even steps. `kind` is how its elements lie, as a number of its memory's.
    """

    memory: SharedMemory
    data: np.ndarray
    merged: tuple[int, ...] | None = None
    kind: int = 0

    @property
    def shadow(self) -> np.ndarray:
        return shadow_of(self.memory, self.data, self.address - self.memory.address)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape if self.merged is None else self.merged

    @property
    def values(self) -> np.ndarray:
        """What is there, in its shape: a view of it, or a copy."""
        return self.data.reshape(self.shape)

    def put(self, values: np.ndarray) -> None:
        if self.memory.kinds is not None:
            self._kinds(self.memory.kinds)[...] = self.kind
        self.data[...] = np.broadcast_to(values, self.shape).reshape(self.data.shape)

    def _kinds(self, kinds: np.ndarray) -> np.ndarray:
        offset = self.address - self.memory.address
        return np.ndarray(self.data.shape, np.uint8, kinds, offset, self.data.strides)

    @property
    def lies_otherwise(self) -> bool:
        """Was something there written as other elements, of which swizzles are not emulated?"""
        kinds = self.memory.kinds
        return kinds is not None and bool((self._kinds(kinds) != self.kind).any())

    @property
    def address(self) -> int:
        return self.data.__array_interface__["data"][0]

    @property
    def cell(self) -> int:
        return (self.address - self.memory.address) // self.memory.cell_bytes

    def part(self, where: tuple[slice, ...] | int) -> View | None:
        """None, as of `transposed`, where its axes do not lie in even steps."""
        if self.merged is not None:
            return None
        return self._replace(data=self.data[where])

    def transposed(self, order: tuple[int, ...]) -> View | None:
        if self.merged is not None:
            return None
        return self._replace(data=self.data.transpose(order))

    def reshaped(self, shape: tuple[int, ...]) -> View:
        if self.data.flags.c_contiguous:
            return self._replace(data=self.data.reshape(shape))
        return self._replace(merged=shape)

    def reinterpreted(
        self, dtype: np.dtype, shape: tuple[int, ...], before: str, after: str
    ) -> View | None:
        """Its bytes as elements that lie as `after` says; None where they are not in one piece."""
        memory, nbytes = self.memory, int(np.prod(shape)) * dtype.itemsize
        if not self.data.flags.c_contiguous or nbytes > self.data.nbytes:
            return None
        if dtype.itemsize < memory.cell_bytes:
            memory.refine(dtype.itemsize)
        if memory.kinds is None:
            memory.kinds = np.zeros(memory.nbytes, np.uint8)
            memory.lying[before] = self.kind
        kind = memory.lying.setdefault(after, len(memory.lying))
        offset = self.address - memory.address
        data = memory.array[offset : offset + nbytes].view(dtype).reshape(shape)
        return View(memory, data, kind=kind)


class Beyond:
    """A slot that is not there: who uses it comes to its end; a name for it harms nobody."""

    def __init__(self, fail: Callable[[], None]) -> None:
        self._fail = fail

    def __getattr__(self, name: str) -> None:
        self._fail()
