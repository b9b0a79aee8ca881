"""Workspaces that are right eager, captured, replayed and mixed, with shapes that change.

A slot is buffers, signals and one epoch word per rank, on the symmetric heap. No number known to
the host enters a signal or a wait: a call reads `e = epoch + 1` on the device and its last program
stores `e`. A writer waits until every reader's credit, `slot_free`, has reached the slot's last
epoch. So the host may hand out slots in any way it likes; alternating is only faster. How many
there are is a setting, WEFT_SLOTS.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from math import ceil, prod
from typing import Any

import torch

from weft.base.errors import DtypeError, OutOfMemoryError, ShapeError, UsageError
from weft.base.place import Frame
from weft.base.user_place import user_place
from weft.base.whole_numbers import extents_of, whole_number
from weft.language.world_arg import SlotArg
from weft.runtime.heap import Wanted
from weft.runtime.recorded import Recorded
from weft.runtime.symmetric_memory import SymmetricMemory

BufferRequest = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
SignalRequest = Mapping[str, tuple[int, torch.dtype]]

# What is outgrown grows by half at least, so that sizes which rise call by call (a prompt of one
# more token) leave no more behind than twice what is used at last.
GROWTH = 1.5
# Requests, the latest used, whose slots are kept as they were cut.
MOST_REQUESTS = 1024
# Attributes of a slot that are no parts of it.
RESERVED = ("key", "index", "arg", "number", "is_outgrown")

_numbers = itertools.count()


class Slot:
    """One workspace: every buffer and signal array of the request is an attribute.

    It is for one call: take it anew at each. `is_outgrown`: the workspace has larger slots since,
    and calls to come use those. The memory is then freed when that is needed, unless the Slot or
    one of its tensors is still held, or a recording of the user's was made with it. `number` is the
    slot's own: what is kept by it does not hold the slot.
    """

    def __init__(self, key: str, index: int, tensors: dict[str, torch.Tensor], arg: SlotArg):
        self.key = key
        self.index = index
        self.arg = arg
        self.number = next(_numbers)
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

    def __init__(
        self, world: SymmetricMemory, label: str, buffers: dict[str, int], signals: SignalRequest
    ):
        self.capacity = buffers
        self.counts = dict(signals)
        self.buffers = {
            # What is empty has no address, by which its allocation is known.
            name: world.empty((max(nbytes, 1),), torch.uint8, name=f"{label}.{name}")
            for name, nbytes in buffers.items()
        }
        self.signals = {
            name: world.signals(max(count, 1), dtype, name=f"{label}.{name}")
            for name, (count, dtype) in signals.items()
        }
        own = _own_words(world.num_ranks)
        # Of a list: ranks change places within, and a tuple must not be seen half made.
        self.arg = SlotArg(
            *[
                world.signals(count, dtype, name=f"{label}.{name}")
                for name, (count, dtype) in zip(SlotArg._fields, own, strict=True)
            ]
        )
        # The user's lines that recorded calls on it.
        self.recorded = Recorded(world.backend)
        # Slots that were cut from it, and their tensors.
        self._held: list[weakref.ref[Any]] = []

    def cut(self, key: str, index: int, buffers: BufferRequest, signals: SignalRequest) -> Slot:
        tensors = {
            name: self.buffers[name][: _nbytes(shape, dtype)].view(dtype).view(shape)
            for name, (shape, dtype) in buffers.items()
        }
        tensors.update((name, self.signals[name][:count]) for name, (count, _) in signals.items())
        slot = Slot(key, index, tensors, self.arg)
        self._held = [one for one in self._held if one() is not None]
        self._held += [weakref.ref(one) for one in (slot, *tensors.values())]
        return slot

    @property
    def recorded_at(self) -> set[str]:
        """The user's lines that made recordings of calls on it, which may still be replayed."""
        return {str(line) for line, _ in self.recorded.items()}

    @property
    def is_held(self) -> bool:
        """Does somebody have a slot that was cut from it, or a tensor of one?"""
        return any(one() is not None for one in self._held)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Each an allocation of the heap."""
        return [*self.buffers.values(), *self.signals.values(), *self.arg]


# Of one size, the storages of all slots.
_Storages = list[_Storage]


def _tensors(storages: _Storages) -> list[torch.Tensor]:
    return [tensor for one in storages for tensor in one.tensors]


class Workspace:
    """All slots of one key. It grows by making new slots and never shrinks.

    Slots that were outgrown keep their memory until the heap has no room for something else. Those
    that a recording of the user's may replay, or that somebody holds, keep it as long as that
    lasts, even beyond the world's end. New ones have room to spare, if the heap has it (GROWTH).
    """

    def __init__(self, world: SymmetricMemory, key: str, num_slots: int | None = None) -> None:
        self.world = world
        self.key = key
        asked = (f"the workspace {key!r}: num_slots", num_slots)
        what, count = ("WEFT_SLOTS", world.settings.slots) if num_slots is None else asked
        self._num_slots = whole_number(what, count, 1, UsageError)
        self._storages: _Storages = []
        # By how often the workspace had grown before.
        self._outgrown: dict[int, _Storages] = {}
        self._generation = 0
        self._turn = 0
        self._order = world.stream_order()
        self._cuts: OrderedDict[tuple, tuple[Slot, ...]] = OrderedDict()

    def take(self, buffers: BufferRequest, signals: SignalRequest) -> Slot:
        """The next slot, cut to this request. Collective: the same request on every rank."""
        slots = self._slots(buffers, signals)
        self._order.take()
        self._turn = (self._turn + 1) % self._num_slots
        if self.world.is_recording():
            self._storages[self._turn].recorded.keep(_users_line(), None)
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
            if len(self._cuts) > MOST_REQUESTS:
                self._cuts.popitem(last=False)
        else:
            self._cuts.move_to_end(request)
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
        old, self._storages = self._storages, []
        sizes = [(needed, signals)]
        if old:
            sizes = [_grown(old[0], needed, signals, by) for by in (GROWTH, 1.0)]
            self._outgrown[self._generation] = old
            self._let_go()
        try:
            size = self._find_room(sizes)
        except OutOfMemoryError:
            # Smaller calls go on with what they had.
            if old:
                self._storages = self._outgrown.pop(self._generation)
            raise
        self._generation += 1
        self._storages = [
            _Storage(self.world, label, dict(size[0]), size[1]) for label in self._labels()
        ]

    def _let_go(self) -> None:
        """Of all slots: what is held from here on is held by others."""
        for slots in self._cuts.values():
            for slot in slots:
                slot.is_outgrown = True
        self._cuts.clear()

    def _find_room(
        self, sizes: Sequence[tuple[dict[str, int], SignalRequest]]
    ) -> tuple[dict[str, int], SignalRequest]:
        """The first of these sizes of a slot that the heap has room for.

        Raises  OutOfMemoryError: it has none for the last
        """
        *larger, least = [list(self._wanted(*size)) for size in sizes]
        for size, wanted in zip(sizes, larger, strict=False):
            if self.world.has_room(wanted):
                return size
        self.world.make_room(least)
        return sizes[-1]

    def _labels(self) -> list[str]:
        return [f"{self.key}[{index}]" for index in range(self._num_slots)]

    def _wanted(self, buffers: dict[str, int], signals: SignalRequest) -> Iterator[Wanted]:
        """What a _Storage of each slot allocates, in its order."""
        own = _own_words(self.world.num_ranks)
        words = [*signals.items(), *zip(SlotArg._fields, own, strict=True)]
        for label in self._labels():
            for name, nbytes in buffers.items():
                yield Wanted(nbytes, f"{label}.{name}")
            for name, (count, dtype) in words:
                yield Wanted(count * dtype.itemsize, f"{label}.{name}", is_signal=True)

    # ---- what is outgrown

    @property
    def unused(self) -> tuple[int, ...]:
        """Of what is outgrown, what nobody here may use again."""
        return tuple(
            generation
            for generation, storages in self._outgrown.items()
            if not any(one.recorded_at or one.is_held for one in storages)
        )

    @property
    def has_outgrown(self) -> bool:
        """Alike on all ranks, which `unused` is not."""
        return bool(self._outgrown)

    def outgrown(self, generation: int) -> list[torch.Tensor]:
        """The allocations of what is outgrown."""
        return _tensors(self._outgrown[generation])

    def forget(self, generation: int) -> None:
        """It is freed."""
        del self._outgrown[generation]

    def holdings(self) -> Iterator[tuple[str, list[torch.Tensor]]]:
        """What holds memory of the heap, in words, with the allocations."""
        if self._storages:
            yield f"workspace {self.key!r}, {len(self._storages)} in use", _tensors(self._storages)
        for storages in self._outgrown.values():
            recorded = {line for one in storages for line in one.recorded_at}
            if recorded:
                why = f"kept for what was recorded at {', '.join(sorted(recorded))}"
            elif any(one.is_held for one in storages):
                why = "kept because a Slot, or a tensor of one, is still held"
            else:
                why = "kept until that makes room enough, and no rank uses them"
            yield f"workspace {self.key!r}, {len(storages)} outgrown, {why}", _tensors(storages)


def _users_line() -> Frame:
    return user_place().outermost or Frame("an unknown place", 0)


def _own_words(num_ranks: int) -> tuple[tuple[int, torch.dtype], ...]:
    """The words that every slot has, in the order of SlotArg."""
    return (1, torch.int64), (1, torch.int32), (num_ranks, torch.int64)


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
