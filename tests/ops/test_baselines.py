"""What operators are measured against gives their answers, on emulated ranks and for odd m."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from multiplying import scales_rows_on_a_cpu

import weft
from weft.base.errors import UnsupportedError
from weft.ops import card
from weft.tune.case import Case

SHAPES = {
    "ag_gemm": {"m": 5, "n": 8, "k": 16},  # of four ranks one has a row less, and one has none
    "ag_wgrad": {"m": 7, "n": 8, "k": 24},
    "all_gather": {"m": 5, "n": 8},
    "reduce_scatter": {"m": 16, "n": 8},
    "all_reduce": {"m": 7, "n": 3},
    "all_to_all": {"m": 16, "n": 8},
    "send": {"m": 9, "n": 8},
    "recv": {"m": 9, "n": 8},
    "ag_moe": {"m": 14, "n": 8, "k": 16, "experts": 6, "top_k": 2},
    "moe_rs": {"m": 16, "n": 8, "k": 16, "experts": 6, "top_k": 2},
    "moe_ar": {"m": 15, "n": 8, "k": 16, "experts": 6, "top_k": 2},
    "ep_dispatch": {"m": 14, "n": 8, "experts": 6, "top_k": 2},
    "ep_combine": {"m": 14, "n": 8, "experts": 6, "top_k": 2},
}


def answers(
    op: str, name: str, shape: dict[str, int], dtype: str = "bfloat16", **fields: Any
) -> list[list[float]]:
    """How far each rank's answers are off, and the tolerance last."""

    def main() -> list[float]:
        torch.distributed.init_process_group()
        world = weft.init()
        chosen = card(op)
        problem = replace(chosen.make_problem(4, shape, dtype), **fields)
        case = Case(world, chosen, problem, l2_bytes=1 << 20)
        variant = chosen.baselines[name](case)
        errors = []
        for index, call in enumerate(variant.calls):
            for _ in range(2):
                if variant.before:
                    variant.before(index)
                out = call()
                errors.append(case.error(index, out) if variant.answers else 0.0)
        return [*errors, case.tolerance]

    with weft.emulated(ranks=4, seed=0) as session:
        return session.run(main)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("op", "name"),
    [
        (op, name)
        for op in SHAPES
        for name in card(op).baselines
        if name in ("cublas", "nccl", "cublas_nccl", "weft_in_place") or op.startswith("ep_")
    ],
)
def test_the_unfused_way_and_wefts_in_place_give_the_operators_answer(op: str, name: str):
    for *errors, tolerance in answers(op, name, SHAPES[op]):
        assert len(errors) == 6 and max(errors) <= tolerance


def test_uneven_splits_are_refused_by_what_takes_even_ones():
    with pytest.raises(UnsupportedError, match="m=7"):
        answers("reduce_scatter", "nccl", {"m": 7, "n": 8})


@pytest.mark.parametrize("op", SHAPES)
def test_every_operator_names_the_vendors_collective(op: str):
    assert "nccl" in card(op).baselines


def test_wefts_product_alone_gives_the_operators_answer():
    for *errors, tolerance in answers("ag_gemm", "weft_alone", {"m": 7, "n": 8, "k": 16}):
        assert len(errors) == 6 and max(errors) <= tolerance


@pytest.mark.slow
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm_ar"])
def test_the_operators_work_as_a_program_gives_its_answer(op: str):
    for fields in ({}, {"b_is_nk": True}):
        for *errors, tolerance in answers(op, "weft_program", {"m": 7, "n": 32, "k": 16}, **fields):
            assert len(errors) == 6 and max(errors) <= tolerance


@pytest.mark.parametrize("name", ["cublas", "cublas_nccl", "weft_alone"])
def test_scaled_products_beside_ours(name):
    """Uneven rows, so that padded scales are in between."""
    if name != "weft_alone" and not scales_rows_on_a_cpu():
        pytest.skip("this torch's CPU build has one scale for all rows")
    shape = {"m": 27, "n": 16, "k": 32}
    for *errors, tolerance in answers("ag_gemm", name, shape, "float8_e4m3fn", b_is_nk=True):
        assert max(errors) <= tolerance < 0.01, "the result's dtype decides, not fp8"


@pytest.mark.parametrize("op", ["gemm_rs", "gemm_ar"])
def test_sums_of_scaled_products_beside_ours(op):
    if not scales_rows_on_a_cpu():
        pytest.skip("this torch's CPU build has one scale for all rows")
    shape = {"m": 28, "n": 16, "k": 32}
    for *errors, tolerance in answers(op, "cublas_nccl", shape, "float8_e4m3fn", b_is_nk=True):
        assert max(errors) <= tolerance < 0.01


def test_scaled_products_that_torch_does_not_take():
    shape = {"m": 16, "n": 16, "k": 32}
    for fields in ({"scaling": "blocks", "b_is_nk": True}, {"b_is_nk": False}):
        for op in ("ag_gemm", "gemm_rs", "gemm_ar"):
            with pytest.raises(UnsupportedError, match="takes scales of rows"):
                answers(op, "cublas_nccl", shape, "float8_e4m3fn", **fields)
    with pytest.raises(UnsupportedError, match="a program's call takes no scales"):
        answers("gemm_rs", "weft_program", shape, "float8_e4m3fn", b_is_nk=True)
