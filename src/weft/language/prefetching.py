"""Declarations: memory that is asked for before it is read."""

from __future__ import annotations

import triton.language as tl

from weft.language.registry import declare


@declare()
def prefetch(ptr: tl.tensor, num_bytes: int) -> None:
    """Ask that the `num_bytes` behind each pointer come into this GPU's L2 cache.

        prefetch(weights + rows * k, 256);   wait(flag, at_least=1);   load(weights + ..)

    A hint: nothing is read, nothing waits for it, and results are the same without it. It is for
    memory whose address is known before its reader may begin, weights above all.

    Shapes  ptr: a pointer, or a tile of pointers; of a tile smaller than the program has threads,
            some ask twice
    Units   num_bytes: a constant, a multiple of 16; what lies there is the caller's to read. From
            each pointer it is counted from the last multiple of 16 bytes
    Sync    none: what is written there later is seen all the same
    Cost    an instruction for each pointer (sm_90 on); before, one line of 128 bytes each; nothing
            on AMD and on the emulator
    Source  PTX ISA cp.async.bulk.prefetch.L2, prefetch.global.L2
    """
