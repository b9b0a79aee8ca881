"""What a many-core machine is, in numbers: core groups, cores, scratchpads, DMA, the link of ranks.

A rank is one such machine. Its cores reach main memory through the DMA engine of their group, by
transfers of blocks with strides, and compute on what is in their own scratchpad.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.errors import UsageError

NAME = "manycore"


@dataclass(frozen=True)
class Machine:
    """`mesh` counts rows and columns of cores in a group.

    A transfer takes its channel `dma_startup_ns`, `dma_block_ns` for each contiguous block, and its
    bytes at the core's share of `dma_gbps`, in whole lines of `dma_align` bytes; it is there
    `dma_latency_ns` later, while others are under way.

    Units   dma_gbps: 10^9 bytes per second of a group, shared by its active cores; link_gbps: of a
            rank to all others; gflops: of a core
    """

    name: str
    groups: int
    mesh: tuple[int, int]
    scratchpad_bytes: int
    dma_latency_ns: float
    dma_startup_ns: float
    dma_block_ns: float
    dma_gbps: float
    dma_align: int
    gflops: float
    link_gbps: float
    link_latency_ns: float
    signal_ns: float
    barrier_ns: float

    def __post_init__(self) -> None:
        numbers = {name: one for name, one in vars(self).items() if isinstance(one, (int, float))}
        numbers |= {"mesh": min(self.mesh)}
        for name, value in numbers.items():
            if not (value > 0 or (name.endswith("_ns") and value == 0)):
                raise UsageError(f"machine {self.name!r}: {name}={value!r} must be positive")
        if self.dma_align & (self.dma_align - 1):
            raise UsageError(f"machine {self.name!r}: dma_align={self.dma_align} is no power of 2")

    @property
    def cores(self) -> int:
        """Of all groups; the i-th is of group i % groups."""
        return self.groups * self.mesh[0] * self.mesh[1]

    def lines(self, first_byte: int, num_bytes: int) -> int:
        """Bytes of the lines that a row of a block touches."""
        return -(-(first_byte % self.dma_align + num_bytes) // self.dma_align) * self.dma_align

    def aligned(self, num_bytes: int) -> int:
        return self.lines(0, num_bytes)

    def share_ns(self, active: int) -> float:
        """What a byte takes of a core's channel where so many cores are active."""
        return -(-active // self.groups) / self.dma_gbps


# As published of the SW26010: 4 groups of 8 x 8 cores at 1.45 GHz with 64 KB each, 34 GB/s a group.
# Latencies are of the order that microbenchmarks of it report; barriers and signals are guesses.
SW26010 = Machine(
    "sw26010", groups=4, mesh=(8, 8), scratchpad_bytes=64 << 10, dma_latency_ns=190,
    dma_startup_ns=20, dma_block_ns=4, dma_gbps=34.0, dma_align=16, gflops=11.6, link_gbps=8.0,
    link_latency_ns=1000, signal_ns=200, barrier_ns=100,
)  # fmt: skip
# No machine: few enough cores that each is a thread of a laptop's.
SMALL = Machine(
    "small", groups=1, mesh=(2, 2), scratchpad_bytes=32 << 10, dma_latency_ns=200,
    dma_startup_ns=20, dma_block_ns=4, dma_gbps=8.0, dma_align=16, gflops=4.0, link_gbps=2.0,
    link_latency_ns=1000, signal_ns=200, barrier_ns=100,
)  # fmt: skip

MACHINES = {one.name: one for one in (SMALL, SW26010)}


def is_manycore(target: str) -> bool:
    return target.partition(":")[0] == NAME


def parse_machine(target: str) -> Machine:
    """`manycore` is manycore:small. Raises  UsageError: a machine without a record"""
    name = target.partition(":")[2] or SMALL.name
    if not is_manycore(target) or name not in MACHINES:
        known = ", ".join(f"{NAME}:{one}" for one in MACHINES)
        raise UsageError(f"--target {target!r}: machines with a record are {known}")
    return MACHINES[name]
