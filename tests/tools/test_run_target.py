"""Where `weft run` runs an operator, and what it says about it, on machines with so many GPUs."""

from __future__ import annotations

import pytest

from weft.base.errors import UsageError
from weft.tools import run


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
