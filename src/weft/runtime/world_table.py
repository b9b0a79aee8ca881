"""The table that kernels read of a world: which rank this is, where peers' heaps begin, what waits
ask.

Its layout is language/world_layout.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.base.settings import Settings
from weft.language import world_layout as layout
from weft.runtime.backend import Backend


def words_of(
    backend: Backend, settings: Settings, heaps: Sequence[torch.Tensor | None], base: int,
    barrier: tuple[int, int], trace: torch.Tensor | None,
) -> list[int]:  # fmt: skip
    """`heaps` are the ranks', None where far, of which this rank's begins at `base`; `barrier` are
    the addresses of the barrier's arrivals and generations."""
    seats, n = backend.seats, len(heaps)
    timeout_ns = int(settings.timeout_s * 1e9) if settings.bounded_waits else layout.NEVER_NS
    words = [0] * layout.table_words(n)
    words[layout.RANK] = seats.rank
    words[layout.NUM_RANKS] = n
    words[layout.NODE] = seats.nodes[seats.rank]
    words[layout.ABORT_PTR] = backend.abort_address
    words[layout.TIMEOUT_NS] = timeout_ns
    words[layout.REPORT_PTR] = backend.report_address
    words[layout.HEAP_BASE] = base
    words[layout.BARRIER_ARRIVALS], words[layout.BARRIER_GENERATIONS] = barrier
    if trace is not None:
        words[layout.TRACE_PTR] = trace.data_ptr()
        words[layout.TRACE_TILES] = len(trace)
    if backend.far is not None:
        words[layout.STAGE_PTR] = backend.far.stage_address
        words[layout.STAGE_LOCKS] = backend.far.locks_address
    for peer, heap in enumerate(heaps):
        words[layout.peer_base(peer)] = 0 if heap is None else heap.data_ptr()
        words[layout.peer_node(peer, n)] = seats.nodes[peer]
        words[layout.peer_global_rank(peer, n)] = seats.global_ranks[peer]
    return words
