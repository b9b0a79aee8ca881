"""One program of a kernel: the context that generated code calls for everything with an effect.

A program is a coroutine. It runs undisturbed between synchronising operations, which is enough:
whether two plain accesses race does not depend on when they run but on what orders them, and only
synchronising operations order. At those the program may be set aside, and another one runs.

What it does to memory is in `plain_access`, `synchronising`, `packets`, `assembly` and
`shared_access`, each building on the one before. Here are its life, weft's own primitives, its
partitions, and `Residency`: which programs run at a time.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from weft.base.counts import counted
from weft.base.errors import (
    FarPointerError,
    NotSymmetricError,
    OutOfBoundsError,
    PeerError,
    ResidencyError,
    UnsupportedError,
)
from weft.base.vocabulary import Scope, SignalOp
from weft.emulator.accesses import Awaited, Killed
from weft.emulator.device import Device
from weft.emulator.isolation import process_stdout
from weft.emulator.memory import ORDERS, SCOPES, SyncWord, behind, wrap_add
from weft.emulator.nvshmem import FUNCTIONS as NVSHMEM
from weft.emulator.shared_memory import Past, View
from weft.emulator.tensor_access import TensorAccess
from weft.emulator.works import KernelWork


class Program(TensorAccess):
    """The `rt` of generated code; see the module's words."""

    partition = ""  # how reports name it, where it is one of several
    joins = False  # does it wait for its partitions?
    partitions: Sequence[Partition] = ()  # those that have not ended
    ends: list[Partition]  # the others

    def __init__(
        self, device: Device, work: KernelWork, pid: tuple[int, int, int],
        reached: Callable[[int], None], ended: Callable[[Program], None],
    ) -> None:  # fmt: skip
        """`reached(mark)` is called where it comes by one, `ended(self)` at its end."""
        super().__init__(device, work, pid)
        self.program = pid
        self.name = (work.rank, work.number, pid)
        self.reached = reached
        self.ended = ended
        self.coroutine = greenlet(self._run, self.scheduler.hub)

    def _run(self) -> None:
        for watch in self.watches:
            watch.began(self)
        self._survive(self.work.kernel.function, self.work.args)
        self.leave_shared()
        self.ended(self)

    def _survive(self, function: Callable[..., None], args: Sequence[Any]) -> None:
        """Run it to its end, which may be a failure that is reported."""
        try:
            function(self, *args)
        except Killed:
            if self.under_way:
                self.under_way.clear()
        except OutOfBoundsError as error:
            # An index that went wrong before it became an access: generated code raises.
            self.findings.failure(
                self, OutOfBoundsError, "out of bounds", error.message, error.place,
                "check the index, and widen it before it is multiplied: i.to(tl.int64) * stride",
            )  # fmt: skip
        self.leave_packets()
        self.acquire_seen(Scope.SYSTEM)

    def step(self) -> None:
        self.waiting = None
        self.coroutine.switch()

    def kill(self) -> None:
        """End it where it is suspended, without another step."""
        self.coroutine.parent = getcurrent()
        self.coroutine.throw(GreenletExit)

    # ------------------------------------------------------------------------------------------
    # Its partitions

    def specialize(self, functions, values):
        """Let each function run as a partition beside this one, with the same values."""
        if not self.in_block:
            self.begin_block()
        past = self.past()
        self.ends = []
        self.partitions = [
            Partition(self, number, function, values, past)
            for number, function in enumerate(functions)
        ]

    def join_partitions(self, left: Sequence[View] = ()):
        """Go on when all partitions have ended; `left` is memory that nobody names behind them."""
        self.pause("join", lambda: bool(self.partitions))
        while self.partitions:
            self.joins = True
            self.scheduler.hub.switch()
            self.joins = False
        self.blocked = None
        for partition in self.ends:
            self.took(partition)
            self.inherit(partition.past())
        self.ends.clear()
        if left:
            self.leave_shared(left)

    def partition_ended(self, partition: Partition) -> None:
        self.partitions.remove(partition)
        self.gave(partition)
        self.ends.append(partition)
        if self.joins and not self.partitions:
            self.scheduler.make_ready(self)

    # ------------------------------------------------------------------------------------------
    # What wl's primitives become

    def extern(self, symbol, args, dtype, shape, loc):
        name, _, static = symbol.partition(":")
        handler = EXTERNS.get(name) or NVSHMEM.get(name)
        if handler is None:
            raise UnsupportedError(
                f"the emulator does not know the external function {symbol!r}; it runs weft's own"
                " primitives and plain Triton",
                place=self.locations[loc],
            )
        return handler(self, args, static.split("."), dtype, shape, loc)

    def _translate(self, args, static, dtype, shape, loc, far_allowed=False):
        ptr, table, peer = args
        heap = self.device.heap_of(int(table))
        peer = int(peer)
        if not 0 <= peer < heap.num_ranks:
            self.fail(
                PeerError, "peer",
                f"peer {peer} is outside the world's ranks 0 .. {heap.num_ranks - 1}", loc,
                remedy="compute the peer modulo wl.num_ranks(world)",
            )  # fmt: skip
        lo, hi = int(np.min(ptr)), int(np.max(ptr))
        own = heap.bases[heap.rank]
        if hi < own or own + heap.nbytes <= lo:  # masked lanes may be behind its end
            found = self.memory.find(lo)
            what = f"{found.name} of rank {found.rank}" if found else f"address {lo:#x}"
            self.fail(
                NotSymmetricError, "not symmetric",
                f"{what} is not on rank {heap.rank}'s symmetric heap, so it has no address on"
                f" rank {peer}", loc,
                remedy="allocate it with world.empty(...) or world.signals(...)",
            )  # fmt: skip
        if not heap.near[peer] and not far_allowed:
            self.fail(
                FarPointerError, "far pointer",
                f"rank {peer} is on another node: rank {heap.rank} cannot dereference its memory",
                loc, remedy="use wl.put, wl.get or wl.put_signal, or ask wl.is_near first",
            )  # fmt: skip
        delta = heap.bases[peer] - own
        if not heap.near[peer]:
            target = self.memory.find(lo + delta)
            if target is not None:
                self._far_ranks = self._far_ranks | {target.rank}
        return ptr + np.int64(delta)

    def _notify(self, args, static, dtype, shape, loc):
        ptr, value = args
        operation, order, scope = static
        kind = np.dtype(np.int64) if np.asarray(value).dtype.itemsize == 8 else None
        located = self._locate_word(ptr, kind, "signals", loc)
        if located is None:
            return np.int32(0)
        allocation, index, kind = located
        self.complete_stores()
        value, how = kind.type(value), "add"

        def change(old):
            return wrap_add(old, value, kind)

        if operation == SignalOp.SET.value:
            how = "set"

            def change(old):  # looked at when it is set, not when somebody may yet come first
                self.findings.check_set(self, allocation, index, kind, value, loc)
                return value

        self.atomic(allocation, index, kind, loc, ORDERS[order], SCOPES[scope], change, how=how)
        return np.int32(0)

    def _locate_word(self, ptr, kind: np.dtype | None, what: str, loc: int):
        """(allocation, index, dtype) of a signal word, whose width is that of its array."""
        allocation = self.memory.find(int(ptr))
        if kind is None or (allocation is not None and allocation.cell_bytes in (4, 8)):
            width = allocation.cell_bytes if allocation is not None else 4
            kind = np.dtype(np.int64 if width == 8 else np.int32)
        located = self.locate(ptr, kind.itemsize, what, loc)
        return None if located is None else (*located, kind)

    def _words(self, ptr, count, what: str, loc: int):
        """`count` words from `ptr` on, as _locate_word gives them; ends where one is not there."""
        for _ in range(int(count)):
            located = self._locate_word(ptr, None, what, loc)
            if located is None:
                return
            yield located
            ptr = ptr + np.int64(located[2].itemsize)

    def _wait(self, args, static, dtype, shape, loc):
        ptr, at_least, count = args[:3]
        order, scope = ORDERS[static[0]], SCOPES[static[1]]
        for allocation, index, kind in self._words(ptr, count, "waits for", loc):
            self._wait_word(allocation, index, kind, kind.type(at_least), order, scope, loc)
        return np.int32(0)

    def _wait_word(self, allocation, index, kind, at_least, order, scope, loc) -> None:
        view = allocation.view(kind)
        cell = index * (kind.itemsize // allocation.cell_bytes)
        self.pause("wait", lambda: behind(view[index], at_least, kind))
        while behind(view[index], at_least, kind):
            seen = int(view[index])
            self.set_aside(allocation, index, kind.itemsize, loc, int(at_least), seen)
        self.blocked = None
        segment = self.segment(loc, scope)
        self.touch_element(Awaited, allocation, index, kind.itemsize, loc, segment, modifies=False)
        for watch in self.watches:  # before it learns: what did it know without the wait?
            watch.passed(
                self, allocation, cell, int(at_least), int(view[index]), self.locations[loc],
                scope if order.acquires else None,
            )  # fmt: skip
        word, newest = allocation.sync_word(cell), view[index]

        def suits(value) -> bool:
            return not behind(value, at_least, kind)

        if self.sight is not None:
            _, word = self.sight.seen(self, allocation, cell, newest, word, suits)
        else:
            word = SyncWord(word.values.told(self, newest, word.published, suits))
        if order.acquires:
            self.learn(word.acquire(self.rank, scope))

    def _test(self, args, static, dtype, shape, loc):
        ptr, at_least, count = args
        order, scope = ORDERS[static[0]], SCOPES[static[1]]
        passed = tested = 0
        for allocation, index, kind in self._words(ptr, count, "tests", loc):
            seen = self.atomic(
                allocation, index, kind, loc, order, scope, lambda old: old, how="test"
            )
            passed += not behind(seen, kind.type(at_least), kind)
            tested += 1
        return np.bool_(passed == tested == int(count))

    def _ordered_load(self, args, static, dtype, shape, loc):
        located = self.locate(args[0], dtype.itemsize, "reads", loc)
        if located is None:
            return dtype.type(0)
        order, scope = ORDERS[static[0]], SCOPES[static[1]]
        return self.atomic(*located, dtype, loc, order, scope, lambda old: old, how="load")

    def _ordered_store(self, args, static, dtype, shape, loc):
        ptr, value = args
        kind = np.asarray(value).dtype
        located = self.locate(ptr, kind.itemsize, "writes", loc)
        if located is not None:
            order, scope = ORDERS[static[0]], SCOPES[static[1]]
            self.atomic(*located, kind, loc, order, scope, lambda old: kind.type(value), how="set")
        return np.int32(0)

    def _complete(self, *_):
        self.complete_stores()
        return np.int32(0)

    def _reached(self, args, static, dtype, shape, loc):
        self.reached(int(static[0]))
        return np.int32(0)

    # ------------------------------------------------------------------------------------------
    # The rest

    def assert_(self, cond, message, loc):
        if not np.all(cond):
            self.fail(
                AssertionError, "assertion", f"device_assert failed: {message}", loc,
                remedy="the values above do not satisfy the kernel's own check",
            )  # fmt: skip

    def print_(self, prefix, values, loc):
        shown = " ".join(str(value) for value in values)
        process_stdout().write(
            f"rank {self.rank} {self.work.kernel.name}{self.program}: {prefix}{shown}\n"
        )


# ---------------------------------------------------------------------------------------------


EXTERNS = {
    "weft.at": Program._translate,
    "weft.translate": lambda self, args, static, dtype, shape, loc: self._translate(
        args, static, dtype, shape, loc, far_allowed=True
    ),
    "weft.notify": Program._notify,
    "weft.wait": Program._wait,
    "weft.wait_bounded": Program._wait,
    "weft.test": Program._test,
    "weft.load": Program._ordered_load,
    "weft.store": Program._ordered_store,
    "weft.complete_stores": Program._complete,
    "weft.reached": Program._reached,
    "weft.clock_ns": Program.clock_ns,
    "weft.fence": Program.fence,
    "weft.put_packets": Program.put_packets,
    "weft.wait_packets": Program.wait_packets,
}


class Partition(Program):
    """Warps of a program's block that run a function of their own, beside the program.

    An agent and a coroutine of their own, with all that they have under way.
    """

    def __init__(
        self, whole: Program, number: int, function: Callable[..., None], values: Sequence[Any],
        past: Past,
    ) -> None:  # fmt: skip
        super().__init__(whole.device, whole.work, whole.program, whole.reached, whole.ended)
        self.begin_block()
        self.whole, self.name = whole, whole.new_name()
        self.under_way = whole.under_way
        self.partition = f", partition {number}"
        identity = self.agents.identity[self.agent]
        name = f"{identity.kernel}{self.partition}"
        self.agents.identity[self.agent] = replace(identity, kernel=name)
        self.inherit(past)
        self.function, self.values = function, values
        self.gave(self)
        self.scheduler.make_ready(self)

    def _run(self) -> None:
        self.took(self)
        with np.errstate(all="ignore"):
            self._survive(self.function, self.values)
        self.whole.partition_ended(self)

    def kill(self) -> None:
        """With it the program, which would wait for it."""
        super().kill()
        if self.whole.joins:
            self.whole.joins = False
            self.whole.kill()


class Residency:
    """The programs of all ranks' kernels, of which `room` are resident on a rank at a time.

    `reached(mark)` is called by programs that come by a mark.
    """

    def __init__(self, device: Device, reached: Callable[[int], None]) -> None:
        self.device = device
        self.reached = reached
        self.room = device.num_sms
        self._resident: Counter[int] = Counter()
        self._kernels: dict[int, list[KernelWork]] = defaultdict(list)
        device.start_kernel = self._start_kernel

    def unstarted(self) -> list[KernelWork]:
        """The kernels that are on and have programs that found no room."""
        ranks = range(self.device.num_ranks)
        return [work for rank in ranks for work in self._kernels[rank] if work.next < work.total]

    def make_room(self) -> None:
        """Let each rank hold one program more than a GPU's would."""
        self.room += 1
        for rank in range(self.device.num_ranks):
            self._fill(rank)

    def _start_kernel(self, work: KernelWork) -> None:
        self.device.scheduler.progress += 1
        num_sms = self.device.num_sms
        if work.total == 0:
            work.stream.finished(work)
            return
        if work.cooperative and work.total > num_sms:
            self.device.checker.findings.failure(
                None, ResidencyError, "residency",
                f"{work.describe()} is cooperative but has {work.total} programs; rank"
                f" {work.rank} holds {num_sms} at a time", work.place,
                f"launch at most {counted(num_sms, 'program')} and let each take several"
                " tiles",
                rank=work.rank, kernel=work.kernel.name,
            )  # fmt: skip
            work.stream.finished(work)
            return
        self._kernels[work.rank].append(work)
        self._fill(work.rank)

    def _fill(self, rank: int) -> None:
        """Start programs of the kernels that are on, in order, while the device has room."""
        for work in self._kernels[rank]:
            while work.next < work.total:
                if self._resident[rank] >= self.room:
                    return
                self._start_program(work, self._next_index(work))

    def _next_index(self, work: KernelWork) -> int:
        """Which program of `work` starts next: in order, unless an explored machine is full."""
        left = work.total - work.next
        scheduler, num_sms = self.device.scheduler, self.device.num_sms
        if not scheduler.explores or self._resident[work.rank] + left <= num_sms:
            return work.next if not work.out_of_order else work.out_of_order.pop(0)
        if not work.out_of_order:
            work.out_of_order.extend(range(work.next, work.total))
        return work.out_of_order.pop(scheduler.chooser.choose(left, "the program that starts"))

    def _start_program(self, work: KernelWork, index: int) -> None:
        program = Program(
            self.device, work, work.program_id(index), self.reached, self._program_ended
        )
        work.next += 1
        self._resident[work.rank] += 1
        for watch in self.device.checker.watches:
            watch.gave((work, program.program))
        self.device.scheduler.make_ready(program)

    def _program_ended(self, program: Program) -> None:
        work = program.work
        for watch in self.device.checker.watches:
            watch.ended(program)
        self.device.scheduler.progress += 1
        self._resident[work.rank] -= 1
        work.ended += 1
        if program.clock is not work.clock:
            work.stream.clock.join(program.clock)
        if work.ended == work.total:
            self._kernels[work.rank].remove(work)
            work.stream.finished(work)
        if self._kernels[work.rank]:
            self._fill(work.rank)
