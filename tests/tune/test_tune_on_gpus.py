"""`weft tune` on GPUs: choices by time, kept, and taken by a later world."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

import pytest
import torch

import weft
from weft.base.hardware import H200X4
from weft.ops.gemm_rs import Config
from weft.tune.case import Case
from weft.tune.processes import run_on_gpus


def _takes(rank: int, config: dict) -> None:
    with weft.init() as world:
        a = torch.ones(512, 256, device=world.device, dtype=torch.bfloat16)
        b = torch.ones(512, 256, device=world.device, dtype=torch.bfloat16).t()
        assert (weft.ops.gemm_rs(a, b, world=world) == 512).all()
        # An unfused way is also a call of a collective.
        assert Config(**config) in [call.config for call in world.calls._latest.values()]


def _tunes(rank: int) -> None:
    """In a world of one's own, which a candidate that breaks it does not touch."""
    with weft.init() as world:
        (found,) = weft.tune("gemm_rs", {"m": 512, "n": 512, "k": 256}, world=world)
        assert found.eager["us"] >= found.eager["best_us"] > 0
        everyone = world.backend.exchange(found.eager, 30.0)
        assert all(one == everyone[0] for one in everyone)


@pytest.mark.gpu(n=2)
def test_the_verb_keeps_what_a_later_world_takes(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    words = ["tune", "gemm_rs", "--shape", "m=512,n=512,k=256", "--ranks", "2", "--json"]
    done = subprocess.run([sys.executable, "-m", "weft", *words], capture_output=True, text=True,
                          env=dict(os.environ), timeout=280)  # fmt: skip
    assert done.returncode == 0, done.stderr
    (choice,) = json.loads(done.stdout)["choices"]
    run_on_gpus(_takes, 2, choice["eager"]["config"])


def _reckons(rank: int, fields: dict) -> None:
    with weft.init() as world:
        assert world.target.machine.copy_gbps == fields["copy_gbps"]
        a = torch.ones(512, 512, device=world.device, dtype=torch.bfloat16)
        assert weft.ops.gemm_rs(a, a, world=world).shape == (256, 512)


@pytest.mark.gpu(n=2)
def test_a_probe_reads_plausible_rates_within_20_s_and_later_worlds_reckon_with_them(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    words = [sys.executable, "-m", "weft", "machine", "--ranks", "2", "--json"]
    for _ in range(2):  # first with kernels to compile
        began = time.monotonic()
        done = subprocess.run(words, capture_output=True, text=True, env=dict(os.environ),
                              timeout=280)  # fmt: skip
        took_s = time.monotonic() - began
        assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert took_s < 40, "20 s, and processes that start"
    fields = json.loads(done.stdout)["record"]
    for name in ("copy_gbps", "push_gbps", "memory_gbps", "library_tflops", "program_tflops"):
        assert 1 / 4 < fields[name] / getattr(H200X4, name) < 2, name
    assert 0.5 < fields["signal_us"] < 10
    run_on_gpus(_reckons, 2, fields)


def _runs_unfused(rank: int) -> None:
    with weft.init() as world:
        for name in ("ag_attention", "flash_decode", "moe_route", "ep_dispatch", "ep_combine",
                     "ag_moe", "moe_rs", "moe_ar"):  # fmt: skip
            card = weft.ops.card(name)
            problem = card.make_problem(2, card.default_shape, "bfloat16")
            case = Case(world, card, problem, 1 << 20)
            answer = card.run(world, problem, case.sets[0], card.unfused[0])
            assert case.error(0, answer) <= case.tolerance, name


@pytest.mark.gpu(n=2)
def test_unfused_ways_give_the_operators_answers():
    run_on_gpus(_runs_unfused, 2)


@pytest.mark.gpu(n=2)
def test_a_program_tunes_in_its_own_world(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    run_on_gpus(_tunes, 2)
    assert len(list(tmp_path.iterdir())) == 1
