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
    frontend,
)
from weft.ir.task import Program


def ag_gemm(problem: Any) -> Program:
    def ag_gemm(a, b):
        return frontend.all_gather(a) @ b

    a, b = (("m", problem.k), Shard(0)), ((problem.k, _all(problem, "n")), Shard(1))
    return _traced(ag_gemm, problem, a=a, b=b)


def _all(problem: Any, size: str) -> int:
    """Over all ranks what each has as much of."""
    return getattr(problem, size) * problem.num_ranks


def _traced(function: Any, problem: Any, **parameters: Any) -> Program:
    types = {name: Tensor(problem.dtype, *rest) for name, rest in parameters.items()}
    return frontend.trace(function, "tp", types)
