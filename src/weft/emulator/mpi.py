"""`mpi4py` of emulated ranks: the collectives by which a host of the field finds its peers."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from types import ModuleType
from typing import Any

import numpy as np

from weft.base.topology import Topology
from weft.emulator.context import context_of_rank
from weft.emulator.meetings import Meetings

NAMES = ("mpi4py", "mpi4py.MPI")


class Communicator:
    """Ranks of the world, or of the calling rank's node."""

    def __init__(self, meetings: Meetings, topology: Topology, *, of_node: bool = False) -> None:
        self._meetings = meetings
        self._topology = topology
        self._of_node = of_node

    def _members(self) -> list[int]:
        ranks = list(range(self._topology.num_ranks))
        if not self._of_node:
            return ranks
        node = self._topology.seat(context_of_rank("mpi4py").rank).node
        return [rank for rank in ranks if self._topology.seat(rank).node == node]

    def Get_rank(self) -> int:
        return self._members().index(context_of_rank("mpi4py").rank)

    def Get_size(self) -> int:
        return len(self._members())

    rank, size = property(Get_rank), property(Get_size)

    def Split_type(self, kind: int, *about: Any, **options: Any) -> Communicator:
        return Communicator(self._meetings, self._topology, of_node=True)

    def Free(self) -> None:
        """Nothing is held."""

    def allgather(self, value: Any, what: str = "an all-gather of mpi4py") -> list[Any]:
        members = self._members()
        return self._meetings.exchange(("mpi4py", *members), members, self.Get_rank(), what, value)

    def Barrier(self) -> None:
        self.allgather(None, "a barrier of mpi4py")

    barrier = Barrier

    def bcast(self, value: Any, root: int = 0) -> Any:
        return self.allgather(value, "a broadcast of mpi4py")[root]

    def Bcast(self, buffer: np.ndarray, root: int = 0) -> None:
        buffer[...] = self.allgather(np.array(buffer), "a broadcast of mpi4py")[root]

    def Allgather(self, sendbuf: np.ndarray, recvbuf: np.ndarray) -> None:
        recvbuf[...] = np.concatenate(self.allgather(np.array(sendbuf))).reshape(recvbuf.shape)


def intercept_mpi(meetings: Meetings, topology: Topology) -> Callable[[], None]:
    """Answer `mpi4py`, installed or not; returns the undo."""
    before = {name: sys.modules.get(name) for name in NAMES}
    package, module = (module_from_spec(ModuleSpec(name, None)) for name in NAMES)
    vars(package)["MPI"] = module
    vars(module).update(COMM_WORLD=Communicator(meetings, topology), COMM_TYPE_SHARED=0)
    sys.modules.update(zip(NAMES, (package, module), strict=True))

    def restore() -> None:
        for name, own in before.items():
            _put_back(name, own)

    return restore


def _put_back(name: str, module: ModuleType | None) -> None:
    if module is None:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = module
