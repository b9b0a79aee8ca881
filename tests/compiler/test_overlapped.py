"""Operators as programs: their plans are those of the golden files, whatever is chosen else."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import operators
import pytest
import torch
from effort import calls_of
from ir_reader import read
from operators import compiled
from random_programs import random_layers, random_program

from weft.base.errors import UsageError
from weft.base.target import parse_target
from weft.compiler import Compiled
from weft.compiler.binding import bind
from weft.compiler.facts import Facts, class_of
from weft.compiler.frontend import trace
from weft.compiler.pipeline import overlap
from weft.ir import device, task

GOLDEN = Path(__file__).parent / "golden"
WIDE = {"tiles": {"product": (128, 256, 64)}}
PLANS = {
    "ag_gemm_put": (operators.ag_gemm, {"engines": {"gathered": "ce_push"}, **WIDE}),
    "ag_gemm_push": (operators.ag_gemm, {"engines": {"gathered": "sm_push"}, **WIDE}),
    "ag_gemm_pushers": (operators.ag_gemm, {"engines": {"gathered": "pushers"}, **WIDE}),
    "ag_gemm_packets": (operators.ag_gemm, {
        "engines": {"gathered": "one_shot_ll"}, "tiles": {"product": (64, 64, 128)}, "m": 64}),
    "ag_gemm_scaled": (operators.ag_gemm_scaled, {"engines": {"gathered": "pushers"}, **WIDE}),
    "gemm_rs": (operators.gemm_rs, {"engines": {"scattered": "sm_push"}, **WIDE}),
    "gemm_rs_staged": (operators.gemm_rs, {
        "engines": {"scattered": "ce_push"}, "chunks": {"scattered": 2}, **WIDE}),
    "gemm_rs_scaled": (operators.gemm_rs_scaled, {
        "engines": {"scattered": "ce_push"}, "chunks": {"scattered": 2},
        "tiles": {"product": (128, 128, 128)}}),
    "gemm_ar_two_shot": (operators.gemm_ar, {"engines": {"reduced": "sm_push"}, **WIDE}),
    "ag_gemm_nodes": (
        operators.ag_gemm, {"engines": {"gathered": "sm_put"}, "nodes": (2, 2), **WIDE},
    ),
    "ag_gemm_relay": (
        operators.ag_gemm, {"engines": {"gathered": "relay"}, "nodes": (2, 2), **WIDE},
    ),
    "gemm_rs_relay": (
        operators.gemm_rs, {"engines": {"scattered": "relay"}, "nodes": (2, 2), **WIDE},
    ),
    "gemm_ar_nodes": (
        operators.gemm_ar, {"engines": {"reduced": "sm_put"}, "nodes": (2, 2), **WIDE},
    ),
    "gemm_a2a": (operators.gemm_a2a, {"engines": {"exchanged": "sm_push"}, **WIDE}),
    "a2a_gemm": (operators.a2a_gemm, {
        "engines": {"exchanged": "ce_push"}, "chunks": {"exchanged": 4}, **WIDE}),
    "a2a_gemm_push": (operators.a2a_gemm, {"engines": {"exchanged": "sm_push"}, **WIDE}),
    "gemm_ar_one_shot": (operators.gemm_ar, {"engines": {"reduced": "one_shot_ll"}, "m": 64}),
    "all_reduce_rms_norm": (operators.all_reduce_rms_norm, {}),
    "all_reduce_rms_norm_few": (operators.all_reduce_rms_norm, {"m": 8}),
    "all_reduce_rms_norm_twice": (operators.all_reduce_rms_norm, {"m": 64}),
    "ag_moe": (operators.ag_moe, {}),
    "moe_rs": (operators.moe_rs, {}),
    "moe_rs_relay": (operators.moe_rs, {"nodes": (2, 2)}),
    "moe": (operators.moe, {}),
    "mlp": (operators.mlp, {"engines": {"gathered": "ce_push", "scattered": "sm_push"}, "tiles": {
        "product": (128, 256, 64), "product_2": (128, 128, 64)}}),
    "mlp_staged": (operators.mlp, {"engines": {
        "gathered": "ce_push", "scattered": "ce_push"}, "tiles": {
        "product": (128, 256, 64), "product_2": (128, 128, 64)}}),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANS)
def test_the_plan_is_the_golden_one(name: str):
    function, choices = PLANS[name]
    shown = device.show(compiled(function, **choices).plan.bare, places=False)
    assert shown == (GOLDEN / f"{name}.plan").read_text()


def drawn(seed: int):
    """A random program, and the facts of a random call of it."""
    num_ranks = 1 + seed % 4
    made = random_layers if seed % 3 else random_program
    program = made(seed, num_ranks).stages.tasks["place"]
    target = parse_target("cuda:90" if seed % 5 == 0 else "emu")
    nodes = (1, num_ranks - 1) if seed % 7 == 0 and num_ranks > 1 else ()
    return program, Facts({"m": seed % 11 + 1}, num_ranks, target, nodes)


def goes_through(seeds) -> set[str]:
    """Each passes the tables of legality; gives the engines that occurred."""
    found = set()
    for seed in seeds:
        program, facts = drawn(seed)
        stages = overlap(program, facts)
        assert read(task, task.show(stages.program)) == stages.program
        assert read(device, device.show(stages.plan)) == stages.plan
        found |= {one.engine for one in stages.program.tasks if one.engine}
    return found


@pytest.mark.slow
def test_random_programs_have_legal_plans():
    found = goes_through(range(60))
    assert {"ce_push", "sm_push", "sm_put"} <= found


@pytest.mark.slow
def test_many_random_programs_have_legal_plans():
    goes_through(range(1000, 1600))


@pytest.mark.parametrize("function", operators.PARAMETERS)
def test_operators_are_compiled_in_less_than_a_second(function):
    """Before Triton, for the largest sizes: most take 10,000 calls, in 5 to 15 ms."""
    compiled(function, m=16384)
    assert calls_of(lambda: compiled(function, m=16384)) < 60_000


def layers(seed: int = 1) -> Compiled:
    return random_layers(seed, 4)


def test_calls_of_one_class_of_sizes_run_one_plan():
    one = layers()
    facts = [Facts({"m": m}, 4) for m in (4096, 4000, 3073, 3072, 8192)]
    plans = [one.overlapped(each) for each in facts]
    assert plans[0] is plans[1] is plans[2]
    assert plans[3] is not plans[0] and plans[4] is not plans[0]
    assert [class_of(m) for m in (0, 1, 2, 16, 17, 25, 4096, 3073)] == [
        0, 1, 16, 16, 24, 32, 4096, 4096,
    ]  # fmt: skip


def test_a_lowering_that_there_is_not():
    with pytest.raises(UsageError, match="lowering='hidden'; it is overlapped, unfused or"):
        layers().options(lowering="hidden")


class World:
    """What a call asks of a world."""

    rank, num_ranks, target = 0, 4, parse_target("cuda:90")
    choices = MappingProxyType({})  # nothing was measured
    backend = SimpleNamespace(seats=SimpleNamespace(nodes=[0] * 4))


def test_what_calls_share_is_found_once(monkeypatch):
    """Of the same shapes nothing is checked or chosen again: a call's host time is microseconds."""
    one = Compiled(trace(operators.ag_gemm, "tp", operators.PARAMETERS[operators.ag_gemm]))
    seen, bound = [], []
    monkeypatch.setattr(
        "weft.compiler.compiled.bind", lambda *given: bound.append(given) or bind(*given)
    )
    monkeypatch.setattr(
        "weft.plan.run_plan", lambda stages, *_, **__: seen.append(stages) or (None,)
    )
    world = World()
    for rows in (1024, 1024, 1000, 2048):
        a, b = (torch.empty(size, dtype=torch.bfloat16, device="meta")
                for size in ((rows, 4096), (4096, 7168)))  # fmt: skip
        one(a, b, world=world)
    assert len(bound) == 3
    assert seen[0] is seen[1] is seen[2] and seen[3] is not seen[0]
