"""Declarations: the time, as a program sees it."""

from __future__ import annotations

import triton.language as tl

from weft.language.registry import declare


@declare()
def timestamp() -> tl.tensor:
    """The time now, in nanoseconds, to be written down.

        before = timestamp();   ...;   took = timestamp() - before

    On GPUs the clock goes on between kernels and while nobody looks. GPUs of one host count from
    nearly the same moment: what they differ by can be measured (docs/timeline.md). On the emulator
    each program counts how often it has looked: 1, 2, 3, .. in every schedule.

    Dtypes  int64, one number. Threads of a program may read different times: store it, which one
            thread does, and let no branch depend on it
    Units   nanoseconds; AMD's clock moves in steps of 10 ns, NVIDIA's in steps of 32 ns or of
            about 1 us, by generation
    Sync    between two block barriers: what this program's threads have issued before it is before
            it, and what follows is after it. It does not wait until stores have been written
    Cost    two block barriers and one read of a register; nothing in kernels that do not use it
    Source  PTX ISA %globaltimer; CDNA 3 ISA S_MEMREALTIME
    """


@declare(public=False)
def clock_ns() -> tl.tensor:
    """What one thread's clock shows, in nanoseconds; orders nothing but memory accesses.

    Contained in `timestamp` and in waits that have a deadline.

    Cost    one read of a register
    """
