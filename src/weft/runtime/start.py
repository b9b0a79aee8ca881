"""`weft.init` and `weft.world`: how a script comes to its world, on whichever machine it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from weft.base.errors import UsageError
from weft.base.settings import Settings
from weft.base.topology import parse_nodes
from weft.runtime import registry
from weft.runtime.world import World


def init(
    group: Any = None,
    *,
    name: str | None = None,
    heap_bytes: int | None = None,
    heap_limit: int | None = None,
    nodes: int | Sequence[int] | None = None,
    trace_tiles: int | None = None,
    strict: bool | None = None,
) -> World:
    """A world over `group`: all ranks, a process group's, or those of a device mesh of one axis.

    Collective among them. Where torch has no default process group yet, it has one afterwards.
    Under a launcher (torchrun) the processes find each other through its environment; inside
    `weft.emulated` each emulated rank gets its own world. Groups may use one `name`: it is this
    rank's alone.

    `nodes` declares which GPUs are near each other, as `weft.emulated` does: a number of nodes, or
    their sizes. Left out, each host is one, unless WEFT_NODES says otherwise. Where there are
    several, what crosses between them goes through NVSHMEM. Under the emulator the session knows.

    `strict`, or WEFT_STRICT: no call compiles a kernel. What `weft.prepare` was not asked for is an
    error then, a NotPreparedError that says what to ask.

    `trace_tiles`, or WEFT_TRACE_TILES: of so many tiles products leave a trace; see `World.trace`.

    Units   heap_bytes: this rank's symmetric heap, 1 GiB unless WEFT_HEAP_BYTES says otherwise;
            heap_limit, or WEFT_HEAP_LIMIT: bytes up to which it grows where it is full; it does not
            unless one of them says so
    Raises  TimeoutError: ranks that did not come within WEFT_INIT_TIMEOUT_S, by number
            UsageError: a mesh of more axes than one, a group without this rank
    """
    machine = _machine()
    scope = machine.scope()
    group = None if group is None else _process_group(group)
    asked = name or _default_name(group)
    chosen = registry.free_name(scope, asked)
    settings = Settings.from_environment(
        heap_bytes=heap_bytes, heap_limit=heap_limit, trace_tiles=trace_tiles, strict=strict
    )
    if nodes is None and settings.nodes:
        nodes = parse_nodes(settings.nodes)
    backend = machine.connect(group, settings, name=chosen, asked=asked, nodes=nodes)
    return World(chosen, backend, settings, scope)


def world(name: str = "world") -> World:
    """The open world called `name`: custom operators carry a world by its name."""
    return registry.find(_machine().scope(), name)


def world_over(given: Any, caller: str) -> World:
    """The world that is meant: itself, or one over the ranks of a device mesh of one axis or of a
    process group, the open one if there is. Collective among them where there is none.

    Raises  UsageError: a mesh of more axes, or none of all these
    """
    if isinstance(given, World):
        return given
    import torch.distributed as dist

    if not (isinstance(given, dist.ProcessGroup) or _is_mesh(given)):
        raise UsageError(
            f"{caller}: it takes a world over the ranks of its collectives, not {given!r}; pass "
            "what weft.init() returned, or a device mesh of one axis, such as mesh['tp']"
        )
    group = _process_group(given)
    ranks = tuple(dist.get_process_group_ranks(group))
    open_ones = registry.all_of(_machine().scope())
    found = (one for one in open_ones if one.backend.seats.global_ranks == ranks)
    return next(found, None) or init(group)


@contextmanager
def called(world: Any) -> Iterator[None]:
    """In the brackets `world`, which `init` has not made, is found by its name."""
    scope = _machine().scope()
    registry.add(scope, world)
    try:
        yield
    finally:
        registry.remove(scope, world)


def _machine() -> Any:
    """The backend module for whoever is calling: an emulated rank's thread, or a process."""
    # A process that has not imported the emulator is not inside one; a GPU run needs no package
    # of it.
    emulator = sys.modules.get("weft.emulator")
    if emulator is not None and emulator.active():
        from weft.runtime.backends import emu

        return emu
    from weft.runtime.backends import cuda

    return cuda


def _is_mesh(given: Any) -> bool:
    return hasattr(given, "mesh_dim_names") and hasattr(given, "get_group")


def _process_group(group: Any) -> Any:
    """The process group that is meant: a device mesh of one axis stands for its own.

    Raises  UsageError: a mesh of more axes, a group without this rank, or neither of both
    """
    import torch.distributed as dist

    if _is_mesh(group):
        if group.ndim != 1:
            axes = group.mesh_dim_names
            one = f"mesh[{axes[-1]!r}]" if axes else 'mesh["tp"], of a mesh with mesh_dim_names,'
            raise UsageError(
                f"weft.init(group=mesh): a world is over one axis, but the mesh of shape "
                f"{tuple(group.shape)} has {group.ndim} ({axes or 'without names'}); pass one "
                f"axis of it, e.g. {one} or mesh.get_group({len(group.shape) - 1})"
            )
        if group.get_coordinate() is None:
            raise UsageError(
                f"weft.init(group=mesh): rank {dist.get_rank()} is not in the mesh "
                f"{group.mesh.tolist()}; only its members call weft.init"
            )
        return group.get_group()
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UsageError(
            f"weft.init(group=..): rank {dist.get_rank()} is no member of this group; only its "
            "members call weft.init"
        )
    if not isinstance(group, dist.ProcessGroup):
        raise UsageError(
            f"weft.init(group={group!r}): pass a process group, e.g. torch.distributed.new_group("
            "[0, 1]), or a device mesh of one axis"
        )
    return group


def _default_name(group: Any) -> str:
    if group is None:
        return "world"
    import torch.distributed as dist

    return "world-" + "-".join(map(str, dist.get_process_group_ranks(group)))
