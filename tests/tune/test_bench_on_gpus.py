"""`weft bench` on real GPUs, briefly: everything runs, answers are checked, a hang is ended."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from weft.base.card import Op
from weft.tools.main import main
from weft.tools.programs import find_op
from weft.tune import supervision
from weft.tune.variants import Variant

BASELINES = {
    "ag_gemm": {"cublas", "nccl", "cublas_nccl", "torch_async_tp", "weft_alone"},
    "all_gather": {"nccl", "torch_low_contention", "copy_engine_pulls"},
    "reduce_scatter": {"nccl", "torch_low_contention", "torch_reduce_scatter_out"},
    "all_reduce": {"nccl", "torch_one_shot", "torch_two_shot"},
    "all_to_all": {"nccl"},
}


def hangs(case: Any) -> Variant:
    """Sleeps for half a minute and more."""
    return Variant("hangs", [lambda: torch.cuda._sleep(1 << 36)] * len(case.sets))


def with_one_that_hangs(name: str) -> Op:
    """The card of an operator; its name is what the ranks' processes get."""
    card = find_op(name)
    return replace(card, baselines={**card.baselines, "hangs": hangs})


def document(capsys: Any, *words: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["bench", *words, "--rounds", "7", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.gpu(2)
@pytest.mark.parametrize("op", BASELINES)
def test_every_operator_beside_its_baselines(op: str, capsys: Any):
    shape = "m=512,n=512" + (",k=512" if op == "ag_gemm" else "")
    found = document(capsys, op, "--ranks", "2", "--shape", shape)
    measured = {(row["variant"], row["mode"]) for row in found["rows"]}
    for mode in ("graph", "queued", "eager"):
        assert {(name, mode) for name in BASELINES[op] | {"weft"}} <= measured, found["failed"]
    for row in found["rows"]:
        assert row["checked"] or row["variant"] == "nccl"
        assert 0 < row["p10_us"] <= row["median_us"] <= row["p90_us"]


@pytest.mark.gpu(2)
def test_what_hangs_on_the_device_is_ended(capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("weft.tools.bench.find_op", with_one_that_hangs)
    monkeypatch.setattr(supervision, "SILENCE_S", 15.0)
    words = ("all_reduce", "--ranks", "2", "--shape", "m=64,n=64")
    found = document(capsys, *words)
    assert [(one["variant"], one["error"]) for one in found["failed"]] == [
        ("hangs", "silent for 15 s: it hangs")
    ]
    assert {row["mode"] for row in found["rows"] if row["variant"] == "weft"} == {
        "graph", "queued", "eager"
    }  # fmt: skip
