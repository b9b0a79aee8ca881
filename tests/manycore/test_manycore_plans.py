"""Plans for the many-core target: transfers, orders of loops, scratchpads, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from manycore_programs import Case, programs

import weft
from weft import manycore
from weft.base.errors import ShapeError, UnsupportedError, UsageError
from weft.compiler import Replicate, Shard, Tensor, rope, silu, silu_mul
from weft.manycore import nest, vendor
from weft.manycore.picture import picture
from weft.manycore.record import parse_machine
from weft.manycore.scratchpad import Request, allocate


@pytest.mark.parametrize("order", ["mnk", "nmk"])
@pytest.mark.parametrize("depends_on", ["mk", "nk", "mn"])
def test_an_operand_is_got_when_its_tile_changes(order, depends_on):
    """By counting the changes of a walk through the loops."""
    for sizes in product((1, 2, 3), repeat=3):
        counts = dict(zip("mnk", sizes))
        walk = [dict(zip(order, at)) for at in product(*(range(counts[one]) for one in order))]
        tiles = [tuple(at[one] for one in depends_on) for at in walk]
        changes = 1 + sum(a != b for a, b in zip(tiles, tiles[1:]))
        assert nest.times(order, depends_on, counts) == changes, (order, counts)
        assert nest.times(order, depends_on, counts, is_hoisted=False) == len(walk)


def test_buffers_lie_apart_and_within_the_scratchpad():
    machine = manycore.SMALL
    for num_ranks, (name, program) in product((1, 2), programs("float32").items()):
        plan = manycore.compile_program(program, {"m": 37}, num_ranks=num_ranks)
        for kernel in plan.kernels:
            if kernel.map is None:
                continue
            spans = sorted((offset, offset + one.request.num_bytes)
                           for one in kernel.map.buffers for offset in one.offsets)  # fmt: skip
            assert all(end <= first for (_, end), (first, _) in zip(spans, spans[1:])), name
            assert spans[-1][1] <= machine.scratchpad_bytes
            assert all(first % machine.dma_align == 0 for first, _ in spans)
    assert allocate([Request("x", 1, machine.scratchpad_bytes, copies=2)], machine) is None


def test_neighbouring_columns_are_got_as_one():
    @weft.program(mesh="tp", x=Tensor("float32", ("m", 32)))
    def taps(x):
        return x[:, 0:8] + x[:, 8:16] + x[:, 16:24] + x[:, 24:32]

    one, apart = (
        manycore.compile_program(taps, {"m": 8}, choices=manycore.Choices(coalesce=coalesce))
        for coalesce in (True, False)
    )
    assert [len(plan.kernels[0].loaded) for plan in (one, apart)] == [1, 4]
    assert len(one.kernels) == 1  # what is added up on the way is never stored


def test_values_lie_apart_and_kernels_come_in_the_order_of_their_operands():
    plan = Case(programs("float32")["mlp"], {"m": 37}, 2).plan()
    spans = sorted((one.offset, one.offset + one.num_bytes) for one in plan.values)
    assert all(end <= first for (_, end), (first, _) in zip(spans, spans[1:]))
    kinds = [(one.name, one.kind) for one in plan.kernels]
    assert kinds == [
        ("normed", "rows"), ("gathered", "exchange"), ("product", "product"), ("gated", "rows"),
        ("product_2", "product"), ("total", "rows"),
    ]  # fmt: skip
    assert plan.kernels[2].gathered and plan.kernels[4].sums


def test_what_there_is_no_kernel_for_goes_to_a_routine_or_is_refused(monkeypatch):
    @weft.program(
        mesh="tp", x=Tensor("float32", ("m", 32)), lengths=Tensor("int32", (1, "m"), Replicate())
    )
    def turn(x, lengths):
        return rope(silu(x), lengths, head=16)

    with pytest.raises(UnsupportedError, match=r"lengths.*int32.*leave it outside") as error:
        manycore.compile_program(turn, {"m": 4})
    assert "test_manycore_plans.py" in str(error.value)

    @weft.program(mesh="tp", x=Tensor("float32", ("m", 32)), y=Tensor("float32", ("m", 16)))
    def summed(x, y):
        return weft.compiler.matmul_tn(x, y)

    plan = manycore.compile_program(summed, {"m": 4})
    assert "cblas_sgemm" in manycore.source(plan)
    monkeypatch.delitem(vendor.ROUTINES, "matmul_tn")
    with pytest.raises(UnsupportedError, match="no kernel for matmul_tn.*register"):
        manycore.compile_program(summed, {"m": 4})


def test_sizes_that_are_missing_or_that_ranks_would_cut_apart_are_refused():
    @weft.program(mesh="tp", x=Tensor("float32", ("m", 34), Shard(1)))
    def gate(x):
        return silu_mul(x)

    with pytest.raises(ShapeError, match="pairs of columns, but of 34 on 2 ranks each has 17"):
        manycore.compile_program(gate, {"m": 4}, num_ranks=2)
    with pytest.raises(UsageError, match="m is missing"):
        manycore.compile_program(gate)


def test_a_row_that_no_scratchpad_holds_is_refused():
    @weft.program(mesh="tp", x=Tensor("float32", ("m", 5000)))
    def wide(x):
        return silu(x)

    with pytest.raises(UnsupportedError, match="32768 bytes"):
        manycore.compile_program(wide, {"m": 4})
    single = manycore.compile_program(wide, {"m": 4}, machine=manycore.SW26010)
    assert not single.kernels[0].choices.double_buffer  # twice, it would not fit


def test_the_picture_shows_loops_and_scratchpads():
    plan = Case(programs("float32")["mlp"], {"m": 37}, 2).plan()
    shown = picture(plan)
    assert shown.count("scratchpad [") == 5 and "shards as they come" in shown
    assert "send to the ranks that own its rows" in shown


def test_machines_are_found_by_name():
    assert parse_machine("manycore") == manycore.SMALL
    assert parse_machine("manycore:sw26010").cores == 256
    with pytest.raises(UsageError, match="manycore:sw26010"):
        parse_machine("manycore:nothing")
    with pytest.raises(UsageError, match="dma_gbps=0"):
        replace(manycore.SMALL, dma_gbps=0)
