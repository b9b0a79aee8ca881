"""What weft asks of Triton's version, and the store that only newer ones have.

Of Triton: `atomic_store` of `triton.language.core`, from 3.9 on.
"""

from __future__ import annotations

import re

import triton
from triton.language import core

TRITON_VERSION = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])

# From 3.9 on Triton has them. Before, an exchange whose result nobody wants stands in, and that is
# an atomic: it comes back from the rank it went to, where a store is sent and forgotten.
HAS_ORDERED_STORES = TRITON_VERSION >= (3, 9)

if HAS_ORDERED_STORES:

    @triton.jit
    def ordered_store(ptr, value, order: core.constexpr, scope: core.constexpr):
        core.atomic_store(ptr, core.cast(value, ptr.dtype.element_ty), sem=order, scope=scope)

else:

    @triton.jit
    def ordered_store(ptr, value, order: core.constexpr, scope: core.constexpr):
        core.atomic_xchg(ptr, value, sem=order, scope=scope)
