"""Channels of kernels' collectives: of which rows, with how many words."""

from __future__ import annotations

import operators
import pytest
from operators import compiled

from weft.compiler.lower.channels import travelling
from weft.ir.device import Channel


@pytest.mark.parametrize(("chunks", "columns"), [(1, 0), (4, 1024)])
def test_what_engines_carry_has_a_word_for_each_chunk_of_columns(chunks: int, columns: int):
    """Tokens where tiles are stored, words where they are summed."""
    asked = {"engines": {"scattered": "ce_push"}, "chunks": {"scattered": chunks}}
    plan = compiled(operators.gemm_rs, tiles={"product": (128, 256, 64)}, **asked).plan
    tokens, arrived = plan.of(Channel)
    assert (tokens.buffer, tokens.to, tokens.columns) == ("staged", "engine", columns)
    assert (arrived.buffer, arrived.to, arrived.columns) == ("partials", "owner", columns)
    assert (tokens.push_rows, arrived.tile_rows, tokens.chunks) == (128, 128, 1)


def test_of_results_that_follow_from_each_other_one_travels():
    body = [("reduced", ("x",)), ("total", ("reduced", "residual")), ("normed", ("total", "w"))]
    for made, travels in {
        ("total", "normed"): "total",
        ("normed",): "normed",
        ("reduced", "normed"): "reduced",
        ("reduced",): "reduced",
    }.items():
        assert travelling(body, made) == travels
    apart = [*body[:2], ("gate", ("reduced",)), ("gated", ("gate", "total"))]
    assert travelling(apart, ("gated",)) == "gated"
    assert travelling(apart, ("total", "gated")) == "reduced"
