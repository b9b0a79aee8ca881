"""NVIDIA: what the architecture that is compiled for can do."""

from __future__ import annotations

from weft.base.errors import UnsupportedError
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


@api.builtin
def require_multicast(_semantic=None):
    """Raises  UnsupportedError: compiled for an architecture without multicast instructions"""
    arch = api.cuda_arch(_semantic)
    if arch < 90:
        raise UnsupportedError(f"wl.multimem_*: sm_{arch} has no multicast; it came with sm_90")
    return api.constexpr(True)
