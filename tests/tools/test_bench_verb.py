"""`weft bench` where there are no GPUs, and with GPUs that are made up: its words and its table."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import weft.tools.bench as verb
from weft.base.errors import UsageError
from weft.tools.main import main
from weft.tune.presets import points_of


@pytest.fixture
def without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def test_without_gpus_it_says_so_and_ends_with_2(without_gpus: None, capsys: Any):
    assert main(["bench", "ag_gemm"]) == 2
    assert "at least one needed, 0 here" in capsys.readouterr().err
    assert main(["bench", "ag_gemm", "--ranks", "4", "--json"]) == 2
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is False and "4 needed" in said["error"]["message"]


@pytest.mark.parametrize(
    "words",
    [
        ["no_such_op"],
        ["ag_gemm", "--rounds", "3"],
        ["ag_gemm", "--preset", "huge"],
        ["all_reduce", "--preset", "llama3-8b-mlp"],
        ["all_reduce", "--m", "64"],
        ["ag_gemm", "--m", "64,few"],
        ["ag_gemm", "--m", "0"],
        ["ag_gemm", "--m", "64", "--shape", "m=64"],
        ["ag_gemm", "--modes", "fast"],
        ["ag_gemm", "--shape", "m=4,q=4"],
        ["ag_gemm", "--dtype", "int8"],
    ],
)
def test_misuse_ends_with_2(words: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(verb, "find_gpus", lambda ranks: 4)
    monkeypatch.setattr("weft.tune.supervision.messages_from_gpus", _never)
    assert main(["bench", *words]) == 2


def _never(*args: Any, **options: Any) -> Iterator[Any]:
    raise AssertionError("nothing is started by a command that is wrong")


def _row(point: Any, variant: str, us: float) -> dict[str, Any]:
    return {
        "op": point.op, "label": point.label, "shape": dict(point.shape), "mode": "queued",
        "variant": variant, "median_us": us, "p10_us": us, "p90_us": us, "checked": True,
        "ratio_to_serial": 1.5, "ceiling": None, "overlap_efficiency": None,
    }  # fmt: skip


def test_a_run_is_shown_and_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any):
    def ranks(main: Any, num_ranks: int, card_of: Any, plan: Any, silence_s: float):
        yield "started", {"device": "NVIDIA H200", "commit": "abc"}
        for point in plan.points:
            yield "at", {"point": point.name, "variant": "weft"}
            yield "row", _row(point, "weft", 12.5)
            failure = {**_row(point, "torch_one_shot", 0.0), "error": "it hangs"}
            yield "failed", failure
            yield "measured", {"point": point.name, "mode": "queued"}

    monkeypatch.setattr(verb, "find_gpus", lambda ranks: 4)
    monkeypatch.setattr("weft.tune.supervision.messages_from_gpus", ranks)
    file = tmp_path / "results.json"
    assert main(["bench", "all_reduce", "--preset", "quick", "-o", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "12.5" in shown and "FAILED it hangs" in shown and "1.50" in shown
    assert len(json.loads(file.read_text())["rows"]) == len(points_of("all_reduce", "quick", 4))
    assert main(["bench", "all_reduce", "ag_gemm", "--json", "-o", str(tmp_path)]) == 0
    documents = json.loads(capsys.readouterr().out)
    assert [document["op"] for document in documents] == ["all_reduce", "ag_gemm"]
    assert (tmp_path / "ag_gemm_h200x4.json").exists()


def test_modes_may_be_named():
    points = tuple(points_of("ag_gemm", "quick", 4))
    assert verb.with_modes(points, "auto") is points
    named = verb.with_modes(points, "eager,graph")
    assert {point.modes for point in named} == {("eager", "graph")}
    with pytest.raises(UsageError):
        verb.with_modes(points, "")
