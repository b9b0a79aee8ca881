"""The GEMM template for few rows beside cuBLAS: one GPU, products alone, weights from memory.

    PYTHONPATH=src python benchmarks/gemm_few.py [--m 1,16,64]

Writes results/gemm_few_<gpu>.json. One process; calls are recorded, twice as many in a row as there
are sets of weights, which are several times the L2; so a call costs what it costs in a recorded
model, its launch included. Answers are checked before. Every way to cut that `gemm_small.cuts`
names is timed, the one first that is taken unmeasured. Times are medians of recordings that take
turns, microseconds of a call; `floor` is the weights' bytes at the rate of a copy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from gemm import LAYERS, RESULTS, ROTATED_BYTES

from weft.base.dtypes import tolerance
from weft.base.target import TARGETS
from weft.tiles import gemm, gemm_small
from weft.tiles.blocking import Blocking, descriptor
from weft.tune.figures import percentile
from weft.tune.provenance import clocks, provenance, save

TARGET = TARGETS["cuda:90"]
# What a device-to-device copy reads and writes together.
COPY_GBPS = 4300.0


@triton.jit
def multiply(a, b, c, sums, come, shape, tile):
    gemm_small.gemm_small(
        b, shape, tile, gemm_small.Partials(sums, come), tl.program_id(0), tl.num_programs(0),
        gemm.ready_always, gemm.Always(a, shape.m), gemm.emit_store, gemm.Stored(c, shape),
    )  # fmt: skip


class Bench:
    """All ways of one shape."""

    def __init__(self, m: int, n: int, k: int) -> None:
        self.m, self.n, self.k = m, n, k
        sets = range(max(2, min(16, int(ROTATED_BYTES / (n * k * 2)))))

        def rows(count: int, columns: int) -> list[torch.Tensor]:
            return [torch.randn(count, columns, device="cuda").bfloat16() for _ in sets]

        self.a, self.b, self.c = rows(m, k), rows(n, k), rows(m, n)

    def cublas(self, i: int) -> None:
        torch.matmul(self.a[i], self.b[i].t(), out=self.c[i])

    def template(self, cut: Blocking) -> Callable[[int], None]:
        tiles, num_k = cut.num_tiles(self.m, self.n), -(-self.k // cut.tile_k)
        most = gemm_small.most_resident(cut, "bfloat16", "bfloat16", True, TARGET)
        programs = gemm_small.programs_for(tiles, num_k, most)
        elements = gemm_small.partial_elements(cut.tile_m, cut.tile_n, programs)
        sums = torch.empty(elements, device="cuda")
        come = torch.zeros(tiles, dtype=torch.int32, device="cuda")
        tile = gemm.Tile.of(
            cut.tile_m, cut.tile_n, cut.tile_k, size_k=self.k, b_is_nk=True, tma=True
        ).as_constexpr()
        shape = gemm.Shape(self.m, self.n, self.k, self.k, self.k, self.n)
        blocks = ((cut.tile_m, cut.tile_k), (cut.tile_n, cut.tile_k), (cut.tile_m, cut.tile_n))
        operands = [
            [descriptor(one, block) for one, block in zip(abc, blocks, strict=True)]
            for abc in zip(self.a, self.b, self.c, strict=True)
        ]

        def call(i: int) -> None:
            multiply[(programs,)](
                *operands[i], sums, come, shape, tile,
                num_warps=cut.num_warps, num_stages=cut.num_stages,
            )  # fmt: skip

        return call

    def is_right(self, call: Callable[[int], None]) -> bool:
        self.c[0].fill_(float("nan"))
        call(0)
        expected = self.a[0].float() @ self.b[0].float().t()
        error = (self.c[0].float() - expected).norm() / expected.norm()
        return error.item() <= tolerance("bfloat16", self.k)

    def recorded(self, call: Callable[[int], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        call(0)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for i in range(2 * len(self.b)):
                call(i % len(self.b))
        return graph

    def read(self, rounds: int) -> dict[str, Any]:
        cuts = list(gemm_small.cuts(max(16, triton.next_power_of_2(self.m)), self.n, TARGET))
        calls = {f"{cut.tile_n}x{cut.tile_k}, {cut.num_stages} stages": self.template(cut)
                 for cut in cuts}  # fmt: skip
        for name, call in calls.items():
            if not self.is_right(call):
                raise SystemExit(f"{name}: wrong at m={self.m} n={self.n} k={self.k}")
        calls = {"cublas": self.cublas, **calls}
        graphs = {name: self.recorded(call) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in graphs}
        for turn in range(rounds + 1):
            for name, graph in graphs.items():
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda._sleep(400_000)
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                if turn:
                    us = begin.elapsed_time(end) * 1e3 / (2 * len(self.b))
                    times[name].append(us)
        return {
            "m": self.m, "n": self.n, "k": self.k, "dtype": "bfloat16",
            "floor": round(self.n * self.k * 2 / COPY_GBPS / 1e3, 2),
            "us": {name: round(percentile(one, 0.5), 2) for name, one in times.items()},
            "p10": {name: round(percentile(one, 0.1), 2) for name, one in times.items()},
            "p90": {name: round(percentile(one, 0.9), 2) for name, one in times.items()},
            "clocks": clocks()[:1],
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--m", default="1,16,64")
    parser.add_argument("--rounds", type=int, default=9)
    chosen = parser.parse_args()
    found = []
    for layer, (n, k) in LAYERS.items():
        for m in map(int, chosen.m.split(",")):
            torch.manual_seed(0)
            found.append({"layer": layer, **Bench(m, n, k).read(chosen.rounds)})
            us = found[-1]["us"]
            print(m, layer, *(f"{name} {time}" for name, time in us.items()), sep="  ", flush=True)
    document = {"what": __doc__.splitlines()[0], **provenance(), "rows": found}
    print(save("gemm_few", document, 1, RESULTS))


if __name__ == "__main__":
    main()
