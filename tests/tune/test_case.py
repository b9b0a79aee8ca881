"""Inputs drawn on the device by the card's own words, weft's variants by theirs, rank processes."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.base.errors import ConfigError, UsageError
from weft.base.target import TARGETS
from weft.ops import card
from weft.tune import processes, variants
from weft.tune.answers import poison, rel_err
from weft.tune.case import Case, drawn_on
from weft.tune.processes import RanksStopped, messages_from_gpus, run_on_gpus

WORLD = SimpleNamespace(
    device=torch.device("cpu"), rank=1, num_ranks=4, target=TARGETS["cuda:90"], choices={}
)  # fmt: skip


def a_case(op: str = "ag_gemm", l2_bytes: int = 1 << 20, **shape: int) -> Case:
    chosen = card(op)
    sizes = {**chosen.default_shape, **shape}
    return Case(WORLD, chosen, chosen.make_problem(4, sizes, "bfloat16"), l2_bytes)


def test_inputs_are_the_cards_and_answers_this_ranks():
    case = a_case(m=16, n=8, k=32)
    mine = case.card.make_inputs(case.problem, WORLD.rank, 0)
    assert case.sets[0]["a"].shape == mine["a"].shape
    assert case.expected[0].shape == (16, 8)
    wanted = case.card.reference(
        case.problem,
        [drawn_on(WORLD.device, case.card.make_inputs, case.problem, r, 0) for r in range(4)],
    )[1]
    assert case.error(0, wanted) == 0.0
    assert case.error(0, wanted + 1) > case.tolerance


def test_generators_are_moved_to_the_device_with_their_seed():
    drawn = drawn_on(torch.device("meta"), lambda: torch.zeros(3))
    assert drawn.device.type == "meta"
    twice = [
        drawn_on(torch.device("cpu"), card("all_reduce").make_inputs, a_case("all_reduce").problem,
                 rank, 0)["x"] for rank in (0, 0, 1)
    ]  # fmt: skip
    assert torch.equal(twice[0], twice[1]) and not torch.equal(twice[0], twice[2])


def test_sets_are_more_than_l2_or_it_is_swept():
    small = a_case("all_reduce", l2_bytes=1 << 20, m=4, n=4)
    assert len(small.sets) == 3 and small.is_swept
    large = a_case("all_reduce", l2_bytes=1 << 10, m=64, n=64)
    assert len(large.sets) == 2 and not large.is_swept
    assert not torch.equal(small.sets[0]["x"], small.sets[1]["x"])


def test_errors_of_answers():
    ones = torch.ones(4)
    assert rel_err(ones, ones) == 0.0
    assert rel_err((ones, ones * 2), (ones, ones)) == 1.0
    assert rel_err(torch.ones(3), ones) == float("inf")
    poison(ones)
    assert rel_err(ones, torch.ones(4)) == float("inf")


def test_wefts_variants_by_words():
    case = a_case(m=512, n=512, k=512)
    (default,) = variants.of_weft(case, "weft")
    assert default.name == "weft" and len(default.calls) == len(case.sets)
    names = {v.name for v in variants.of_weft(case, "weft/each")}
    assert names == {"weft sm_push", "weft ce_push", "weft all_gather", "weft nccl"}
    (one,) = variants.of_weft(case, "weft/transport=ce_push/chunks=4")
    assert "transport='ce_push'" in one.about and "chunks=4" in one.about
    for words in ("weft/chunks", "weft/colour=red", "weft/chunks=many"):
        with pytest.raises(UsageError):
            list(variants.of_weft(case, words))
    with pytest.raises(ConfigError):
        list(variants.of_weft(case, "weft/chunks=0"))


def test_the_configuration_that_is_told_is_the_one_that_is_taken():
    """Of ag_gemm, which takes torch's product in a recording: launches cost the host nothing
    there."""
    op, target = card("ag_gemm"), TARGETS["cuda:90"]
    problem = op.make_problem(2, {"m": 128, "n": 7168, "k": 4096}, "bfloat16")
    case = SimpleNamespace(
        card=op, problem=problem, world=SimpleNamespace(target=target, choices={}), sets=[]
    )
    (weft,) = variants.of_weft(case, "weft")
    assert "transport='all_gather'" in weft.about_in("graph")
    first = str(next(iter(op.candidates(problem, target))))
    assert weft.about_in("eager") == weft.about_in("queued") == first
    assert variants.Variant("a peer", [], about="it").about_in("graph") == "it"


# ---------------------------------------------------------------------------------------------
# Processes


def speak(rank: int, send: Callable[[Any], None], what: str) -> None:
    for number in range(3):
        send((what, number))
    if what == "die" and rank == 1:
        os._exit(3)
    if what == "hang":
        time.sleep(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "said"),
    [
        pytest.param("end", None, marks=pytest.mark.slow),
        ("die", r"exit codes by rank \[0, 3\]"),
        pytest.param("hang", "silent", marks=pytest.mark.slow),
    ],
)
def test_what_ranks_say_is_heard_and_they_are_ended(what: str, said: str | None, monkeypatch):
    heard: list[tuple[str, int]] = []
    clock = itertools.count()

    def monotonic() -> int:
        """Only those that hang are waited for; how long processes take to begin is no matter."""
        return next(clock) if what == "hang" and len(heard) == 3 else 0

    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))
    stream = messages_from_gpus(speak, 2, what, silence_s=100.0)
    if said is None:
        heard = list(stream)
    else:
        with pytest.raises(RanksStopped, match=said):
            for message in stream:
                heard.append(message)
    assert heard == [(what, 0), (what, 1), (what, 2)]


def fail(rank: int) -> None:
    os._exit(rank)


@pytest.mark.slow
def test_a_failing_rank_is_told():
    with pytest.raises(RanksStopped, match="fail"):
        run_on_gpus(fail, 2)
    assert run_on_gpus(fail, 2, tolerate=True) == [0, 1]
