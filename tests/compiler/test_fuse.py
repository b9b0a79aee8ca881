"""Which tasks become one kernel, and which stay calls of libraries."""

from __future__ import annotations

import operators
import pytest
from ir_reader import read
from operators import placed

from weft.compiler import (
    Partial,
    Replicate,
    Shard,
    Tensor,
    all_gather,
    all_reduce,
    reduce_scatter,
    rms_norm,
    silu,
    silu_mul,
)
from weft.compiler.frontend import trace
from weft.compiler.passes.fuse import fuse
from weft.compiler.passes.place import place
from weft.ir import kinds, task, task_rules


def kernels(function, **parameters) -> dict[str, str]:
    """Of each task its kernel, without the program's name; libraries' tasks left out."""
    program = fuse(place(trace(function, "tp", parameters)))
    task_rules.require(program)
    assert read(task, task.show(program)) == program
    short = len(program.name) + 1
    return {one.name: one.kernel[short:] for one in program.tasks if one.kernel}


ROWS = Tensor("bfloat16", ("m", 64), Shard(0))
WHOLE = Tensor("bfloat16", ("m", 64), Replicate())
SUM = Tensor("bfloat16", ("m", 64), Partial())
UP = Tensor("bfloat16", (64, 64), Shard(1))
PART = Tensor("bfloat16", ("m", 64), Shard(1))
DOWN = Tensor("bfloat16", (64, 64), Shard(0))
WEIGHT = Tensor("bfloat16", (1, 64), Replicate())


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (operators.ag_gemm, {"gathered": "gather", "product": "multiply"}),
        (operators.gemm_rs, {"product": "multiply", "scattered": "multiply"}),
        (operators.gemm_ar, {"product": "multiply", "reduced": "multiply"}),
        (operators.all_reduce_rms_norm,
         {"reduced": "reduce", "total": "reduce", "normed": "reduce"}),
        (operators.mlp, {"gathered": "gather", "product": "multiply", "gated": "multiply",
                         "product_2": "multiply_2", "scattered": "multiply_2"}),
    ],
)  # fmt: skip
def test_operators(function, expected: dict[str, str]):
    program = fuse(placed(function))
    short = len(program.name) + 1
    assert {one.name: one.kernel[short:] for one in program.tasks if one.kernel} == expected


def test_what_follows_a_product_is_done_in_registers_up_to_what_is_used_elsewhere():
    def both(x, w):
        h = all_gather(x) @ w
        return silu(h) * h

    assert set(kernels(both, x=ROWS, w=UP)) == {"gathered", "product", "activated", "scaled"}

    def used(x, w):
        h = all_gather(x) @ w
        return silu(h) * h, h

    assert set(kernels(used, x=ROWS, w=UP)) == {"gathered", "product"}


def test_a_row_for_all_rows_is_added_in_registers():
    row = Tensor("bfloat16", (1, 64), Shard(1))
    found = kernels(lambda x, w, b: silu(all_gather(x) @ w + b), x=ROWS, w=UP, b=row)
    assert set(found) == {"gathered", "product", "total", "activated"}
    found = kernels(lambda x, b: rms_norm(all_reduce(x) + b, b), x=SUM, b=WEIGHT)
    assert set(found) == {"reduced", "total", "normed"}


def test_rows_of_other_kernels_are_read_as_they_are():
    """Two products of the same rows; the second takes the first's result in its epilogue."""

    def gate(x, w, v):
        rows = all_gather(x)
        return silu(rows @ w) * (rows @ v)

    found = kernels(gate, x=ROWS, w=UP, v=UP)
    assert found["product"] == found["activated"] == found["scaled"] == "multiply"
    assert found["product_2"] == "multiply_2"


def test_a_row_is_worked_on_by_the_rank_that_sums_it_only_with_what_all_have():
    def normed(x, weight):
        return rms_norm(all_reduce(x), weight)

    assert len(kernels(normed, x=SUM, weight=WEIGHT)) == 2
    each = Tensor("bfloat16", (1, 64), Partial())
    assert kernels(normed, x=SUM, weight=each) == {}


def test_kernels_that_would_need_each_other_are_not_fused():
    """Either sum could be one kernel with what follows it, but not both of them."""
    row = Tensor("bfloat16", (1, 64), Partial())

    def knot(x, y):
        first, second = all_reduce(x), all_reduce(y)
        a, c = silu(first), silu(second)
        return first + c, rms_norm(c, a)

    found = kernels(knot, x=row, y=row)
    assert found == {"reduced": "reduce", "activated": "reduce", "total": "reduce"}


@pytest.mark.parametrize(
    ("function", "parameters", "why"),
    [
        (lambda x: all_gather(x), {"x": ROWS}, "its rows must outlive the call"),
        (lambda x, y: all_gather(x) + y, {"x": ROWS, "y": WHOLE}, "total reads it otherwise"),
        (lambda x, w: all_gather(w, dim=1) * x, {"x": WHOLE, "w": PART}, "rows alone are overl"),
        (lambda x: reduce_scatter(x), {"x": SUM}, "x is of input"),
        (lambda x, w: (reduce_scatter(x @ w), x @ w), {"x": PART, "w": DOWN}, ""),
        (lambda x: all_reduce(x), {"x": SUM}, "x is of input"),
    ],
)
def test_what_stays_the_libraries(function, parameters, why: str):
    program = fuse(place(trace(function, "tp", parameters)))
    collectives = [one for one in program.tasks if kinds.KINDS[one.kind].is_collective]
    told = {one.subject: one for one in program.choices if one.taken == "library"}
    if not why:  # both products are made, one of them with its sums
        assert all(one.kernel for one in collectives)
        return
    assert all(not one.kernel and why in told[one.name].why for one in collectives)


def test_a_product_alone_is_the_librarys():
    assert kernels(lambda x, w: silu_mul(x @ w), x=WHOLE, w=UP) == {}
