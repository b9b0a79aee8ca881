"""NVIDIA: what the architecture that is compiled for can do."""

from __future__ import annotations

from weft.language import triton_api as api


@api.builtin
def has_bulk_stores(_semantic=None):
    """Are there asynchronous (TMA) stores, and with them the async proxy? A constant."""
    return api.constexpr(api.cuda_arch(_semantic) >= 90)


@api.builtin
def sharers(count, _semantic=None):
    """How many threads share the work on `count` words, each with its own. A constant."""
    # A constant is usually 1; in Gluon a part of the program may run what is traced.
    if not api.is_tensor(count) or api.is_gluon(_semantic):
        return api.constexpr(1)
    return api.constexpr(32 * api.num_warps(_semantic))
