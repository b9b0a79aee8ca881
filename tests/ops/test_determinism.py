"""One way of doing a call gives the same bits each time; and where torch is asked for deterministic
algorithms, recorded and eager calls are done in one way."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launching import check_under_torchrun
from torchrun import on_two_and_four_gpus

import weft
from weft.base.target import TARGETS
from weft.plan import gathered, summed
from weft.plan.runner import is_as_recorded
from weft.tune import presets

H200 = TARGETS["cuda:90"]
MODELS = ("llama3-8b mlp", "llama3-70b attention", "llama3-70b mlp", "qwen3-32b mlp")
ALL_M = (64, 128, 256, 1024, 2048, 4096, 8192)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Chosen:
    """What calls of an operator choose, whose tensors have no memory, on a rank of H200s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, num_ranks: int) -> None:
        self.module, self.is_recorded = importlib.import_module(f"weft.ops.{name}"), False
        seats = SimpleNamespace(nodes=(0,) * num_ranks)
        self.world = SimpleNamespace(
            target=H200, rank=0, num_ranks=num_ranks, device=torch.device("meta"),
            backend=SimpleNamespace(seats=seats), is_recording=lambda: self.is_recorded, choices={},
        )  # fmt: skip

        def chosen(world: Any, problem: Any, config: Any, *rest: Any) -> Any:
            return config

        for calls in (summed, gathered):
            monkeypatch.setattr(calls, "Call", chosen)

    def config(self, m: int, n: int, k: int, is_recorded: bool) -> Any:
        self.is_recorded, world = is_recorded, self.world
        rows = m // world.num_ranks if self.module.op.name == "ag_gemm" else m
        a = torch.empty(rows, k, dtype=torch.bfloat16, device="meta")
        b = torch.empty(n, k, dtype=torch.bfloat16, device="meta").t()
        given: tuple = (a, b, None, None, None)
        if self.module.op.name == "ag_gemm":
            given += (None,)
        return self.module._make_call(world, *given, is_as_recorded(world), None)


def sizes(name: str) -> list[tuple[int, int, int]]:
    return [(m, *presets.LAYERS[name][label]) for label in MODELS for m in ALL_M]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", ["gemm_rs", "ag_gemm"])
def test_recorded_and_eager_calls_choose_alike_where_that_is_asked_for(
    monkeypatch, name, num_ranks
):
    chosen, shapes = Chosen(monkeypatch, name, num_ranks), sizes(name)
    assert len(shapes) == 28
    ways = {is_recorded: [chosen.config(*one, is_recorded) for one in shapes]
            for is_recorded in (False, True)}  # fmt: skip
    unlike = [one for one, eager, recorded in zip(shapes, *ways.values()) if eager != recorded]
    with deterministic():
        for is_recorded in (False, True):
            found = [chosen.config(*one, is_recorded) for one in shapes]
            assert found == ways[True], "as recorded"
    # docs/memory_model.md says so: else nothing was asked here.
    if name == "gemm_rs":
        assert len(unlike) >= 10, unlike


UNLIKE = {
    "gemm_rs": [{"transport": "ce_push", "tile_k": 16}, {"transport": "sm_push", "tile_k": 64}],
    # A recorded call has the eager one's memory, unless it is the library's, which needs none.
    "ag_gemm": [{"transport": "ce_push", "tile_k": 16}, {"transport": "ce_push", "tile_k": 64}],
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", UNLIKE)
def test_eager_recorded_replayed_and_repeated_calls_have_the_same_bits(ranks, monkeypatch, name):
    """Of a choice that differs by recording; and without the mode bits differ, so this can fail."""
    module = importlib.import_module(f"weft.ops.{name}")

    def chosen(world, problem, config, is_recorded=False):
        cut = {"tile_m": 16, "tile_n": 16, **UNLIKE[name][is_recorded]}
        return module.Config(**cut)

    monkeypatch.setattr(module, "given_or_chosen", chosen)
    problem = module.op.make_problem(2, {"m": 64, "n": 32, "k": 512}, "float32")

    def main():
        world = weft.init()
        mine = module.op.make_inputs(problem, world.rank)

        def call():
            return getattr(module, name)(mine["a"], mine["b"], world=world)

        found = [call().clone() for _ in range(3)]
        with world.record() as recording:
            out = call()
        for _ in range(2):
            out.fill_(float("nan"))
            recording.replay()
            found.append(out.clone())
        found.append(call().clone())
        world.close()
        return [torch.equal(one, found[0]) for one in found]

    assert ranks(main, 2)[0] == [True] * 3 + [False] * 2 + [True]
    with deterministic():
        assert ranks(main, 2) == [[True] * 6] * 2


@on_two_and_four_gpus
def test_bits_on_gpus(ranks):
    check_under_torchrun("same_bits.py", ranks)
