"""A program's transfers that do not block: an agent of their own until they are fenced or complete.

Between begin and end, loads and stores are the transfer's: neither the program's later accesses
nor its releases are ordered behind them. `fence` lets later releases, and later relaxed signals
too, cover them; `quiet` makes them the program's past.
"""

from __future__ import annotations

import numpy as np

from weft.emulator.clocks import Clock
from weft.emulator.packets import PacketAccess


class Transfers(PacketAccess):
    """put_nbi and get_nbi, fence and quiet."""

    _transferring = False
    _transfer = -1  # the agent of what is under way
    _transfer_clk = 0
    _transfer_fenced = -1
    _fenced: Clock | None = None  # what a relaxed signal after a fence publishes
    _unfenced: int | None = None  # the location of the last transfer behind the last fence

    def segment(self, loc, scope=None) -> int:
        if not self._transferring or scope is not None:
            return super().segment(loc, scope)
        if self._transfer < 0:
            self._transfer = self.new_agent()
        key = ("transfer", loc, self._transfer_clk)
        segment = self.segments.get(key)
        if segment is None:
            segment = self._new_segment(key, self._transfer, self._transfer_clk, loc, None)
            self._did_something = True
        return segment

    def publish(self) -> Clock:
        clock = super().publish()
        if self._transfer_fenced >= 0:
            clock.learn(self._transfer, self._transfer_fenced)
        return clock

    def begin_transfer(self, args, static, dtype, shape, loc):
        self._transferring = True
        self._unfenced = loc
        return np.int32(0)

    def end_transfer(self, args, static, dtype, shape, loc):
        self._transferring = False
        return np.int32(0)

    def fence(self, args, static, dtype, shape, loc):
        self.complete_stores()
        self._unfenced = None
        if self._transfer >= 0:
            self._transfer_fenced = self._transfer_clk
            self._transfer_clk += 1
        self._fenced = self.publish()
        return np.int32(0)

    def quiet(self, args, static, dtype, shape, loc):
        self.fence(args, static, dtype, shape, loc)
        if self._transfer >= 0:
            done = Clock()
            done.learn(self._transfer, self._transfer_fenced)
            self.learn([done])
        return np.int32(0)

    def leave_transfers(self) -> None:
        """The program ends: nothing says when what it has not fenced will be over."""
        if self._unfenced is not None:
            self.findings.unfinished(self, self._unfenced)

    def atomic(self, allocation, index, dtype, loc, order, scope, change, *, how="update", **more):
        fenced, modified = self._fenced, how == "set"

        def tracked(old):
            nonlocal modified
            new = change(old)
            modified = modified or bool(new != old)
            return new

        old = super().atomic(
            allocation, index, dtype, loc, order, scope, tracked, how=how, **more
        )  # fmt: skip
        if fenced is not None and modified and not order.releases:
            cell = index * (dtype.itemsize // allocation.cell_bytes)
            allocation.sync_word(cell).release(self.rank, scope, fenced.copy())
        return old
