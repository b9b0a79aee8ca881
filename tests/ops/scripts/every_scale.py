"""ag_gemm, gemm_rs and gemm_ar of fp8 under torchrun: every way of them, scales of rows and of
blocks, b in both orders.

Eager, then again and again, so that calls are replayed, each time with other inputs in the same
place; answers against fp32 sums on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.base.dtypes import tolerance
from weft.tune.case import drawn_on

SHAPES = [(997, 768, 512), (512, 1024, 1024), (9, 136, 272)]
DTYPES = ("float8_e4m3fn", "float8_e5m2")
OPERATORS = ("ag_gemm", "gemm_rs", "gemm_ar")
# The third is recorded, and replayed from then on.
CALLS = 5


def ways(op: Any, problem: Any, target: Any) -> Iterator[Any]:
    """The first configuration of each kind: compiling takes most of the time here."""
    done = set()
    for config in op.candidates(problem, target):
        if (config.transport, config.template) not in done:
            done.add((config.transport, config.template))
            yield config


def problems(op: Any, num_ranks: int) -> Iterator[Any]:
    for i, (m, n, k) in enumerate(SHAPES):
        for scaling in ("rows", "blocks"):
            dtype = DTYPES[(i + (scaling == "rows")) % 2]
            one = op.make_problem(num_ranks, {"m": m, "n": n, "k": k}, dtype)
            yield replace(one, scaling=scaling, b_is_nk=True)
    yield replace(one, b_is_nk=False)


def tried(op: Any, world: Any) -> int:
    """How many cases of an operator were right."""
    cases = 0
    for problem in problems(op, world.num_ranks):
        everyone = range(world.num_ranks)
        sets = [
            [drawn_on(world.device, op.make_inputs, problem, rank, seed) for rank in everyone]
            for seed in range(CALLS)
        ]
        for config in ways(op, problem, world.target):
            given = {name: x.clone() for name, x in sets[0][world.rank].items()}
            for inputs in sets:
                for name, x in inputs[world.rank].items():
                    given[name].copy_(x)
                out = op.run(world, problem, given, config)
                expected = op.reference(problem, inputs)[world.rank]
                assert out.shape == expected.shape and out.dtype == torch.bfloat16
                # A rank may have no rows of a sum.
                size = expected.norm().item() if expected.numel() else 1.0
                error = (out.float() - expected).norm().item() / size
                assert error <= tolerance("bfloat16", problem.k), (problem, config, error)
            cases += 1
    return cases


def main() -> None:
    world = weft.init()
    cases = sum(tried(weft.ops.cards()[name], world) for name in OPERATORS)
    world.close()
    print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {cases} cases", flush=True)


main()
