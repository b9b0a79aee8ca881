"""What kernels call to reach other ranks: `import weft.language as wl`.

    @triton.jit
    def send(world, row, inbox, ready, size: tl.constexpr):
        peer = (wl.rank(world) + 1) % wl.num_ranks(world)
        at = tl.arange(0, size)
        wl.put(world, inbox + at, tl.load(row + at), to=peer)
        wl.notify(world, ready, to=peer)     # releases: who sees the signal sees the row
        wl.wait(ready, at_least=1)           # acquires: the other neighbour's row is in our inbox

`world` is `world.arg`, passed at the launch; `help(wl.put)` and docs/language.md say what each
primitive does and orders.

Each primitive is declared once, in a file of this folder, and implemented in cuda/, hip.py and
emu.py, or in portable/ where machines do not differ.
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from weft.base.vocabulary import Order, Scope, SignalOp
from weft.language.world_arg import SlotArg, WorldArg, language_version


def _has_triton() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


# A process whose calls come from an artefact (weft.runtime.load) may be without Triton: it has the
# layouts of this room, and no primitives.
if TYPE_CHECKING or _has_triton():
    from weft.language.addressing import at, is_near, node, num_ranks, rank
    from weft.language.barriers import barrier, barrier_grid
    from weft.language.clock import timestamp
    from weft.language.one_sided import fence, get, put, put_signal
    from weft.language.ordered import atomic_add, atomic_cas, atomic_exchange, load, store
    from weft.language.packets import put_packets, wait_packets
    from weft.language.signals import complete_stores, notify, notify_all, test, wait
    from weft.language.slots import slot_close, slot_epoch, slot_finish, slot_wait_free
    from weft.language.tickets import next_task

    # Implementations join themselves to their declarations: importing them is all it takes.
    for _file in (
        *("cuda.signals", "cuda.packets", "cuda.one_sided", "hip", "emu"),
        *("portable.addressing", "portable.signals", "portable.ordered", "portable.one_sided"),
    ):
        importlib.import_module(f"{__name__}.{_file}")

__all__ = [
    "Order",
    "Scope",
    "SignalOp",
    "SlotArg",
    "WorldArg",
    "at",
    "atomic_add",
    "atomic_cas",
    "atomic_exchange",
    "barrier",
    "barrier_grid",
    "complete_stores",
    "fence",
    "get",
    "is_near",
    "language_version",
    "load",
    "next_task",
    "node",
    "notify",
    "notify_all",
    "num_ranks",
    "put",
    "put_packets",
    "put_signal",
    "rank",
    "slot_close",
    "slot_epoch",
    "slot_finish",
    "slot_wait_free",
    "store",
    "test",
    "timestamp",
    "wait",
    "wait_packets",
]


def __getattr__(name: str) -> Any:
    """Names that there are not: kernels are full of them until they are right."""
    if name in __all__:
        raise AttributeError(f"wl.{name} needs Triton, which cannot be imported here")
    near = "" if name.startswith("_") else difflib.get_close_matches(name, __all__, n=1)
    hint = f"; did you mean wl.{near[0]}?" if near else ""
    raise AttributeError(f"weft.language has no {name!r}{hint}")
