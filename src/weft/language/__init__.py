"""The language of distributed kernels: `import weft.language as wl`.

Each primitive is declared once, in a file of this folder, and implemented under the same file
name in cuda/, hip/ and emu/, or in portable/ where machines do not differ.
"""

from __future__ import annotations

from weft.base.vocabulary import Order, Scope, SignalOp
from weft.language.addressing import at, is_near, local_rank, node, num_ranks, rank
from weft.language.barriers import barrier, barrier_grid
from weft.language.one_sided import get, put, put_signal
from weft.language.ordered import atomic_add, atomic_cas, atomic_exchange, load, store
from weft.language.signals import complete_stores, consume, notify, test, wait
from weft.language.slots import slot_epoch, slot_finish, slot_wait_free
from weft.language.world_arg import SlotArg, WorldArg, language_version

# Implementations join themselves to their declarations: importing them is all it takes.
from weft.language.cuda import ordered as _cuda_ordered, signals as _cuda_signals  # isort: skip
from weft.language.hip import ordered as _hip_ordered, signals as _hip_signals  # isort: skip
from weft.language.emu import addressing as _emu_addressing  # isort: skip
from weft.language.emu import ordered as _emu_ordered, signals as _emu_signals  # isort: skip
from weft.language.portable import addressing as _addressing  # isort: skip
from weft.language.portable import barriers as _barriers, one_sided as _one_sided  # isort: skip

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
    "consume",
    "get",
    "is_near",
    "language_version",
    "load",
    "local_rank",
    "node",
    "notify",
    "num_ranks",
    "put",
    "put_signal",
    "rank",
    "slot_epoch",
    "slot_finish",
    "slot_wait_free",
    "store",
    "test",
    "wait",
]
