"""gemm_rs, gemm_ar, ag_wgrad, all_reduce_rms_norm, flash_decode and ag_attention on GPUs, under
torchrun: every way of each, in ragged and tiny shapes.

Eager, then again and again, so that calls are replayed; answers against fp32 sums on the device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import weft
from weft.base.dtypes import tolerance
from weft.tune.case import drawn_on

SHAPES = [(997, 768, 512), (9, 1024, 512), (200, 70, 50)]
# Of gemm_rs and gemm_ar, where tiles leave by TMA and are told of late: on two ranks some own tiles
# of 256 columns are in the first round, and four programs share each of the last round's. Who has
# a shared one waits for programs that wait for a peer's tile, which must have been told of by then.
WAITING = (1024, 5120, 2048)
# Sequences, keys of each on a rank, elements of a head, heads of queries and of the cache.
DECODED = [(8, 3000, 128, 32, 8), (1, 20000, 128, 8, 1), (3, 70, 50, 12, 4), (64, 999, 64, 64, 1)]
# Tokens, heads of queries and of keys, elements of a head, sequences (0: one), causal? zigzag?
ATTENDED = [(997, 8, 2, 128, 5, 1, 0), (4096, 8, 1, 64, 0, 1, 0), (301, 6, 6, 80, 2, 0, 0),
            (997, 8, 2, 128, 5, 1, 1)]  # fmt: skip
# The third is recorded, and replayed from then on.
CALLS = 5


def ways(op: Any, problem: Any, target: Any) -> Iterator[Any]:
    """The first configuration of each kind: compiling takes most of the time here."""
    done = set()
    for config in op.candidates(problem, target):
        template = getattr(config, "template", "")
        several = getattr(config, "chunks", 1) > 1
        kind = (config.transport, template, template == "sm90" and config.tile_n, several)
        if (problem.m, problem.n, getattr(problem, "k", 0)) == WAITING and not config.by_tma:
            continue
        if kind not in done:
            done.add(kind)
            yield config


def problems(num_ranks: int) -> Iterator[tuple[Any, Any, int]]:
    """Each operator with each problem, and how many numbers are summed on a rank."""
    for m, n, k in (*SHAPES, WAITING):
        for name in ("gemm_rs", "gemm_ar"):
            op = weft.ops.cards()[name]
            problem = op.make_problem(num_ranks, {"m": m, "n": n, "k": k}, "bfloat16")
            yield op, replace(problem, b_is_nk=True), k
    for m, n, k in SHAPES:
        op = weft.ops.cards()["ag_wgrad"]
        problem = op.make_problem(num_ranks, {"m": m, "n": n, "k": k}, "bfloat16")
        yield from ((op, replace(problem, b_is_nk=is_nk), m) for is_nk in (False, True))
        op = weft.ops.cards()["all_reduce_rms_norm"]
        yield op, op.make_problem(num_ranks, {"m": m, "n": n}, "bfloat16"), 1
    op = weft.ops.cards()["flash_decode"]
    for sizes in DECODED:
        shape = dict(zip(("m", "n", "k", "heads", "kv_heads"), sizes, strict=True), variable=1)
        yield op, op.make_problem(num_ranks, shape, "bfloat16"), shape["k"]

    op = weft.ops.cards()["ag_attention"]
    for sizes in ATTENDED:
        shape = dict(zip(op.default_shape, sizes, strict=True))
        problem = op.make_problem(num_ranks, shape, "bfloat16")
        yield op, problem, problem.k


def check(out: Any, expected: Any, k: int, config: Any) -> None:
    if isinstance(expected, tuple):
        for one, wanted in zip(out, expected, strict=True):
            check(one, wanted, k, config)
    elif expected.numel():
        wanted = expected.float()
        error = ((out.float() - wanted).norm() / wanted.norm()).item()
        assert error <= tolerance("bfloat16", k), (config, error)


def main() -> None:
    world = weft.init()
    cases = 0
    for op, problem, k in problems(world.num_ranks):
        inputs = [
            drawn_on(world.device, op.make_inputs, problem, rank) for rank in range(world.num_ranks)
        ]
        expected = op.reference(problem, inputs)[world.rank]
        for config in ways(op, problem, world.target):
            for _ in range(CALLS):
                out = op.run(world, problem, inputs[world.rank], config)
                check(out, expected, k * world.num_ranks, config)
            cases += 1
    rank, num_ranks = world.rank, world.num_ranks
    world.close()
    print(f"rank {rank} of {num_ranks}: {cases} cases", flush=True)


main()
