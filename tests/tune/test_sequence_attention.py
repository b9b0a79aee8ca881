"""benchmarks/sequence_attention.py, briefly and on emulated ranks: all ways have one answer."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import weft

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["forward", "both"])
def test_all_ways_have_one_answer(ranks, monkeypatch, mode):
    monkeypatch.syspath_prepend(str(FOLDER))
    script = importlib.import_module("sequence_attention")
    assert mode in script.MODES

    def main():
        dist.init_process_group()
        with weft.init() as world:
            subject = script.subject_of(36, (4, 2, 16), world.device, torch.bfloat16)
            ways = script.ways_of(world, 36, with_kernels=False)
            calls, failed, _ = script.checked(world, ways, mode, subject)
            assert not failed, failed
            return list(calls)

    names = ranks(main, 2)[0]
    assert len(names) == 10 and len(set(names)) == 10
