"""NVIDIA: what the architecture that is compiled for can do."""

from __future__ import annotations

from weft.language import triton_api as api


@api.builtin
def has_bulk_stores(_semantic=None):
    """Are there asynchronous (TMA) stores, and with them the async proxy? A constant."""
    return api.constexpr(api.cuda_arch(_semantic) >= 90)
