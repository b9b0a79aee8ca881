"""A session: emulated ranks in this process, and what is run on them.

    with weft.emulated(ranks=4) as ranks:
        results = ranks.run(main)

Inside `run` every rank is a thread, and one runs at a time. All that a process would own is
switched with the rank; all that a script asks of torch, torch.distributed and Triton is answered
by the emulated machine.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from weft.base.errors import UsageError
from weft.base.report import Report
from weft.base.topology import Topology
from weft.base.user_place import user_place
from weft.emulator.choices import Chooser
from weft.emulator.clocks import Clock
from weft.emulator.context import RankContext, current
from weft.emulator.cuda_driver import intercept_driver
from weft.emulator.hip_runtime import intercept_hip
from weft.emulator.isolation import Isolation
from weft.emulator.launches import take_launch
from weft.emulator.machine import Machine
from weft.emulator.meetings import Meetings
from weft.emulator.mpi import intercept_mpi
from weft.emulator.observation import Observer
from weft.emulator.rewriting import Rewrite
from weft.emulator.torch_compile import intercept_compilers
from weft.emulator.torch_cuda import intercept_cuda
from weft.emulator.torch_distributed import Distributed, RankGroups
from weft.emulator.torch_library import intercept_library
from weft.emulator.torch_nvshmem import intercept_nvshmem
from weft.emulator.torch_ops import TorchOperations, intercept_host_reads
from weft.emulator.torch_symmetric_memory import intercept_symmetric_memory
from weft.emulator.torch_symmetric_ops import intercept_symmetric_ops
from weft.emulator.traffic import Traffic
from weft.language import triton_api

_open: list[Session] = []


def active() -> bool:
    """Is the caller the host code of an emulated rank?"""
    return current() is not None


def open_session() -> Session:
    """The session whose ranks run."""
    return _open[-1]


class Session:
    """Emulated ranks. Made by `emulated`; `report` holds what was found so far.

    `results` and `errors` are the last run's, by rank.
    """

    def __init__(
        self, topology: Topology, local_root: str | None, seed: int, collect: bool, **options: Any
    ) -> None:
        ranks = topology.num_ranks
        self.topology = topology
        self.num_ranks = ranks
        self.num_nodes = topology.num_nodes
        self.collect = collect
        self.machine = Machine(topology, seed=seed, **options)
        self.isolation = Isolation(topology, seed=seed, local_root=local_root)
        self.machine.hosts.on_switch = self.isolation.switch
        self.meetings = Meetings(self.machine.hosts)
        self.distributed = Distributed(ranks, self.meetings)
        self.shared: dict[Any, Any] = {}
        self.closing: list[tuple[Any, Callable[[], None]]] = []
        self.contexts = [RankContext(self.machine, rank) for rank in range(ranks)]
        self.groups = [RankGroups() for _ in range(ranks)]
        self.results: list[Any] = []
        self.errors: dict[int, BaseException] = {}

    @property
    def report(self) -> Report:
        return self.machine.report

    @property
    def traffic(self) -> Traffic:
        """Bytes that went from rank to rank so far."""
        return self.machine.checker.traffic

    def run(self, main: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `main(*args)` on every rank; returns the results in rank order.

        A `main` that takes one parameter more than `args` gets its rank first.

        Raises  what the machine found first, else what a rank's code raised; with `collect`
                findings are only filed in `report`
        """
        if _open[-1:] != [self]:
            raise UsageError("ranks.run() works inside its own `with weft.emulated(...)` block")
        wants_rank = _wants_rank(main, args)
        return self.run_each(
            [
                lambda rank=rank: main(*((rank,) if wants_rank else ()), *args)
                for rank in range(self.num_ranks)
            ]
        )

    def run_each(self, mains: list[Callable[[], Any]], *, raising: bool = True) -> list[Any]:
        """Run one function per rank; see `run`. Without `raising` errors stay in `errors`."""
        machine = self.machine
        past = self._common_past()
        hosts = [
            machine.hosts.add(rank, lambda rank=rank, main=main: self._on_rank(rank, main))
            for rank, main in enumerate(mains)
        ]
        for host in hosts:
            host.clock.join(past)
        before = len(machine.report.findings)
        try:
            machine.run()
        finally:
            self.isolation.switch(None)
        self.results = [host.result for host in hosts]
        self.errors = {host.rank: host.error for host in hosts if host.error is not None}
        if raising:
            self._raise_first(before)
        return self.results

    def _on_rank(self, rank: int, main: Callable[[], Any]) -> Any:
        """The bottom of a rank's thread."""
        context = self.contexts[rank]
        with context, self.distributed.rank(self.groups[rank]), TorchOperations(context):
            try:
                return main()
            except triton_api.CompilationError as error:
                raise triton_api.compile_error(error, _kernel_name(error), "emu") from error
            except Exception as error:
                if (found := triton_api.scan_error(error, "emu")) is not None:
                    raise found from error
                raise

    def _common_past(self) -> Clock:
        """All that has happened in earlier runs: whatever follows is ordered after it."""
        clock = Clock()
        for host in self.machine.hosts:
            clock.join(self.machine.hosts.publish(host.rank))
            clock.join(host.clock)
        for stream in self.machine.device.all_streams.values():
            clock.join(stream.clock)
        return clock

    def _raise_first(self, before: int) -> None:
        error = self.machine.error
        found = len(self.machine.report.findings) > before
        if error is not None and found and not self.collect:
            cause = next(iter(self.errors.values()), None)
            raise error from cause
        if self.errors and not (found and self.collect):
            rank, failure = min(self.errors.items(), key=lambda item: item[0])
            if hasattr(failure, "add_note"):
                failure.add_note(f"(raised on emulated rank {rank})")
                if self.machine.left_behind:
                    failure.add_note(self.machine.left_behind)
            raise failure

    def close(self) -> None:
        self.machine.close()
        for _, forget in self.closing:
            forget()
        for context in self.contexts:
            context.belongings.clear()
        self.shared.clear()


