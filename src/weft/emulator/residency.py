"""Which programs are resident: a kernel's start in order, as long as their rank has room."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from weft.base.counts import counted
from weft.base.errors import ResidencyError
from weft.emulator.device import Device
from weft.emulator.programs import Program
from weft.emulator.works import KernelWork


class Residency:
    """The programs of all ranks' kernels, of which `room` are resident on a rank at a time.

    `make(work, pid, ended=...)` makes a program that calls `ended(itself)` when it has run.
    """

    def __init__(self, device: Device, make: Callable[..., Program]) -> None:
        self.device = device
        self.make = make
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
        program = self.make(work, work.program_id(index), ended=self._program_ended)
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
