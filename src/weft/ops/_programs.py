"""The operators as tensor programs, which `weft explain` and `weft timeline` follow, and which
`weft bench` sets beside them.

A function for each, of the operator's name: from its problem to a traced program, with m open. It
is read through the compiler's passes; what a call runs is in the operator's own file.
"""

from __future__ import annotations

from typing import Any

from weft.compiler import (
    Shard,
    Tensor,
    Times,
    frontend,
)
from weft.ir.task import Program


def ag_gemm(problem: Any) -> Program:
    def ag_gemm(a, b):
        return frontend.all_gather(a) @ b

    a, b = (("m", problem.k), Shard(0)), ((problem.k, _all(problem, "n")), Shard(1))
    return _traced(ag_gemm, problem, a=a, b=b)


def ag_moe(problem: Any) -> Program:
    def ag_moe(x, logits, b):
        routing = frontend.moe_route(logits, top_k=problem.top_k)
        rows = frontend.gather_rows(frontend.all_gather(x), routing)
        return frontend.grouped_matmul(rows, b, routing)

    experts = problem.experts
    return _traced(
        ag_moe, problem, x=(("m", problem.k), Shard(0)), logits=(("m", experts), Shard(0)),
        b=((experts, problem.k, _all(problem, "n")), Shard(2)),
    )  # fmt: skip


def moe_rs(problem: Any) -> Program:
    def moe_rs(x, logits, b):
        routing = frontend.moe_route(logits, top_k=problem.top_k)
        products = frontend.grouped_matmul(x, b, routing)
        return frontend.reduce_scatter(frontend.scatter_rows(products, routing))

    experts, k = problem.experts, _all(problem, "k")
    return _traced(
        moe_rs, problem, x=((Times("m", problem.top_k), k), Shard(1)),
        logits=(("m", experts), Shard(0)), b=((experts, k, problem.n), Shard(1)),
    )  # fmt: skip


def _all(problem: Any, size: str) -> int:
    """Over all ranks what each has as much of."""
    return getattr(problem, size) * problem.num_ranks


def _traced(function: Any, problem: Any, **parameters: Any) -> Program:
    types = {name: Tensor(problem.dtype, *rest) for name, rest in parameters.items()}
    return frontend.trace(function, "tp", types)
