"""torch's rendezvous of symmetric memory, for ranks that have met others more or less often.

torch numbers the exchanges of a rendezvous by one counter for the process, whatever the group: a
rank that made a world more than another looks for keys that nobody sets, and both wait for ever.
So each world brings a store of its own that counts anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class CountingStore(dist.Store):
    """A store for one rendezvous: its exchanges count from 0, whatever number torch gives them.

    symmetric_memory/17/rank, symmetric_memory/18/rank   ->   prefix/0/rank, prefix/1/rank
    """

    def __init__(self, store: dist.Store, prefix: str) -> None:
        super().__init__()
        self._store, self._prefix = store, prefix
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        exchange, _, rank = key.rpartition("/")
        number = self._numbers.setdefault(exchange, len(self._numbers))
        return f"{self._prefix}/{number}/{rank}"

    def set(self, key: str, value: Any) -> None:
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        return self._store.get(self._key(key))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        wanted = [self._key(key) for key in keys]
        if timeout is None:
            self._store.wait(wanted)
        else:
            self._store.wait(wanted, timeout)


def register(store: dist.Store, name: str, rank: int, num_ranks: int) -> str:
    """The name under which torch finds a group of these ranks, whose store counts anew.

    The group has no backend: it is for a rendezvous alone.
    """
    from torch._C._distributed_c10d import _register_process_group

    group_name = f"weft/{name}"
    counting = CountingStore(store, f"weft-symmetric/{name}")
    group = dist.ProcessGroup(counting, rank, num_ranks)
    _register_process_group(group_name, group)
    _kept.append((group, counting))
    return group_name


def meet(heap: torch.Tensor, *, store: dist.Store, name: str, rank: int, num_ranks: int) -> Any:
    """torch's handle of `heap`, which has the parts of all ranks. Collective among them.

    `name` is the same on all ranks, and no other rendezvous' of these ranks.
    """
    from torch._C._distributed_c10d import _SymmetricMemory

    return _SymmetricMemory.rendezvous(heap, register(store, name, rank, num_ranks))


# torch keeps neither a group that is registered, nor the Python half of its store.
_kept: list[tuple[Any, CountingStore]] = []
