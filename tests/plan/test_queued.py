"""Calls are written down as they are made, by weft's own kernels, or refused."""

from __future__ import annotations

import json

import pytest
import torch

from weft.base import artefacts, columns
from weft.base.errors import UnsupportedError, UsageError
from weft.base.target import parse_target
from weft.ops import card
from weft.plan import artefact, prepare
from weft.plan.queued import Kernels, LibraryCallError, WrittenWorld, write_down

HOPPER = parse_target("cuda:90")


def problem_of(op: str, **sizes: int):
    return card(op).make_problem(2, {**card(op).default_shape, **sizes}, "bfloat16")


def written(op: str, config=None, rank: int = 0, is_recorded: bool = False, **sizes: int):
    problem, described = problem_of(op, **sizes), card(op).kernels
    kernels = Kernels()
    tree = write_down(
        lambda world, problem, inputs: described.run(world, problem, inputs, config), problem,
        described.inputs(problem, rank), rank, HOPPER, is_recorded,
        lambda launch: kernels.number_of(launch, prepare.key_of), lambda values: "",
    )  # fmt: skip
    return tree, kernels


def test_addresses_are_places():
    """Own rows go to the peer's slot, and the word behind them."""
    config = card("ag_gemm").config(
        transport="ce_push", template="sm90", tile_n=128, num_warps=4, num_stages=4, chunks=1
    )
    tree, _ = written("ag_gemm", config, rank=1, m=256, n=256, k=64)
    rows, word = [step for step in tree["steps"] if step[0] == "copy"]
    assert rows[1] != "main" and rows[2:] == [
        ["slot:0:memory", 0, 128 * 64 * 2], ["input:a", -1, 0], 128 * 64 * 2,
    ]  # fmt: skip
    assert word[2][:2] == ["slot:0:gathered_ready", 0] and word[4] == 8
    assert [one["at"][0] for one in tree["results"]] == ["made:0"]
    assert tree["made"] == [256 * 256 * 2]
    json.dumps(tree)


def test_a_rank_without_rows_is_written_down():
    tree, _ = written("ag_gemm", rank=1, m=1, n=64, k=64)
    assert tree["inputs"][0]["shape"] == [0, 64]
    assert tree["results"][0]["shape"] == [1, 64]


def test_what_libraries_would_do_is_refused_and_done_by_kernels():
    with pytest.raises(LibraryCallError, match="runs torch's aten.mm.out, and an artefact holds"):
        written("gemm_rs", m=64, n=512, k=512)
    for op in ("ag_gemm", "all_gather"):
        with pytest.raises(LibraryCallError, match="runs collectives of torch.distributed"):
            written(op, card(op).config(transport="nccl"), m=64)
    problem, kernels = problem_of("gemm_rs", m=64, n=512, k=512), Kernels()
    made = artefact._on_all_ranks(
        artefact.Built(), card("gemm_rs"), problem, HOPPER, None, False, kernels
    )
    assert len(made) == 2 and all("launch" in [step[0] for step in one["steps"]] for one in made)


def test_what_no_artefact_can_hold_is_refused():
    with pytest.raises(UnsupportedError, match="reports errors"):
        artefact._on_all_ranks(
            artefact.Built(), card("ep_dispatch"), problem_of("ep_dispatch"), HOPPER, None, False,
            Kernels(),
        )  # fmt: skip


def test_rows_that_are_worked_on_before_they_travel_are_a_kernels():
    kernels = Kernels()
    made = artefact._on_all_ranks(
        artefact.Built(),
        card("ag_rms_gemm"),
        problem_of("ag_rms_gemm"),
        HOPPER,
        None,
        False,
        kernels,
    )
    names = [one.fn.__name__ for one in kernels.launches]
    assert names[0] == "ag_rms_gemm_rows" and len(names) >= 2
    launched = [[step[2] for step in one["steps"] if step[0] == "launch"] for one in made]
    assert launched[0] == launched[1] and launched[0][0] == "#0"


def test_addresses_can_be_read_and_memory_of_others_is_refused():
    """What prints a tensor reads it; in an error that would end the process."""
    world = WrittenWorld(1, 2, HOPPER, False, lambda launch: 0)
    x = world.memory("input:x", (4, 8), torch.float32, is_symmetric=True)
    assert "0." in repr(x) and "0." in repr(world.peer(x, 0))
    assert world.find(x[2:].data_ptr()) == ("input:x", -1, 64)
    assert world.find(world.peer(x, 0)[1:].data_ptr()) == ("input:x", 0, 32)
    with pytest.raises(UnsupportedError, match="neither its tensors' nor the world's"):
        world.find(x.data_ptr() + x.nbytes)
    with pytest.raises(UnsupportedError, match="neither its tensors' nor the world's"):
        world.find(torch.zeros(1).data_ptr())


@pytest.mark.slow
def test_all_sizes_are_in_few_tables(tmp_path):
    built = artefact.build("all_reduce", {"m": range(1, 201), "n": 256}, num_ranks=2)
    built.write(tmp_path)
    manifest = artefacts.read_manifest(tmp_path)
    (entry, *_) = manifest["targets"]["cuda:90"]["calls"]
    tables = json.loads(artefacts.read_file(tmp_path, entry))
    assert sum(one["count"] for one in tables) == 400 and len(tables) <= 16
    sizes = sorted(
        columns.at(one["call"]["sizes"], i)["m"] for one in tables for i in range(one["count"])
    )
    assert sizes == sorted([*range(1, 201)] * 2)
    # A smaller one in its place leaves nothing of it.
    artefact.build("all_reduce", {"m": 1, "n": 256}, num_ranks=2).write(tmp_path)
    left = {str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*.*")}
    named = {one["file"] for one in artefacts.entries(artefacts.read_manifest(tmp_path))}
    assert left == {*named, artefacts.MANIFEST}


def test_what_is_asked_for_is_checked():
    for given, said in (
        ({"targets": ["emu"]}, "an artefact is for cuda or hip, not for emu"),
        ({"targets": ["cuda:7"]}, "unknown target"),
    ):
        with pytest.raises(UsageError, match=said):
            artefact.build("all_reduce", {"m": 1, "n": 8}, num_ranks=2, **given)
    with pytest.raises(UsageError, match="all_reduce needs n"):
        artefact.build("all_reduce", {"m": 1}, num_ranks=2)
    with pytest.raises(UsageError, match="is no operator"):
        artefact.build("nothing", {"m": 1}, num_ranks=2)
