"""Choices that are measured on emulated ranks: agreed, kept, taken; what fails on one rank."""

from __future__ import annotations

import json
import operator
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from weft.base.errors import CompileError, UsageError
from weft.ops.ag_gemm import Config, choose, op
from weft.ops.gemm_rs import op as gemm_rs
from weft.plan import prepare
from weft.runtime.choices import EMULATED, file_name
from weft.tools.programs import compiled_of, find_op
from weft.tune.choosing import best_of, tune
from weft.tune.variants import worth_measuring

SIZES = {"m": [30, 32], "n": 16, "k": 32}


def on_two_ranks(main: Callable[..., Any], *args: Any) -> list[Any]:
    with weft.emulated(ranks=2, seed=0) as session:
        return session.run(main, *args)


def tuned(card: Any = op, sizes: Any = SIZES) -> Any:
    with weft.init() as world:
        return tune(card, sizes, world=world, dtype="float32")


def taken(folder: str, m: int = 32) -> list[Any]:
    """The configurations of two calls, the second where torch is asked for the same bits."""
    if folder:
        os.environ["WEFT_CHOICES"] = folder
    with weft.init() as world:
        found = []
        for is_deterministic in (False, True):
            torch.use_deterministic_algorithms(is_deterministic)
            try:
                a, b = torch.ones(m // 2, 32), torch.ones(32, 16)
                assert (weft.ops.ag_gemm(a, b, world=world) == 32).all()
            finally:
                torch.use_deterministic_algorithms(False)
            mine = [one for one in world.calls._latest.values() if one.problem.op == "ag_gemm"]
            found.append(mine[-1].config)
        return found


@pytest.mark.slow
def test_what_is_measured_is_agreed_kept_and_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    mine, theirs = on_two_ranks(tuned)
    assert mine == theirs and [one.shape["m"] for one in mine] == [30, 32]
    (path,) = tmp_path.iterdir()
    document = json.loads(path.read_text())
    assert path.name == file_name("ag_gemm", EMULATED, 2)
    assert document["unit"] == "steps of the emulator", "it is no time, and says so"
    assert [one["eager"] for one in document["choices"]] == [one.eager for one in mine]
    assert all(one.eager["us"] == one.eager["best_us"] > 0 for one in mine)
    measured = Config(**mine[1].eager["config"])
    first, second = on_two_ranks(taken, "")
    assert first == second and first[0] == measured
    assert first[1] != measured, "bits do not depend on files where torch is asked for the same"
    # Other sizes stay beside it.
    on_two_ranks(tuned, op, {"m": 8, "n": 16, "k": 32})
    assert len(json.loads(path.read_text())["choices"]) == 3


def test_the_file_of_rank_0_decides_for_all(tmp_path):
    """One rank has no file, or another one: its calls are done as the others' are."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, transport in zip(folders, ("ll", "sm_push")):
        _write(folder, transport)

    def differing(rank: int) -> list[Any]:
        return taken(str(folders[rank]))

    def without(rank: int) -> list[Any]:
        return taken(str(folders[0]) if rank == 0 else str(tmp_path))

    for main in (differing, without):
        assert {one[0].transport for one in on_two_ranks(main)} == {"ll"}


def _write(folder: Path, transport: str) -> None:
    problem = op.make_problem(2, {"m": 32, "n": 16, "k": 32}, "float32")
    configs = worth_measuring(op, problem, weft.base.target.TARGETS["emu"])
    config = next(one for one in configs if one.transport == transport)
    key = "m=32 n=16 k=32 dtype=float32 out_dtype=float32 nodes=() scaling="
    record = {"config": vars(config), "us": 1.0, "best_us": 1.0}
    document = {"op": "ag_gemm", "choices": [{"key": key, "eager": record, "recorded": record}]}
    folder.mkdir()
    (folder / file_name("ag_gemm", EMULATED, 2)).write_text(json.dumps(document))


def test_a_file_that_is_none_is_refused_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    (tmp_path / file_name("ag_gemm", EMULATED, 2)).write_text("{")

    def refused() -> str:
        with pytest.raises(UsageError, match="remove it, or set WEFT_CHOICES=off") as raised:
            weft.init()
        return raised.value.message

    assert len(set(on_two_ranks(refused))) == 1


PROGRAM = """
import weft
from weft.compiler import Shard, Tensor, all_gather, reduce_scatter, silu_mul

@weft.program(mesh="tp", x=Tensor("float32", ("m", 32), Shard(0)),
              w1=Tensor("float32", (32, 64), Shard(1)), w2=Tensor("float32", (32, 32), Shard(0)))
def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)
"""


@pytest.mark.slow
def test_a_program_is_run_as_was_measured(monkeypatch, tmp_path):
    """Unless it says how, or torch is asked for the same bits."""
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    (tmp_path / "model.py").write_text(PROGRAM)
    words = f"{tmp_path}/model.py:mlp"
    card, mlp = find_op(words), compiled_of(words)
    (found,), _ = on_two_ranks(tuned, card, {"m": 24})
    assert found.eager["us"] == found.eager["best_us"] > 0
    (path,) = tmp_path.glob("programs-*.json")
    document = json.loads(path.read_text())
    for mode in ("eager", "recorded"):
        document["choices"][0][mode]["config"]["transport"] = "unfused"
    path.write_text(json.dumps(document))

    def lowerings() -> list[str]:
        with weft.init() as world:
            problem = card.make_problem(2, {"m": 24}, card.dtypes[0])
            inputs = card.make_inputs(problem, world.rank).values()
            told = []
            for program, is_deterministic in (
                (mlp, False), (mlp.options(lowering="overlapped"), False), (mlp, True)
            ):  # fmt: skip
                torch.use_deterministic_algorithms(is_deterministic)
                try:
                    program(*inputs, world=world)
                finally:
                    torch.use_deterministic_algorithms(False)
                told.append([*program._calls[world].values()][-1].lowering)
            return told

    assert on_two_ranks(lowerings) == [["unfused", "overlapped", "overlapped"]] * 2


PLANTED = {
    "compile": "rank 1: CompileError: planted", "memory": "rank 1: OutOfMemoryError: planted",
    "answer": "wrong answer",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLANTED)
def test_a_candidate_that_fails_on_one_rank_is_left_out_on_all(kind, monkeypatch):
    """Before a call is made, while it is, or by its answer: no rank waits for that one for ever."""
    compile_call, run = prepare.compile_call, op.run

    def compiled(world: Any, card: Any, problem: Any, config: Any) -> None:
        if kind == "compile" and world.rank == 1 and config.transport == "ll":
            raise CompileError("planted")
        compile_call(world, card, problem, config)

    def ran(world: Any, problem: Any, inputs: Any, config: Any = None) -> Any:
        out = run(world, problem, inputs, config)
        if world.rank == 1 and config.transport == "ll":
            if kind == "memory":
                raise torch.OutOfMemoryError("planted")
            if kind == "answer":
                world.synchronize()
                out.zero_()
        return out

    monkeypatch.setattr(prepare, "compile_call", compiled)
    card = replace(op, run=ran)
    (mine,), (theirs,) = on_two_ranks(tuned, card, {"m": 32, "n": 16, "k": 32})
    assert mine == theirs and mine.eager["config"]["transport"] != "ll", "which is best elsewhere"
    (left_out,) = mine.left_out.items()
    assert left_out[0].startswith("weft ll") and left_out[1].startswith(PLANTED[kind])


def _row(variant: str, mode: str, us: float, **config: Any) -> dict[str, Any]:
    fields = dict(vars(replace(Config(), **config)))
    return {"variant": variant, "mode": mode, "median_us": us, "fields": fields}


def test_eager_and_recorded_calls_are_done_alike_unless_the_operator_can_tell():
    rows = [
        _row("a", "eager", 60.0, transport="sm_push"),
        _row("a", "graph", 60.0, transport="sm_push"),
        _row("b", "eager", 70.0, chunks=1), _row("b", "graph", 40.0, chunks=1),
        _row("c", "eager", 100.0, transport="all_gather"),
        _row("c", "graph", 35.0, transport="all_gather"),
    ]  # fmt: skip
    found = best_of(op, rows)
    assert found["eager"]["config"]["transport"] == "sm_push"
    assert found["recorded"]["config"]["transport"] == "all_gather", "what torch needs is there"
    found = best_of(replace(op, records_as=operator.eq), rows)
    assert found["eager"]["config"] == found["recorded"]["config"]
    assert (found["eager"]["us"], found["eager"]["best_us"]) == (70.0, 60.0)
    # Of the same product the first; rows come in the order of candidates.
    alike = [_row(name, mode, 5.0, chunks=i) for mode in ("eager", "graph")
             for i, name in enumerate("ab", 1)]  # fmt: skip
    assert best_of(op, alike)["eager"]["config"]["chunks"] == 1
    assert best_of(op, []) == {}


def test_what_is_predicted_to_be_far_behind_is_not_measured():
    target = weft.base.target.TARGETS["cuda:90"]
    for card in (op, gemm_rs):
        problem = card.make_problem(2, {"m": 8192, "n": 4096, "k": 4096}, "bfloat16")
        problem = replace(problem, b_is_nk=True)
        every = list(card.candidates(problem, target))
        kept = worth_measuring(card, problem, target)
        us = {one: card.predict(problem, target, one) for one in every}
        least = min(one for one in us.values() if one is not None)
        assert {one.transport for one in kept} >= {"nccl"}, "the unfused way always is"
        assert all(
            us[one] is None or us[one] <= 1.3 * least or one.transport == "nccl" for one in kept
        )
        assert next(iter(every)) in kept
    assert choose(replace(op.make_problem(2, op.default_shape, "bfloat16")), target)
