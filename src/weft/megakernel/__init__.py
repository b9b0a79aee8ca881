"""The persistent kernel: a program's tile tasks, and one kernel whose workers do them.

    y = mlp.options(lowering="persistent")(x, w1, w2, world=world)

`lowering=weft.megakernel.Persistent(num_workers=64, ...)` says how.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from weft.base.errors import WeftError
from weft.base.target import TARGETS

if TYPE_CHECKING:
    from weft.megakernel.run import Persistent

__all__ = ["Persistent", "run_persistent", "why_not"]


def run_persistent(
    program: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int], *, world: Any,
    settled: Collection[str] = (),
) -> Any:  # fmt: skip
    """One rank's results of a tiled program, as one kernel; see run.py. Collective."""
    from weft.megakernel.run import Persistent

    return Persistent().run_persistent(program, tensors, sizes, world=world, settled=settled)


def why_not(compiled: Any, sizes: Mapping[str, int], num_ranks: int) -> str:
    """Why a compiled program is not one persistent kernel; empty where it is."""
    from weft.megakernel.extents import chosen
    from weft.megakernel.graph import build

    sms, settled = TARGETS["emu"].num_sms, tuple(compiled.settings.tiles)
    try:
        build(chosen(compiled.tiled, sizes, num_ranks, sms, settled), sizes, num_ranks)
    except WeftError as error:
        return error.message
    return ""


def __getattr__(name: str) -> Any:
    if name != "Persistent":
        raise AttributeError(f"weft.megakernel has no {name!r}; it has {', '.join(__all__)}")
    from weft.megakernel.run import Persistent

    return Persistent
