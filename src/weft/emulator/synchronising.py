"""A program's atomic accesses, and how it is set aside while it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from weft.base.vocabulary import Order, Scope
from weft.emulator.affine import box_tile
from weft.emulator.clocks import Clock
from weft.emulator.descriptors import DescriptorAccess
from weft.emulator.protocols import Waiting
from weft.emulator.transitions import Atomic
from weft.emulator.waiters import SIGNALS_IN_A_TILE
from weft.emulator.words import ORDERS, RMW, RMW_TILES, SCOPES
from weft.language.triton_api import TRITON_VERSION

# From this version on a release by tl.atomic_* completes the program's asynchronous stores.
RELEASE_COMPLETES_STORES = TRITON_VERSION >= (3, 8)


class Synchronising(DescriptorAccess):
    """Atomics: an acquire learns what releases of the word have published."""

    waiting: Waiting | None = None
    adds_floats = False  # while it does: sums then depend on the order
    blocked: Callable[[], bool] | None = None  # while an explored machine need not let it go on
    coming = ""  # what it does when it goes on, in the words of _atomic, or "wait"
    _last_poll: tuple[int, int, Any] | None = None

    def pause(self, coming: str = "", blocked: Callable[[], bool] | None = None) -> None:
        """A point at which the scheduler may let another task go first.

        What is `blocked` may be tried in vain all the same, unless the machine explores.
        """
        self._did_something |= coming != "add"  # to add again is to announce nothing new
        scheduler = self.scheduler
        if scheduler.explores:
            self.coming, self.blocked = coming, blocked
        if scheduler.preempts():
            scheduler.make_ready(self)
            scheduler.hub.switch()

    def set_aside(self) -> None:
        """Let others run until the word that this program waits for changes."""
        for watch in self.watches:
            watch.waits(self, self.waiting)
        self.waiters.add(self)
        self.scheduler.hub.switch()

    def wake(self) -> None:
        self.scheduler.make_ready(self)

    def _atomic(self, allocation, index, dtype, loc, order, scope, change, *, how="update"):
        """One atomic access: `change(old)` is the new value. Returns the old one.

        `how`: "set" is a store, with which ends what earlier releases published; of an "add"
        nobody gets the old value; "load" and "test" change nothing; all else is an "update".
        """
        self._last_spin = None
        replaces = how == "set"
        self.pause(how)
        view = allocation.view(dtype)
        old = view[index]
        cell = index * (dtype.itemsize // allocation.cell_bytes)
        word = allocation.sync_word(cell)
        if self.sight is not None and how in ("load", "test"):
            old, word = self.sight.seen(self, allocation, cell, old, word)
        new = change(old)
        modifies = new != old or replaces
        if self.checks:
            segment = self.segment(loc, scope)
            access = Atomic(self, allocation, loc, np.array([cell]), segment, bool(modifies))
            self._touch_scalar(allocation, index, dtype.itemsize, access)
        if order.acquires:
            self.learn(word.acquire(self.rank, scope))
        if replaces:
            word.published.clear()
        if order.releases:
            if RELEASE_COMPLETES_STORES:
                self.complete_stores()
            word.release(self.rank, scope, self.publish())
        if modifies:
            view[index] = new
            for watch in self.watches:
                watch.signalled(
                    self, allocation, cell, old.item(), new.item(), self.locations[loc], how,
                    scope if order.releases else None,
                )  # fmt: skip
            self.waiters.word_changed(allocation, cell, self.locations[loc])
        else:
            for watch in self.watches:
                watch.looked(
                    self, how, allocation, cell, old.item(), self.locations[loc],
                    scope if order.acquires else None, scope if order.releases else None,
                )  # fmt: skip
            self._poll(allocation, index, dtype, loc, old)
        return old

    def _poll(self, allocation, index, dtype, loc, value) -> None:
        """An access that changed nothing: set the program aside if it is going round in a spin."""
        poll = (loc, allocation.address + index * dtype.itemsize, value.item())
        if poll != self._last_poll:
            self._last_poll = poll
            return
        cell = index * (dtype.itemsize // allocation.cell_bytes)
        self.waiting = Waiting(
            allocation, cell, allocation.index(poll[1], dtype.itemsize), self.locations[loc],
            None, value.item(),
        )  # fmt: skip
        self._last_poll = None
        self.set_aside()

    def atomic_rmw(self, op, sem, scope, ptr, value, mask, dtype, shape, loc):
        self.adds_floats = op == "fadd"
        try:
            return self._rmw(op, ORDERS[sem], SCOPES[scope], ptr, value, mask, dtype, shape, loc)
        finally:
            self.adds_floats = False

    def _rmw(self, op, order, scope, ptr, value, mask, dtype, shape, loc):
        change = RMW[op]
        if shape == ():
            if mask is not None and not mask:
                return dtype.type(0)
            located = self._locate_scalar(ptr, dtype.itemsize, "updates", loc)
            if located is None:
                return dtype.type(0)
            allocation, index = located
            return self._atomic(
                allocation, index, dtype, loc, order, scope,
                lambda old: change(old, value, dtype),
            )  # fmt: skip
        result = self._atomic_block(op, order, scope, ptr, value, mask, dtype, shape, loc)
        if result is not None:
            return result
        return self._atomic_tile(
            order, scope, ptr, mask, dtype, shape, loc,
            lambda old, values: change(old, values, dtype), value,
        )  # fmt: skip

    def _atomic_block(self, op, order, scope, ptr, value, mask, dtype, shape, loc):
        """All lanes at once, where they are different words of one tensor; None where not."""
        ptr = np.broadcast_to(ptr, shape)
        chosen = ptr if mask is None else ptr[np.broadcast_to(mask, shape)]
        if not chosen.size:
            return np.zeros(shape, dtype)
        lo, hi = int(chosen.min()), int(chosen.max())
        allocation = self._find(lo, hi + dtype.itemsize, loc)
        if allocation is None or np.unique(chosen).size < chosen.size:
            return None
        self.pause("update")
        index = self._index(chosen, allocation, dtype.itemsize, loc)
        view = allocation.view(dtype)
        old = view.take(index)
        values = np.broadcast_to(value, shape)
        values = values if mask is None else values[np.broadcast_to(mask, shape)]
        cells = self._cells(allocation, index, dtype.itemsize)
        if self.checks:
            segment = self.segment(loc, scope)
            access = Atomic(self, allocation, loc, cells, segment, True)
            self._touch_gathered(allocation, cells, access)
        first = cells[..., 0] if cells.ndim > index.ndim else cells
        self._acquire_and_release(allocation, np.ravel(first), order, scope)
        view[index] = RMW_TILES[op](old, values)
        self.waiters.words_changed(allocation, np.ravel(cells).tolist(), self.locations[loc])
        if self.watches and old.size <= SIGNALS_IN_A_TILE:
            words = zip(np.ravel(first).tolist(), np.ravel(old), np.ravel(view[index]))
            for cell, before, after in words:
                self._signalled(allocation, cell, before, after, order, scope, loc)
        if mask is None:
            return old
        result = np.zeros(shape, dtype)
        result[np.broadcast_to(mask, shape)] = old
        return result

    def _signalled(self, allocation, cell, before, after, order, scope, loc) -> None:
        for watch in self.watches:
            watch.signalled(
                self, allocation, cell, before.item(), after.item(), self.locations[loc],
                "update", scope if order.releases else None,
            )  # fmt: skip

    def _acquire_and_release(self, allocation, cells, order, scope) -> None:
        """Acquire from, and release to, each of these words."""
        if order.acquires and allocation.sync:
            words = [allocation.sync[c] for c in cells.tolist() if c in allocation.sync]
            learnt = [clock for word in words for clock in word.acquire(self.rank, scope)]
            self.learn(list({id(clock): clock for clock in learnt}.values()))
        if order.releases:
            if RELEASE_COMPLETES_STORES:
                self.complete_stores()
            clock, key = self.publish(), (self.rank, scope)
            joined: dict[int, Clock] = {}
            for cell in cells.tolist():
                published = allocation.sync_word(cell).published
                earlier = published.get(key)
                if earlier is None:
                    published[key] = clock
                    continue
                if id(earlier) not in joined:
                    joined[id(earlier)] = earlier.copy()
                    joined[id(earlier)].join(clock)
                published[key] = joined[id(earlier)]

    def atomic_cas(self, sem, scope, ptr, compare, value, dtype, shape, loc):
        order, scope = ORDERS[sem], SCOPES[scope]
        if shape == ():
            located = self._locate_scalar(ptr, dtype.itemsize, "updates", loc)
            if located is None:
                return dtype.type(0)
            allocation, index = located
            return self._atomic(
                allocation, index, dtype, loc, order, scope,
                lambda old: value if old == compare else old,
            )  # fmt: skip
        pairs = np.stack([np.broadcast_to(compare, shape), np.broadcast_to(value, shape)], axis=-1)
        return self._atomic_tile(
            order, scope, ptr, None, dtype, shape, loc,
            lambda old, pair: pair[1] if old == pair[0] else old, pairs,
        )  # fmt: skip

    def descriptor_reduce(self, kind, desc, indices, value, loc):
        """An asynchronous block of atomics, relaxed and of the device's scope."""
        pointers, box = self._block(desc, indices)
        change = RMW[kind]
        self.adds_floats = kind == "fadd"
        self._atomic_tile(
            Order.RELAXED, Scope.DEVICE, np.asarray(pointers), box_tile(box, desc.block),
            desc.dtype, desc.block, loc, lambda old, one: change(old, one, desc.dtype),
            np.asarray(value).reshape(desc.block), self.async_segment(loc, Scope.DEVICE),
        )  # fmt: skip
        self.adds_floats = False

    def _atomic_tile(
        self, order, scope, ptr, mask, dtype, shape, loc, change, values, segment=None
    ):
        """Lanes one after the other, in an order that nobody may rely on."""
        self.pause("update")
        result = np.zeros(shape, dtype)
        ptr = np.broadcast_to(ptr, shape)
        mask = np.broadcast_to(True if mask is None else mask, shape)
        values = np.broadcast_to(values, (*shape, *np.shape(values)[len(shape) :]))
        segment = self.segment(loc, scope) if segment is None else segment
        learnt: list[Clock] = []
        touched: set[tuple[int, int]] = set()
        words = []
        changes: list[tuple[Any, ...]] = []
        for lane in np.argwhere(mask):
            lane = tuple(lane)
            located = self._locate_scalar(ptr[lane], dtype.itemsize, "updates", loc)
            if located is None:
                continue
            allocation, index = located
            view = allocation.view(dtype)
            old = view[index]
            new = change(old, values[lane])
            result[lane] = old
            cell = index * (dtype.itemsize // allocation.cell_bytes)
            if self.checks:
                access = Atomic(self, allocation, loc, np.array([cell]), segment, True)
                self._touch_scalar(allocation, index, dtype.itemsize, access)
            view[index] = new
            changes.append((allocation, cell, old, new))
            if (id(allocation), cell) not in touched:
                touched.add((id(allocation), cell))
                words.append((allocation, cell))
                if order.acquires and cell in allocation.sync:
                    learnt += allocation.sync[cell].acquire(self.rank, scope)
        self.learn(learnt)
        clock = self.publish() if order.releases else None
        for allocation, cell in words:
            if clock is not None:
                allocation.sync_word(cell).release(self.rank, scope, clock.copy())
            self.waiters.word_changed(allocation, cell, self.locations[loc])
        if self.watches and len(changes) <= SIGNALS_IN_A_TILE:
            for change in changes:
                self._signalled(*change, order, scope, loc)
        return result
