"""What a machine can do, in numbers: one record for each that was measured.

The cost model (compiler/cost/) reckons with them. Read from benchmarks, not from data sheets:
docs/hardware.md, docs/performance/. What a number was fitted to stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.errors import UsageError
from weft.base.target import Target

# (bytes, us), ascending: what a collective took; between two of them it is linear.
Curve = tuple[tuple[int, float], ...]

KB, MB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Hardware:
    """Units  *_gbps: 10^9 bytes per second of one rank; *_us: of one such thing

    `program_tflops`: one program's products in wide tiles; `turns_cost`: narrow ones take so much
    longer, `rest_cost`: those of more columns than a power of two, `thin_rest_cost`: of 32 more.
    `gate_us`: from the call to a copy engine's first copy where it carries tiles as they come,
    `put_gate_us` where it carries rows; `copy_us` and `word_us` start each copy and the word behind
    it, `token_us` is from a token to the copy that waits for it. `push_us`: a launch before the
    product; `pusher_gbps`: what one program stores of those that push. `leave_us`, `wide_leave_us`:
    a program's next product waits so long for a narrow or a wide tile of a product whose tiles go
    to other ranks; `tma_leave_us`, `wide_tma_leave_us` where they go by TMA. `sums_us`: such a
    product's first and last tiles.
    `combine_gbps`: what one program reads of other ranks' sums in its epilogue; `sums_gbps` and
    `wide_sums_gbps` where engines have carried them, in narrow and in wide tiles.
    `end_us`: the last tile's way out.
    `reread_gbps`: B slows products down by so much where less than `many_rows` share a reading.
    `small_*`, `few_*`: few rows, where reading B takes nearly all time; `few_wide_us` above 32.
    `packet_*`: data that carries its flags; `rows_us`: few rows summed by pushes.
    `library_*`: cuBLAS; `gather`, `scatter` by the bytes of a shard and `reduce` by all bytes:
    weft's own collectives, on `library_ranks` ranks. `task_us` is what a task of the persistent
    kernel costs beside its tile, `tasks_us` what each more of them adds to all;
    `task_gbps`: what one loads, from L2 too.
    """

    name: str
    num_sms: int
    program_tflops: float
    turns_cost: float
    rest_cost: float
    thin_rest_cost: float
    gate_us: float
    put_gate_us: float
    copy_us: float
    word_us: float
    token_us: float
    copy_gbps: float
    push_us: float
    push_gbps: float
    pusher_gbps: float
    leave_us: float
    wide_leave_us: float
    tma_leave_us: float
    wide_tma_leave_us: float
    sums_us: float
    combine_gbps: float
    sums_gbps: float
    wide_sums_gbps: float
    signal_us: float
    small_us: float
    small_gbps: float
    few_us: float
    few_wide_us: float
    few_gbps: float
    packet_us: float
    packet_gbps: float
    rows_us: float
    share_us: float
    end_us: float
    memory_gbps: float
    cached_bytes: float
    reread_gbps: float
    many_rows: int
    far_us: float
    far_gbps: float
    library_tflops: float
    library_gbps: float
    library_us: float
    library_host_us: float
    library_ranks: int
    gather: Curve
    scatter: Curve
    reduce: Curve
    task_us: float
    tasks_us: float
    task_gbps: float

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, (int, float)) and not (
                value > 0 or (name.endswith("_us") and value == 0)
            ):
                raise UsageError(f"hardware {self.name!r}: {name}={value!r} must be positive")


H200X4 = Hardware(
    "h200x4", num_sms=132,
    # The template alone, many rounds of tiles: of 320 columns at 0.95 of the wide ones' rate, of
    # 384 at 0.96, of 192 at 0.97. Of 160 at 0.90 from m 1024 on: a product of 32 columns takes 16
    # cycles of tensor cores and 24 of shared memory, which has to read all of A for it once more.
    rest_cost=1.05, thin_rest_cost=1.11,
    # Fitted to 97 readings of ag_gemm, m 256 to 8192 of TP4 on 2 and 4 ranks: 4 % off on average;
    # share_us was 8.8 in these, and some 4 more than since sums lie in squares.
    program_tflops=784 / 132, turns_cost=1.05, gate_us=20.0, copy_us=3.0, word_us=1.0,
    # Fitted to 25 readings of gemm_rs by engines on 4 ranks: 4 % off on average.
    token_us=8.0, sums_gbps=20.0, wide_sums_gbps=12.0,
    put_gate_us=12.9, copy_gbps=390.0, push_us=1.0, push_gbps=287.0, pusher_gbps=18.0,
    share_us=5.0, end_us=3.2,
    memory_gbps=3800.0, cached_bytes=30e6, reread_gbps=17800.0, many_rows=1530,
    # Fitted to 45 readings of gemm_rs, 25 of 2 ranks and 20 of 4, k 2048 to 7168, m 512 to 8192:
    # 3 % off on average; so was combine_gbps, which had been read as 40 where nothing else ran.
    leave_us=3.1, wide_leave_us=17.4, tma_leave_us=3.4, wide_tma_leave_us=11.0, sums_us=22.0,
    # docs/hardware.md: a signal's way is half a round trip; 16 KB tiles from L2 and HBM.
    signal_us=1.5, combine_gbps=16.0,
    # ag_gemm at decode sizes: by pushes; by packets under one launch, of which few_us adds 6 to a
    # sequence on 2 x H200 (12 readings, m 1, 16 and 64) and 9 to 12 on 2 x H100.
    small_us=15.0, small_gbps=3300.0, few_us=8.0, few_wide_us=14.5, few_gbps=4200.0,
    # docs/performance/collectives.md: packets of a call in 5 us, half of their bytes are data.
    packet_us=5.0, packet_gbps=120.0,
    # The same page: all_reduce of 8 KB by pushes 15.9 us, of which 4 were the graph's.
    rows_us=12.0,
    # Not measured: one port of 400 Gb/s to other nodes.
    far_us=5.0, far_gbps=50.0,
    # A product and a collective, each a call: 64 to 81 us where a bare launch takes 21, half as
    # long elsewhere.
    library_host_us=60.0,
    # What they add to a recorded sequence of calls: 40 readings beside products on 2 x H100
    # (benchmarks/results/unfused_h100x2.json), and from 4 MB a rank on those of 4 x H200 alone.
    library_tflops=740.0, library_gbps=4000.0, library_us=4.0, library_ranks=4,
    gather=((0, 4.0), (64 * KB, 5.7), (160 * KB, 8.8), (352 * KB, 12.0), (704 * KB, 16.0),
            (1408 * KB, 25.0), (4 * MB, 50.0), (16 * MB, 166.0), (128 * MB, 1190.0)),
    scatter=((0, 4.5), (64 * KB, 6.2), (160 * KB, 9.3), (352 * KB, 11.0), (704 * KB, 16.0),
             (1408 * KB, 24.0), (4 * MB, 49.0), (16 * MB, 165.0), (128 * MB, 1190.0)),
    reduce=((0, 4.5), (128 * KB, 5.5), (512 * KB, 8.5), (MB, 11.5), (2 * MB, 18.5), (4 * MB, 27.5),
            (8 * MB, 44.0), (16 * MB, 82.0), (64 * MB, 300.0), (128 * MB, 630.0)),
    # Not measured: guesses of what tasks of the persistent kernel cost.
    task_us=1.0, tasks_us=0.02,
    # A guess with which choices agree with readings of decode steps of 16 rows on 2 x H100.
    task_gbps=42.0,
)  # fmt: skip

# What was measured, by the name of a target; emulated ranks stand in for them.
MEASURED = {"cuda:90": H200X4, "emu": H200X4}


def hardware_of(target: Target) -> Hardware | None:
    """The machine to reckon with there; None where none was measured."""
    return target.machine or MEASURED.get(target.name)
