"""Declarations: low-latency packets, data and its flag in one word that is written at once."""

from __future__ import annotations

import triton.language as tl

from weft.language.operands import Number, Values
from weft.language.registry import declare
from weft.language.world_arg import WorldArg


@declare(kinds={"dst": "packets", "src": "packet_data"})
def put_packets(
    world: WorldArg,
    dst: tl.tensor,
    src: Values,
    flag: Number,
    *,
    to: Number,
    mask: tl.tensor | None = None,
) -> None:
    """Write 32 bits of `src` at a time to rank `to`, in one 8-byte word together with `flag`.

        dst[i]@to  <-  flag << 32 | bits of src[i]             where mask holds

    Data needs no signal and no fence: whoever sees the flag in a word sees the data in it. It
    costs half the bandwidth, so it is for small messages.

    Shapes  dst: a (tile of) pointer(s) to symmetric int64 words; src: values, or pointers to
            them, of a shape that broadcasts to dst's. Of 16-bit values two neighbours, of 8-bit
            ones four, share a word: src's last extent is then twice, or four times, dst's
    Dtypes  src has 8, 16 or 32 bits; flag is an int32 that differs from what the word holds
            (not 0 in zeroed memory)
    Sync    pairs with wait_packets of the same flag, word by word; publishes nothing else that
            this program wrote. The word's last reader must be known to have read it
    Raises  NotSymmetricError, PeerError: as `at`
            SignalError: the word holds a packet of this flag already (emulator)
    Cost    one relaxed 8-byte store per value
    Source  NCCL's LL protocol; PTX ISA st.relaxed.sys.b64
    """


@declare(kinds={"packets": "packets", "dtype": "packet_dtype"}, needs_site=True)
def wait_packets(
    packets: tl.tensor,
    flag: Number,
    *,
    world: WorldArg | None = None,
    mask: tl.tensor | None = None,
    dtype: tl.dtype | None = None,
) -> tl.tensor:
    """Wait until every word of `packets` carries `flag`; the result is their data.

        while any(packets[i] >> 32 != flag):  look again;      result[i] = packets[i] & 0xffffffff

    Bounded as `wait` is: when it has the world, given or found in the calling function.

    Shapes  packets: a (tile of) pointer(s) to local int64 words; the result has its shape, with
            the last extent twice as long for a dtype of 16 bits and four times for one of 8, and
            is 0 where mask does not hold
    Dtypes  dtype: a type of 8, 16 or 32 bits as which the data is taken, int32 when None
    Sync    pairs with put_packets; orders nothing but the words themselves and this: what the
            sender had read with wait_packets before may be overwritten. So two buffers in turn
            are enough where every rank sends to every rank. A flag is waited for exactly: a later
            one does not satisfy it
    Raises  TimeoutError: a bounded wait gave up (host, at its next call)
    Cost    polls of the local memory, with a reduction over the program's threads each
    Source  NCCL's LL protocol; PTX ISA ld.relaxed.sys.b64
    """
