"""The command line's words: shapes, dtypes, targets, names, and a script's own arguments."""

from __future__ import annotations

import pytest

import weft
from weft.tools.programs import find_op
from weft.tools.words import (
    find_script,
    op_dtype,
    parse_shape,
    parse_targets,
    parse_topology,
    shape_text,
)

DEFAULT = {"m": 8, "n": 4, "k": 2}


def test_a_shape_keeps_what_is_not_said():
    assert parse_shape("m=388, k=0", DEFAULT) == {"m": 388, "n": 4, "k": 0}
    assert parse_shape("", DEFAULT) == DEFAULT
    assert shape_text(DEFAULT) == "m=8,n=4,k=2"


@pytest.mark.parametrize(
    "text, said",
    [("m:3", "NAME=SIZE"), ("m=", "NAME=SIZE"), ("m=3.5", "NAME=SIZE"), ("q=3", "called 'q'"),
     ("m=-1", "negative")],
)  # fmt: skip
def test_a_shape_that_is_none_is_told_what_one_looks_like(text: str, said: str):
    with pytest.raises(weft.ShapeError, match=said):
        parse_shape(text, DEFAULT)


@pytest.mark.parametrize("word", ["bf16", "bfloat16", "torch.bfloat16"])
def test_dtypes_have_their_names(word: str):
    assert op_dtype(find_op("ag_gemm"), word).name == "bfloat16"


def test_a_dtype_that_the_operator_does_not_take():
    with pytest.raises(weft.UsageError, match="ag_gemm takes float16"):
        op_dtype(find_op("ag_gemm"), "int8")


def test_an_operator_that_is_not_there_names_its_nearest():
    with pytest.raises(weft.UsageError, match="did you mean ag_gemm"):
        find_op("ag_gem")


def test_targets():
    assert [t.name for t in parse_targets("cuda:sm_90a, hip:gfx942")] == ["cuda:90", "hip:gfx942"]
    assert [t.name for t in parse_targets("sm_90a,gfx942")] == ["cuda:90", "hip:gfx942"]
    for wrong in ("", "cuda:42"):
        with pytest.raises(weft.UsageError):
            parse_targets(wrong)


@pytest.mark.parametrize(
    "ranks, nodes, sizes",
    [(4, "1", (4,)), (4, "2", (2, 2)), (5, "2", (3, 2)), (None, "2", (2, 2)), (None, "3+1", (3, 1)),
     (4, "1,3", (1, 3)), (6, "1+2+3", (1, 2, 3))],
)  # fmt: skip
def test_nodes_are_a_number_or_sizes(ranks, nodes, sizes):
    topology = parse_topology(ranks, nodes)
    assert topology.sizes == sizes
    seats = [topology.seat(rank) for rank in range(topology.num_ranks)]
    assert [seat.local_size for seat in seats] == [size for size in sizes for _ in range(size)]


@pytest.mark.parametrize(
    "ranks, nodes, said",
    [(0, "1", "at least one rank"), (4, "0", "1 to 4 nodes"), (2, "3", "1 to 2 nodes"),
     (1, "2", "1 rank can be on 1 node$"),
     (None, "5", "1 to 4 nodes"), (4, "2+1", "hold 3 ranks"), (2, "2+1", "hold 3 ranks"),
     (None, "2+0", "at least 1"),
     (4, "two", "or their sizes"), (4, "3+", "or their sizes"), (4, "-1", "or their sizes")],
)  # fmt: skip
def test_ranks_and_nodes_that_cannot_be(ranks, nodes, said):
    with pytest.raises(weft.UsageError, match=said):
        parse_topology(ranks, nodes)


def test_a_script_that_names_a_program_of_a_file_is_told_both_ways(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("")
    with pytest.raises(weft.UsageError, match=f"name all of it, {path}, or .* weft run {path}:mlp"):
        find_script(f"{path}:mlp")
