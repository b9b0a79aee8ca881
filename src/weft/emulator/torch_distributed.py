"""`torch.distributed` among emulated ranks: one thread per rank, each with groups of its own.

Which part of torch holds the groups is private: the names that are replaced in `distributed_c10d`
(2.11 to 2.13) are all in `install`.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.distributed import distributed_c10d as c10d

from weft.base.errors import UsageError
from weft.base.user_place import user_place
from weft.emulator.meetings import Meetings
from weft.emulator.process_group import EmulatedGroup


class RankGroups(c10d._World):
    """One rank's groups: what torch otherwise keeps in globals of its module."""

    def __init__(self) -> None:
        super().__init__()
        self.maps: dict[str, dict] = {}
        self.count = 0

    def _map(self, name: str) -> dict:
        return self.maps.setdefault(name, {})

    pg_map = property(lambda self: self._map("pg_map"))
    pg_names = property(lambda self: self._map("pg_names"))
    pg_group_ranks = property(lambda self: self._map("pg_group_ranks"))
    pg_backend_config = property(lambda self: self._map("pg_backend_config"))
    tags_to_pg = property(lambda self: self._map("tags_to_pg"))
    pg_to_tag = property(lambda self: self._map("pg_to_tag"))

    @property
    def group_count(self) -> int:
        return self.count

    @group_count.setter
    def group_count(self, value: int) -> None:
        self.count = value


class _Worlds:
    """Stands where torch keeps its one `_World`; every emulated rank's thread sees its own."""

    def __init__(self, own: Any) -> None:
        object.__setattr__(self, "_own", own)
        object.__setattr__(self, "_local", threading.local())

    def _world(self) -> Any:
        return getattr(self._local, "world", self._own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._world(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._world(), name, value)


class Distributed:
    """`torch.distributed` of one session: replaces torch's entry points while it is installed."""

    def __init__(self, num_ranks: int, meetings: Meetings) -> None:
        self.num_ranks = num_ranks
        self.meetings = meetings
        self.store = dist.HashStore()

    def install(self) -> Callable[[], None]:
        """Take over; returns how to undo it."""
        before = {
            name: getattr(c10d, name)
            for name in ("_world", "_new_process_group_helper", "rendezvous")
        }
        own_excepthook = sys.excepthook
        self.own_helper = before["_new_process_group_helper"]
        self.own_rendezvous = before["rendezvous"]
        self.worlds = _Worlds(before["_world"])
        c10d._world = self.worlds
        c10d._new_process_group_helper = self._new_group
        c10d.rendezvous = self._rendezvous
        torch._C._distributed_c10d._set_thread_isolation_mode(True)
        # A script that asks for nccl gets emulated ranks: that torch has no NCCL is no news.
        quiet = warnings.catch_warnings()
        quiet.__enter__()
        warnings.filterwarnings("ignore", message="Attempted to get default timeout for nccl")
        # torch asks for it where it logs an error of a group called nccl; without NCCL it would
        # raise that there is none in the error's place.
        own_version = nccl.version
        if not hasattr(torch._C, "_nccl_version"):
            nccl.version = lambda: ()

        def restore() -> None:
            nccl.version = own_version
            quiet.__exit__(None, None, None)
            for name, value in before.items():
                setattr(c10d, name, value)
            sys.excepthook = own_excepthook
            torch._C._distributed_c10d._set_thread_isolation_mode(False)

        return restore

    @contextmanager
    def rank(self, groups: RankGroups) -> Iterator[None]:
        """This thread is a rank, with these groups."""
        registry = torch._C._distributed_c10d
        self.worlds._local.world = groups
        for group, name in groups.pg_names.items():
            registry._register_process_group(name, group)
        try:
            yield
        finally:
            registry._unregister_all_process_groups()
            del self.worlds._local.world

    def _is_rank(self) -> bool:
        return hasattr(self.worlds._local, "world")

    def _rendezvous(self, url: str, rank: int = -1, world_size: int = -1, **options: Any):
        if not self._is_rank():
            yield from self.own_rendezvous(url, rank, world_size, **options)
            return
        here = self.meetings.hosts.current().rank
        if rank not in (-1, here) or world_size not in (-1, self.num_ranks):
            raise UsageError(
                f"init_process_group says rank {rank} of {world_size}, but this is rank {here} of "
                f"{self.num_ranks} emulated ranks; leave both out, or pass what RANK and "
                "WORLD_SIZE say",
                place=user_place(),
            )
        yield self.store, here, self.num_ranks

    def _new_group(self, group_size, group_rank, ranks, backend, store, group_name, *rest, **named):
        if not self._is_rank():
            return self.own_helper(
                group_size, group_rank, ranks, backend, store, group_name, *rest, **named
            )
        world = self.worlds._world()
        here = self.meetings.hosts.current().rank
        if group_name in world.pg_names.values():
            raise UsageError(f"there is a process group {group_name!r} already; name it otherwise")
        tag = named.get("pg_tag") or ""
        if tag:
            existing = c10d._find_pg_by_ranks_and_tag(tag, ranks)
            if existing:
                return existing, world.pg_map[existing][1]
        members = list(ranks) or list(range(self.num_ranks))
        if ranks and here not in ranks:
            return dist.GroupMember.NON_GROUP_MEMBER, None
        name = "gloo" if str(backend) == "undefined" else str(backend)
        group = EmulatedGroup(self.meetings, str(group_name), group_rank, members, name)
        prefixed = dist.PrefixStore(f"{group_name}/", store)
        world.pg_map[group] = (name, prefixed)
        world.pg_names[group] = group_name
        world.pg_backend_config[group] = name if ":" in name else f"cpu:{name},cuda:{name}"
        if tag:
            full_tag = f"user:{tag}"
        else:
            full_tag = f"ptd:{group_name}"
            world.tags_to_pg.setdefault("", []).append(group)
        world.tags_to_pg.setdefault(full_tag, []).append(group)
        world.pg_to_tag[group] = full_tag
        torch._C._distributed_c10d._register_process_group(group_name, group)
        return group, prefixed
