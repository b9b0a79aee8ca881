"""`weft.init` and `weft.world`: how a script comes to its world, on whichever machine it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from weft.base.settings import Settings
from weft.base.topology import parse_nodes
from weft.runtime import registry
from weft.runtime.world import World


def init(
    group: Any = None,
    *,
    name: str | None = None,
    heap_bytes: int | None = None,
    nodes: int | Sequence[int] | None = None,
    trace_tiles: int | None = None,
) -> World:
    """A world over `group`: all ranks, or a process group's. Collective among them.

    Under a launcher (torchrun) the processes find each other through its environment; inside
    `weft.emulated` each emulated rank gets its own world.

    `nodes` declares which GPUs are near each other, as `weft.emulated` does: a number of nodes, or
    their sizes. Left out, each host is one, unless WEFT_NODES says otherwise. Where there are
    several, what crosses between them goes through NVSHMEM. Under the emulator the session knows.

    `trace_tiles`, or WEFT_TRACE_TILES: of so many tiles products leave a trace; see `World.trace`.

    Units   heap_bytes: this rank's symmetric heap, 1 GiB unless WEFT_HEAP_BYTES says otherwise
    """
    machine = _machine()
    scope = machine.scope()
    chosen = registry.free_name(scope, name or _default_name(group))
    settings = Settings.from_environment(heap_bytes=heap_bytes, trace_tiles=trace_tiles)
    if nodes is None and settings.nodes:
        nodes = parse_nodes(settings.nodes)
    return World(chosen, machine.connect(group, chosen, nodes), settings, scope)


def world(name: str = "world") -> World:
    """The open world called `name`: custom operators carry a world by its name."""
    return registry.find(_machine().scope(), name)


def _machine() -> Any:
    """The backend module for whoever is calling: an emulated rank's thread, or a process."""
    # Who has not imported the emulator is not inside one; a GPU run needs none of its packages.
    emulator = sys.modules.get("weft.emulator")
    if emulator is not None and emulator.active():
        from weft.runtime.backends import emu

        return emu
    from weft.runtime.backends import cuda

    return cuda


def _default_name(group: Any) -> str:
    if group is None:
        return "world"
    import torch.distributed as dist

    return "world-" + "-".join(map(str, dist.get_process_group_ranks(group)))
