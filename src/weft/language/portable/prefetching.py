"""Where nobody is asked: AMD has no instruction for it, and the emulator no caches."""

from __future__ import annotations

import triton

from weft.language import prefetching as declared
from weft.language.registry import implement


@implement(declared.prefetch, "hip", "emu")
@triton.jit
def prefetch(ptr, num_bytes):
    pass
