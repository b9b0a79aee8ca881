"""Gradients of ag_attention on GPUs, under torchrun, held to torch's own of its reference: packed
and causal, with heads that share keys, in shards that differ."""

from __future__ import annotations

from typing import Any

import torch

import weft
from weft.base.dtypes import tolerance
from weft.ops import cards
from weft.ops.ag_attention import ag_attention
from weft.tune.case import drawn_on

# Tokens of all ranks, heads of queries and of keys, elements of a head, sequences, causal.
SHAPES = [
    (997, 8, 2, 128, 3, 1),
    (600, 4, 4, 64, 0, 0),
    (70, 6, 3, 80, 2, 1),
    (300, 4, 1, 256, 0, 1),
]
NAMES = ("q", "k", "v")


def expected(op: Any, problem: Any, inputs: list[Any], slopes: list[torch.Tensor]) -> list[Any]:
    """Of all ranks' inputs, in fp32."""
    leaves = [{n: one[n].float().requires_grad_() for n in NAMES} for one in inputs]
    results = op.reference(
        problem, [{**one, **leaf} for one, leaf in zip(inputs, leaves, strict=True)]
    )
    sum((out * slope).sum() for (out, _), slope in zip(results, slopes, strict=True)).backward()
    return [[leaf[name].grad for name in NAMES] for leaf in leaves]


def main() -> None:
    world = weft.init()
    op, cases = cards()["ag_attention"], 0
    for sizes in SHAPES:
        names = ("m", "q_heads", "kv_heads", "d", "sequences", "causal")
        shape = {**op.default_shape, **dict(zip(names, sizes, strict=True))}
        for dtype in ("bfloat16", "float32"):
            problem = op.make_problem(world.num_ranks, shape, dtype)
            inputs = [
                drawn_on(world.device, op.make_inputs, problem, rank)
                for rank in range(world.num_ranks)
            ]
            slopes = [one["q"].float().flip(0) for one in inputs]
            mine = inputs[world.rank]
            for _ in range(4):
                leaves = [mine[name].clone().requires_grad_() for name in NAMES]
                out = ag_attention(
                    *leaves, world=world, causal=problem.causal, cu_seqlens=mine["cu_seqlens"],
                    m=problem.m,
                )  # fmt: skip
                (out.float() * slopes[world.rank]).sum().backward()
            wanted = expected(op, problem, inputs, slopes)[world.rank]
            for leaf, grad in zip(leaves, wanted, strict=True):
                if grad.numel():
                    error = ((leaf.grad.float() - grad).norm() / grad.norm()).item()
                    assert error <= 2 * tolerance(dtype, problem.k), (sizes, dtype, error)
            cases += 1
    rank, num_ranks = world.rank, world.num_ranks
    world.close()
    print(f"rank {rank} of {num_ranks}: {cases} cases", flush=True)


main()
