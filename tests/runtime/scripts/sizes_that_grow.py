"""Operators whose sizes grow, in a heap that holds the largest of them but not all; what was
recorded of the smallest is replayed in between, what is recorded of each size is dropped.

Under torchrun or emulated:

torchrun --nproc-per-node 2 tests/runtime/scripts/sizes_that_grow.py
"""

from types import SimpleNamespace

import torch

import weft
from weft.ops import ag_gemm, all_gather, all_reduce, gemm_ar, gemm_rs

ROUNDS = 3


class Calls:
    """One call of each operator at a size; all results are known numbers."""

    def __init__(self, world: weft.World, m: int, width: int) -> None:
        self.world, self.m, self.width = world, m, width
        dtype = torch.float32 if world.target.backend == "emu" else torch.bfloat16
        self.a = torch.empty(m, width, dtype=dtype, device=world.device)
        self.b = torch.full((width, width), 1 / width, dtype=dtype, device=world.device)
        self.results: list[torch.Tensor] = []

    def run(self, value: float) -> None:
        self.a.fill_(value)
        self.launch()
        self.check(value)

    def launch(self) -> None:
        world, own = self.world, self.a[: self.m // self.world.num_ranks]
        self.results = [
            ag_gemm(own, self.b, world=world),
            all_gather(own, world=world),
            gemm_rs(self.a, self.b, world=world),
            gemm_ar(self.a, self.b, world=world),
            all_reduce(self.a, world=world),
        ]

    def check(self, value: float) -> None:
        total = value * self.world.num_ranks
        for result, right in zip(self.results, (value, value, total, total, total), strict=True):
            assert (result == right).all(), (self.m, right, result.unique())


def record(world: weft.World, calls: Calls) -> SimpleNamespace:
    """The calls as a graph of the user's."""
    for value in (1.0, 2.0):
        calls.run(value)
    if world.target.backend == "emu":
        with world.record() as recording:
            calls.launch()
        return recording
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls.launch()
    return SimpleNamespace(replay=graph.replay)


def used_bytes(sizes: list[int], width: int, heap_bytes: int) -> int:
    """Of a heap that has room for all, of calls and of their recordings: these go other ways."""
    with weft.init(heap_bytes=heap_bytes) as world:
        before = world.heap_free_bytes
        for m in sizes:
            record(world, Calls(world, m, width))
        world.synchronize()
        return before - world.heap_free_bytes


def main() -> None:
    with weft.init(heap_bytes=1 << 20) as world:
        emulated = world.target.backend == "emu"
    width, large = (16, 16 << 20) if emulated else (1024, 4 << 30)
    sizes = [16 << i for i in range(6)] if emulated else [256 << i for i in range(6)]
    last, everything = (used_bytes(some, width, large) for some in ([sizes[0], sizes[-1]], sizes))
    heap_bytes = (last + 2 * everything) // 3
    assert heap_bytes < everything, "nothing has to be freed: the sizes show nothing"
    with weft.init(heap_bytes=heap_bytes) as world:
        small = Calls(world, sizes[0], width)
        recording = record(world, small)
        for i, m in enumerate(sizes):
            calls = Calls(world, m, width)
            for value in range(1, ROUNDS + 1):
                calls.run(float(value))
                # Small numbers are exact in bfloat16.
                small.a.fill_(8 * i + value)
                recording.replay()
                small.check(8 * i + value)
            passing = record(world, calls)
            calls.a.fill_(7.0)
            passing.replay()
            calls.check(7.0)
            del passing
        world.synchronize()
        print(f"rank {world.rank} of {world.num_ranks}: {len(sizes)} sizes in {heap_bytes} bytes, "
              f"all together take {everything}")  # fmt: skip


if __name__ == "__main__":
    main()
