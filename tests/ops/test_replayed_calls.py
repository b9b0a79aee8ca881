"""Calls that come again are replayed, on emulated ranks too: with what a call names, not what the
call that was recorded named."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import weft
from weft.base.dtypes import tolerance
from weft.base.errors import WeftError
from weft.base.target import TARGETS
from weft.compiler.experts import Routing
from weft.emulator.recording import LaunchRecording
from weft.ops import (
    ag_attention,
    ag_gemm,
    ag_moe,
    ag_wgrad,
    all_gather,
    cards,
    flash_decode,
    gemm_ar,
    gemm_rs,
    moe_ar,
    moe_rs,
)
from weft.plan.attention_launches import GatheredAttention
from weft.runtime import replays

RANKS = 3
EMU = TARGETS["emu"]


@dataclass(frozen=True)
class Subject:
    """An operator by one transport; `call(world, inputs, problem, config, out)`."""

    op: str
    transport: str
    call: Callable[..., Any]
    shape: dict[str, int]
    # The inputs that stay as they are: sizes and tables that others agree with.
    fixed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.op}-{self.transport}"


def _product(function: Any) -> Callable[..., Any]:
    def call(world: Any, given: Any, problem: Any, config: Any, out: Any) -> Any:
        return function(given["a"], given["b"], world=world, config=config, out=out)

    return call


def _gather(world: Any, given: Any, problem: Any, config: Any, out: Any) -> Any:
    return all_gather(given["x"], world=world, m=problem.m, config=config, out=out)


def _attend(world: Any, given: Any, problem: Any, config: Any, out: Any) -> Any:
    got = ag_attention(
        given["q"], given["k"], given["v"], world=world, causal=problem.causal, m=problem.m,
        cu_seqlens=given["cu_seqlens"], config=config, out=out[0],
    )  # fmt: skip
    return (got,)


def _decode(world: Any, given: Any, problem: Any, config: Any, out: Any) -> Any:
    return flash_decode(
        given["q"], given["k_cache"], given["v_cache"], given["lengths"], world=world,
        block_table=given.get("block_table"), config=config, out=out,
    )  # fmt: skip


def _experts(function: Any) -> Callable[..., Any]:
    def call(world: Any, given: Any, problem: Any, config: Any, out: Any) -> Any:
        routing = Routing.of(given, problem.tile_m)
        return function(given["x"], given["b"], routing, world=world, config=config, out=out)

    return call


def _gradient(world: Any, given: Any, problem: Any, config: Any, out: Any) -> Any:
    return ag_wgrad(given["x"], given["y"], world=world, config=config, out=out)


PRODUCT = {"m": 12, "n": 32, "k": 32}
SUBJECTS = [
    Subject("all_gather", "ce_pull", _gather, {"m": 8, "n": 40}),
    Subject("ag_gemm", "sm_push", _product(ag_gemm), PRODUCT),
    Subject("ag_gemm", "ce_push", _product(ag_gemm), PRODUCT),
    Subject("ag_gemm", "ll", _product(ag_gemm), PRODUCT),
    Subject("gemm_rs", "sm_push", _product(gemm_rs), PRODUCT),
    Subject("gemm_rs", "ce_push", _product(gemm_rs), PRODUCT),
    Subject("gemm_rs", "ce_parts", _product(gemm_rs), PRODUCT),
    Subject("gemm_ar", "two_shot_ll", _product(gemm_ar), PRODUCT),
    Subject("ag_wgrad", "sm_push", _gradient, PRODUCT),
    Subject("ag_attention", "ce_push", _attend, {}, ("cu_seqlens",)),
    Subject("flash_decode", "sm_push", _decode, {}, ("block_table",)),
    Subject("ag_moe", "sm_push", _experts(ag_moe), {}),
    Subject("ag_moe", "ce_push", _experts(ag_moe), {}),
    Subject("moe_rs", "sm_push", _experts(moe_rs), {}),
    Subject("moe_ar", "sm_push", _experts(moe_ar), {}),
    Subject("moe_ar", "two_shot_ll", _experts(moe_ar), {}),
]  # fmt: skip


@pytest.fixture(autouse=True)
def recorded_at_once(monkeypatch):
    """The second call of a key is a replay, and all calls are on one slot and, as a GPU's allocator
    does it, with the same memory for what each of them allocates."""
    monkeypatch.setattr(replays, "SIGHTINGS", 1)
    monkeypatch.setenv("WEFT_SLOTS", "1")
    launch, lse = GatheredAttention.launch, {}

    def launch_with_the_same_lse(self: Any, world: Any, tensors: tuple) -> None:
        q, k, v, out, own, sequences = tensors
        launch(self, world, (q, k, v, out, lse.setdefault(world.rank, own), sequences))

    monkeypatch.setattr(GatheredAttention, "launch", launch_with_the_same_lse)


@pytest.fixture
def replayed(monkeypatch):
    """The recordings that were replayed, in turn."""
    seen, replay = [], LaunchRecording.replay
    monkeypatch.setattr(LaunchRecording, "replay", lambda self: seen.append(self) or replay(self))
    return seen


def other_operands(subject: Subject, problem: Any, rank: int) -> Iterator[dict[str, Any]]:
    """The inputs, then with each of them another tensor."""
    op = cards()[subject.op]
    first, other = (op.make_inputs(problem, rank, seed) for seed in (0, 1))
    yield first
    for name, value in first.items():
        if isinstance(value, torch.Tensor) and name not in subject.fixed and not is_table(value):
            yield {**first, name: other[name]}


def is_table(value: torch.Tensor) -> bool:
    return not value.is_floating_point()


def check(subject: Subject) -> int:
    """Calls with every operand and result in turn, three times; each has its own result. Returns
    how many differ."""
    op = cards()[subject.op]
    problem = op.make_problem(RANKS, {**op.trials[0].shape, **subject.shape}, "float32")
    config = next(c for c in op.candidates(problem, EMU) if c.transport == subject.transport)
    everyone = [list(other_operands(subject, problem, rank)) for rank in range(RANKS)]
    right = [op.reference(problem, list(inputs)) for inputs in zip(*everyone, strict=True)]

    def result_of(world: Any) -> Any:
        return torch.utils._pytree.tree_map(
            lambda one: torch.empty_like(one, device="cpu"),
            op.fake(problem, everyone[world.rank][0], world.rank),
        )

    def main() -> None:
        world = weft.init()
        outs = [result_of(world), result_of(world)]
        calls = [(i, outs[0]) for i in range(len(right))] + [(0, outs[1])]
        for _ in range(3):
            for i, out in calls:
                got = subject.call(world, everyone[world.rank][i], problem, config, out)
                assert_same(got, right[i][world.rank], problem)
        world.close()

    with weft.emulated(ranks=RANKS, seed=1) as ranks:
        ranks.run(main)
    return len(right) + 1


def assert_same(got: Any, want: Any, problem: Any) -> None:
    got = _parts(got)
    for one, other in zip(got, _parts(want)[: len(got)], strict=True):
        error = (one.double() - other.double()).norm() / other.double().norm()
        assert error <= tolerance("float32", RANKS)


def _parts(value: Any) -> Any:
    return value if isinstance(value, (tuple, list)) else (value,)


@pytest.mark.few(1)
@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_a_replay_has_the_operands_and_the_result_of_its_own_call(subject, replayed):
    calls = check(subject)
    # A rank records each call once at least, and replays it in the two rounds behind.
    assert len(replayed) >= 2 * RANKS * calls


def test_a_replay_has_the_scale_of_its_own_call(replayed):
    """A number, which launches hold as it is."""
    op = cards()["flash_decode"]
    problem = op.make_problem(RANKS, op.trials[0].shape, "float32")
    config = next(c for c in op.candidates(problem, EMU) if c.transport == "sm_push")
    everyone = [op.make_inputs(problem, rank, 0) for rank in range(RANKS)]

    def main() -> None:
        world = weft.init()
        given = everyone[world.rank]
        out, by_scale = torch.empty_like(given["q"]), {}
        for scale in (0.05, 2.0) * 3:
            got = flash_decode(
                given["q"], given["k_cache"], given["v_cache"], given["lengths"], world=world,
                scale=scale, block_table=given.get("block_table"), config=config, out=out,
            ).clone()  # fmt: skip
            world.synchronize()
            assert torch.equal(by_scale.setdefault(scale, got), got)
        assert not torch.allclose(*by_scale.values())
        world.close()

    with weft.emulated(ranks=RANKS, seed=1) as ranks:
        ranks.run(main)
    assert len(replayed) == 4 * RANKS


@pytest.mark.parametrize("subject", [SUBJECTS[0], SUBJECTS[5]], ids=str)
def test_a_key_without_one_of_its_addresses_is_found(subject, monkeypatch):
    """So what tests on emulated ranks say of keys is true."""
    run, keys = replays.Replays.run, []
    monkeypatch.setattr(
        replays.Replays,
        "run",
        lambda self, key, *work, **_: keys.append(key) or run(self, key, *work),
    )
    check(subject)
    # The streams beside a product have shorter ones, without addresses.
    length = max(map(len, keys))
    full = next(key for key in keys if len(key) == length)
    # Addresses: the slot's number is small.
    found = [i for i, part in enumerate(full) if isinstance(part, int) and part > 1 << 20]
    assert len(found) == length - 1
    for i in found:
        monkeypatch.setattr(
            replays.Replays, "run",
            lambda self, key, *work, i=i, **_: run(
                self, (*key[:i], *key[i + 1 :]) if len(key) == length else key, *work
            ),
        )  # fmt: skip
        with pytest.raises((AssertionError, WeftError)):
            check(subject)


def test_a_finding_of_a_replay_names_the_lines_of_its_own_call():
    op = cards()["all_gather"]
    problem = op.make_problem(2, {"m": 8, "n": 40}, "float32")
    config = next(c for c in op.candidates(problem, EMU) if c.transport == "ce_pull")
    lines = {}

    def main() -> None:
        world = weft.init()
        x, out = op.make_inputs(problem, world.rank)["x"], torch.empty(8, 40)
        all_gather(x, world=world, m=8, config=config, out=out)
        world.synchronize()
        call = _line_behind()
        all_gather(x, world=world, m=8, config=config, out=out)
        with world.stream("another"):
            out.zero_()  # nothing orders it after the copies
        lines[world.rank] = call

    with weft.emulated(ranks=2, collect=True) as ranks:
        ranks.run(main)
    sides = [side for one in ranks.report for side in one.sides]
    copies = [side.place for side in sides if "copy of recording" in str(side.kernel)]
    assert {place.outermost.line for place in copies} == {lines[0]}
    assert all("_copy" in [frame.function for frame in place.frames] for place in copies)


def _line_behind() -> int:
    return sys._getframe(1).f_lineno + 1
