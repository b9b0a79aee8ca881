"""Products with experts by torch's grouped product, and NCCL before or behind it: no host's wait.

    cublas        the grouped product alone, by offsets that lie on the device; of ag_moe with the
                  rows' gathering by token, of moe_rs with the weighted sums of choices, which
                  torch.compile makes one kernel
    nccl          all-gather of tokens, or reduce-scatter of their sums
    cublas_nccl   one after the other

Each function takes a benchmark's case and returns a Variant. Tables are the inputs' own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weft.compiler import experts
from weft.ops import _moe
from weft.ops._baselines.nccl import even, padded
from weft.tune.case import Case
from weft.tune.variants import Variant


def as_one_kernel(function: Callable[..., Any], like: torch.Tensor) -> Callable[..., Any]:
    """What a user would do with many passes over rows: compiled, on GPUs."""
    if not like.is_cuda:
        return function
    # Once for each set of inputs of each point, all from the same lines.
    torch._dynamo.config.recompile_limit = 1000
    return torch.compile(function, fullgraph=True, dynamic=False)


class _Way:
    """Both halves for every set of inputs; a buffer of what lies between them for each."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.b = [inputs["b"] for inputs in case.sets]
        self.routing = [_moe.routing_of(case.problem, inputs) for inputs in case.sets]

    def rows(self, count: int, columns: int) -> torch.Tensor:
        problem = self.case.problem
        return torch.empty(count, columns, dtype=problem.torch_dtype, device=self.case.world.device)

    def calls(self, *parts: Any) -> list[Any]:
        """Of each set: one after the other, the last one's answer."""
        return [lambda i=i: [part(i) for part in parts][-1] for i in range(len(self.case.sets))]


class _Gather(_Way):
    """Tokens of all ranks, then a row of each slot, then its expert's columns."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        problem = case.problem
        self.x = [padded(case, inputs["x"]) for inputs in case.sets]
        everyone = problem.rows * problem.num_ranks
        self.gathered = [self.rows(everyone, problem.k) for _ in case.sets]

    def gather(self, i: int) -> None:
        dist.all_gather_into_tensor(self.gathered[i], self.x[i], group=self.case.group)

    def multiply(self, i: int) -> torch.Tensor:
        rows = experts.gather_rows(self.gathered[i], self.routing[i])
        return experts.grouped_matmul(rows, self.b[i], self.routing[i])


class _Scatter(_Way):
    """Each slot's product, the weighted sum of a token's choices, then the sum over ranks."""

    def __init__(self, case: Case) -> None:
        even(case, "reduce_scatter_tensor")
        super().__init__(case)
        problem = case.problem
        self.x = [inputs["x"] for inputs in case.sets]
        self.sums = as_one_kernel(experts.scatter_rows, self.x[0])
        self.share = [self.rows(problem.m, problem.n).zero_() for _ in case.sets]
        self.out = self.rows(problem.rows, problem.n)

    def multiply(self, i: int) -> torch.Tensor:
        product = experts.grouped_matmul(self.x[i], self.b[i], self.routing[i])
        self.share[i] = self.sums(product, self.routing[i])
        return self.share[i]

    def scatter(self, i: int) -> torch.Tensor:
        dist.reduce_scatter_tensor(self.out, self.share[i], group=self.case.group)
        return self.out


def ag_moe_product(case: Case) -> Variant:
    way = _Gather(case)
    for i in range(len(case.sets)):
        way.gather(i)
    return Variant("cublas", way.calls(way.multiply))


def ag_moe_gather(case: Case) -> Variant:
    way = _Gather(case)
    return Variant("nccl", way.calls(way.gather), answers=False)


def ag_moe_serial(case: Case) -> Variant:
    way = _Gather(case)
    return Variant("cublas_nccl", way.calls(way.gather, way.multiply))


def moe_rs_product(case: Case) -> Variant:
    """A rank's share is no rank's answer."""
    way = _Scatter(case)
    return Variant("cublas", way.calls(way.multiply), answers=False)


def moe_rs_scatter(case: Case) -> Variant:
    way = _Scatter(case)
    return Variant("nccl", way.calls(way.scatter), answers=False)


def moe_rs_serial(case: Case) -> Variant:
    way = _Scatter(case)
    return Variant("cublas_nccl", way.calls(way.multiply, way.scatter))
