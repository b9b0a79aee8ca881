"""Which transport is best for how many bytes: measured, in one place.

Read on 4 and 2 x H200 and 4 x H100 (torch 2.11, Triton 3.6), beside NCCL and torch's symmetric
memory, with answers checked: benchmarks/results/{all_gather,all_reduce,all_to_all,reduce_scatter}
_h200x4.json (what is chosen), collective_variants_h200x4.json and _h100x4 (channels and tiles, in
place too) and _h200x2 (channels that share an SM, in place). What was expected, and what is still
behind: docs/performance/collectives.md. Two ranks have rows of their own where they were read to
differ, on 2 x H100 (collective_variants_h100x2.json). Other machines take the same rows,
unmeasured.

Not an operator. Bytes are those of a shard; of all x for all_reduce.
"""

from __future__ import annotations

from typing import NamedTuple

KB, MB = 1 << 10, 1 << 20
ANY = 1 << 62


class Row(NamedTuple):
    """Up to so many bytes: this transport. `thread_bytes` is what a thread moves of a tile; of
    packets it is 16, four of them."""

    up_to: int
    transport: str
    channels: int = 128
    num_warps: int = 8
    thread_bytes: int = 64


_PUSHED = (
    Row(512 * KB, "ll", 128, 4, 16),
    Row(1 * MB, "sm_push", 512, 4, 64),
    Row(ANY, "sm_push", 256, 8, 64),
)
# In place, by two ranks.
_PULLED = (
    Row(768 * KB, "ll", 128, 4, 16),
    Row(2 * MB, "sm_push", 512, 4, 64),
    Row(8 * MB, "sm_push", 256, 8, 64),
    Row(ANY, "sm_pull", 256, 8, 64),
)
# NCCL adds in another order and rounds at every step: it is not taken for sums, though at 128 MB
# its all-reduce is 6 % faster.
MEASURED = {
    "all_reduce": (
        Row(128 * KB, "one_shot_ll", 128, 4, 16),
        Row(1 * MB, "two_shot_ll", 128, 4, 16),
        Row(2 * MB, "two_shot_ll", 256, 4, 16),
        Row(ANY, "two_shot", 256, 8, 64),
    ),
    "all_gather": _PUSHED,
    "reduce_scatter": _PUSHED,
    "all_to_all": (
        Row(512 * KB, "ll", 128, 4, 16),
        Row(ANY, "sm_push", 256, 8, 64),
    ),
}
# What no machine has read yet. Messages, by few programs, since something else runs beside, of many
# warps each, for as many loads on their way; of an engine's, those of the receiver.
# benchmarks/pipeline_p2p.py reads them.
_MESSAGES = (
    Row(8 * MB, "sm_push", 16, 16, 64),
    Row(ANY, "ce_push", 16, 16, 64),
)
EXPECTED = {"send": _MESSAGES, "recv": _MESSAGES}
# Of two ranks, to which a sum in two steps sends as many bytes as one step does: 1, 2, 4 MB in
# 11.4, 18.5, 26.9 us, in two steps 12.2 (packets), 24.1, 30.6. Behind a product, as in gemm_ar, one
# step is ahead from 512 KB on (1 to 2 us), alone from 1 MB.
OF_TWO = {
    "all_reduce": (
        Row(256 * KB, "one_shot_ll", 128, 4, 16),
        Row(12 * MB, "one_shot", 256, 8, 64),
        Row(ANY, "two_shot", 256, 8, 64),
    ),
}
# Where peers may read x where it lies; rows of MEASURED come behind. Two meetings cost more than
# boxes do, up to some MB. Bytes are those that a rank gets of all others: of parts, and for
# all_reduce of sums too. On two ranks:
IN_PLACE = {
    "all_reduce": (*OF_TWO["all_reduce"][:-1], Row(48 * MB, "sm_pull", 256, 8, 64)),
    "all_gather": (
        Row(768 * KB, "ll", 128, 4, 16),
        Row(2 * MB, "sm_push", 512, 4, 64),
        Row(8 * MB, "sm_push", 256, 8, 64),
        Row(63 * MB, "sm_pull", 256, 8, 64),
        Row(ANY, "ce_pull", 128, 16, 64),
    ),
    "reduce_scatter": _PULLED,
    "all_to_all": _PULLED,
}
# On four pushes to boxes were ahead nearly everywhere. Plain and in place, us: reduce_scatter of 4,
# 16, 128 MB 53 and 60, 167 and 178, 1191 and 1264; all_gather 54 and 60, 171 and 173, 1193 and 1134
# (copy engines); all_to_all of 16 MB 55 and 61; all_reduce of 1, 4, 16 MB 18.5 and 21.7, 41 and 35,
# 92 and 100. Of 2 MB, on 4 x H100: packets 31.5, boxes 33.3; in place by 32 bytes of a thread 31.9,
# by 64 32.8 (of 1 MB 25.7 and 28.3, on 4 x H200 17.9 and 22.8).
IN_PLACE_OF_MORE = {
    "all_reduce": (
        Row(192 * KB, "one_shot_ll", 128, 4, 16),
        Row(2 * MB, "two_shot_ll", 128, 4, 16),
        Row(4 * MB, "sm_pull", 256, 8, 32),
        Row(12 * MB, "sm_pull", 256, 8, 64),
    ),
    "all_gather": (
        Row(1536 * KB, "ll", 128, 4, 16),
        Row(3 * MB, "sm_push", 512, 4, 64),
        Row(63 * MB, "sm_push", 256, 8, 64),
        Row(ANY, "ce_pull", 128, 16, 64),
    ),
    "reduce_scatter": (),
    "all_to_all": (),
}


def rows_for(
    op: str, num_bytes: int, moved_bytes: int | None = None, *, num_ranks: int
) -> tuple[Row, ...]:
    """The rows that hold for so many bytes, the best first; those behind it are for where it cannot
    be had. `moved_bytes` are told where x may be read in place."""
    found = {**EXPECTED, **MEASURED}[op]
    plain = OF_TWO.get(op, found) if num_ranks <= 2 else found
    rows = [row for row in plain if num_bytes <= row.up_to]
    if moved_bytes is not None:
        in_place = IN_PLACE if num_ranks <= 2 else IN_PLACE_OF_MORE
        rows = [row for row in in_place[op] if moved_bytes <= row.up_to] + rows
    return tuple(rows)
