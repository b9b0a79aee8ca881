"""Where `weft run` runs an operator, and what it says about it, on machines with so many GPUs."""

from __future__ import annotations

import pytest
import torch

from weft.base.errors import ShapeError, UsageError
from weft.ops import cards
from weft.tools import run
from weft.tools.check import Work
from weft.tools.main import main


@pytest.mark.parametrize(
    ("gpus", "target", "ranks", "nodes", "expected", "words"),
    [
        (0, "auto", None, "1", (None, "emu"), "0 GPUs here, at least two are needed"),
        (1, "auto", None, "1", (None, "emu"), "1 GPU here, at least two are needed"),
        (2, "auto", None, "1", (2, "cuda"), "2 GPUs here, 2 ranks"),
        (4, "auto", None, "1", (4, "cuda"), "4 GPUs here, 4 ranks"),
        (4, "auto", 2, "1", (2, "cuda"), "2 ranks"),
        (4, "auto", 8, "1", (8, "emu"), "8 ranks, but 4 GPUs here"),
        (4, "auto", None, "3+1", (None, "emu"), "one host are one node"),
        (4, "emu", None, "1", (None, "emu"), "as --target says"),
        (4, "cuda", None, "1", (4, "cuda"), "as --target says"),
        (4, "cuda", 3, "1", (3, "cuda"), "4 GPUs here"),
        (4, "cuda", None, "2", (4, "cuda"), "4 GPUs here, declared 2 nodes"),
        (4, "cuda", None, "2+1", (3, "cuda"), "declared 2+1 nodes"),
    ],
)
def test_where_it_runs_and_why(monkeypatch, gpus, target, ranks, nodes, expected, words):
    monkeypatch.setattr(run, "count_gpus", lambda: gpus)
    *chosen, why = run.choose_target(target, ranks, nodes)
    assert tuple(chosen) == expected and words in why


@pytest.mark.parametrize(
    ("gpus", "target", "ranks", "nodes", "words"),
    [
        (0, "cuda", None, "1", "2 GPUs needed, one for each rank, 0 here"),
        (2, "cuda", 4, "1", "4 GPUs needed, one for each rank, 2 here"),
        (4, "cuda", None, "3+2", "5 GPUs needed, one for each rank, 4 here"),
        (4, "tpu", None, "1", "one of auto, cuda, emu"),
    ],
)
def test_where_it_cannot_run(monkeypatch, gpus, target, ranks, nodes, words):
    monkeypatch.setattr(run, "count_gpus", lambda: gpus)
    with pytest.raises(UsageError, match=words):
        run.choose_target(target, ranks, nodes)


@pytest.mark.parametrize("name", sorted(cards()))
def test_sizes_that_no_memory_holds_are_an_error_with_the_bytes(name):
    """Before any of it is had; what is counted is what inputs take."""
    op = cards()[name]
    work = Work(op, 2, op.default_shape, op.dtypes[0])
    inputs = work.inputs(0, 0).values()
    held = sum(one.nbytes for one in inputs if isinstance(one, torch.Tensor))
    assert held <= work.rank_bytes() or name in ("ag_moe", "moe_rs", "ep_combine")  # their tables
    work.check_memory()
    sizes = {**op.default_shape, "m": 10**10}
    wide = max((one for one in ("d", "k", "n") if one in sizes), default="n")
    large = Work(op, 2, {**sizes, wide: 128 if wide == "d" else 2**20}, op.dtypes[0])
    with pytest.raises(ShapeError, match=r"take \d{13,} bytes \(|slots are int32|experts"):
        large.check_memory()


@pytest.mark.parametrize("verb", ["run", "verify"])
def test_a_huge_shape_is_one_line(capsys, verb):
    words = [verb, "ag_gemm", "--ranks", "2", "--shape", "m=1000000,n=4096,k=1000000"]
    assert main([*words, *(["--target", "emu"] if verb == "run" else [])]) == 2
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "m=1000000,n=4096,k=1000000: inputs and results of 2 ranks take" in said
    assert "Traceback" not in said


def test_ranks_share_gpus_where_that_is_asked_for(monkeypatch):
    monkeypatch.setattr(run, "count_gpus", lambda: 1)
    monkeypatch.setenv("WEFT_SHARE_GPUS", "1")
    assert run.choose_target("cuda", 2, "1")[:2] == (2, "cuda")
    monkeypatch.setattr(run, "count_gpus", lambda: 0)
    with pytest.raises(UsageError, match="WEFT_SHARE_GPUS=1"):
        run.choose_target("cuda", 2, "1")
