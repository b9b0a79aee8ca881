"""Hooks of docs/decisions/009-hooks.md with segments and a state: they run, compile for GPUs."""

from __future__ import annotations

import pytest
import torch
from hook_kernels import kernel

import weft
from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.language import triton_api


def test_a_tile_travels_from_hook_to_hook(ranks):
    groups = torch.tensor([0, 1, 0, 1], dtype=torch.int32)
    x = torch.arange(32.0)

    def main():
        weft.init()
        out, done = torch.zeros(4, 16), torch.zeros(4, dtype=torch.int32)
        kernel[(2,)](groups, x, out, done, 4)
        for i in range(4):
            parts = [x[16 * h :][:16] for h in ((s + i % 2) % 2 for s in range(groups[i] + 1))]
            wanted = torch.stack(parts)
            more = x[16 * (i // 2) :][:16]
            assert torch.equal(out[i], wanted.sum(0) + more + wanted.max(0).values)
        assert done.tolist() == [1] * 4

    ranks(main, 1)


@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
def test_they_compile(target: str):
    signature = {"groups": "*i32", "x": "*fp32", "out": "*fp32", "done": "*i32", "num_tiles": "i32"}
    record = KernelRecord("kernel", signature=signature)
    compiled = triton_api.compile_kernel(kernel, record, TARGETS[target])
    assert "ttgir" in compiled.asm
