"""What an eager call costs the host: counted in functions of weft that it calls, since microseconds
are a machine's. On one H200 a function and what it does take about 0.5 us."""

from __future__ import annotations

import pytest
import torch
from fake_machine import FakeBackend, FakeRecording, functions_of, run_ranks

import weft.ops as ops
from weft.base.target import parse_target
from weft.language import triton_api
from weft.ops import card
from weft.plan.runner import PlanRunner

N, K = 256, 128
# Calls after which all is found, kept and recorded; those that are counted.
WARM_UP, COUNTED = 8, 4


class Recording(FakeRecording):
    is_current, device_bytes = True, 0


class Driver:
    """Triton's, of a machine on which nothing is launched."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def hopper(monkeypatch):
    """GPUs of which only the host's part is done; a launch again is one by its addresses."""
    monkeypatch.setattr(FakeBackend, "target", parse_target("cuda:90"))
    monkeypatch.setattr(FakeBackend, "record_launches", lambda *_: Recording(), raising=False)
    monkeypatch.setattr(PlanRunner, "_queue_steps", lambda *_: {})
    monkeypatch.setattr(triton_api.driver_config, "_active", Driver())
    with triton_api.held_launches():
        yield


def shapes_of(op: str, num_ranks: int, m: int) -> tuple[list[tuple[int, int]], tuple[int, int]]:
    """Of an operator's tensors, and of its result."""
    rows = m // num_ranks
    return {
        "all_gather": ([(rows, N)], (m, N)),
        "reduce_scatter": ([(m, N)], (rows, N)),
        "all_reduce": ([(m, N)], (m, N)),
        "ag_gemm": ([(rows, K), (K, N)], (m, N)),
        "gemm_rs": ([(m, K), (K, N)], (rows, N)),
        "gemm_ar": ([(m, K), (K, N)], (m, N)),
    }[op]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    ("op", "m", "config", "most"),
    [
        ("all_gather", 256, {}, 15),
        ("reduce_scatter", 256, {}, 15),
        ("all_reduce", 256, {}, 15),
        ("gemm_rs", 256, {"transport": "sm_push", "template": "sm90"}, 16),
        ("gemm_ar", 64, {"transport": "one_shot_ll"}, 16),
        ("ag_gemm", 256, {"transport": "sm_push", "template": "sm90"}, 17),
        # The library's product, and a collective behind it.
        ("ag_gemm", 64, {"transport": "all_gather"}, 27),
        ("gemm_rs", 64, {"transport": "reduce_scatter"}, 23),
        ("gemm_ar", 256, {"transport": "all_reduce"}, 23),
    ],
)
def test_an_eager_call_calls_few_functions(hopper, op, m, config, most, num_ranks):
    def main(world):
        shapes, shape = shapes_of(op, num_ranks, m)
        tensors = [torch.zeros(one, dtype=torch.bfloat16) for one in shapes]
        out = torch.zeros(shape, dtype=torch.bfloat16)  # results of one address each
        options = {"config": card(op).config(**config)} if config else {}

        def call():
            getattr(ops, op)(*tensors, world=world, out=out, **options)

        for _ in range(WARM_UP):
            call()
        return min(functions_of(call) for _ in range(COUNTED))

    for count in run_ranks(main, num_ranks, heap_bytes=1 << 26):
        assert count <= most
