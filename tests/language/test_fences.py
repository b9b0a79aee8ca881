"""Fences: a relaxed signal behind one publishes what was put before it."""

from __future__ import annotations

import re

import language_kernels as kernels
import pytest
import torch
import triton
import triton.language as tl
from language_kernels import CUDA, GPUS, HIP, machine_text

import weft
import weft.language as wl
from weft.verify import compiled

SIZE = 64


@triton.jit
def push(world, source, inbox, signal, out, IS_FENCED: tl.constexpr, SIZE: tl.constexpr):
    """To the right neighbour, with a relaxed signal."""
    at = tl.arange(0, SIZE)
    right = (wl.rank(world) + 1) % world.num_ranks
    wl.put(world, inbox + at, source + at, to=right)
    if IS_FENCED:
        wl.fence(world)
    wl.notify(world, signal, to=right, order=wl.Order.RELAXED)
    wl.wait(signal, at_least=1)
    tl.store(out + at, tl.load(inbox + at))


@triton.jit
def fenced(world, x, out, flags, n):
    i = tl.arange(0, 1024)
    wl.put(world, out + i, x + i, to=1, mask=i < n)
    wl.fence(world)
    wl.notify(world, flags, to=1, order=wl.Order.RELAXED)
    wl.get(world, x + i, out + i, source=2)
    wl.fence(world)
    wl.notify(world, flags, to=2, order=wl.Order.RELAXED)


def pushing(is_fenced):
    def main():
        world = weft.init()
        source = torch.arange(SIZE) + 100.0 * world.rank
        inbox = world.empty((SIZE,), torch.float32, name="inbox")
        out = torch.zeros(SIZE)
        push[(1,)](world.arg, source, inbox, world.signals(1), out, IS_FENCED=is_fenced, SIZE=SIZE)
        world.synchronize()
        return out

    return main


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("seed", range(2))
def test_what_was_put_before_a_fence_is_seen(ranks, nodes, seed):
    """By far ranks too."""
    results = ranks(pushing(True), 4, nodes=nodes, seed=seed)
    for rank, out in enumerate(results):
        assert torch.equal(out, torch.arange(SIZE) + 100.0 * ((rank - 1) % 4))


@pytest.mark.parametrize("seed", range(3))
def test_without_one_it_is_a_race(ranks, seed):
    report = ranks(pushing(False), 2, collect=True, seed=seed)
    assert {finding.kind for finding in report.findings} == {"race"}
    assert "tl.load(inbox" in str(report)


@pytest.mark.parametrize("target", GPUS)
def test_it_compiles_and_the_check_finds_nothing(target):
    report = compiled(kernels.compiled(fenced, target))
    assert report.ok, str(report)


@pytest.mark.parametrize("target", CUDA)
def test_a_fence_comes_behind_the_barrier_and_before_the_signal(target):
    code = machine_text(fenced, target)
    fences = [m.start() for m in re.finditer(r"fence\.acq_rel\.sys", code)]
    barriers = [m.start() for m in re.finditer(r"bar\.sync|barrier\.sync", code)]
    signals = [m.start() for m in re.finditer(r"(atom|red)\.global\.sys\.relaxed", code)]
    stores = [m.start() for m in re.finditer(r"st\.global", code)]
    assert len(signals) == 2 and len(fences) == 2
    assert any(min(stores) < barrier < fences[0] for barrier in barriers)
    assert fences[0] < signals[0] < fences[1] < signals[1]


@pytest.mark.parametrize("target", HIP)
def test_a_fence_writes_back_on_amd(target):
    code = machine_text(fenced, target)
    assert len(re.findall(r"buffer_wbl2 sc0 sc1", code)) >= 2
