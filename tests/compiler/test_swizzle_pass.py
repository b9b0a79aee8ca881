"""Orders of tiles: which a kernel gets, and a user's, which must be a bijection."""

from __future__ import annotations

from dataclasses import replace

import operators
import pytest
import triton
import triton.language as tl
from operators import compiled, placed

from weft.base.errors import ConfigError
from weft.compiler.facts import Facts, Settings
from weft.compiler.passes import swizzle
from weft.compiler.pipeline import overlap
from weft.ir.device import Launch
from weft.tiles import swizzle as orders
from weft.tiles.swizzle import rotated


@triton.jit
def backwards(i, num_m, num_n, args):
    return num_m - 1 - i // num_n, i % num_n


@triton.jit
def by_columns(i, num_m, num_n, args):
    return orders.grouped(i, num_m, num_n, (num_m,))


@triton.jit
def around(i, num_m, num_n, args):
    return rotated(i, num_m, num_n, (args[0], args[1], tl.cdiv(num_m, 2)))


@triton.jit
def not_integers(i, num_m, num_n, args):
    return tl.minimum(i, num_m), 0


@triton.jit
def forgetful(i, num_m, num_n, args):
    return i // num_n, 0 * i


@triton.jit
def astray(i, num_m, num_n, args):
    return i, 0 * i


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
    found = swizzle.swizzle(program, facts, settings).task("product").order
    assert found == "hierarchical_scatter"
    found = swizzle.swizzle(program, facts, settings, ("scatter",)).task("product").order
    assert found == "scatter"
    unlike = replace(facts, nodes=(1, 3))
    found = swizzle.swizzle(program, unlike, settings)
    assert found.task("product").order == "scatter"
    assert "rank by rank, as nodes of 1+3 ranks are not alike" in found.choices[-1].why


def test_rows_are_put_in_the_order_in_which_other_nodes_ask_for_them():
    plan = compiled(operators.ag_gemm, engines={"gathered": "sm_put"}, nodes=(2, 2)).plan
    orders = {one.kernel: one.order for one in plan.of(Launch)}
    assert orders == dict.fromkeys(("ag_gemm_push", "ag_gemm_multiply"), "hierarchical_gather")


def test_a_users_order_is_taken_if_each_tile_comes_once():
    found = order(operators.ag_gemm, "ag_gemm_multiply", orders={"product": backwards})
    assert found == "backwards"
    # Made of others', by their name or their module's.
    for given in (by_columns, around):
        assert order(operators.ag_gemm, "ag_gemm_multiply", orders={"product": given})


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (forgetful, r"product with m=8192 on rank 0: order forgetful of 64 x \d+ tiles gives tile "
                    r"\(0, 0\) for i=0 and i=1, and never \(0, 1\); .* begin with i_m, i_n = "),
        (astray, r"order astray .* tile \(64, 0\) for i=64, which is none; keep i_m below 64"),
        (not_integers, r"order not_integers .* cannot be checked: for i=0 .* write it with what "
                       r"integers have too, \+ - \* // % min max"),
    ],
)  # fmt: skip
def test_a_users_order_that_is_no_bijection(given, told: str):
    with pytest.raises(ConfigError, match=told) as caught:
        compiled(operators.ag_gemm, orders={"product": given})
    frame = caught.value.place.outermost
    assert frame is not None and frame.file == operators.__file__


@pytest.mark.parametrize(
    ("function", "engines", "task", "told"),
    [
        (operators.gemm_rs, {"scattered": "sm_push"}, "product",
         "ranks wait for each other's tiles, .* leave it to scatter"),
        (operators.gemm_rs, {"scattered": "ce_push"}, "product",
         "ranks wait for each other's tiles, .* leave it to part_by_part"),
        (operators.moe_rs, {}, "products", "turns of routing: leave it to in_turn_backwards"),
    ],
    ids=["sums", "carried", "tables"],
)  # fmt: skip
def test_tiles_that_ranks_wait_for_have_no_order_of_ones_own(function, engines, task, told):
    with pytest.raises(ConfigError, match=f"{task} has order=backwards; here .*{told}"):
        compiled(function, engines=engines, orders={task: backwards})


def test_orders_are_of_kernels_tiles():
    with pytest.raises(ConfigError, match="orders for scattered; tiles are in an order of product"):
        compiled(operators.gemm_rs, orders={"scattered": backwards})


@pytest.mark.parametrize("num_m", [1, 3, 8, 13])
@pytest.mark.parametrize("num_n", [1, 5])
def test_the_orders_of_tiles_pass_the_check(num_m: int, num_n: int):
    for first in range(num_m):
        for head in {1, num_m, max(1, num_m // 2)}:
            swizzle.check(orders.rotated, num_m, num_n, (3, first, head))
    swizzle.check(orders.grouped, num_m, num_n, (3,))
