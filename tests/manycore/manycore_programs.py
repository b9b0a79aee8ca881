"""Programs for the many-core target, and how one is run beside what it means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

import weft
from weft import manycore
from weft.base.dtypes import tolerance
from weft.compiler import (
    Compiled,
    Partial,
    Pieces,
    Shard,
    Tensor,
    all_gather,
    all_reduce,
    attention,
    gelu,
    gelu_mul,
    matmul_tn,
    reduce_scatter,
    rms_norm,
    silu,
    silu_mul,
    split,
)
from weft.manycore.lower import Plan
from weft.manycore.run import Run
from weft.plan import program_cards

K, N = 40, 48


def programs(dtype: str) -> dict[str, Compiled]:
    """One for each kind of kernel, and the MLP and an attention block."""
    program, found = weft.program, []

    @program(mesh="tp", x=Tensor(dtype, ("m", K)), w=Tensor(dtype, (K, 50)))
    def matmul(x, w):
        return x @ w

    @program(mesh="tp", x=Tensor(dtype, ("m", K), Shard(0)))
    def gather(x):
        return all_gather(x)

    @program(mesh="tp", x=Tensor(dtype, (9, "m"), Shard(1)))
    def gather_columns(x):
        return all_gather(x, dim=1)

    @program(mesh="tp", x=Tensor(dtype, ("m", K), Partial()))
    def scatter(x):
        return reduce_scatter(x)

    @program(mesh="tp", x=Tensor(dtype, ("m", K), Partial()))
    def scatter_columns(x):
        return reduce_scatter(x, dim=1)

    @program(mesh="tp", x=Tensor(dtype, ("m", K), Partial()))
    def reduce(x):
        return all_reduce(x)

    @program(mesh="tp", x=Tensor(dtype, ("m", K), Shard(0)), w=Tensor(dtype, (K, N), Shard(1)))
    def ag_gemm(x, w):
        return all_gather(x) @ w

    @program(mesh="tp", x=Tensor(dtype, ("m", K), Shard(1)), w=Tensor(dtype, (K, N), Shard(0)))
    def gemm_rs(x, w):
        return reduce_scatter(x @ w)

    @program(mesh="tp", x=Tensor(dtype, ("m", K), Shard(1)), w=Tensor(dtype, (K, N), Shard(0)))
    def gemm_ar(x, w):
        return all_reduce(x @ w)

    @program(
        mesh="tp", x=Tensor(dtype, ("m", K), Shard(0)), gain=Tensor(dtype, (1, K)),
        w1=Tensor(dtype, (K, 2 * N), Shard(1)), w2=Tensor(dtype, (N, K), Shard(0)),
    )  # fmt: skip
    def mlp(x, gain, w1, w2):
        h = all_gather(rms_norm(x, gain)) @ w1
        return reduce_scatter(silu_mul(h) @ w2) + x

    @program(
        mesh="tp", x=Tensor(dtype, ("m", 64), Shard(0)), gain=Tensor(dtype, (1, 64)),
        qkv=Tensor(dtype, (64, 128), Pieces(1, (64, 32, 32))), o=Tensor(dtype, (64, 64), Shard(0)),
    )  # fmt: skip
    def attend(x, gain, qkv, o):
        q, k, v = split(all_gather(rms_norm(x, gain)) @ qkv, (64, 32, 32))
        return reduce_scatter(attention(q, k, v, head=16) @ o) + x

    @program(mesh="tp", **{name: Tensor(dtype, ("m", 32), Shard(0)) for name in "qkv"})
    def sharded_tokens(q, k, v):
        return attention(q, all_gather(k), all_gather(v), head=16)

    @program(
        mesh="tp", x=Tensor(dtype, ("m", K)), y=Tensor(dtype, ("m", K)), w=Tensor(dtype, (1, K))
    )
    def on_rows(x, y, w):
        h = gelu(x + y * w)
        gated = gelu_mul(h, approximate="tanh"), silu_mul(h, side_by_side=True)
        return (rms_norm(h, w), silu(h), *gated)

    @program(mesh="tp", x=Tensor(dtype, ("m", K), Shard(0)), y=Tensor(dtype, ("m", 32), Shard(0)))
    def weight_gradient(x, y):
        return reduce_scatter(matmul_tn(x, y))

    found = [matmul, gather, gather_columns, scatter, scatter_columns, reduce, ag_gemm, gemm_rs,
             gemm_ar, mlp, attend, sharded_tokens, on_rows, weight_gradient]  # fmt: skip
    return {one.stages.program.name: one for one in found}


def of_sizes(dtype: str, k: int, n: int) -> dict[str, Compiled]:
    """What overlaps with a product, of any k and n."""
    program = weft.program

    @program(mesh="tp", x=Tensor(dtype, ("m", k), Shard(0)), w=Tensor(dtype, (k, n), Shard(1)))
    def any_ag_gemm(x, w):
        return silu(all_gather(x) @ w)

    @program(
        mesh="tp", x=Tensor(dtype, ("m", k), Shard(1)), w=Tensor(dtype, (k, n), Shard(0)),
        bias=Tensor(dtype, (1, n)),
    )  # fmt: skip
    def any_gemm_rs(x, w, bias):
        return reduce_scatter(x @ w) + bias

    @program(mesh="tp", x=Tensor(dtype, ("m", k), Shard(1)), w=Tensor(dtype, (k, n), Shard(0)))
    def any_gemm_ar(x, w):
        return gelu(all_reduce(x @ w))

    @program(mesh="tp", x=Tensor(dtype, ("m", k), Shard(1)))
    def any_columns(x):
        return all_gather(gelu(x), dim=1)

    return {one.stages.program.name: one for one in (any_ag_gemm, any_gemm_rs, any_gemm_ar,
                                                     any_columns)}  # fmt: skip


@dataclass
class Case:
    """A program at a size on ranks, with inputs and what they should give."""

    program: Compiled
    sizes: Mapping[str, int]
    num_ranks: int

    def __post_init__(self) -> None:
        name = self.program.stages.program.name
        card = program_cards.card(
            f"manycore_{name}", lambda problem: self.program, summary=name,
            default_shape=self.sizes, dtypes=("float32",), smallest=self.sizes, trials=(),
        )  # fmt: skip
        self.problem = card.make_problem(self.num_ranks, self.sizes, "float32")
        self.inputs = [
            program_cards.make_inputs(self.problem, rank, 0) for rank in range(self.num_ranks)
        ]
        results = program_cards.reference(self.problem, self.inputs)
        self.expected = [one if isinstance(one, tuple) else (one,) for one in results]

    def plan(self, machine=manycore.SMALL, choices=manycore.Choices()) -> Plan:
        return manycore.compile_program(
            self.program, self.sizes, num_ranks=self.num_ranks, machine=machine, choices=choices
        )

    def check(self, run: Run, dtype: str) -> None:
        """Right on every rank, as far as its dtype goes."""
        allowed = 2 * tolerance(dtype, self.problem.k)
        for rank, wanted in enumerate(self.expected):
            for (name, found), right in zip(run.results[rank].items(), wanted, strict=True):
                assert found.shape == right.shape, (name, rank, found.shape, right.shape)
                error = (found.float() - right.float()).norm()
                is_right = error <= allowed * right.float().norm()  # and no NaN
                assert is_right, f"{name} of rank {rank} is off by {float(error)}"


def in_order(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """x @ w, a summand of fp32 after the other."""
    found = torch.zeros(x.shape[0], w.shape[1])
    for i in range(x.shape[1]):
        found += x[:, i : i + 1] * w[i : i + 1]
    return found
