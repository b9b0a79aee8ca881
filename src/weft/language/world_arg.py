"""What kernels are handed: a world as one argument, a slot as one argument."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path
from typing import Any, NamedTuple


class WorldArg(NamedTuple):
    """`world.arg`: a world, as a kernel sees it.

    Rank, heap bases and nodes are in the table: integers in here would be specialised, and every
    rank would compile its own binary. `version` keeps Triton's cache honest across upgrades, and
    says whether kernels need the code that reaches far peers, and that which keeps a trace.
    """

    table: Any  # int64 device tensor, laid out as world_layout says
    num_ranks: Any  # tl.constexpr
    version: Any  # tl.constexpr: language_version() or far_version(), as `traced_version` of it


class SlotArg(NamedTuple):
    """`slot.arg`: a slot of a workspace, as weft.language.slots sees it."""

    epoch: Any  # int64 word, local: the last call that finished with this slot
    ticket: Any  # int32 word, local: how many programs of the running call are done
    slot_free: Any  # int64[num_ranks], symmetric: slot_free[r] = last epoch that r is done with


_VERSION_BITS = 56
_FAR = 1 << _VERSION_BITS
_TRACED = 2 << _VERSION_BITS


def far_version(library: int) -> int:
    """The version of a world with peers that GPUs reach through a library; `library` < 2**56 is
    another number for other device code of it."""
    return _FAR | (language_version() ^ library)


def is_far_version(version: int) -> bool:
    return bool(version & _FAR)


def traced_version(version: int) -> int:
    """The version of a world that is like one of `version`, and keeps a trace of tiles."""
    return _TRACED | version


def is_traced_version(version: int) -> bool:
    return bool(version & _TRACED)


@functools.lru_cache(maxsize=1)
def language_version() -> int:
    """A hash of every source file of the language, whatever the directory it is installed in.

    A number: Triton 3.6 cannot compare a tuple that holds a string with None.
    """
    root = Path(__file__).parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[: _VERSION_BITS // 8], "little")
