"""Workspaces that are right eager, captured, replayed and mixed, with shapes that change.

A slot is buffers, signals and one epoch word per rank, on the symmetric heap. No number known to
the host enters a signal or a wait: a call reads `e = epoch + 1` on the device and its last program
stores `e`. A writer waits until every reader's credit, `slot_free`, has reached the slot's last
epoch. So the host may hand out slots in any way it likes; alternating is only faster. How many
there are is a setting, WEFT_SLOTS.

Calls of a world follow each other, whatever operator and sizes they have. So their buffers may lie
in the same memory, if their epochs and credits are the same words too: a call then waits for the
readers of the call before it on that memory, whichever that was. Such buffers are asked for as
`shared`; signals stay with their own operator, for a word means what one program says.
"""

from __future__ import annotations

import itertools
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import ceil, prod
from typing import Any

import torch

from weft.base.elements import Axes
from weft.base.errors import DtypeError, OutOfMemoryError, ShapeError, UsageError
from weft.base.place import Frame
from weft.base.user_place import user_place
from weft.base.whole_numbers import extents_of, whole_number
from weft.language.world_arg import SlotArg
from weft.runtime.heap import Wanted, round_up
from weft.runtime.holders import OUTGROWN, SLOTS, Holding
from weft.runtime.recorded import Recorded
from weft.runtime.stream_order import StreamOrder
from weft.runtime.symmetric_memory import SymmetricMemory

BufferRequest = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
SignalRequest = Mapping[str, tuple[int, torch.dtype]]

# What is outgrown grows by half at least, so that sizes which rise call by call (a prompt of one
# more token) leave no more behind than twice what is used at last.
GROWTH = 1.5
# Attributes of a slot that are no parts of it.
RESERVED = ("key", "index", "arg", "number", "is_outgrown")

# A world's workspace whose memory others share, and what that is called there.
POOL, POOLED = "shared", "memory"
_NOTHING: BufferRequest = {}
_UNNAMED: Mapping[str, Axes] = {}

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
    """The memory behind one slot: flat arrays that requests are cut from. `arg`: words of the slot
    that are another's, or were there before."""

    def __init__(
        self, world: SymmetricMemory, label: str, buffers: dict[str, int], signals: SignalRequest,
        arg: SlotArg | None = None,
    ):  # fmt: skip
        self.capacity = buffers
        self.counts = dict(signals)
        self.buffers = {
            # What is empty has no address, by which its allocation is known.
            name: world.empty((max(nbytes, 1),), torch.uint8, name=f"{label}.{name}")
            for name, nbytes in buffers.items()
        }
        # The user's lines that recorded calls on it, each with what signals stood for then.
        self.recorded = Recorded(world.backend)
        # Of the call that took the slot last, by signal array what its indices stand for.
        self.axes: Mapping[str, Axes] = _UNNAMED

        def words(name: str, count: int, dtype: torch.dtype) -> torch.Tensor:
            axes = partial(self.axes_of, name)
            return world.signals(count, dtype, name=f"{label}.{name}", axes=axes)

        self.signals = {
            name: words(name, max(count, 1), dtype) for name, (count, dtype) in signals.items()
        }
        self._ranks = (("from rank", world.num_ranks),)
        if arg is None:
            own = _own_words(world.num_ranks)
            # Of a list: ranks change places within, and a tuple must not be seen half made.
            arg = SlotArg(*[words(*one) for one in zip(SlotArg._fields, *zip(*own), strict=True)])
        self.arg = arg
        # Slots that were cut from it, and their tensors, by their identity.
        self._held: dict[int, weakref.ref[Any]] = {}

    def axes_of(self, name: str) -> Axes:
        """What the indices of a signal array stand for: () where a recording may replay a call to
        which they mean something else."""
        if name == "slot_free":
            return self._ranks
        taken = self.axes.get(name, ())
        recorded = (axes.get(name, ()) for _, axes in self.recorded.items())
        return taken if all(axes == taken for axes in recorded) else ()

    def cut(self, buffers: BufferRequest, signals: SignalRequest) -> dict[str, torch.Tensor]:
        """Tensors of its own arrays."""
        tensors = {
            name: _view(self.buffers[name], 0, shape, dtype)
            for name, (shape, dtype) in buffers.items()
        }
        for name, (count, _) in signals.items():
            tensors[name] = self.signals[name][:count]
        return tensors

    def cut_shared(self, buffers: BufferRequest) -> dict[str, torch.Tensor]:
        """Tensors that lie one behind the other in its one array."""
        (memory,), offset, tensors = self.buffers.values(), 0, {}
        for name, (shape, dtype) in buffers.items():
            tensors[name] = _view(memory, offset, shape, dtype)
            offset += round_up(_nbytes(shape, dtype))
        return tensors

    def hold(self, things: Iterable[Any]) -> None:
        """These are cut from it."""
        held = self._held
        for one in things:
            number = id(one)
            held[number] = weakref.ref(one, lambda _, number=number: held.pop(number, None))

    @property
    def recorded_at(self) -> set[str]:
        """The user's lines that made recordings of calls on it, which may still be replayed."""
        return {str(line) for line, _ in self.recorded.items()}

    @property
    def is_held(self) -> bool:
        """Does somebody have a slot that was cut from it, or a tensor of one?"""
        return bool(self._held)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Each an allocation of the heap, without the slot's own words."""
        return [*self.buffers.values(), *self.signals.values()]


