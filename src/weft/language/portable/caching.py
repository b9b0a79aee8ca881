"""Where caches are asked for nothing."""

from __future__ import annotations

import triton

from weft.language import caching as declared
from weft.language.registry import implement


@implement(declared.prefetch, "hip", "emu")
@triton.jit
def prefetch(src, num_bytes, mask):
    pass
