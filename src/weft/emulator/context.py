"""What belongs to one emulated rank's host thread: its current stream, recording and accesses."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from weft.base.errors import UnsupportedError, UsageError
from weft.base.place import Place
from weft.base.user_place import user_place
from weft.emulator.actors import CELLS, Actor, address_of, span_of
from weft.emulator.clocks import Clock
from weft.emulator.device import Stream, Work
from weft.emulator.machine import Machine
from weft.emulator.memory import Allocation
from weft.emulator.variables import variable_at
from weft.emulator.works import Event, EventRecord, EventWait

_THREAD = threading.local()

# So often one line may read one address before it is taken for a loop that polls, and so often
# may it look again with everybody else stuck before it is taken for stuck as well.
POLLS_BEFORE_WAITING = 8
POLLS_IN_VAIN = 10_000

# Names of tracked memory that no launch has given a better one yet.
UNNAMED = "unnamed tensor"
FRESH = "empty tensor"


MakeWork = Callable[[], Work]
# The tensors that a piece of work keeps alive, asked for when the work is made.
Kept = Callable[[], Any]


def current() -> RankContext | None:
    """The context of the emulated rank whose host code calls; None elsewhere."""
    return getattr(_THREAD, "context", None)


def context_of_rank(what: str) -> RankContext:
    """The context of the emulated rank that calls `what`."""
    context = current()
    if context is None:
        raise UsageError(f"{what} is for the host code of an emulated rank", place=user_place())
    return context


class RankContext:
    """One rank of a session. `belongings` is a place for others to keep what is per rank."""

    def __init__(self, machine: Machine, rank: int) -> None:
        self.machine = machine
        self.device = machine.device
        self.hosts = machine.hosts
        self.memory = machine.memory
        self.rank = rank
        self.stream = self.device.stream(rank)
        self.recording: Any = None  # a Recording under way: it is given what would else be queued
        self.num_recordings = 0
        self.belongings: dict[Any, Any] = {}
        # By storage that only torch has seen: who filled it.
        self._fills: WeakKeyDictionary[Any, Actor] = WeakKeyDictionary()
        self._polled: Any = None
        self._polls = self._in_vain = 0

    def __enter__(self) -> RankContext:
        _THREAD.context = self
        return self

    def __exit__(self, *failure: Any) -> None:
        _THREAD.context = None

    # ---- order

    def settle(self, *, may_go_on: bool = False) -> bool:
        """Wait until the current stream's queue is empty; orders nothing by itself.

        With `may_go_on` the answer may be False: the queue can only move if this host goes on.
        """
        return self._drain(
            self.stream, " (on a GPU the host would go on here; the emulator runs torch operations"
            " on the host)", may_go_on,
        )  # fmt: skip

    def synchronize(self, stream: Stream | None = None) -> None:
        """Wait for the stream's earlier work, and know of it: what a GPU's host would do."""
        stream = stream or self.stream
        self._drain(stream)
        self.hosts.current().clock.join(stream.clock)

    def _drain(self, stream: Stream, remark: str = "", may_go_on: bool = False) -> bool:
        target, why = stream.enqueued, f"the work queued on stream {stream.name}{remark}"
        drained = stream.idle or self.hosts.wait(
            lambda: stream.done >= target, why, may_go_on=may_go_on
        )
        if drained:
            self._took(stream)
        return drained

    def _took(self, key: object) -> None:
        for watch in self.hosts.watches:
            watch.took(key)

    def past(self, in_stream: bool = True) -> Clock:
        """What this rank's host, and its current stream, know and have done, for other ranks."""
        if in_stream and self.recording is not None:
            raise UnsupportedError(
                "ranks cannot meet on the host while a recording is under way: nothing that was "
                "recorded has run; meet before or after it, or use world.barrier()",
                place=user_place(),
            )
        if in_stream:
            self.settle()
        clock = self.hosts.publish(self.rank)
        if in_stream:
            clock.join(self.stream.clock)
        return clock

    def learn(self, pasts: Iterable[Clock], in_stream: bool = True) -> None:
        """What follows on the host, and on the current stream, is ordered after `pasts`."""
        host = self.hosts.current()
        for clock in pasts:
            host.clock.join(clock)
            if in_stream:
                self.stream.clock.join(clock)

    @contextmanager
    def operation(self, place: Place | None = None) -> Iterator[Actor]:
        """Do something on this thread as the idle current stream's next work."""
        stream, work = self.stream, _Inline(place or user_place())
        stream.admit(work)
        stream.begin(work)
        try:
            yield Actor.of_work(work, "torch")
        finally:
            stream.finished(work)

    def polls(self, address: int, place: Place) -> None:
        """The host reads memory that other ranks may write: one that polls lets them run.

        A loop that has nobody left to wait for ends as a deadlock, not as a hang.
        """
        frame = place.outermost
        if (address, frame) != self._polled:
            self._polled, self._polls, self._in_vain = (address, frame), 0, 0
            return
        self._polls += 1
        self._took("whatever happens")
        if self._polls < POLLS_BEFORE_WAITING:
            return
        scheduler = self.hosts.scheduler
        progress = scheduler.progress
        known = self.memory.find(address)
        why = f"a change of {known.name if known else 'memory'}, which it polls"
        if self.hosts.wait(lambda: scheduler.progress != progress, why, may_go_on=True):
            self._in_vain = 0
        else:
            self._in_vain += 1
            if self._in_vain > POLLS_IN_VAIN:
                self.hosts.wait(lambda: False, why)

    # ---- device work

    def enqueue(self, make: MakeWork) -> None:
        """Queue the work that `make` makes on the current stream, or record how to make it."""
        if self.recording is None:
            self.stream.enqueue(make())
        else:
            self.recording.add(self.stream, make)

    def order(self, later: Stream, earlier: Stream) -> None:
        """Work of `later` from here on starts after what `earlier` holds now."""
        if later is not earlier:
            if self.recording is not None:
                self.recording.check_holds(earlier, later)
            self.follow(later, self.mark(earlier))

    def mark(self, stream: Stream) -> Any:
        """What `stream` holds now: a point that others may follow."""
        if self.recording is not None:
            return self.recording.mark(stream)
        event = Event()
        stream.enqueue(EventRecord(event, place=user_place()))
        return event

    def follow(self, later: Stream, mark: Any) -> None:
        """Work of `later` from here on starts after what was marked."""
        if self.recording is not None:
            self.recording.follow(later, mark)
        elif not isinstance(mark, Event):
            raise UsageError(
                "an event that was recorded in a capture is waited for outside of it",
                place=user_place(),
            )
        else:
            later.enqueue(EventWait(mark, place=user_place()))

    def variable(self, makers: Sequence[str]) -> str:
        """The variable that the user assigns what one of `makers` gives to; "" if it is unclear."""
        frame = user_place().outermost
        turns = self.belongings.setdefault("turns", {})
        return "" if frame is None else variable_at(frame, makers, turns)

    def keeping(self, *tensors: torch.Tensor) -> Kept:
        """What a piece of work keeps alive until it has run."""
        return (lambda: tensors) if self.recording is None else self.recording.keeping(tensors)

    # ---- memory

    def track(self, tensor: torch.Tensor, name: str, *, initialised: bool = True) -> Allocation:
        """Let the checker know the memory behind `tensor`; it forgets it with the storage."""
        known = self._known(address_of(tensor), name)
        if known is not None:
            return known
        storage = tensor.untyped_storage()
        base, nbytes = storage.data_ptr(), storage.nbytes()
        if self.machine.rewrite.keeps_memory:
            self.memory.kept.append(storage)
        fill = self._fills.pop(storage, None) if initialised else None
        # A view's kernel may also be handed its whole: what counts is the storage.
        whole = tensor.is_contiguous() and tensor.numel() * tensor.element_size() == nbytes
        shape: Sequence[int] = tensor.shape if whole else ()
        allocation = self.memory.register(
            base, nbytes, tensor.element_size(), self.rank, name,
            initialised=initialised and fill is None, shape=tuple(shape), owner=storage,
        )  # fmt: skip
        if fill is not None:
            itemsize = allocation.cell_bytes
            fill.access([(base, (nbytes // itemsize,), (itemsize,), CELLS[itemsize])], True)
        return allocation

    def filled(self, tensor: torch.Tensor) -> None:
        """The current stream gives words a start, of which it and whoever waits for it know."""
        stream, work = self.stream, _Inline(user_place())
        if stream.idle:
            stream.admit(work)
            stream.begin(work)
            stream.finished(work)
        else:
            stream.enqueue(work)
        self._fills[tensor.untyped_storage()] = Actor.of_work(work, "torch")

    def _known(self, address: int, name: str) -> Allocation | None:
        """The tracked memory at `address`, which is called `name` if it had no name yet."""
        known = self.memory.find(address)
        if known is not None and known.name in (UNNAMED, FRESH):
            known.name = name
        return known

    def address_taken(self, tensor: torch.Tensor, address: int) -> None:
        """A tensor whose address is known may be reached by kernels through it."""
        if address and self.memory.find(address) is None:
            if tensor.device.type == "cpu" and not self.device.on_heap(address):
                self.track(tensor, UNNAMED)

    def reach(self, tensor: torch.Tensor, address: int, name: str) -> None:
        """A kernel or a copy gets `tensor` under the name `name`."""
        if self._known(address, name) is None and not self.device.on_heap(address):
            self.track(tensor, name)

    def found(self, address: int, name: str) -> Any:
        """What lies at `address` now, for a kernel or a copy to which it is `name`."""
        known = self._known(address, name)
        return None if known is None else known.owner and known.owner()  # None: a finding

    def forget_if_filled(self, tensor: torch.Tensor) -> None:
        """Fresh memory that torch has filled, and that no kernel knows, needs no shadow."""
        known = self.memory.find(address_of(tensor))
        if known is not None and known.name == FRESH and known.heap_offset is None:
            if tensor.numel() * tensor.element_size() == known.nbytes:
                self.memory.forget(known)

    def refuse_reads_of_recordings(self) -> None:
        if self.recording is not None:
            raise UnsupportedError(
                "a recording cannot read a tensor's value on the host: at that moment nothing "
                "has run; read it after replay()",
                place=user_place(),
            )

    def host_read(self, tensor: torch.Tensor) -> None:
        """The host looks at values: the current stream's work first, as on a GPU."""
        if not tensor.numel():
            return
        known = self.memory.find(address_of(tensor))
        if known is not None:
            self.refuse_reads_of_recordings()
            self.synchronize()
            place = user_place()
            if known.heap_offset is not None:
                self.polls(address_of(tensor), place)
            Actor.of_host(self.device, self.rank, place).access([span_of(tensor)], False)


class RankStream:
    """A stream of the calling rank, which is the current one inside `with`."""

    def __init__(self, context: RankContext, stream: Stream) -> None:
        self.context = context
        self.stream = stream
        self._outer: list[Stream] = []

    def synchronize(self) -> None:
        self.context.synchronize(self.stream)

    def __enter__(self) -> RankStream:
        self._outer.append(self.context.stream)
        self.context.stream = self.stream
        return self

    def __exit__(self, *failure: Any) -> None:
        self.context.stream = self._outer.pop()


class _Inline(Work):
    """What torch does at once, on the host; where it is queued, its place in the stream counts."""

    kind = "torch operation"

    def start(self) -> None:
        self.stream.finished(self)
