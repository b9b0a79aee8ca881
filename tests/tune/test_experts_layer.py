"""benchmarks/experts_layer.py, briefly and on emulated ranks: all ways have one answer."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch

import weft

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.parametrize("routing", ["even", "zipf", "one"])
def test_all_ways_have_one_answer(ranks, monkeypatch, routing):
    monkeypatch.syspath_prepend(str(FOLDER))
    script = importlib.import_module("experts_layer")
    monkeypatch.setattr(script, "as_one_kernel", lambda function: function)
    mixture = script.Mixture(hidden=32, experts=8, top_k=3, inner=16)

    def main():
        with weft.init() as world, torch.no_grad():
            made = script.weights_of(mixture, world.rank, 2, world.device, torch.float32)
            x, gate = script.tokens_of(mixture, 5, routing, world.rank, "cpu", torch.float32)
            return [call() for call in script.ways_of(world, mixture, made, x, gate).values()]

    for first, *rest in ranks(main, 2):
        for one in rest:
            torch.testing.assert_close(one, first, rtol=1e-4, atol=1e-4)
