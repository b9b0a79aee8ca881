"""Accesses by copy engines and by torch operations on the host, and torch's tensors as they take
them: addresses, shapes and strides in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch

from weft.base.place import Place
from weft.base.vocabulary import Order, Scope
from weft.emulator.accesses import Accessor, Atomic, Awaited, Moved, Read, Write
from weft.emulator.affine import AffinePointers, Window, find_window
from weft.emulator.clocks import NOWHERE
from weft.emulator.device import Device, Work
from weft.emulator.memory import WORD, Span
from weft.emulator.shadow import carry

# The checker looks at bytes: for it an element is an unsigned integer of the same size.
CELLS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
CELLS[16] = np.dtype(np.complex128)

# torch's own method: while a session is on, Tensor.data_ptr also tells the checker.
address_of = torch._C.TensorBase.data_ptr


def span_of(tensor: torch.Tensor) -> Span:
    """(address, shape, strides in bytes, dtype) of a strided tensor; repeats are left out."""
    size = tensor.element_size()
    shape, strides = tuple(tensor.shape), tensor.stride()
    if 0 in strides:
        shape = tuple(min(n, 1) if s == 0 else n for n, s in zip(shape, strides, strict=True))
    return address_of(tensor), shape, tuple(s * size for s in strides), CELLS[size]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in tuples and lists of whatever depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)


def spans_of(tensor: torch.Tensor, chosen: torch.Tensor) -> list[Span]:
    """The elements of `tensor` where `chosen` holds, those that lie side by side as one span."""
    size, address = tensor.element_size(), address_of(tensor)
    places = (chosen.nonzero() * torch.tensor(tensor.stride(), dtype=torch.int64)).sum(1)
    offsets = np.unique(places.numpy())
    runs = np.split(offsets, np.flatnonzero(np.diff(offsets) != 1) + 1)
    return [
        (address + int(run[0]) * size, (len(run),), (size,), CELLS[size])
        for run in runs
        if len(run)
    ]


class MovedWord(Atomic):
    """A word that a copy engine moves, written or not."""

    __slots__ = ()

    def unwritten(self, number: int) -> bool:
        return False


class Actor(Accessor):
    """Does strided accesses under one agent's clock, at one place of the host's code.

    A stream's is part of no device: only system scope includes it, except for a word that it
    writes.
    """

    place: Place

    @classmethod
    def of_work(cls, work: Work, what: str, *, of_device: bool = False) -> Actor:
        """Somebody to do `work`'s accesses, ordered behind its stream's earlier work.

        `of_device`: the device scope of the stream's rank includes it.
        """
        stream, device = work.stream, work.stream.device
        agent = device.checker.agents.add(
            stream.identity(what), stream.number, work.position,
            device=None if of_device else NOWHERE,
        )  # fmt: skip
        actor = cls(device.checker, device.waiters, agent, 0, work.clock, work)
        actor.place = work.place
        return actor

    @classmethod
    def of_host(cls, device: Device, rank: int, place: Place) -> Actor:
        """The host of `rank`, which looks at memory itself."""
        host = device.hosts.by_rank[rank]
        actor = cls(device.checker, device.waiters, host.agent, host.clk, host.clock, None)
        actor.place = place
        return actor

    def place_of(self, loc: Any) -> Place:
        return self.place

    def access(self, spans: Iterable[Span], is_write: bool, *, looks: bool = True) -> None:
        """Check and note each span; spans in untracked memory are passed over.

        A read that only moves values (`looks` is False) may meet unwritten ones.
        """
        for span in spans:
            if (window := self._window(span)) is not None:
                self._touch(window, Write if is_write else Read if looks else Moved)

    def copy(self, dst: Span, src: Span) -> None:
        """Move the bytes of `src` to `dst`, as a transfer that other agents may race with."""
        if 0 in dst[1]:
            return
        windows = [self._window(span, what) for span, what in ((src, "reads"), (dst, "writes"))]
        source, target = windows
        if source is None or target is None:
            return
        self._touch(source, Read)
        self._touch(target, Write)
        target.data[...] = source.data

    def read_word(self, address: int) -> int:
        return self._word(address, "reads", Order.RELAXED, "load", MovedWord)

    def write_word(self, address: int, value: int, dtype: np.dtype = WORD) -> None:
        """Store a signal word behind everything that this actor's stream has done."""
        self._word(address, "signals", Order.RELEASE, "set", value=value, dtype=dtype)

    def begin_wait(self, address: int, dtype: np.dtype) -> None:
        """Look at a word for the first time, knowing nothing yet of who signals it: whatever writes
        it without a signal, a reset say, must be ordered before, or after, this look."""
        found = self.memory.find(address)
        if found is None or address + dtype.itemsize > found.end:
            return  # the look that ends the wait reports it
        located = self.locate(address, dtype.itemsize, "waits for", None)
        if located is not None:
            segment = self.segment(None, Scope.SYSTEM)
            self.touch_element(Awaited, *located, dtype.itemsize, None, segment, modifies=False)

    def acquire_word(self, address: int, dtype: np.dtype) -> None:
        """Know from here on what was released with the word."""
        self._word(address, "waits for", Order.ACQUIRE, "load", dtype=dtype)

    def take_word(self, address: int) -> None:
        """Set a word that is 1 back to 0, knowing from here on what was released with the 1."""
        found = self.memory.find(address)
        if found is not None:
            cell = (address - found.address) // found.cell_bytes
            if self.shadow.histories[int(found.shadow[cell])].is_unwritten:
                index = found.index(address, found.cell_bytes)
                self.findings.fault("stale signal", self, None, found, index)
        self._word(address, "takes", Order.ACQ_REL, "take", value=0)

    def _word(
        self, address: int, what: str, order: Order, how: str, kind: Any = Atomic,
        value: int | None = None, dtype: np.dtype = WORD,
    ) -> int:  # fmt: skip
        located = self.locate(address, dtype.itemsize, what, None)
        if located is None:
            return 0

        def change(old: Any) -> Any:
            return old if value is None else dtype.type(value)

        return int(
            self.atomic(*located, dtype, None, order, Scope.SYSTEM, change, how=how, kind=kind)
        )

    def _window(self, span: Span, what: str = "") -> Window | None:
        """The span's data and shadow; `what` is done to it where it must be tracked memory."""
        address, shape, strides, dtype = span
        if 0 in shape:
            return None
        pointers = AffinePointers(address, strides, shape)
        window = find_window(self.find, pointers, None, dtype, 0)
        if window is None and what:
            end = pointers.bounds()[1] + dtype.itemsize
            found = self.memory.find(address)
            if found is None or end > found.end:
                bad = address if found is None else found.end
                self.findings.out_of_bounds(self, bad, dtype.itemsize, what, None)
        return window

    def _touch(self, window: Window, kind: Any) -> None:
        allocation, first = window.allocation, window.first_cell()
        if allocation.rank != self.rank:
            self.moves(kind, allocation, window.data.nbytes)
        if allocation.sync:
            start, nbytes = window.span()
            start //= allocation.cell_bytes
            end = start + -(-nbytes // allocation.cell_bytes)
            self.ledger.touched(self, allocation, start, end, kind is Write)
        carry(window.shadow, kind(self, allocation, None, first, shadow=window.shadow))
