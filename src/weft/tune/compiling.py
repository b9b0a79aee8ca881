"""Kernels of all ranks compiled once: each by one rank, for the others to find in Triton's cache.

Ranks launch the same kernels in the same order. Left to themselves, each compiles all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from weft.language import triton_api


def compile_together(world: Any, walk: Callable[[], None]) -> tuple[int, float]:
    """Compile what `walk()` launches; returns how many kernels, and in how many seconds.

    `walk` is called once, with launches left out: it makes calls of operators, whose results are
    then undefined. Collective. On the emulator nothing is done: its ranks share a process, and what
    was compiled.
    """
    if world.target.backend == "emu":
        return 0, 0.0
    begin = time.perf_counter()
    with triton_api.held_launches() as held:
        walk()
    # What calls keep are launches that were left out.
    world.calls.clear()
    triton_api.compile_held(list(held.values())[world.rank :: world.num_ranks])
    world.synchronize()
    world.backend.exchange("compiled", COMPILE_TIMEOUT_S)
    return len(held), time.perf_counter() - begin


# A rank may have the slowest kernels to compile.
COMPILE_TIMEOUT_S = 180.0
