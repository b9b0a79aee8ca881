"""Collectives of every transport, in the dtypes and shapes that a benchmark leaves out.

    torchrun --nproc-per-node 4 tests/ops/scripts/every_dtype.py

Eager, replayed, and eager again, bit by bit against the reference; in the world of all ranks and in
one of every second rank, in turns. Each rank says `rank R of N: C cases`, or raises with all that
went wrong.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.tune.answers import poison
from weft.tune.compiling import compile_together

SUMS, MOVES = ("all_reduce", "reduce_scatter"), ("all_gather", "all_to_all")
ODD, WHOLE, UNEVEN = {"m": 24, "n": 33}, {"m": 48, "n": 256}, {"m": 7, "n": 40}
DTYPES = {
    **dict.fromkeys(SUMS, (("float16", WHOLE), ("float32", ODD), ("bfloat16", UNEVEN))),
    **dict.fromkeys(MOVES, (("float8_e4m3fn", ODD), ("float16", ODD), ("float32", UNEVEN))),
}


class Case:
    """One call, on plain x or in place."""

    def __init__(self, world: Any, op: Any, problem: Any, config: Any, in_place: bool) -> None:
        self.world, self.op, self.problem, self.config = world, op, problem, config
        where = " in place" if in_place else ""
        self.name = f"{op.name} {config.transport} {problem.dtype} {problem.m}x{problem.n}{where}"
        everyone = [op.make_inputs(problem, rank) for rank in range(world.num_ranks)]
        self.expected = op.reference(problem, everyone)[world.rank]
        x = everyone[world.rank]["x"].to(world.device)
        if in_place:
            x = world.empty(tuple(x.shape), x.dtype).copy_(x)
        self.x = x

    def call(self) -> torch.Tensor:
        return self.op.run(self.world, self.problem, {"x": self.x}, self.config)

    def is_right(self, out: torch.Tensor) -> bool:
        want = self.expected.contiguous()
        return torch.equal(out.cpu().view(torch.uint8), want.view(torch.uint8))

    def failures(self) -> Iterator[str]:
        world = self.world
        if not self.is_right(self.call()):
            yield f"{self.name}: eager"
        with world.record() as recording:
            out = self.call()
        for turn in range(2):
            poison(out)
            recording.replay()
            if not self.is_right(out):
                yield f"{self.name}: replay {turn}"
        if not self.is_right(self.call()):
            yield f"{self.name}: eager again"


def cases(world: Any) -> Iterator[Case]:
    for name, kinds in DTYPES.items():
        op = importlib.import_module(f"weft.ops.{name}").op
        for dtype, shape in kinds:
            problem = op.make_problem(world.num_ranks, shape, dtype)
            for config in op.candidates(problem, world.target):
                if config.transport == "nccl":
                    continue
                config = replace(config, channels=min(6, config.channels))
                yield Case(world, op, problem, config, False)
                if config.reads_in_place and problem.m % world.num_ranks == 0:
                    yield Case(world, op, problem, config, True)


def main() -> None:
    whole = weft.init(heap_bytes=64 << 20)
    n = whole.num_ranks
    groups = [dist.new_group(list(range(first, n, 2))) for first in (0, 1)]
    part = weft.init(groups[whole.rank % 2], heap_bytes=64 << 20)
    found, count = [], 0
    for world in (whole, part):
        some = list(cases(world))
        compile_together(world, lambda some=some: [one.call() for one in some])
        for one in some:
            found += one.failures()
            count += 1
        world.synchronize()
    for one, other in zip(cases(whole), cases(part), strict=False):
        found += [f"{case.name}: in turns" for case in (one, other)
                  if not case.is_right(case.call())]  # fmt: skip
    assert not found, "\n".join(found)
    print(f"rank {whole.rank} of {n}: {count} cases", flush=True)
    part.close()
    whole.close()


if __name__ == "__main__":
    main()
