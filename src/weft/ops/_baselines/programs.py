"""The operator's work as a tensor program, whose kernels and plan are the compiler's.

What the compiler chooses for the program and what the operator's card chooses may differ, in tiles
and engines; `about` says what the program took.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import weft.ops
from weft.compiler import Shard, Tensor, all_gather, all_reduce, program, reduce_scatter
from weft.compiler.facts import Facts
from weft.tune.case import Case
from weft.tune.variants import Variant


def ag_gemm(case: Case) -> Variant:
    def gathered_product(x: Any, w: Any) -> Any:
        return all_gather(x) @ w

    n, k = case.problem.n, case.problem.k
    return _variant(case, gathered_product, x=(("m", k), 0), w=((k, n * _ranks(case)), 1))


def gemm_rs(case: Case) -> Variant:
    def scattered_product(x: Any, w: Any) -> Any:
        return reduce_scatter(x @ w)

    return _variant(case, scattered_product, **_split_over_k(case))


def gemm_ar(case: Case) -> Variant:
    def summed_product(x: Any, w: Any) -> Any:
        return all_reduce(x @ w)

    return _variant(case, summed_product, **_split_over_k(case))


def _ranks(case: Case) -> int:
    return case.world.num_ranks


def _split_over_k(case: Case) -> Mapping[str, tuple[tuple, int]]:
    n, k = case.problem.n, case.problem.k * _ranks(case)
    return {"x": (("m", k), 1), "w": ((k, n), 0)}


def _variant(case: Case, function: Callable[..., Any], **types: tuple[tuple, int]) -> Variant:
    """`types`: by parameter the whole tensor's sizes, and the dimension that ranks share."""
    problem, world = case.problem, case.world
    tensors = {
        name: Tensor(problem.dtype, sizes, Shard(dim)) for name, (sizes, dim) in types.items()
    }
    compiled = program(mesh="tp", **tensors)(function)

    def call(inputs: Mapping[str, Any]) -> Callable[[], Any]:
        return lambda: compiled(
            inputs["a"], inputs["b"], world=world, collectives=weft.ops, lowering="overlapped",
            m=problem.m,
        )  # fmt: skip

    plan = compiled.overlapped(Facts({"m": problem.m}, _ranks(case), world.target)).program
    about = ", ".join(f"{one.subject} {one.what}={one.taken}" for one in plan.choices)
    return Variant("weft_program", [call(inputs) for inputs in case.sets], about=about)
