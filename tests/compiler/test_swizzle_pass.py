"""Orders of tiles: which a kernel gets."""

from __future__ import annotations

from dataclasses import replace

import operators
from operators import compiled, placed

from weft.compiler.facts import Facts, Settings
from weft.compiler.passes import swizzle
from weft.compiler.pipeline import overlap
from weft.ir.device import Launch


def order(function, kernel: str, **choices) -> str:
    return compiled(function, **choices).program.of_kernel(kernel)[0].order


def test_rows_that_arrive_come_in_their_order_and_sums_that_leave_go_first():
    assert order(operators.ag_gemm, "ag_gemm_multiply") == "gather"
    for engine, form in (("sm_push", "scatter"), ("ce_push", "part_by_part")):
        asked = {"engines": {"scattered": engine}}
        assert order(operators.gemm_rs, "gemm_rs_multiply", **asked) == form
        assert order(operators.mlp, "mlp_multiply_2", **asked) == form
    packets = {"engines": {"reduced": "one_shot_ll"}, "m": 64}
    assert order(operators.gemm_ar, "gemm_ar_multiply", **packets) == "rows"


def test_several_nodes_go_node_by_node_where_kernels_can():
    facts = Facts({"m": 8192}, nodes=(2, 2))
    settings = Settings(engines={"scattered": "sm_put"})
    program = overlap(placed(operators.gemm_rs), facts, settings).tasks["tile"]
    found = swizzle.swizzle(program, facts).task("product").order
    assert found == "hierarchical_scatter"
    unlike = replace(facts, nodes=(1, 3))
    found = swizzle.swizzle(program, unlike)
    assert found.task("product").order == "scatter"
    assert "rank by rank, as nodes of 1+3 ranks are not alike" in found.choices[-1].why


def test_rows_are_put_in_the_order_in_which_other_nodes_ask_for_them():
    plan = compiled(operators.ag_gemm, engines={"gathered": "sm_put"}, nodes=(2, 2)).plan
    orders = {one.kernel: one.order for one in plan.of(Launch)}
    assert orders == dict.fromkeys(("ag_gemm_push", "ag_gemm_multiply"), "hierarchical_gather")
