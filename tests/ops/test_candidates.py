"""What every operator proposes, it takes: each candidate passes its own check, whatever the sizes,
on every target."""

from __future__ import annotations

from itertools import product
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from weft.base.card import Op
from weft.base.errors import ShapeError
from weft.base.target import TARGETS, Target
from weft.ops import card, names

# One row, what nothing divides, and as much as there ever is.
ROWS = (0, 1, 3, 14, 64, 130, 512, 997, 4096, 65536)
COLUMNS = (1, 7, 8, 24, 40, 64, 100, 130, 256, 1000, 2048, 2560, 7168, 8192)
SIZES = {
    "m": ROWS,
    "n": COLUMNS,
    "k": COLUMNS,
    "d": (16, 20, 64, 128, 256),
    "experts": (1, 2, 7, 9, 60, 256),
    "top_k": (1, 2, 3, 7, 8),
    "capacity": (-1, 0, 50),
    "heads": (1, 6, 8, 20, 64),
    "q_heads": (1, 2, 6, 32),
    "kv_heads": (1, 2, 8),
    "sequences": (0, 1, 5),
    "causal": (0, 1),
    "zigzag": (0, 1),
    "variable": (0, 1),
    "by_choice": (0, 1),
    "split_experts": (0, 1),
    # Not every card has these.
    "tile_m": (16, 64, 128),
    "scale_bytes": (0, 12, 224),
}
BESIDE = ("tile_m", "scale_bytes")
# What has no products of fp8, which is said of every candidate.
WITHOUT_FP8 = {(op, "cuda:80", "float8_e4m3fn") for op in ("ag_gemm", "gemm_rs", "gemm_ar")}
NODES = ((1,), (2,), (4,), (8,), (1, 1), (2, 2), (3, 1))


def check(op: Op, problem: Any, target: Target) -> None:
    if (op.name, target.name, problem.dtype) in WITHOUT_FP8:
        return
    found = list(op.candidates(problem, target))
    assert found, f"{op.name} has nothing for {problem} on {target}"
    if op.choose is not None:
        found += [op.choose(problem, target, is_recorded) for is_recorded in (False, True)]
    for config in found:
        config.check(problem, target)


@st.composite
def problems(draw: st.DrawFn, op: Op) -> Any:
    nodes = draw(st.sampled_from(NODES))
    shape = {name: draw(st.sampled_from(SIZES[name])) for name in (*op.default_shape, *BESIDE)}
    try:
        return op.make_problem(sum(nodes), shape, draw(st.sampled_from(op.dtypes)), nodes)
    except ShapeError:  # sizes that do not go together
        hypothesis.reject()


@pytest.mark.few(2)
@pytest.mark.parametrize("op", names())
def test_every_candidate_passes_its_own_check(op):
    @hypothesis.settings(
        max_examples=100, suppress_health_check=[hypothesis.HealthCheck.filter_too_much]
    )
    @hypothesis.given(problems(card(op)))
    def in_any_shape(problem):
        for target in TARGETS.values():
            check(card(op), problem, target)

    in_any_shape()


@pytest.mark.parametrize("target", TARGETS.values(), ids=str)
@pytest.mark.parametrize("op", ["ep_dispatch", "ep_combine"])
def test_tokens_of_any_length(op, target):
    """Rows of 7 elements, of which a channel once was to move 8 together, and all around them."""
    op = card(op)
    for dtype, m, n, num_ranks in product(op.dtypes, ROWS, COLUMNS, (1, 2, 4)):
        shape = {"m": m, "n": n, "experts": 9, "top_k": 3, "scale_bytes": 12}
        check(op, op.make_problem(num_ranks, shape, dtype), target)
