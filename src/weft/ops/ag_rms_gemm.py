"""Norm of own rows, gathered over ranks while they are multiplied.

    out = all_gather(x / sqrt(mean(x^2) + eps) * gamma) @ w

Every rank has ceil(m / num_ranks) rows of x and n columns of w, and ends with all m rows of its n
columns. Rows are normed before they travel: once, not on every rank.

Plan and signals are the compiler's: `weft explain ag_rms_gemm`.
Limits  shards of w are alike on all ranks; k and n are compiled in
Source  Megatron-LM's sequence parallelism: a norm of split rows, a projection to split columns
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weft.compiler import Replicate, Shard, all_gather, rms_norm
from weft.ops import _baselines
from weft.plan.program_cards import Config, Operator, Problem


def traced(x: Any, gamma: Any, w: Any, eps: float = 1e-6) -> Any:
    return all_gather(rms_norm(x, gamma, eps=eps)) @ w


PROGRAM = Operator(
    "ag_rms_gemm", traced, x=("m k", Shard(0)), gamma=("1 k", Replicate()), w=("k n", Shard(1))
)


def ag_rms_gemm(
    x: torch.Tensor, gamma: torch.Tensor, w: torch.Tensor, eps: float = 1e-6, *, world: Any,
    m: int | None = None, config: Config | None = None,
) -> torch.Tensor:  # fmt: skip
    """All ranks' normed rows times this rank's columns. Collective.

    Shapes  x: [own rows, k]; gamma: [k]; w: [k, n], or a transposed [n, k]; out: [m, n]. m: rows of
            all ranks, by default num_ranks * own ones: pass it where shards differ
    Dtypes  all alike, float16, bfloat16 or float32; sums in fp32, normed rows rounded once
    Sync    stream-ordered on the current stream; can be recorded; differentiated by weft.plan
    Raises  ShapeError, DtypeError, ConfigError: with the values; CallOrderError: ranks that differ
    """
    return PROGRAM(x, gamma.view(1, -1), w, world=world, m=m, config=config, eps=eps)


def run(world: Any, problem: Problem, inputs: Mapping[str, Any], config: Any = None) -> Any:
    return ag_rms_gemm(**inputs, world=world, m=problem.open_sizes["m"], config=config)


op = PROGRAM.card(
    run, {"m": 20, "k": 16, "n": 16}, {"m": 80, "k": 16, "n": 40}, baselines=_baselines.PROGRAM,
    summary="C = rms_norm(all_gather(X[m, k])) @ W[k, n], n of each rank",
    default_shape={"m": 96, "k": 32, "n": 32},
    awkward_shapes=((4, {"m": 97, "k": 40, "n": 24}), (3, {"m": 2, "k": 16, "n": 16}),
                    (1, {"m": 37, "k": 64, "n": 48}), (4, {"m": 0, "k": 16, "n": 16})),
)  # fmt: skip
