"""benchmarks/stress.py, briefly and on emulated ranks: it runs operators, and counts errors."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
import weft.ops

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "stress.py"


@pytest.fixture(scope="module")
def stress() -> Any:
    spec = importlib.util.spec_from_file_location("stress", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(stress: Any, ranks: Any, ops: Any) -> None:
    def main() -> dict[str, Any]:
        options = argparse.Namespace(ops=",".join(ops), calls=4, replays=2)
        return stress.stress(weft.init(), weft.init(), options)

    for result in ranks(main, 2):
        ways = [way for way in result.values() if "calls" in way]
        assert not result["first"] and len(ways) >= 3
        assert all(way["calls"] and not way["wrong_elements"] for way in ways)


def test_a_few_operators(stress, ranks):
    run(stress, ranks, ["ag_wgrad"])


@pytest.mark.slow
def test_others(stress, ranks):
    run(stress, ranks, ["ag_moe", "ep_dispatch", "ag_attention", "flash_decode", "persistent"])


def test_every_operator_is_there(stress):
    assert {*stress.OPS} == {*weft.ops.cards(), "persistent"}


def test_other_bits_are_counted(stress, ranks):
    """One element of one call in three, and one that the reference has otherwise."""

    def main() -> tuple[int, int]:
        calls = []

        def double(inputs: dict[str, torch.Tensor]) -> torch.Tensor:
            calls.append(1)
            out = 2 * inputs["x"]
            if len(calls) == stress.SETS + 2:
                out[1] += 1
            return out

        def right(turn: int) -> torch.Tensor:
            return torch.full((4,), 2.0 * turn + 2 * (turn == 1))

        sets = [{"x": torch.full((4,), float(turn))} for turn in range(stress.SETS)]
        one = stress.Turns(weft.init(), "double", double, sets, right, 1e-3)
        one.prepare()
        prepared = int(one.errors)
        for _ in range(3):
            one.call()
        return prepared, int(one.errors)

    assert ranks(main, 1) == [(1, 2)]
