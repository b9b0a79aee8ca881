"""Static mappings fit at every size; what does not cover is told with its tiles."""

from __future__ import annotations

import operators
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operators import compiled
from test_tile import placed

from weft.base.errors import ConfigError
from weft.compiler.passes import map as mapping
from weft.compiler.passes.map import Span, map_rows, misfits, travelling
from weft.compiler.passes.tile import tile
from weft.ir.device import Channel


def test_the_mlp_has_two_channels():
    program = tile(placed(), {"gathered": (32, 8), "product": (128, 64), "product_2": (64, 8)})
    gather, scatter = map_rows(program, chunks=4)
    assert gather == Channel("gathered_ready", "gathered", "m", 4, 32, 128,
                             place=program.task("gathered").place)  # fmt: skip
    assert (scatter.buffer, scatter.push_rows, scatter.cuts) == ("scattered", 64, "part")
    assert scatter.parts == "num_ranks"


@settings(max_examples=80)
@given(
    st.integers(0, 200), st.integers(1, 6), st.integers(1, 5), st.integers(1, 40),
    st.integers(1, 40), st.sampled_from(["whole", "part"]),
)  # fmt: skip
def test_static_mappings_fit(m, num_ranks, chunks, push_rows, tile_rows, cuts):
    channel = Channel("ready", "x", "m", chunks, push_rows, tile_rows, cuts)
    mapping.check(channel, {"m": m}, num_ranks)
    produced, consumed = mapping.views(channel, {"m": m}, num_ranks)
    own = produced + (consumed if cuts == "part" else [])
    each = max(1, -(-m // num_ranks))
    assert all(one.first // each == (one.end - 1) // each for one in own)


@pytest.mark.parametrize(("chunks", "columns"), [(1, 0), (4, 1024)])
def test_what_engines_carry_has_a_word_for_each_chunk_of_columns(chunks: int, columns: int):
    """Tokens where tiles are stored, words where they are summed; both fit at every size."""
    asked = {"engines": {"scattered": "ce_push"}, "chunks": {"scattered": chunks}}
    plan = compiled(operators.gemm_rs, tiles={"product": (128, 256, 64)}, **asked).plan
    tokens, arrived = plan.of(Channel)
    assert (tokens.buffer, tokens.to, tokens.columns) == ("kept", "engine", columns)
    assert (arrived.buffer, arrived.to, arrived.columns) == ("partials", "owner", columns)
    assert (tokens.push_rows, arrived.tile_rows, tokens.chunks) == (128, 128, 1)
    for channel in (tokens, arrived):
        for m in (0, 1, 3, 127, 128, 129, 997, 8192):
            mapping.check(channel, {"m": m}, 4)


# Two ranks of 4 rows, a word each; the producer has tiles of 2 rows, the consumer one of 8.
PRODUCED = [Span(0, 2, 0, 1), Span(2, 4, 0, 1), Span(4, 6, 1, 1), Span(6, 8, 1, 1)]
CONSUMED = [Span(0, 8, 0, 2)]
FULL = [2, 2]


def test_what_fits_is_silent():
    assert list(misfits(8, PRODUCED, CONSUMED, FULL)) == []


@pytest.mark.parametrize(
    ("produced", "consumed", "full", "told"),
    [
        (PRODUCED[:1] + PRODUCED[2:], CONSUMED, FULL,
         "rows 2 to 3 are in none of the producer's tiles: let tile 1 begin at row 2, or"),
        (PRODUCED[:3], CONSUMED, [2, 1],
         "the producer's tiles end at row 6 of 8: the last one must end at row 8"),
        ([Span(0, 3, 0, 1), *PRODUCED[1:]], CONSUMED, FULL,
         "the producer's tiles 0 and 1 both have row 2: let tile 1 begin at row 3, or leave"),
        (PRODUCED, [Span(0, 5, 0, 2), Span(4, 8, 1, 1)], FULL,
         "the consumer's tiles 0 and 1 both have row 4: let tile 1 begin at row 5"),
        (PRODUCED, [Span(0, 8, 0, 1)], FULL,
         "the consumer's tile 0 reads rows of the producer's tile 2, on words 1 to 1, and waits "
         "for 0 to 0: let it wait for one of those words too"),
        (PRODUCED, CONSUMED, [2, 3],
         "word 1 is full at 3, and 2 tiles announce it: let it be full at 2"),
        ([*PRODUCED[:3], Span(6, 8, 2, 1)], CONSUMED, FULL,
         "the producer's tile 3 announces word 2 of 2: it must be one of 0 to 1"),
    ],
)  # fmt: skip
def test_misfits_name_the_tiles(produced, consumed, full, told: str):
    assert any(told in one for one in misfits(8, produced, consumed, full))


def test_a_channel_that_does_not_fit_names_its_line(monkeypatch):
    """A mapping that loses the last chunk: found for sizes where there is one."""
    program = tile(placed())
    channel = map_rows(program)[0]
    right = mapping.views

    def views(*args):
        produced, consumed = right(*args)
        return produced[:-1], consumed

    monkeypatch.setattr(mapping, "views", views)
    told = "the producer's tiles end at row 4 of 7: .* lowering='unfused' needs none at these sizes"
    with pytest.raises(ConfigError, match=told) as caught:
        mapping.check(channel, {"m": 7}, 2)
    assert caught.value.place == program.task("gathered").place


def test_of_all_that_is_wrong_the_first_is_told():
    """Every other tile of many is lost."""
    channel = Channel("routed_ready", "x", "m", 1, 16, 16, "experts")
    tiles = [(0, first, first + 1, 0, 0) for first in range(1, 20, 2)]
    with pytest.raises(ConfigError) as caught:
        mapping.check_tables(channel, tiles, [0] * 20, 1)
    told = str(caught.value)
    assert told.count("are in none of") == mapping.MOST_TOLD and "; and 16 more; " in told
    assert "weft.ops.moe_route makes tables that fit" in told


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
