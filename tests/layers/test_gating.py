"""The gate of an MLP in one pass: as torch's functions, and theirs where torch looks on."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

import weft
from weft.layers.gating import Gating

ACTS = {
    "silu": functional.silu, "SiLU": nn.SiLU(), "gelu": functional.gelu, "GELU": nn.GELU(),
    "tanh": nn.GELU("tanh"), "relu": functional.relu,
}  # fmt: skip


def torchs(act, h):
    gate, value = h.chunk(2, dim=-1)
    return act(gate) * value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
def test_as_torchs_functions(ranks, act, dtype):
    def main():
        with weft.init() as world:
            for shape in ((5, 2 * 40), (2, 3, 2 * 1030), (0, 2 * 8), (4, 0)):
                gating = Gating(act, shape[-1] // 2, dtype, world)
                h = torch.randn(shape).to(dtype)
                close = {} if dtype == torch.float32 else {"rtol": 2**-7, "atol": 1e-3}
                torch.testing.assert_close(gating(h), torchs(act, h), **close)

    ranks(main, 1)


def test_one_kernel_where_torch_only_calls(ranks, monkeypatch):
    started = []
    monkeypatch.setattr(Gating, "_start", lambda self, h, out, start=Gating._start:
                        started.append(h.shape) or start(self, h, out))  # fmt: skip

    def main():
        with weft.init() as world:
            gating = Gating(functional.silu, 8, torch.float32, world)
            h = torch.randn(4, 16)
            started.clear()
            gating(h.t().contiguous().t())  # rows are not in rows
            gating(h.bfloat16())
            leaf = h.clone().requires_grad_()
            gating(leaf).sum().backward()
            torch.testing.assert_close(leaf.grad, torch.autograd.grad(
                torchs(functional.silu, h.requires_grad_()).sum(), h)[0])  # fmt: skip
            assert not started
            gating(h.detach())
            assert started == [(4, 16)]

    ranks(main, 1)