def _kernel_name(error: Any) -> str:
    """The kernel that Triton could not compile: the outermost function of its error."""
    found = re.search(r"\bdef (\w+)", error.src or "")
    return found[1] if found else "the kernel"


def _wants_rank(main: Callable[..., Any], args: tuple) -> bool:
    try:
        signature = inspect.signature(main)
    except (TypeError, ValueError):
        return False
    for wants, given in ((False, args), (True, (0, *args))):
        try:
            signature.bind(*given)
            return wants
        except TypeError:
            pass
    raise UsageError(
        f"{getattr(main, '__name__', main)}{signature} takes neither the {len(args)} given "
        "arguments nor these and its rank",
        place=user_place(),
    )


ARCHITECTURES = (0, 90, 100)


@contextmanager
def emulated(
    ranks: int | None = None, nodes: int | Sequence[int] = 1, seed: int = 0, num_sms: int = 132,
    collect: bool = False, *, arch: int = 0, name: str = "program",
    local_root: str | None = None, rewrite: Rewrite | None = None, chooser: Chooser | None = None,
    observers: Sequence[Observer] = (),
) -> Iterator[Session]:  # fmt: skip
    """Emulated ranks in this process; `.run(main)` runs a function on each of them.

    `seed` chooses the schedule: the same seed is the same run. `collect` files findings in
    `.report` where they would otherwise be raised. Modules from below `local_root` are kept per
    rank, as are the environment, the random states and the default process group.

    `observers` receive every event (emulator/observation.py); a `chooser` decides the
    schedule in the seed's place (emulator/choices.py).
    `rewrite` may change kernels and host operations before they run (emulator/rewriting.py).

    Units   ranks: 4, or what `nodes` holds; nodes: how many scale-up domains, or the size of
            each, e.g. (3, 1); num_sms: programs resident on one rank; arch: 90 runs what weft runs
            on Hopper, kernels in Gluon among it, and 100 what it runs on Blackwell
    """
    topology = Topology.of(ranks, nodes)
    if num_sms < 1:
        raise UsageError(f"num_sms={num_sms}: a rank holds at least one program")
    if arch not in ARCHITECTURES:
        raise UsageError(
            f"arch={arch}: the emulator runs what weft runs on 90 or 100, or anywhere: 0"
        )
    if _open:
        raise UsageError("weft.emulated() does not nest: leave the outer block first")
    session = Session(
        topology, local_root, seed, collect, num_sms=num_sms, arch=arch, name=name,
        rewrite=rewrite, chooser=chooser, observers=observers,
    )  # fmt: skip
    with ExitStack() as stack:
        _open.append(session)
        stack.callback(_open.remove, session)
        stack.callback(session.close)
        stack.callback(triton_api.take_launches(take_launch, num_sms, arch))
        stack.callback(session.distributed.install())
        stack.callback(intercept_host_reads())
        stack.callback(intercept_compilers())
        stack.callback(intercept_cuda(topology, arch))
        stack.callback(intercept_library())
        stack.callback(intercept_driver())
        stack.callback(intercept_hip())
        stack.callback(intercept_mpi(session.meetings, topology))
        stack.callback(intercept_symmetric_memory(session.meetings))
        stack.callback(intercept_symmetric_ops())
        stack.callback(intercept_nvshmem())
        session.isolation.start()
        stack.callback(session.isolation.stop)
        grad = torch.autograd.set_multithreading_enabled(False)
        stack.callback(grad.__exit__, None, None, None)
        yield session
