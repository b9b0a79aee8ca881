"""AMD: ordered stores are exchanges: see docs/decisions/007-three-tritons.md for why."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language import ordered as declared
from weft.language.portable.ordered import as_integers, before
from weft.language.registry import implement


@implement(declared.store, "hip")
@triton.jit
def store(ptr, value, order, scope):
    words = as_integers(ptr)
    before(order)
    tl.atomic_xchg(words, value.to(words.dtype.element_ty, bitcast=True), sem=order, scope=scope)
