"""A benchmark from outside: rows and their ratios, what hangs, what is saved, points."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weft.base.errors import UsageError
from weft.base.target import TARGETS
from weft.ops import card, cards
from weft.tune.bench import Message, Plan
from weft.tune.figures import Times
from weft.tune.presets import Point, points_of
from weft.tune.processes import RanksStopped
from weft.tune.results import Results
from weft.tune.rows import rows
from weft.tune.supervision import supervised
from weft.tune.variants import Variant

POINTS = tuple(Point("ag_gemm", "", {"m": m, "n": 8, "k": 8}, ("queued",)) for m in (1, 2, 3))


def some_rows(**medians: float) -> dict[str, dict[str, Any]]:
    able = [Variant(name, [], answers=name != "nccl") for name in medians]
    times = {name: Times((us,) * 7) for name, us in medians.items()}
    errors = dict.fromkeys(medians, 0.001)
    found = rows(POINTS[0], 4, "queued", able, times, errors, {"weft": 12.0})
    return {row["variant"]: row for row in found}


def test_a_row_holds_what_the_contract_says():
    row = some_rows(cublas=100.0, nccl=50.0, cublas_nccl=150.0, weft=120.0)["weft"]
    assert row["median_us"] == row["p10_us"] == row["p90_us"] == 120.0
    parts = (row["t_gemm_us"], row["t_comm_us"], row["t_serial_us"])
    assert parts == (100.0, 50.0, 150.0)
    assert (row["ratio_to_serial"], row["ceiling"], row["overlap_efficiency"]) == (1.25, 1.5, 0.6)
    assert row["checked"] is True and row["host_us"] == 12.0
    assert (row["shape"], row["ranks"], row["dtype"]) == ({"m": 1, "n": 8, "k": 8}, 4, "bfloat16")


def test_no_ratio_without_two_checked_answers():
    without_serial = some_rows(cublas=100.0, nccl=50.0, weft=120.0)["weft"]
    assert without_serial["ratio_to_serial"] is None
    assert without_serial["overlap_efficiency"] is None
    able = [Variant("cublas", []), Variant("nccl", []), Variant("cublas_nccl", []),
            Variant("weft", [], answers=False)]  # fmt: skip
    times = {v.name: Times((10.0,)) for v in able}
    unchecked = list(rows(POINTS[0], 4, "queued", able, times, {}, {}))[-1]
    assert unchecked["checked"] is False and unchecked["ratio_to_serial"] is None


def test_a_part_of_the_unfused_way_is_not_compared_with_the_whole():
    found = some_rows(cublas=100.0, nccl=50.0, cublas_nccl=150.0)
    assert found["cublas"]["ratio_to_serial"] is None
    assert found["cublas_nccl"]["ratio_to_serial"] == 1.0


def test_a_collective_is_compared_with_the_vendors():
    able = [Variant("nccl", []), Variant("weft", [])]
    times = {"nccl": Times((20.0,)), "weft": Times((10.0,))}
    nccl, weft = rows(POINTS[0], 4, "graph", able, times, {}, {})
    assert (weft["ratio_to_serial"], weft["t_serial_us"], weft["ceiling"]) == (2.0, 20.0, None)
    assert nccl["ratio_to_serial"] == 1.0


# ---------------------------------------------------------------------------------------------
# What hangs


class Ranks:
    """Ranks that measure `a` and `b` at every point, and hang where told."""

    def __init__(self, hangs: set[tuple[str, str]]) -> None:
        self.hangs = hangs
        self.starts: list[Plan] = []

    def __call__(self, plan: Plan) -> Iterator[Message]:
        self.starts.append(plan)
        yield "started", {"device": "NVIDIA H200", "commit": "abc"}
        for point in plan.points:
            yield "at", {"point": point.name, "variant": ""}
            for name in ("a", "b"):
                if plan.leaves_out(point, name):
                    continue
                yield "at", {"point": point.name, "variant": name}
                if (point.name, name) in self.hangs:
                    raise RanksStopped("silent for 60 s: it hangs")
                yield "row", {"op": point.op, "variant": name, "shape": dict(point.shape)}
            yield "measured", {"point": point.name, "mode": "queued"}
        yield "finished", {}


def run(ranks: Ranks) -> tuple[list[tuple[int, str]], list[tuple[int, str, str]]]:
    measured, failed = [], []
    for word, values in supervised(Plan(POINTS, 4), ranks):
        if word == "row":
            measured.append((values["shape"]["m"], values["variant"]))
        elif word == "failed":
            failed.append((values["shape"]["m"], values["variant"], values["error"]))
    return measured, failed


def test_all_goes_on_without_what_hangs():
    ranks = Ranks({(POINTS[1].name, "a")})
    measured, failed = run(ranks)
    assert measured == [(1, "a"), (1, "b"), (2, "b"), (3, "a"), (3, "b")]
    assert failed == [(2, "a", "silent for 60 s: it hangs")]
    assert [len(plan.points) for plan in ranks.starts] == [3, 2]


def test_what_hangs_twice_is_not_tried_again():
    ranks = Ranks({(point.name, "a") for point in POINTS})
    measured, failed = run(ranks)
    assert [m for m, name, _ in failed] == [1, 2]
    assert measured == [(1, "b"), (2, "b"), (3, "b")]


def test_ranks_that_do_not_start_are_an_error():
    def dead(plan: Plan) -> Iterator[Message]:
        raise RanksStopped("a process died: exit codes by rank [1, 1]")
        yield

    with pytest.raises(RanksStopped):
        list(supervised(Plan(POINTS, 2), dead))


# ---------------------------------------------------------------------------------------------
# What is saved, points


def test_points_of_one_name_are_refused():
    with pytest.raises(UsageError, match="2 points are called .*; give one point all of its modes"):
        list(supervised(Plan((POINTS[0], *POINTS), 4), Ranks(set())))


def test_a_run_that_is_cut_off_leaves_what_was_measured(tmp_path: Path):
    results = Results(4, str(tmp_path), many=True)
    stream = supervised(Plan(POINTS, 4), Ranks(set()))
    for word, values in stream:
        results.take(word, values)
        if word == "measured":
            break
    saved = json.loads((tmp_path / "ag_gemm_h200x4.json").read_text())
    assert saved["op"] == "ag_gemm" and saved["hardware"] == "4 x NVIDIA H200"
    assert [row["variant"] for row in saved["rows"]] == ["a", "b"]
    assert "op" not in saved["rows"][0]


def test_points_that_are_not_measured_again_keep_their_commit(tmp_path: Path):
    def measure(
        points: tuple[Point, ...], commit: str, device: str = "NVIDIA H200", mode: str = "graph"
    ) -> Any:
        results = Results(4, str(tmp_path / "ag_gemm.json"), keeps=True)
        results.take("started", {"device": device, "commit": commit})
        for point in points:
            row = {"op": "ag_gemm", "label": "", "shape": dict(point.shape), "dtype": "bfloat16"}
            results.take("row", {**row, "mode": mode, "variant": commit})
            results.take("measured", {"point": point.name})
        saved = json.loads((tmp_path / "ag_gemm.json").read_text())
        return {
            row["shape"]["m"]: (row["variant"], row.get("commit"))
            for row in saved["rows"] if row["mode"] == "graph"
        }  # fmt: skip

    measure(POINTS, "first")
    assert measure(POINTS[1:2], "second") == {
        1: ("first", "first"), 2: ("second", None), 3: ("first", "first")
    }  # fmt: skip
    assert measure(POINTS[:1], "third")[2] == ("second", "second")
    assert measure(POINTS[1:2], "fourth", mode="eager")[2] == ("second", "second")
    assert set(measure(POINTS[:1], "other", "NVIDIA B200")) == {1}


def test_weft_that_fails_is_a_problem_and_a_rival_that_fails_is_not():
    for name, is_fine in (("weft", False), ("weft pull", False), ("kraken", True), ("", False)):
        results = Results(4)
        results.take("started", {"device": "NVIDIA H200"})
        results.take("failed", {"op": "ag_gemm", "variant": name, "error": ""})
        assert results.is_fine is is_fine, name


def test_presets_hold_the_shapes_of_the_targets():
    full = points_of("ag_gemm", "full", 4)
    assert len(full) == 55
    assert {point.shape["m"] for point in full} >= {1, 3988, 16384}
    assert {point.modes[0] for point in full if point.shape["m"] < 512} == {"graph"}
    one = points_of("ag_gemm", "llama3-405b-mlp", 4)
    assert {(point.shape["n"], point.shape["k"]) for point in one} == {(26624, 16384)}
    with pytest.raises(UsageError):
        points_of("ag_gemm", "llama3-9b", 4)
    few = points_of("gemm_rs", "quick", 4, [16, 96])
    assert {point.shape["m"] for point in few} == {16, 96} and len(few) == 10
    normed = points_of("all_reduce_rms_norm", "qwen3-32b-mlp", 4)
    assert {point.shape["n"] for point in normed} == {5120} and normed[0].shape["m"] == 1
    with pytest.raises(UsageError):
        points_of("all_reduce", "llama3-8b-mlp", 4)
    with pytest.raises(UsageError, match="no layer of ag_gemm"):
        points_of("ag_gemm", "mixtral-8x7b", 4)


@pytest.mark.parametrize("op", cards())
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_operator_is_measured_at_shapes_that_it_takes(op: str, num_ranks: int):
    full, quick = (points_of(op, preset, num_ranks) for preset in ("full", "quick"))
    assert len({point.name for point in full}) == len(full) > len(quick) > 0
    for point in full:
        problem = card(op).make_problem(num_ranks, point.shape, point.dtype)
        replace(problem, **point.fields)
        next(iter(card(op).candidates(problem, TARGETS["cuda:90"])))


def test_models_of_the_targets():
    found = {point.label: point.shape for point in points_of("ag_moe", "quick", 4)}
    assert found["deepseek-v3"].items() >= {"k": 7168, "n": 1024, "experts": 256}.items()
    assert found["mixtral-8x7b"]["tile_m"] == 128 and found["qwen3-30b-a3b"]["m"] == 4 * 4096
    (one,) = {point.label for point in points_of("moe_rs", "mixtral-8x7b", 4)}
    assert one == "mixtral-8x7b"
    keys = {point.shape["n"] * 4 for point in points_of("flash_decode", "full", 4)}
    assert keys == {64 << 10, 256 << 10, 1 << 20}


@pytest.mark.parametrize("op", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_collectives_go_from_8_kb_to_128_mb(op: str):
    points = points_of(op, "full", 4)
    assert [p.bytes_per_rank for p in (points[0], points[-1])] == [8 << 10, 128 << 20]
    for point in points:
        whole = 2 * point.shape["m"] * point.shape["n"]
        ranks = 4 if op in ("all_gather", "reduce_scatter") else 1
        assert whole == point.bytes_per_rank * ranks, point.name
        assert point.shape["m"] % 4 == 0, point.name
