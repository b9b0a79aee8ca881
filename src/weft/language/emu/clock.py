"""Emulator: simulated time, or a count."""

from __future__ import annotations

import triton

from weft.language import clock as declared
from weft.language.emu.extern import long
from weft.language.registry import implement


@implement(declared.clock_ns, "emu")
@triton.jit
def clock_ns():
    return long("weft.clock_ns")
