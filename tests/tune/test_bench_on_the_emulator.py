"""A whole point on emulated ranks: variants made, checked, recorded and called in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.tools.programs import find_op
from weft.tune.bench import Plan, bench_point
from weft.tune.presets import Point
from weft.tune.variants import MODES, Variant


class EmulatedDevice:
    """A rank's device on the emulator; every call takes ten microseconds, in words."""

    l2_bytes = 1 << 20

    def __init__(self, world: Any) -> None:
        self.world = world

    def warm_us(self, call: Callable[[], Any]) -> float:
        call()
        self.world.synchronize()
        return 5.0

    def held_us(self, call: Callable[[], Any], host_us: float) -> float:
        self.world.barrier()
        call()
        return 10.0

    def burst_us(self, calls: Sequence[Callable[[], Any]], count: int) -> float:
        return self.held_us(calls[0], 0.0)

    def host_us(self, calls: Sequence[Callable[[], Any]]) -> float:
        for call in calls:
            call()
        return 7.0

    def record(self, call: Callable[[], Any]) -> tuple[Callable[[], Any], Any]:
        with self.world.record() as recording:
            answer = call()
        return recording.replay, answer

    def slowest(self, times: list[list[float]]) -> list[list[float]]:
        return times

    def agree(self, value: Any) -> list[Any]:
        return self.world.backend.exchange(value, timeout_s=60.0)

    def sweep(self) -> None:
        pass

    def settle(self) -> None:
        self.world.synchronize()


def run(op: str, shape: dict[str, int], wanted: tuple[str, ...], **more: Any) -> list[Any]:
    """What rank 0 says of one point."""
    point = Point(op, "small", shape, MODES)

    def main() -> list[Any]:
        torch.distributed.init_process_group()
        world = weft.init()
        heard: list[Any] = []
        chosen = find_op(op)
        if more:
            chosen = chosen.__class__(**{**vars(chosen), **more})
        plan = Plan((point,), 2, wanted, rounds=7)
        bench_point(world, EmulatedDevice(world), chosen, point, plan, heard.append)
        world.close()
        return heard

    with weft.emulated(ranks=2, seed=0) as session:
        return session.run(main)[0]


@pytest.mark.slow
def test_ag_gemm_beside_the_unfused_way_in_all_modes():
    wanted = ("weft", "weft/each")
    heard = run("ag_gemm", {"m": 32, "n": 16, "k": 32}, wanted)
    failed = {(v["variant"], v["mode"]): v["error"] for word, v in heard if word == "failed"}
    # torch.distributed is not recorded by the emulator: these cannot be measured as graphs.
    assert set(failed) == {("nccl", "graph"), ("cublas_nccl", "graph")}, failed
    rows = [values for word, values in heard if word == "row"]
    ways = ("weft sm_push", "weft ce_push", "weft ll", "weft all_gather")
    names = {"cublas", "nccl", "cublas_nccl", "weft", *ways}
    assert {(row["variant"], row["mode"]) for row in rows} == {
        (name, mode) for name in names for mode in MODES
    } - set(failed)
    ours = [row for row in rows if row["variant"] == "weft"]
    assert all(row["checked"] for row in ours)
    assert [row["ratio_to_serial"] for row in ours] == [None, 1.0, 1.0], "in its own mode only"
    assert [row.get("host_us") for row in ours] == [None, None, 7.0]


def test_a_wrong_and_a_broken_rival_are_left_out_alone():
    def wrong(case: Any) -> Variant:
        outs = [torch.zeros_like(one["x"]) for one in case.sets]
        return Variant("wrong", [lambda out=out: out for out in outs])

    def broken(case: Any) -> Variant:
        raise RuntimeError("it is not installed")

    heard = run(
        "all_reduce", {"m": 8, "n": 8}, (), baselines={"wrong": wrong, "broken": broken}
    )  # fmt: skip
    failed = {v["variant"]: v["error"] for word, v in heard if word == "failed"}
    assert set(failed) == {"wrong", "broken"}
    assert "wrong answer" in failed["wrong"] and "not installed" in failed["broken"]
    rows = [v for word, v in heard if word == "row"]
    assert {row["variant"] for row in rows} == {"weft"} and len(rows) == len(MODES)
    assert all(row["ratio_to_serial"] is None for row in rows), "nothing to compare with"


def test_a_baseline_that_waits_for_its_stream_is_timed_eagerly_alone():
    """Where a stream is held until a call is enqueued, its calls would all be lost."""
    shape = {"m": 16, "n": 16, "experts": 4, "top_k": 2, "capacity": 24, "tile_m": 16}
    heard = run("ep_dispatch", shape, ("nccl_by_counts",))
    modes = [v["mode"] for word, v in heard if word == "row" and v["variant"] == "nccl_by_counts"]
    assert modes == ["eager"]
    assert not [v for word, v in heard if word == "failed" and v["variant"] == "nccl_by_counts"]


@pytest.mark.slow
def test_a_program_beside_its_library_calls():
    words = f"{Path(__file__).parents[2]}/examples/13_program.py:mlp"
    heard = run(words, {"m": 24}, ("weft/each", "unfused"))
    assert not [values for word, values in heard if word == "failed"]
    rows = [values for word, values in heard if word == "row"]
    names = {"weft overlapped", "weft persistent", "unfused"}
    assert {(row["variant"], row["mode"]) for row in rows} == {
        (name, mode) for name in names for mode in MODES
    }
    assert all(row["checked"] for row in rows)
