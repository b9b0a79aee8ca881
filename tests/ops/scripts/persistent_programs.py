"""Programs as one persistent kernel a rank, with a worker for each SM and with fewer.

    torchrun --nproc-per-node 2 tests/ops/scripts/persistent_programs.py

As overlapping_programs.py does it: eager, with other rows in between, replayed, against the
reference; any number of workers must give the same bits. Each rank says `rank R of N: C programs`,
or raises with all that went wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from overlapping_programs import Case, gemm_ar, mlp

import weft
from weft.compiler.passes.tile import tile
from weft.megakernel import Persistent
from weft.tune.compiling import compile_together

WORKERS = (0, 7)
TILES = {
    "gathered": (128, 64), "product": (128, 128, 64), "gated": (128, 64),
    "product_2": (128, 128, 64), "scattered": (64, 128), "reduced": (64, 128),
}  # fmt: skip


class OneKernel(Case):
    """A program at one number of rows, by so many workers."""

    def __init__(self, world: Any, function: Any, engines: dict[str, str], sizes: tuple) -> None:
        super().__init__(world, function, engines, sizes)
        names = [task.name for task in self.placed.tasks if task.kind != "input"]
        self.settled = {name: TILES[name] for name in names}
        self.tiled = tile(self.placed, self.settled)
        self.how = Persistent()

    def call(self, m: int, mine: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.how.run_persistent(
            self.tiled, mine, {"m": m}, world=self.world, settled=self.settled
        )[0]

    def failures(self) -> Iterator[str]:
        mine, results = self.given(self.tensors(self.m, 9)), []
        for num_workers in WORKERS:
            self.how = Persistent(num_workers)
            yield from (f"{num_workers} workers: {failure}" for failure in super().failures())
            results.append(self.call(self.m, mine))
        if not all(torch.equal(one, results[0]) for one in results):
            yield f"{self.name}: numbers of workers give different bits"


class InParts(OneKernel):
    """A product of few rows that is split along k, and summed by every rank for itself."""

    def __init__(self, world: Any, split_k: int, sizes: tuple) -> None:
        super().__init__(world, gemm_ar, {}, sizes)
        self.name += f" in {split_k} parts"
        self.settled, self.split_k = {}, split_k

    def failures(self) -> Iterator[str]:
        """Tiles are chosen for so many workers, so each number of them has its own bits."""
        for num_workers in WORKERS:
            self.how = Persistent(num_workers, split_k=self.split_k)
            yield from (f"{num_workers} workers: {one}" for one in Case.failures(self))


def main() -> None:
    world = weft.init()
    sizes = (300, 128, 256) if world.target.backend == "emu" else (1500, 2048, 4096)
    some = [
        OneKernel(world, mlp, {"gathered": "sm_push"}, sizes),
        OneKernel(world, gemm_ar, {"reduced": "sm_push"}, sizes),
        InParts(world, 4, (5, *sizes[1:])),
        InParts(world, 0, (1, *sizes[1:])),
    ]
    for one in some:
        mine = one.given(one.tensors(one.m, 0))
        compile_together(world, lambda one=one, mine=mine: one.call(one.m, mine))
    found = [failure for one in some for failure in one.failures()]
    world.synchronize()
    assert not found, "\n".join(found)
    print(f"rank {world.rank} of {world.num_ranks}: {len(some)} programs", flush=True)
    world.close()


if __name__ == "__main__":
    main()
