"""Workspaces that are right eager, captured, replayed and mixed, with shapes that change.

A slot is buffers, signals and one epoch word per rank, on the symmetric heap. No number known to
the host enters a signal or a wait: a call reads `e = epoch + 1` on the device and its last program
stores `e`. A writer waits until every reader's credit, `slot_free`, has reached the slot's last
epoch. So the host may hand out slots in any way it likes; alternating is only faster. How many
there are is a setting, WEFT_SLOTS.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil, prod
from typing import TYPE_CHECKING, Any

import torch

from weft.base.errors import DtypeError, ShapeError, UsageError
from weft.base.whole_numbers import extents_of, whole_number
from weft.language.world_arg import SlotArg
from weft.runtime.heap import round_up

if TYPE_CHECKING:
    from weft.runtime.world import World

BufferRequest = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
SignalRequest = Mapping[str, tuple[int, torch.dtype]]

# What is outgrown grows by half at least, so that sizes which rise call by call (a prompt of one
# more token) leave no more behind than twice what is used at last.
GROWTH = 1.5
# Attributes of a slot that are no parts of it.
RESERVED = ("key", "index", "arg", "is_outgrown")


class Slot:
    """One workspace: every buffer and signal array of the request is an attribute.

    `is_outgrown`: the workspace has larger slots since, and calls to come use those.
    """

    def __init__(self, key: str, index: int, tensors: dict[str, torch.Tensor], arg: SlotArg):
        self.key = key
        self.index = index
        self.arg = arg
        self.is_outgrown = False
        self.__dict__.update(tensors)

    def __getattr__(self, name: str) -> Any:
        known = sorted(set(self.__dict__) - {*RESERVED})
        raise AttributeError(
            f"the workspace {self.key!r} has no {name!r}; it was asked for {', '.join(known)}"
        )

    def __repr__(self) -> str:
        return f"Slot({self.key!r}, {self.index})"


class _Storage:
    """The memory behind one slot: flat arrays that requests are cut from."""

    def __init__(self, world: World, label: str, buffers: dict[str, int], signals: SignalRequest):
        self.capacity = buffers
        self.counts = dict(signals)
        self.buffers = {
            name: world.empty((nbytes,), torch.uint8, name=f"{label}.{name}")
            for name, nbytes in buffers.items()
        }
        self.signals = {
            name: world.signals(count, dtype, name=f"{label}.{name}")
            for name, (count, dtype) in signals.items()
        }
        self.arg = SlotArg(
            epoch=world.signals(1, torch.int64, name=f"{label}.epoch"),
            ticket=world.signals(1, torch.int32, name=f"{label}.ticket"),
            slot_free=world.signals(world.num_ranks, torch.int64, name=f"{label}.slot_free"),
        )

    def cut(self, key: str, index: int, buffers: BufferRequest, signals: SignalRequest) -> Slot:
        tensors = {
            name: self.buffers[name][: _nbytes(shape, dtype)].view(dtype).view(shape)
            for name, (shape, dtype) in buffers.items()
        }
        tensors.update((name, self.signals[name][:count]) for name, (count, _) in signals.items())
        return Slot(key, index, tensors, self.arg)


class Workspace:
    """All slots of one key. It grows by making new slots and never shrinks.

    Slots that were outgrown keep their memory until the world closes: a recorded graph may still
    replay launches that use them. New ones have room to spare, if the heap has it (GROWTH).
    """

    def __init__(self, world: World, key: str, num_slots: int | None = None) -> None:
        self.world = world
        self.key = key
        asked = (f"the workspace {key!r}: num_slots", num_slots)
        what, count = ("WEFT_SLOTS", world.settings.slots) if num_slots is None else asked
        self._num_slots = whole_number(what, count, 1, UsageError)
        self._generation = 0
        self._storages: list[_Storage] = []
        self._outgrown: list[_Storage] = []
        self._turn = 0
        self._order = world.stream_order()
        self._cuts: dict[tuple, tuple[Slot, ...]] = {}

    def take(self, buffers: BufferRequest, signals: SignalRequest) -> Slot:
        """The next slot, cut to this request. Collective: the same request on every rank."""
        slots = self._slots(buffers, signals)
        self._order.take()
        self._turn = (self._turn + 1) % self._num_slots
        return slots[self._turn]

    def reserve(self, buffers: BufferRequest, signals: SignalRequest) -> Slot:
        """The slot whose turn it is, cut to this request: to prepare what calls will do, which then
        take their turns as if nobody had prepared. Collective where the workspace has to grow."""
        return self._slots(buffers, signals)[self._turn]

    def _slots(self, buffers: BufferRequest, signals: SignalRequest) -> tuple[Slot, ...]:
        request = (tuple(buffers.items()), tuple(signals.items()))
        try:
            slots = self._cuts.get(request)
        except TypeError:  # a shape that is a list
            _check_request(self.key, buffers, signals)
            raise
        if slots is None:
            slots = self._cuts[request] = self._cut(buffers, signals)
        return slots

    def _cut(self, buffers: BufferRequest, signals: SignalRequest) -> tuple[Slot, ...]:
        _check_request(self.key, buffers, signals)
        needed = {name: _nbytes(shape, dtype) for name, (shape, dtype) in buffers.items()}
        if not self._storages or not self._fits(needed, signals):
            self._grow(needed, signals)
        return tuple(
            storage.cut(self.key, index, buffers, signals)
            for index, storage in enumerate(self._storages)
        )

    def _fits(self, needed: dict[str, int], signals: SignalRequest) -> bool:
        have = self._storages[0]
        return all(have.capacity.get(name, -1) >= size for name, size in needed.items()) and all(
            name in have.counts and have.counts[name][0] >= count and have.counts[name][1] == dtype
            for name, (count, dtype) in signals.items()
        )

    def _grow(self, needed: dict[str, int], signals: SignalRequest) -> None:
        if self.world.is_recording():
            raise UsageError(
                f"the workspace {self.key!r} must grow, but a recording is under way and memory "
                "cannot be allocated in it; run the call once with these sizes before recording"
            )
        if self._storages:
            old = self._storages[0]
            exact, roomy = (_grown(old, needed, signals, by) for by in (1.0, GROWTH))
            there = self.world.heap_free_bytes // self._num_slots
            needed, signals = roomy if _total_bytes(*roomy) <= there else exact
        self._outgrown.extend(self._storages)
        for slots in self._cuts.values():
            for slot in slots:
                slot.is_outgrown = True
        self._cuts.clear()
        self._generation += 1
        self._storages = [
            _Storage(self.world, f"{self.key}[{index}]", dict(needed), signals)
            for index in range(self._num_slots)
        ]


def _grown(
    old: _Storage, needed: dict[str, int], signals: SignalRequest, by: float
) -> tuple[dict[str, int], SignalRequest]:
    """What holds both the old slots' parts and those of a request; parts too small grow `by`."""

    def size(name: str, have: int, need: int) -> int:
        return have if name in known and need <= have else max(need, ceil(by * have))

    known = {**old.capacity, **old.counts}
    buffers = {
        name: size(name, old.capacity.get(name, 0), needed.get(name, 0))
        for name in {**old.capacity, **needed}
    }
    words = {}
    for name in {**old.counts, **signals}:
        have, dtype = old.counts.get(name, (0, None))
        need, wanted = signals.get(name, (0, dtype))
        words[name] = (size(name, have, need), wanted)
    return buffers, words


