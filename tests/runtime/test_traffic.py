"""benchmarks/traffic.py, briefly and on emulated ranks: what it counts, and that it sees growth."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("traffic")
    for name in ("traffic", "changing_sizes"):
        sys.modules.pop(name, None)


def run(script: Any, monkeypatch: Any, calls: int, most: int) -> list[dict[str, Any]]:
    words = f"traffic.py --calls {calls} --most {most} --hidden 32 --wide 48 --heap 8 --emulated 2"
    found: list[dict[str, Any]] = []
    is_fine = script.is_fine
    monkeypatch.setattr(sys, "argv", words.split())
    monkeypatch.setattr(script, "is_fine", lambda one: found.append(one) or is_fine(one))
    assert script.main() == 0
    return found


@pytest.mark.slow
def test_answers_times_and_memory(script, monkeypatch, capsys):
    monkeypatch.setattr(script, "OPS", ("ag_gemm", "all_reduce"))
    found = run(script, monkeypatch, 12, 8)
    assert [one["compiled"] for one in found] == [[0, 0]] * 2
    assert {*found[0]["ms"]} == {*script.OPS}
    assert sum(one["calls"] for one in found[0]["ms"].values()) == 12
    assert '"p99"' in capsys.readouterr().out


@pytest.mark.slow
def test_some_hundred_calls(script, monkeypatch):
    run(script, monkeypatch, 300, 64)


@pytest.mark.slow
def test_memory_that_grows_and_wrong_answers_are_errors(script, monkeypatch):
    def leak(self: Any, name: str, x: Any) -> Any:
        if not self.world.is_recording():
            self.world.empty(64, x.dtype)
        return own(self, name, x)

    own = script.Caller.call
    words = "traffic.py --calls 4 --most 2 --hidden 16 --wide 16 --heap 8 --emulated 2"
    monkeypatch.setattr(sys, "argv", words.split())
    monkeypatch.setattr(script.Caller, "prepare", lambda self: None)
    monkeypatch.setattr(script, "OPS", ("all_gather",))
    monkeypatch.setattr(script.Caller, "call", leak)
    assert script.main() == 1
    monkeypatch.setattr(script.Caller, "call", lambda self, name, x: own(self, name, x) + 1)
    assert script.main() == 1


def test_quantiles(script):
    found = script.quantiles([*range(200), 1000.0])
    assert found == {"calls": 201, "p50": 100, "p99": 198, "worst": 1000.0}
