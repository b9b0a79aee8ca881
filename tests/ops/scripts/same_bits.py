"""Bits of calls on GPUs, under torchrun: eager, repeated, replayed by the operator, recorded by the
user and replayed; in each way that the operator chooses, and where torch is asked for deterministic
algorithms.

Without being asked for, one way is compared with itself. Asked for, all are compared.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

# Before cuBLAS is: it is deterministic with a workspace of its own for each stream.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

import weft
from weft.tune.case import drawn_on

# Sizes by operator; of gemm_rs the first two are carried by engines where calls are eager.
SHAPES: dict[str, list[dict[str, int]]] = {
    "gemm_rs": [
        {"m": 2048, "n": 8192, "k": 7168}, {"m": 4096, "n": 4096, "k": 3584},
        {"m": 64, "n": 4096, "k": 3584}, {"m": 997, "n": 768, "k": 512},
    ],
    "gemm_ar": [{"m": 16, "n": 4096, "k": 3584}, {"m": 2048, "n": 8192, "k": 2048}],
    "ag_gemm": [
        {"m": 128, "n": 14336, "k": 8192}, {"m": 256, "n": 12800, "k": 5120},
        {"m": 2048, "n": 7168, "k": 4096}, {"m": 16, "n": 2560, "k": 8192},
    ],
    "all_reduce": [{"m": 16, "n": 4096}, {"m": 8192, "n": 4096}],
    "reduce_scatter": [{"m": 64, "n": 4096}, {"m": 16384, "n": 4096}],
    "all_reduce_rms_norm": [{"m": 16, "n": 4096}, {"m": 2048, "n": 4096}],
}  # fmt: skip
# The third eager call is recorded by the operator, and replayed from then on.
EAGER, REPLAYED = 6, 3


def bits(out: Any) -> list[torch.Tensor]:
    parts = out if isinstance(out, tuple) else (out,)
    return [part.clone().view(torch.int16) for part in parts]


def is_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def readings(world: Any, op: Any, problem: Any, inputs: Any) -> tuple[list, list]:
    """Bits of eager calls, and of replays of what the user has recorded."""
    eager = [bits(op.run(world, problem, inputs)) for _ in range(EAGER)]
    with world.record() as recording:
        out = op.run(world, problem, inputs)
    replayed = []
    for _ in range(REPLAYED):
        for part in out if isinstance(out, tuple) else (out,):
            part.fill_(float("nan"))
        recording.replay()
        replayed.append(bits(out))
    eager.append(bits(op.run(world, problem, inputs)))
    world.synchronize()
    return eager, replayed


def main() -> None:
    world, cases = weft.init(), 0
    for name, shapes in SHAPES.items():
        op = weft.ops.cards()[name]
        for shape in shapes:
            problem = op.make_problem(world.num_ranks, shape, "bfloat16")
            if hasattr(problem, "b_is_nk"):
                problem = replace(problem, b_is_nk=True)
            inputs = drawn_on(world.device, op.make_inputs, problem, world.rank)
            unlike = False
            for is_asked in (False, True):
                torch.use_deterministic_algorithms(is_asked)
                eager, replayed = readings(world, op, problem, inputs)
                where = (name, shape, "deterministic" if is_asked else "as it comes")
                assert all(is_same(one, eager[0]) for one in eager), ("eager", *where)
                assert all(is_same(one, replayed[0]) for one in replayed), ("replayed", *where)
                if is_asked:
                    assert is_same(eager[0], replayed[0]), ("eager and replayed", *where)
                else:
                    unlike = not is_same(eager[0], replayed[0])
                cases += 1
            if world.rank == 0 and unlike:
                print(f"{name} {shape}: recorded and eager bits differ where nothing is asked for")
    torch.use_deterministic_algorithms(False)
    rank, num_ranks = world.rank, world.num_ranks
    world.close()
    print(f"rank {rank} of {num_ranks}: {cases} cases", flush=True)


main()
