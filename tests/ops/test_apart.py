"""A result may not lie where the call still reads: the error names both, whenever it is called."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.base.errors import UsageError


def refused(call, op: str, name: str) -> None:
    with pytest.raises(UsageError, match=f"{op}: out shares memory with {name}"):
        call()


def test_products_refuse_an_out_that_they_read(ranks):
    def main():
        world = weft.init()
        whole, b = torch.ones(16, 8), torch.eye(8)
        a = whole[:8]
        # The second call of a shape is another than the first: it is found ready.
        weft.ops.ag_gemm(a, b, world=world, out=torch.empty(16, 8))
        refused(lambda: weft.ops.ag_gemm(a, b, world=world, out=whole), "ag_gemm", "a")
        weft.ops.gemm_ar(a, b, world=world, out=torch.empty(8, 8))
        refused(lambda: weft.ops.gemm_ar(a, b, world=world, out=a), "gemm_ar", "a")
        refused(lambda: weft.ops.gemm_ar(a, b, world=world, out=b), "gemm_ar", "b")
        refused(lambda: weft.ops.gemm_rs(whole, b, world=world, out=a), "gemm_rs", "a")
        world.close()

    ranks(main, 2)


def test_all_reduce_takes_x_itself_as_out_but_no_part(ranks):
    def main():
        world = weft.init()
        x = torch.ones(9, 4)
        weft.ops.all_reduce(x[:8], world=world, out=x[:8])
        assert x[:8].eq(2).all()
        refused(lambda: weft.ops.all_reduce(x[:8], world=world, out=x[1:]), "all_reduce", "x")
        # What lies beside each other is apart.
        weft.ops.all_reduce(x[:4], world=world, out=x[4:8])
        world.close()

    ranks(main, 2)


def test_attention_refuses_an_out_that_it_reads(ranks):
    def main():
        world = weft.init()
        q = torch.ones(4, 2, 8)
        refused(lambda: weft.ops.ag_attention(q, q, q, world=world, out=q), "ag_attention", "q")
        world.close()

    ranks(main, 2)


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda ops, x, b, w: ops.ag_moe(x, b, None, world=w), "ag_moe: routing is of type None"),
        (lambda ops, x, b, w: ops.moe_rs(x, b, 3, world=w), "moe_rs: routing is of type int"),
        (lambda ops, x, b, w: ops.moe_ar(x, b, 3, world=w), "moe_ar: routing is of type int"),
        (lambda ops, x, b, w: ops.ep_combine(x, None, world=w), "ep_combine: handle is of type"),
        (lambda ops, x, b, w: ops.ep_dispatch(x, handle=1, world=w), "ep_dispatch: handle is of"),
        (lambda ops, x, b, w: ops.all_reduce(x.to_sparse(), world=w), "pass x.to_dense"),
    ],
)
def test_what_is_no_routing_no_handle_and_no_dense_tensor_is_named(ranks, call, named):
    def main():
        world = weft.init()
        with pytest.raises(UsageError, match=named):
            call(weft.ops, torch.ones(4, 8), torch.ones(2, 8, 8), world)
        world.close()

    ranks(main, 1)


def test_no_choices_are_refused_with_the_value(ranks):
    def main():
        world = weft.init()
        with pytest.raises(weft.ShapeError, match="top_k=0 of 8 experts"):
            weft.ops.moe_route(torch.ones(4, 8), top_k=0, world=world)
        world.close()

    ranks(main, 1)