# Of one size, the storages of all slots.
_Storages = list[_Storage]


class Workspace:
    """All slots of one key. It grows by making new slots.

    Slots that were outgrown, or of which no call is kept, keep their memory until the heap has no
    room for something else. Those that a recording of the user's may replay, or that somebody
    holds, keep it as long as that lasts, even beyond the world's end. New ones have room to spare,
    if the heap has it (GROWTH).

    With a `pool`, another workspace, its slots take the turns of that one's, have their epochs and
    credits, and their `shared` buffers lie in that one's memory. A pool's slots keep their epochs
    and credits when it grows: they are those of words that the others keep.
    """

    def __init__(
        self, world: SymmetricMemory, key: str, order: StreamOrder,
        num_slots: int | None = None, pool: Workspace | None = None, is_pool: bool = False,
    ) -> None:  # fmt: skip
        self.world = world
        self.key = key
        # Whose turns its slots take; of a pool, the workspaces whose slots are cut from its own.
        self._turns, self._is_pool = pool or self, is_pool
        self._given: Sequence[SlotArg | None] = ()
        self._sharing: list[Workspace] = []
        if pool is not None:
            num_slots = pool._num_slots
            pool._sharing.append(self)
        asked = (f"the workspace {key!r}: num_slots", num_slots)
        what, count = ("WEFT_SLOTS", world.settings.slots) if num_slots is None else asked
        self._num_slots = whole_number(what, count, 1, UsageError)
        self._storages: _Storages = []
        # By how often the workspace had grown before.
        self._outgrown: dict[int, _Storages] = {}
        self._generation = 0
        self._turn = 0
        self._order, self._is_recording = order, world.backend.is_recording
        # By request its slots; none once others have taken their place.
        self._cuts: OrderedDict[tuple, list[Slot]] = OrderedDict()
        # By what was asked for: that the heap had no room, which a recording of it says too.
        self._refused: OrderedDict[tuple, str] = OrderedDict()

    def take(
        self, buffers: BufferRequest, signals: SignalRequest, shared: BufferRequest = _NOTHING,
        axes: Mapping[str, Axes] = _UNNAMED,
    ) -> Slot:  # fmt: skip
        """The next slot, cut to this request. Collective: the same request on every rank."""
        slots = self.slots(buffers, signals, shared)
        self._order.take()
        return slots[self.next_turn(axes, self._is_recording())]

    def next_turn(self, axes: Mapping[str, Axes], is_recording: bool) -> int:
        """Which slot is this call's."""
        turns = self._turns
        turns._turn = turn = (turns._turn + 1) % turns._num_slots
        self._storages[turn].axes = axes
        if is_recording:
            line = _users_line()
            for one in {self, turns}:
                one._storages[turn].recorded.keep(line, axes)
        return turn

    def reserve(
        self, buffers: BufferRequest, signals: SignalRequest, shared: BufferRequest = _NOTHING
    ) -> Slot:
        """The slot whose turn it is, cut to this request: to prepare what calls will do, which then
        take their turns as if nobody had prepared. Collective where the workspace has to grow."""
        return self.slots(buffers, signals, shared)[self._turns._turn]

    def slots(
        self, buffers: BufferRequest, signals: SignalRequest, shared: BufferRequest
    ) -> list[Slot]:
        """All of them, cut to this request: a list that is empty once they are outgrown."""
        request = (tuple(buffers.items()), tuple(signals.items()), tuple(shared.items()))
        try:
            slots = self._cuts.get(request)
        except TypeError:  # a shape that is a list
            _check_request(self.key, {**buffers, **shared}, signals)
            raise
        if slots is None:
            slots = self._cuts[request] = self._cut(buffers, signals, shared)
            if len(self._cuts) > self.world.settings.kept_calls:
                _, dropped = self._cuts.popitem(last=False)
                # Who has them would not hear of it when the workspace grows.
                _let_go(dropped)
        else:
            self._cuts.move_to_end(request)
        return slots

    def _cut(
        self, buffers: BufferRequest, signals: SignalRequest, shared: BufferRequest
    ) -> list[Slot]:
        _check_request(self.key, {**buffers, **shared}, signals)
        if self._turns is not self:
            size = sum(round_up(_nbytes(*one)) for one in shared.values())
            try:
                self._turns._fit({POOLED: size}, {})
            except OutOfMemoryError as error:
                told = f"the workspace {self.key!r} asks for {size} shared bytes"
                raise OutOfMemoryError(f"{told}: {error.message}") from None
        needed = {name: _nbytes(shape, dtype) for name, (shape, dtype) in buffers.items()}
        self._fit(needed, signals)
        slots = []
        for index, (own, other) in enumerate(zip(self._storages, self._turns._storages)):
            mine, theirs = own.cut(buffers, signals), other.cut_shared(shared) if shared else {}
            slots.append(slot := Slot(self.key, index, {**mine, **theirs}, own.arg))
            own.hold((slot, *mine.values()))
            if other is not own:
                other.hold((slot, *theirs.values()))
        return slots

    def _fit(self, needed: dict[str, int], signals: SignalRequest) -> None:
        """There are slots that hold so much."""
        if not self._storages or not self._fits(needed, signals):
            self._grow(needed, signals)

    def _fits(self, needed: dict[str, int], signals: SignalRequest) -> bool:
        # By loops: a first call of an m asks, and each step of a generator is a call.
        capacity, counts = self._storages[0].capacity, self._storages[0].counts
        for name, size in needed.items():
            if capacity.get(name, -1) < size:
                return False
        for name, (count, dtype) in signals.items():
            have, as_dtype = counts.get(name, (-1, dtype))
            if have < count or as_dtype != dtype:
                return False
        return True

    def _grow(self, needed: dict[str, int], signals: SignalRequest) -> None:
        request = (*needed.items(), *signals.items())
        if self._is_recording():
            if message := self._refused.get(request):
                raise OutOfMemoryError(message)
            raise UsageError(
                f"the workspace {self.key!r} must grow, but a recording is under way and memory "
                "cannot be allocated in it; run the call once with these sizes before recording"
            )
        old, self._storages = self._storages, []
        self._given = self._args(old)
        sizes = [(needed, signals)]
        if old:
            sizes = [_grown(old[0], needed, signals, by) for by in (GROWTH, 1.0)]
            self._outgrown[self._generation] = old
            self._let_go()
        try:
            size = self._find_room(sizes)
        except OutOfMemoryError as error:
            self._refused[request] = error.message
            if len(self._refused) > self.world.settings.kept_calls:
                self._refused.popitem(last=False)
            # Smaller calls go on with what they had.
            if old:
                self._storages = self._outgrown.pop(self._generation)
            raise
        self._generation += 1
        with self.world.allocating_together():
            self._storages = [
                _Storage(self.world, label, dict(size[0]), size[1], arg)
                for label, arg in zip(self._labels(), self._given, strict=True)
            ]

    def _args(self, old: _Storages) -> Sequence[SlotArg | None]:
        """Words that new slots have already."""
        if self._turns is not self:
            old = self._turns._storages
        elif not self._is_pool:
            old = []
        return [one.arg for one in old] or [None] * self._num_slots

    def _let_go(self) -> None:
        """Of all slots: what is held from here on is held by others."""
        for slots in self._cuts.values():
            _let_go(slots)
        self._cuts.clear()
        for one in self._sharing:
            one._let_go()

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
        key = self.key.removeprefix("program ")
        return [f"{key}[{index}]" for index in range(self._num_slots)]

    def _wanted(self, buffers: dict[str, int], signals: SignalRequest) -> Iterator[Wanted]:
        """What a _Storage of each slot allocates, in its order."""
        own = zip(SlotArg._fields, _own_words(self.world.num_ranks), strict=True)
        words = [*signals.items(), *([] if self._given[0] else own)]
        for label in self._labels():
            for name, nbytes in buffers.items():
                yield Wanted(nbytes, f"{label}.{name}")
            for name, (count, dtype) in words:
                yield Wanted(count * dtype.itemsize, f"{label}.{name}", is_signal=True)

    # ---- what is outgrown

    def unused(self, is_idle_too: bool = False) -> tuple[int, ...]:
        """Of what is outgrown, what nobody here may use again; with `is_idle_too` of what is in
        use as well, where nobody has a slot of it: calls to come get other memory."""
        found = dict(self._outgrown)
        if is_idle_too and self._storages and not self._is_pool:
            self._let_go()
            found[self._generation] = self._storages
        return tuple(
            generation
            for generation, storages in found.items()
            if not any(one.recorded_at or one.is_held for one in storages)
        )

    @property
    def has_outgrown(self) -> bool:
        """Alike on all ranks, which `unused` is not."""
        return bool(self._outgrown)

    def allocations(self, generation: int) -> list[torch.Tensor]:
        """Of what is `unused`."""
        return self._tensors(self._outgrown.get(generation, self._storages))

    def _tensors(self, storages: _Storages) -> list[torch.Tensor]:
        found = [tensor for one in storages for tensor in one.tensors]
        if self._turns is self and not (self._is_pool and storages is not self._storages):
            found += [word for one in storages for word in one.arg]
        return found

    def forget(self, generation: int) -> None:
        """It is freed."""
        if self._outgrown.pop(generation, None) is None:
            self._storages = []

    def holdings(self) -> Iterator[Holding]:
        if self._storages:
            text = f"workspace {self.key!r}, {len(self._storages)} in use"
            if self._sharing:
                text += f", of {', '.join(one.key for one in self._sharing)}"
            yield SLOTS, text, self._tensors(self._storages)
        for storages in self._outgrown.values():
            recorded = {line for one in storages for line in one.recorded_at}
            if recorded:
                why = f"kept for what was recorded at {', '.join(sorted(recorded))}"
            elif any(one.is_held for one in storages):
                why = "kept because a Slot, or a tensor of one, is still held"
            else:
                why = "kept until that makes room enough, and no rank uses them"
            text = f"workspace {self.key!r}, {len(storages)} outgrown, {why}"
            yield OUTGROWN, text, self._tensors(storages)


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
                if type(size) is not int or size < 0:
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


def _view(
    memory: torch.Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    return memory[offset : offset + _nbytes(shape, dtype)].view(dtype).view(shape)


class Asked:
    """What calls ask of a workspace again and again: cut once, until the workspace grows."""

    def __init__(
        self, workspace: Workspace, buffers: BufferRequest, signals: SignalRequest,
        shared: BufferRequest, axes: Mapping[str, Axes],
    ) -> None:  # fmt: skip
        self._workspace, self._request, self._axes = workspace, (buffers, signals, shared), axes
        self._slots: list[Slot] = []

    def take(self, is_recording: bool) -> Slot:
        """As `World.workspace`, in a call that the world was told of (`operator_call`), which came
        after all others. Collective."""
        if not self._slots:
            self._slots = self._workspace.slots(*self._request)
        return self._slots[self._workspace.next_turn(self._axes, is_recording)]

    @property
    def first(self) -> Slot:
        """One of them, the same as long as there are no larger ones."""
        return self._slots[0]

    def reserve(self) -> Slot:
        """As `World.reserve`."""
        return self._workspace.reserve(*self._request)


def _let_go(slots: list[Slot]) -> None:
    for slot in slots:
        slot.is_outgrown = True
    slots.clear()
