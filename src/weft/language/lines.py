"""Declarations: packets of a whole line, 120 bytes of data and their flag in 128 bytes."""

from __future__ import annotations

import triton
import triton.language as tl

from weft.language.operands import Number, Values
from weft.language.registry import Effects, declare
from weft.language.world_arg import WorldArg


@declare(
    Effects(reads=("world", "src"), writes=("dst",), remote=("dst",), peer="to"),
    kinds={"dst": "lines", "src": "line_data", "count": "line_count"},
)
def put_lines(
    world: WorldArg,
    dst: tl.tensor,
    src: Values,
    flag: Number,
    *,
    to: Number,
    count: Number | None = None,
) -> None:
    """Write lines of 128 bytes to rank `to`, 120 bytes of data and 8 of flag, each line at once.

        dst[16 i : 16 i + 15]@to  <-  the first 120 bytes of src[i]
        dst[16 i + 15]@to         <-  flag                                for i in 0 .. count - 1

    Data needs no signal and no fence: whoever sees a line's flag sees its data. It costs 1/16 of
    the bandwidth, where put_packets costs half.

    That a line arrives at once is no promise of the PTX memory model but of the hardware: NVLink
    does not part the 128 bytes that eight neighbouring threads of a warp write by one instruction.
    That they do is Triton's choice of a layout; `weft.verify.compiled` finds a kernel where it
    chose another ("torn line").

    Shapes  dst: a scalar pointer to symmetric int64 words, divisible by 128 bytes; src: values, or
            pointers to them, [lines, 128 / bytes of one], the last 8 bytes of each row unused (see
            line_elements); lines: a power of two, at least 4 for each warp of the program
    Dtypes  src: 8, 16, 32 or 64 bits; flag: an int32 that differs from what the line holds
            (not 0 in zeroed memory)
    Sync    pairs with wait_lines of the same flag, line by line, in no order among lines;
            publishes nothing else that this program wrote. The line's last reader must be known
            to have read it
    Raises  NotSymmetricError, PeerError, FarPointerError: as `at`; between nodes nothing keeps a
            line whole
            SignalError: the line holds this flag already (emulator)
            UsageError: dst is not divisible by 128 bytes (emulator)
    Cost    one 16-byte store by each of 8 threads per line
    Source  NCCL's LL128 protocol; PTX ISA st.wt
    """


@declare(
    Effects(reads=("lines",), waits=True),
    kinds={"lines": "lines", "count": "line_count", "dtype": "line_dtype"},
    needs_site=True,
)
def wait_lines(
    lines: tl.tensor,
    flag: Number,
    num_lines: Number,
    *,
    world: WorldArg | None = None,
    count: Number | None = None,
    dtype: tl.dtype | None = None,
) -> tl.tensor:
    """Wait until each of the first `count` lines carries `flag`; the result is their data.

        while any(lines[16 i + 15] != flag):  look again
        result[i]  =  lines[16 i : 16 i + 15] and 8 bytes of 0      for i in 0 .. count - 1, else 0

    Bounded as `wait` is: when it has the world, given or found in the calling function.

    Shapes  lines: a scalar pointer to local int64 words, divisible by 128 bytes; num_lines: a
            compile-time power of two, at least 4 for each warp of the program; the result is
            [num_lines, 128 / bytes of dtype]
    Dtypes  dtype: a type of 8, 16, 32 or 64 bits as which the data is taken, int64 when None
    Sync    pairs with put_lines; orders nothing but the lines themselves and what wait_packets
            orders: lines that the sender had read before may be overwritten. A flag is waited for
            exactly: a later one does not satisfy it
    Raises  TimeoutError: a bounded wait gave up (host, at its next call)
            UsageError: lines is not divisible by 128 bytes (emulator)
    Cost    polls of the local memory, 16 bytes by each thread, with a reduction over the
            program's threads each
    Source  NCCL's LL128 protocol; PTX ISA ld.volatile
    """


@triton.jit
def line_elements(LINES: tl.constexpr, dtype: tl.constexpr):
    """Which element of a contiguous array is where in a tile of lines, and which places hold one.

        at, is_data = line_elements(LINES, dtype)
        tile[i, j] = array[at[i, j]]  where is_data[i, j]

    An array of n elements takes cdiv(n, 120 / bytes of one) lines.

    Shapes  both: [LINES, 128 / bytes of dtype]; at: int32
    Cost    nothing is loaded
    """
    WIDTH: tl.constexpr = 1024 // dtype.primitive_bitwidth
    USED: tl.constexpr = 960 // dtype.primitive_bitwidth
    row = tl.arange(0, LINES)[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    return row * USED + column, (column < USED) & (row >= 0)
