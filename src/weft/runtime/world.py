"""A world: a process group with symmetric memory, slots, streams, recordings and barriers.

Everything here is the same on every machine; what differs is behind `backend.Backend`. A call
marked *collective* is made by every rank in the same order with the same arguments.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch

from weft.base.elements import Axes
from weft.base.errors import CallOrderError, UsageError
from weft.base.settings import Settings
from weft.base.whole_numbers import whole_number
from weft.language import world_layout as layout
from weft.runtime import compilations, registry
from weft.runtime.backend import Backend, Recording
from weft.runtime.calls import Calls
from weft.runtime.heap import Wanted
from weft.runtime.holders import Holding, Kept, MemoryReport, holders
from weft.runtime.replays import Recordings, Replays
from weft.runtime.scratch import Scratch
from weft.runtime.slots import POOL, Asked, BufferRequest, SignalRequest, Slot, Workspace
from weft.runtime.stream_order import OrderedRecording, StreamOrder
from weft.runtime.symmetric_memory import SymmetricMemory

# How often the watchdog looks at the abort word; the table is printed within this time.
WATCHDOG_PERIOD_S = 0.05


class World(SymmetricMemory):
    """One rank's view of a world. Made by `weft.init`, found again by `weft.world(name)`.

    `rank`, `num_ranks`, `local_rank`, `node` and `device` say who and where this rank is; `arg` is
    what kernels take. `compiled` counts the kernels of weft that this world's calls have compiled
    in this process, and not found in Triton's cache. `empty`, `zeros` and `signals` allocate on the
    symmetric heap: every rank makes the same calls in the same order. `barrier`, `synchronize` and
    `close` are for all ranks.
    """

    def __init__(self, name: str, backend: Backend, settings: Settings, scope: Hashable = None):
        super().__init__(name, backend, settings)
        self._scope = scope
        self.compiled = 0
        self._itself, self._aborted = ref(self), backend.aborted
        self._stop = threading.Event()
        self._workspaces: dict[str, Workspace] = {}
        self._call_order = self.stream_order()
        self._barrier_orders: dict[int, StreamOrder] = {}
        bounds = (settings.kept_calls, settings.kept_recordings)
        self.calls = Calls(backend, self._forget_errors_of, _at_least_one("KEPT_CALLS", bounds[0]))
        self._recordings = Recordings(_at_least_one("KEPT_RECORDINGS", bounds[1]))
        self._scratch = Scratch(backend)
        # Memory for messages between two ranks, by name: see weft.mailbox.
        self.mailboxes: dict[str, Any] = {}
        registry.add(scope, self)
        self._watchdog: threading.Thread | None = None
        if backend.abort_address:
            named = f"weft-watchdog-{name}"
            self._watchdog = threading.Thread(target=self._watch, name=named, daemon=True)
            self._watchdog.start()

    def __repr__(self) -> str:
        return f"World({self.name!r}, rank {self.rank} of {self.num_ranks} on {self.target})"

    # ---- workspaces

    def workspace(
        self,
        key: str,
        buffers: BufferRequest | None = None,
        signals: SignalRequest | None = None,
        *,
        num_slots: int | None = None,
        shared: BufferRequest | None = None,
        axes: Mapping[str, Axes] | None = None,
    ) -> Slot:
        """The next slot of the workspace `key`; see `slots`. Collective.

        The current stream waits for what another one holds that took the workspace's last slot.

        `buffers` maps names to (shape, dtype), `signals` names to (count, dtype). `num_slots` is
        how many there are in turn, settled by a key's first call: 1 for what takes turns by itself.

        `shared` are buffers that lie where those of other keys do. Of a key that ever asks for such
        every call waits until its slot is free (`wl.slot_wait_free`) before any program or copy
        engine writes to them, on any rank, and ends by `wl.slot_finish`.

        `axes` says of signals what their indices stand for, for findings and tables of waits.
        """
        workspace = self._workspace(key, num_slots, shared)
        return workspace.take(buffers or {}, signals or {}, shared or {}, axes or {})

    def asked(
        self,
        key: str,
        buffers: BufferRequest | None = None,
        signals: SignalRequest | None = None,
        *,
        num_slots: int | None = None,
        shared: BufferRequest | None = None,
        axes: Mapping[str, Axes] | None = None,
    ) -> Asked:
        """What calls ask for again and again. `take()` of it is `workspace` in less time;
        `reserve()` takes no turn: ranks may prepare calls at times of their own, and it is
        collective where there is no memory yet for such a request.
        """
        workspace = self._workspace(key, num_slots, shared)
        return Asked(workspace, buffers or {}, signals or {}, shared or {}, axes or {})

    def _workspace(
        self, key: str, num_slots: int | None, shared: BufferRequest | None
    ) -> Workspace:
        self._check_usable("workspace")
        if key not in self._workspaces:
            if shared is None:
                order, pool = self.stream_order(), None
            else:  # operators' calls lie there too
                order = self._call_order
                if POOL not in self._workspaces:
                    self._workspaces[POOL] = Workspace(self, POOL, order, is_pool=True)
                pool = self._workspaces[POOL]
            self._workspaces[key] = Workspace(self, key, order, num_slots, pool)
        return self._workspaces[key]

    def has_room(self, wanted: Sequence[Wanted]) -> bool:
        """Has the heap room for all of these allocations? Where it needs that of outgrown slots,
        those that no rank uses are freed, once this rank's work has ended. Collective."""
        return self._heap.has_room(wanted) or self._has_room_without_unused(wanted)

    def _forget_calls(self, wanted: Sequence[Wanted]) -> bool:
        """What is kept of calls may hold mailboxes, outgrown and of tiles that none moves any more,
        until they are made again."""
        self.calls.forget_all()
        return self._has_room_without_unused(wanted, is_idle_too=True)

    def memory(self) -> MemoryReport:
        """What this rank's memory and caches hold; `print` shows it as a table.

        The heap's is the same on every rank. `report.held` are its holders, the largest first.
        """
        self._check_usable("memory")
        return MemoryReport(
            world=self.name,
            heap_bytes=self._heap.capacity_bytes,
            heap_limit=self._heap.limit_bytes,
            free_bytes=self._heap.free_bytes,
            largest_free_bytes=self._heap.largest_bytes,
            held=tuple(holders(self._heap, self.holdings(), self._offset_of)),
            scratch_bytes=self._scratch.num_bytes,
            calls=Kept(len(self.calls), self.calls.most),
            recordings=Kept(len(self._recordings.recorded), self._recordings.most),
            recordings_bytes=self._recordings.device_bytes,
        )

    def holdings(self) -> Iterator[Holding]:
        for one in self._workspaces.values():
            yield from one.holdings()

    def _has_room_without_unused(self, wanted: Sequence[Wanted], is_idle_too: bool = False) -> bool:
        """Free what workspaces have outgrown, or have idle too, and no rank uses, if that makes
        room. Collective."""
        if not (is_idle_too or any(one.has_outgrown for one in self._workspaces.values())):
            return False
        mine = tuple(
            (key, i) for key, one in self._workspaces.items() for i in one.unused(is_idle_too)
        )
        self.backend.drain()
        # A slot may be held on one rank and not on another: all ranks free the same.
        everyone = self._meet(mine, "looks for unused slots")
        unused = [one for one in mine if all(one in theirs for theirs in everyone)]
        tensors = [one for key, i in unused for one in self._workspaces[key].allocations(i)]
        offsets = [self._offset_of(one) for one in tensors]
        if not offsets or not self._heap.has_room(wanted, without=offsets):
            return False
        for key, i in unused:
            self._workspaces[key].forget(i)
        for offset in offsets:
            self._release(offset)
        return True

    # ---- recordings

    def scratch(self, key: str, nbytes: int) -> torch.Tensor:
        """uint8, `nbytes` or more of this rank's own memory, for calls that come one after the
        other; see `scratch`. It is taken anew at each call, and may lie elsewhere then."""
        return self._scratch.take(key, nbytes)

    def replays(self) -> Replays:
        """Recordings for an operator that queues the same work again and again; see there."""
        return Replays(self.backend, self._recordings)

    @contextmanager
    def record(self) -> Iterator[Recording]:
        """Freeze what is launched in the brackets; `recording.replay()` runs it, often.

        A replay comes after the calls before it, on whichever streams of this rank those are; see
        `stream_order`.
        """
        self._check_usable("record")
        for order in self._all_orders():
            order.begin_recording()
        with self.backend.record() as recording:
            ordered = OrderedRecording(recording)
            yield ordered
        ordered.end(self._all_orders())

    def _all_orders(self) -> list[StreamOrder]:
        """A recording may hold calls of all worlds of this rank."""
        return [order for one in registry.all_of(self._scope) for order in one.orders]

    # ---- together

    def barrier(self, channel: int = 0) -> None:
        """All ranks meet on their current streams; the host does not wait. Can be recorded.

        Barriers of one channel follow each other, on whichever streams of this rank.
        """
        if channel not in range(layout.NUM_CHANNELS):
            raise UsageError(
                f"barrier: channel {channel} is outside 0 .. {layout.NUM_CHANNELS - 1}"
            )
        from weft.runtime import kernels

        self._check_usable("barrier")
        if channel not in self._barrier_orders:
            self._barrier_orders[channel] = self.stream_order()
        self._barrier_orders[channel].take()
        compilations.begin_call(self._itself, f"barrier channel={channel}")
        kernels.barrier[(1,)](self.arg, channel, num_warps=1)

    def synchronize(self) -> None:
        """Block the host until this rank's work is done, then `check`."""
        self.backend.drain()
        self.check()

    def operator_call(self, name: str, tensors: str = "") -> int:
        """Say that this rank now calls the collective operation `name`; returns the call's number.

        Compares with what the ranks of this node called as their call of the same number, as far
        as they have come: of two ranks that disagree, the later one raises, and ends the waits of
        the others, which raise the same at their next call or `check`. `tensors` says what an error
        tells of them, which may differ by rank where the name does not. What the current stream
        gets from here on comes after this rank's earlier calls on other streams.

        Raises  CallOrderError; and as `check`
        """
        # As begin_call does, whose own call would be one more of each operator's.
        if self._closed or self._aborted():
            self._check_usable(name)
        if self._errors:
            self._raise_errors()
        compilations.begin_call(self._itself, name)
        try:
            number = self._log.call(name, tensors)
        except CallOrderError as error:
            self._raised, self._reported = True, str(error)
            self.backend.abort()
            raise
        self._call_order.take()
        return number

    def begin_call(self, name: str) -> None:
        """Say that this rank now calls `name`, of which other ranks need know nothing: a message
        between two of them, say.

        Raises  as `check`
        """
        if self._closed or self._aborted():
            self._check_usable(name)
        if self._errors:
            self._raise_errors()
        compilations.begin_call(self._itself, name)

    def close(self) -> None:
        """Give everything back; again does nothing. Collective, unless the world is poisoned.

        Raises  what a kernel has said in an `error_word`, and nobody has seen; all is given back
        """
        if self._closed:
            return
        self._stop.set()
        if self._watchdog is not None:
            self._watchdog.join()  # what it looks at is given back below
        poisoned = self.backend.aborted()
        self.backend.drain()
        said = [] if poisoned else list(self._said())
        if not poisoned:
            self._agree("close")
        self._closed = True
        registry.remove(self._scope, self)
        self._workspaces.clear()
        self.calls.clear()
        self.mailboxes.clear()
        self._scratch.clear()
        self._pointers.clear()
        self._log.close()
        self._heaps = []
        self.backend.close()
        for error in said:
            raise error

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type | None, *failure: Any) -> None:
        if kind is None:
            self.close()
        else:
            # The other ranks may never come to close(): make them fall through instead.
            self.backend.abort()
            self._reported = self._reported or "aborted"
            self.close()

    def _watch(self) -> None:
        while not self._stop.wait(WATCHDOG_PERIOD_S):
            if self.backend.aborted():
                if not self._raised and self._reported is None:
                    self._reported = self._log.disagreement() or self.table_of_waits()
                    sys.stderr.write(f"weft: {self._reported}\n")
                    sys.stderr.flush()
                return


def _at_least_one(name: str, count: int) -> int:
    return whole_number(f"WEFT_{name}", count, 1, UsageError)
