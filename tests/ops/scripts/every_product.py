"""gemm_rs and gemm_ar on GPUs, under torchrun: every way of each, in ragged and tiny shapes.

Eager, then again and again, so that calls are replayed; answers against fp32 sums on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch.distributed as dist

import weft
from weft.base.dtypes import tolerance
from weft.tune.case import drawn_on

SHAPES = [(997, 768, 512), (9, 1024, 512), (200, 70, 50)]
# The third is recorded, and replayed from then on.
CALLS = 5


def ways(op: Any, problem: Any, target: Any) -> Iterator[Any]:
    """The first configuration of each kind: compiling takes most of the time here."""
    done = set()
    for config in op.candidates(problem, target):
        kind = (config.transport, config.template, config.template == "sm90" and config.tile_n)
        if kind not in done:
            done.add(kind)
            yield config


def main() -> None:
    world = weft.init()
    cases = 0
    for name in ("gemm_rs", "gemm_ar"):
        op = weft.ops.cards()[name]
        for m, n, k in SHAPES:
            shape = {"m": m, "n": n, "k": k}
            problem = replace(op.make_problem(world.num_ranks, shape, "bfloat16"), b_is_nk=True)
            inputs = [
                drawn_on(world.device, op.make_inputs, problem, rank)
                for rank in range(world.num_ranks)
            ]
            expected = op.reference(problem, inputs)[world.rank]
            for config in ways(op, problem, world.target):
                for _ in range(CALLS):
                    out = op.run(world, problem, inputs[world.rank], config)
                    if expected.numel():
                        error = ((out.float() - expected).norm() / expected.norm()).item()
                        assert error <= tolerance("bfloat16", k * world.num_ranks), (config, error)
                cases += 1
    world.close()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {cases} cases", flush=True)


main()
