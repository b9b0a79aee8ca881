"""Declarations: what is asked of caches."""

from __future__ import annotations

from weft.language.registry import Effects, declare


@declare(Effects(), kinds={"src": "ptr"})
def prefetch(src, num_bytes, *, mask=None):
    """Ask that memory be brought into the L2 cache; nothing is waited for, and nothing comes here.

        L2  <-  num_bytes from src[i] on             where mask holds

    A hint: on targets that have no word for it, nothing happens.

    Shapes  src: a tile of pointers, each aligned to 16 bytes, to memory that may be read
    Units   num_bytes: a constant, a multiple of 16
    Sync    none: what is read later is read in order as ever
    Raises  UsageError: num_bytes is no such constant
    Cost    one instruction for each pointer, and the memory's time
    Source  PTX ISA cp.async.bulk.prefetch.L2 (sm_90), prefetch.global.L2
    """
