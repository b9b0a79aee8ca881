"""Orders of tiles: which a kernel gets, and a user's, which must be a bijection."""

from __future__ import annotations

import operators
import pytest
import triton
from operators import compiled, placed

from weft.base.errors import ConfigError
from weft.compiler.facts import Facts, Settings
from weft.compiler.passes import swizzle
from weft.compiler.pipeline import overlap
from weft.tiles import swizzle as orders


@triton.jit
def backwards(i, num_m, num_n, args):
    return num_m - 1 - i // num_n, i % num_n


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
    assert order(operators.gemm_rs, "gemm_rs_multiply") == "scatter"
    assert order(operators.mlp, "mlp_multiply_2") == "scatter"
    packets = {"engines": {"reduced": "packets"}, "m": 64}
    assert order(operators.gemm_ar, "gemm_ar_multiply", **packets) == "rows"


def test_several_nodes_go_node_by_node_where_kernels_can():
    facts = Facts({"m": 8192}, nodes=(2, 2))
    settings = Settings(engines={"scattered": "put"})
    program = overlap(placed(operators.gemm_rs), facts, settings).tasks["tile"]
    found = swizzle.swizzle(program, facts, settings).task("product").order
    assert found == "hierarchical_scatter"
    found = swizzle.swizzle(program, facts, settings, ("scatter",)).task("product").order
    assert found == "scatter"


def test_a_users_order_is_taken_if_each_tile_comes_once():
    found = order(operators.gemm_rs, "gemm_rs_multiply", orders={"product": backwards})
    assert found == "backwards"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (forgetful, r"order forgetful of 64 x \d+ tiles gives tile \(0, 0\) for i=0 and i=1, "
                    r"and never \(0, 1\)"),
        (astray, r"order astray .* gives tile \(64, 0\) for i=64, which is none"),
    ],
)  # fmt: skip
def test_a_users_order_that_is_no_bijection(given, told: str):
    with pytest.raises(ConfigError, match=told) as caught:
        compiled(operators.gemm_rs, orders={"product": given})
    frame = caught.value.place.outermost
    assert frame is not None and frame.file == operators.__file__


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
