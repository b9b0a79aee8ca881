"""A program that keeps its simulated time.

Between two synchronising operations its loads, its stores and its products overlap, as in a
pipelined loop: the stretch takes as long as the slowest of them. A stretch ends where the program
signals, waits or ends, so that a signal leaves behind all that was done before it.
"""

from __future__ import annotations

from collections import defaultdict
from functools import lru_cache
from math import prod
from typing import Any

import numpy as np

from weft.emulator.accesses import Read, Write
from weft.emulator.codegen import EmulatedKernel, write_kernel
from weft.emulator.device import Device
from weft.emulator.function_writer import FunctionWriter
from weft.emulator.packets import PacketRead
from weft.emulator.programs import Program
from weft.emulator.simulated_time import Sender, SimulatedTime, earliest_for_all, take_all, us
from weft.emulator.works import KernelWork
from weft.ir.ttir import Op
from weft.ir.ttir_parser import parse
from weft.language.symbols import base_symbol, with_trait

# When a packet that nobody has sent was there, and by whom: before all else.
NEVER = (0.0, None)
# Primitives whose data carries its own signal.
FLAGGED = with_trait("carries_flag")


class TimedProgram(Program):
    """See the module's words; `now` is the program's time."""

    def __init__(self, time: SimulatedTime, device: Device, work: KernelWork, *rest, **named):
        super().__init__(device, work, *rest, **named)
        self.time = time
        self.place_number, self.start_us = self.time.place(self.rank, work.begin_us)
        self.lane = f"sm {self.place_number}"
        self.now = self.start_us
        self._product_us = 0.0
        self._flops = 0
        self._local_bytes = 0
        self._moved: dict[tuple[int, bool], int] = defaultdict(int)  # by peer, and is it written

    # ---- what a stretch does

    def multiplied(self, flops: int, operand_bytes: int) -> None:
        """Called by generated code at each product."""
        self._product_us += flops / self.time.hardware.sm_flops_per_us(operand_bytes)
        self._flops += flops

    def touch(self, kind, allocation, index, itemsize, loc, segment=None, **how):
        if kind is not PacketRead:  # it has come by itself
            low, high = int(index.min()) * itemsize, (int(index.max()) + 1) * itemsize
            self._count(allocation, low, high, index.size * itemsize, kind is not Read)
        super().touch(kind, allocation, index, itemsize, loc, segment, **how)

    def touch_element(self, kind, allocation, index, itemsize, loc, segment=None, **how):
        if kind in (Read, Write):
            start = index * itemsize
            self._count(allocation, start, start + itemsize, itemsize, kind is Write)
        super().touch_element(kind, allocation, index, itemsize, loc, segment, **how)

    def touch_window(self, kind, window, loc, segment=None):
        start, nbytes = window.span()
        is_write = kind is Write
        self._count(window.allocation, start, start + nbytes, window.data.nbytes, is_write)
        super().touch_window(kind, window, loc, segment)

    def _count(self, allocation, low: int, high: int, nbytes: int, is_write: bool) -> None:
        """Add the bytes of one access, within low .. high - 1 of an allocation, to the stretch."""
        if allocation.rank != self.rank:
            self._moved[allocation.rank, is_write] += nbytes
            return
        self._local_bytes += nbytes
        first, last, before = self.work.touched.get((allocation, is_write), (low, high, 0))
        self.work.touched[allocation, is_write] = (
            min(first, low), max(last, high), before + nbytes,
        )  # fmt: skip

    def settle_time(self) -> None:
        """End a stretch: `now` becomes the time at which all of it is done."""
        if not (self._product_us or self._local_bytes or self._moved):
            return
        time, hardware, start = self.time, self.time.hardware, self.now
        local = us(self._local_bytes, hardware.sm_gbps)
        worked = max(self._product_us, local)
        end = start + worked
        if self._product_us or not self._moved:
            time.compute[self.rank].append((start, end))
        time.span(self.rank, self.lane, self._worked_on(), start, start + worked, "work")
        for (peer, is_write), nbytes in self._moved.items():
            ends = (self.rank, peer) if is_write else (peer, self.rank)
            links = time.link(*ends, nbytes)
            begin = earliest_for_all(start, links)
            take_all(begin, links)
            # A store leaves and is not waited for; a load has to come back.
            delay = 0.0 if is_write else time.latency(peer, self.rank)
            done = max(begin + links[0][2], start + us(nbytes, hardware.pusher_gbps)) + delay
            time.transfers[self.rank].append((begin, done))
            to = f"to {peer}" if is_write else f"from {peer}"
            name = f"{nbytes} bytes {to}"
            time.span(self.rank, "transfers of SMs", name, begin, done, "transfer", ends[0])
            end = max(end, done)
        self.now = end
        self._product_us, self._local_bytes, self._flops = 0.0, 0, 0
        self._moved.clear()

    def _worked_on(self) -> str:
        memory = f"{self._local_bytes} bytes of memory"
        return f"{self._flops} flops, {memory}" if self._flops else memory

    def _sender(self) -> Sender:
        return Sender(self.rank, self.lane, self.now)

    # ---- where stretches end

    def leave(self) -> None:
        super().leave()
        self.settle_time()
        self.time.leave(self.rank, self.place_number, self.now)
        self.work.end_us = max(self.work.end_us, self.now)
        which = ", ".join(str(i) for i in self.program)
        name = f"{self.work.kernel.name}[{which}]"
        self.time.span(self.rank, self.lane, name, self.start_us, self.now, "program")

    def atomic(self, allocation, index, dtype, loc, order, scope, change, *, how="update", **more):
        self.settle_time()
        seen: list[Any] = []

        def noted(old):
            new = change(old)
            seen[:] = [old, new]
            return new

        old = super().atomic(
            allocation, index, dtype, loc, order, scope, noted, how=how, **more
        )  # fmt: skip
        before, after = seen
        replaces = how == "set"
        word = self.time.word(allocation, index * dtype.itemsize)
        modifies = replaces or before != after
        returns = not replaces and (order.acquires or not order.releases)
        if returns:
            known = word.latest() if modifies and order.acquires else word.showed(old)
            self.now = max(self.now, known)
        delay = self.time.latency(self.rank, allocation.rank)
        if modifies:
            is_set = replaces or dtype.kind not in "iu"  # nobody waits for a float
            word.changed(before, after, self.now + delay, is_set, self._sender())
            if returns:
                self.now += 2 * delay
        return old

    def _wait_word(self, allocation, index, kind, at_least, order, scope, loc) -> None:
        self.settle_time()
        super()._wait_word(allocation, index, kind, at_least, order, scope, loc)
        offset = index * kind.itemsize
        reached = self.time.word(allocation, offset).reached(at_least, kind)
        self._wait_until(*reached, allocation, offset, kind.itemsize)

    def _wait_until(
        self, time: float, by: Sender | None, allocation, offset: int, itemsize: int
    ) -> None:
        word = allocation.word_name(allocation.address + offset, itemsize)
        self.time.signal(word, by, self.rank, self.lane, time)
        if time > self.now:
            self.time.span(self.rank, self.lane, f"wait {word}", self.now, time, "wait")
            self.now = time

    def clock_ns(self, args, static, dtype, shape, loc):
        """The end of a stretch, as a signal is: what was done before took its time."""
        self.settle_time()
        return np.int64(round(self.now * 1e3))

    def atomic_tile(self, *access, **more):
        result = super().atomic_tile(*access, **more)
        self.settle_time()
        return result

    def extern(self, symbol, args, dtype, shape, loc):
        """Packets carry their own signal: the arrival of each flag's word is remembered."""
        name = base_symbol(symbol)
        if name not in FLAGGED:
            return super().extern(symbol, args, dtype, shape, loc)
        ptr, _, *rest = args
        mask = rest[0] if rest else None
        if not name.startswith("weft.put"):
            self.settle_time()
        result = super().extern(symbol, args, dtype, shape, loc)
        self.settle_time()
        for _, allocation, index in self.packet_words(ptr, mask, loc)[1]:
            arrivals = self.time.packets.setdefault(allocation, {})
            words = index.tolist()
            if name.startswith("weft.put"):
                arrival = self.now + self.time.latency(self.rank, allocation.rank)
                arrivals.update(dict.fromkeys(words, (arrival, self._sender())))
            else:
                last = max(words, key=lambda word: arrivals.get(word, NEVER)[0])
                self._wait_until(*arrivals.get(last, NEVER), allocation, last * 8, 8)
        return result


# ---------------------------------------------------------------------------------------------
# Kernels that say what their products cost

PRODUCTS = ("tt.dot", "tt.dot_scaled")


class _TimedFunctionWriter(FunctionWriter):
    def emit(self, op: Op) -> None:
        super().emit(op)
        if op.name in PRODUCTS:
            left, result = op.operands[0], op.result
            flops = 2 * prod(result.type.shape) * left.type.shape[-1]
            width = self.numpy_dtype(left.type.element).itemsize
            self.line(f"rt.multiplied({flops}, {width})")


@lru_cache(maxsize=1024)
def compile_timed(text: str) -> EmulatedKernel:
    """As compile_ttir; each product tells the program how much it was."""
    return write_kernel(parse(text), True, _TimedFunctionWriter)
