"""A program's atomic accesses, and how it is set aside while it waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from weft.base.vocabulary import Order, Scope
from weft.emulator.accesses import RELEASE_COMPLETES_STORES, Atomic
from weft.emulator.affine import box_tile
from weft.emulator.clocks import Clock
from weft.emulator.memory import ORDERS, RMW, SCOPES, Allocation
from weft.emulator.plain_access import PlainAccess
from weft.emulator.scheduler import SIGNALS_IN_A_TILE, Waiting


class Synchronising(PlainAccess):
    """Atomics: an acquire learns what releases of the word have published."""

    waiting: Waiting | None = None
    blocked: Callable[[], bool] | None = None  # while an explored machine need not let it go on
    coming = ""  # what it does when it goes on, in the words of `atomic`, or "wait"
    _last_poll: tuple[int, int, Any] | None = None

    def pause(self, coming: str = "", blocked: Callable[[], bool] | None = None) -> None:
        """A point at which the scheduler may let another task go first.

        What is `blocked` may be tried in vain all the same, unless the machine explores.
        """
        self._last_spin = None
        self._did_something |= coming != "add"  # to add again is to announce nothing new
        scheduler = self.scheduler
        if scheduler.explores:
            self.coming, self.blocked = coming, blocked
        if scheduler.preempts():
            scheduler.make_ready(self)
            scheduler.hub.switch()

    def set_aside(
        self, allocation: Allocation, index: int, itemsize: int, loc: int, expected: int | None,
        seen: int, *, is_packet: bool = False,
    ) -> None:  # fmt: skip
        """Let others run until the word that this program waits for changes."""
        where = allocation.index(allocation.address + index * itemsize, itemsize)
        self.waiting = Waiting(
            allocation, index * (itemsize // allocation.cell_bytes), where, self.locations[loc],
            expected, seen, is_packet,
        )  # fmt: skip
        for watch in self.watches:
            watch.waits(self, self.waiting)
        self.waiters.add(self)
        self.scheduler.hub.switch()

    def wake(self) -> None:
        self.scheduler.make_ready(self)

    def poll(self, allocation, index, dtype, loc, value) -> None:
        """An access that changed nothing: set the program aside if it is going round in a spin."""
        poll = (loc, allocation.address + index * dtype.itemsize, value.item())
        if poll != self._last_poll:
            self._last_poll = poll
            return
        self._last_poll = None
        self.spin(allocation, index, dtype, loc, value.item())

    def spin(self, allocation: Allocation, index: int, dtype: np.dtype, loc: int, seen: int):
        """It has seen the same again, and would for ever: wait for a change, if that is not old."""
        self.sees_newest = allocation.view(dtype)[index] != seen
        if not self.sees_newest:
            self.set_aside(allocation, index, dtype.itemsize, loc, None, seen)

    def atomic_rmw(self, op, sem, scope, ptr, value, mask, dtype, shape, loc):
        self.adds_floats = op == "fadd"
        try:
            return self._changed(RMW[op], sem, scope, ptr, value, mask, dtype, shape, loc)
        finally:
            self.adds_floats = False

    def atomic_red(self, sem, scope, ptr, value, mask, dtype, shape, loc):
        """An addition of which nobody gets the old value: PTX's red. Such additions commute; what
        an acquiring one learns depends on its place among the others."""
        how = "update" if ORDERS[sem].acquires else "add"
        return self._changed(RMW["add"], sem, scope, ptr, value, mask, dtype, shape, loc, how)

    def atomic_cas(self, sem, scope, ptr, compare, value, dtype, shape, loc):
        # As one value: what is expected, and what then replaces it.
        pairs = np.stack([np.broadcast_to(compare, shape), np.broadcast_to(value, shape)], axis=-1)

        def change(old, pair):
            if shape == () and old != pair[0]:
                return None
            return np.where(old == pair[..., 0], pair[..., 1], old)[()]

        return self._changed(change, sem, scope, ptr, pairs, None, dtype, shape, loc)

    def _changed(
        self, change, sem, scope, ptr, value, mask, dtype, shape, loc, how="update"
    ):  # fmt: skip
        """`change(old, value)` of each word of a scalar or a tile; gives the old ones."""
        order, scope = ORDERS[sem], SCOPES[scope]
        if shape != ():
            return self.atomic_tile(change, order, scope, ptr, value, mask, dtype, shape, loc)
        located = None
        if mask is None or mask:
            located = self.locate(ptr, dtype.itemsize, "updates", loc)
        if located is None:
            return dtype.type(0)
        return self.atomic(
            *located, dtype, loc, order, scope, lambda old: change(old, value), how=how, raw=True
        )

    def descriptor_reduce(self, kind, desc, indices, value, loc):
        """An asynchronous block of atomics, relaxed and of the device's scope."""
        pointers, box = self.block(desc, indices)
        self.adds_floats = kind == "fadd"
        self.atomic_tile(
            RMW[kind], Order.RELAXED, Scope.DEVICE, np.asarray(pointers),
            np.asarray(value).reshape(desc.block), box_tile(box, desc.block), desc.dtype,
            desc.block, loc, self.async_segment(loc, Scope.DEVICE),
        )  # fmt: skip
        self.adds_floats = False

    def atomic_tile(self, change, order, scope, ptr, values, mask, dtype, shape, loc, segment=None):
        """All lanes at once; those of one word one after the other, in an order that nobody may
        rely on."""
        result = np.zeros(shape, dtype)
        mask = np.broadcast_to(True if mask is None else mask, shape)
        ptr = np.broadcast_to(ptr, shape)[mask]
        values = np.broadcast_to(values, (*shape, *np.shape(values)[len(shape) :]))[mask]
        if not ptr.size:
            return result
        self.pause("update")
        segment = self.segment(loc, scope) if segment is None else segment
        olds = np.zeros(ptr.shape, dtype)
        changed: list[tuple[Allocation, np.ndarray, np.ndarray, np.ndarray]] = []
        learnt: list[Clock] = []
        for lanes, allocation, index in self.parts(ptr, dtype, "updates", loc):
            self.touch(Atomic, allocation, index, dtype.itemsize, loc, segment, modifies=True)
            view, news = allocation.view(dtype), values[lanes]
            old, new = np.empty_like(olds[lanes]), np.empty_like(olds[lanes])
            for turn in _turns(index):
                old[turn] = view[index[turn]]
                new[turn] = view[index[turn]] = change(old[turn], news[turn])
            olds[lanes] = old
            cells = index * (dtype.itemsize // allocation.cell_bytes)
            changed.append((allocation, cells, old, new))
            if order.acquires:
                words = [allocation.sync[c] for c in cells.tolist() if c in allocation.sync]
                learnt += [one for word in words for one in word.acquire(self.rank, scope)]
        self.learn(list({id(clock): clock for clock in learnt}.values()))
        if order.releases and changed:
            self._release(changed, scope)
        place, release = self.locations[loc], scope if order.releases else None
        for allocation, cells, old, new in changed:
            self.waiters.words_changed(allocation, cells.tolist(), place)
            if self.watches and cells.size <= SIGNALS_IN_A_TILE:
                words = zip(cells.tolist(), old.tolist(), new.tolist(), strict=True)
                for word in words:
                    for watch in self.watches:
                        watch.signalled(self, allocation, *word, place, "update", release)
        result[mask] = olds
        return result

    def _release(self, changed: list, scope: Scope) -> None:
        """Publish at each of these words what this program has done."""
        if RELEASE_COMPLETES_STORES:
            self.complete_stores()
        clock, key = self.publish(), (self.rank, scope)
        joined: dict[int, Clock] = {}  # what words of one past share
        for allocation, cells, *_ in changed:
            for cell in dict.fromkeys(cells.tolist()):
                published = allocation.sync_word(cell).published
                earlier = published.get(key, clock)
                if id(earlier) not in joined:
                    joined[id(earlier)] = clock if earlier is clock else earlier.copy()
                    joined[id(earlier)].join(clock)
                published[key] = joined[id(earlier)]


def _turns(index: np.ndarray) -> list[Any]:
    """The lanes in turns in which no word comes twice: all at once where they are different."""
    if np.unique(index).size == index.size:
        return [...]
    turns: list[list[int]] = []
    seen: dict[int, int] = {}
    for lane, word in enumerate(index.tolist()):
        turn = seen[word] = seen.get(word, -1) + 1
        if turn == len(turns):
            turns.append([])
        turns[turn].append(lane)
    return turns