def _total_bytes(buffers: dict[str, int], signals: SignalRequest) -> int:
    """Of one slot on the heap."""
    words = (count * dtype.itemsize for count, dtype in signals.values())
    return sum(map(round_up, (*buffers.values(), *words)))


def _check_request(key: str, buffers: BufferRequest, signals: SignalRequest) -> None:
    """Here and not at the allocation: a request that is smaller than what is there allocates
    nothing."""
    for parts, form in ((buffers, "((4, 8), torch.float32)"), (signals, "(4, torch.int64)")):
        for name, part in parts.items():
            what = f"the workspace {key!r}: {name!r}"
            if not isinstance(part, tuple) or len(part) != 2:
                raise UsageError(f"{what} is {part!r}; it takes a pair, e.g. {form}")
            size, dtype = part
            if not isinstance(dtype, torch.dtype):
                raise DtypeError(f"{what} has the dtype {dtype!r}; pass one as torch.int64 is")
            if parts is signals:
                whole_number(f"{what}, its number of words,", size)
            elif isinstance(size, tuple):
                extents_of(what, size)
            else:
                raise ShapeError(f"{what} has the shape {size!r}; pass a tuple, e.g. {form}")
    _check_names(key, buffers, signals)


def _check_names(key: str, buffers: BufferRequest, signals: SignalRequest) -> None:
    for name in (*buffers, *signals):
        if not name.isidentifier() or name in RESERVED:
            raise UsageError(
                f"the workspace {key!r} cannot have a part named {name!r}: parts become "
                f"attributes; {', '.join(RESERVED)} are taken"
            )
    if both := sorted(set(buffers) & set(signals)):
        raise UsageError(f"the workspace {key!r} names {both[0]!r} as a buffer and as a signal")


def _nbytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    return prod(shape) * dtype.itemsize
