"""What is done to a tile on its way to memory: as torch does it to what was stored before."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import weft
from weft.ir.kinds import ELEMENTWISE
from weft.ir.shapes import GATED
from weft.tiles import fragments
from weft.tiles.hooks import epilogue

ACTIVATED = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


@triton.jit
def work(product, other, out, m, n, kind: tl.constexpr):
    """One tile of 16 x 16 from (16, 16) on, of m x n."""
    i, j = 16 + tl.arange(0, 16), 16 + tl.arange(0, 16)
    mask = (i < m)[:, None] & (j < n)[None, :]
    value = tl.load(product + i[:, None] * n + j[None, :], mask=mask, other=0.0)
    if kind == "silu_mul" or kind == "gelu_mul" or kind == "gelu_tanh_mul":
        if kind == "silu_mul":
            value = epilogue.silu_mul(value, out.dtype.element_ty)
        elif kind == "gelu_mul":
            value = epilogue.gelu_mul(value, out.dtype.element_ty)
        else:
            value = epilogue.gelu_tanh_mul(value, out.dtype.element_ty)
        cells = epilogue.halved(fragments.Cells(16, 16, 0, True))
        epilogue.store(out, cells, value, m, n // 2)
    else:
        if kind == "silu":
            value = epilogue.silu(value, out.dtype.element_ty)
        elif kind == "gelu":
            value = epilogue.gelu(value, out.dtype.element_ty)
        elif kind == "gelu_tanh":
            value = epilogue.gelu_tanh(value, out.dtype.element_ty)
        elif kind == "mul":
            value = epilogue.mul(other, fragments.Cells(16, 16, 0, True), value, m, n)
        elif kind == "add":
            value = epilogue.add(other, fragments.Cells(16, 16, 0, True), value, m, n)
        elif kind == "mul_row":
            value = epilogue.mul_row(other, fragments.Cells(16, 16, 0, True), value, m, n)
        else:
            value = epilogue.add_row(other, fragments.Cells(16, 16, 0, True), value, m, n)
        epilogue.store(out, fragments.Cells(16, 16, 0, True), value, m, n)


@pytest.mark.parametrize("kind", ELEMENTWISE)
def test_a_ragged_tile_is_what_torch_makes_of_it(ranks, kind):
    m, n = 21, 28
    product, other = torch.randn(m, n), torch.randn(m, n).bfloat16()
    rounded = product.bfloat16().float()
    expected = {
        **{kind: of(rounded) for kind, of in ACTIVATED.items()},
        **{f"{kind}_mul": of(rounded[:, 0::2]) * rounded[:, 1::2]
           for kind, of in ACTIVATED.items()},
        "mul": rounded * other.float(),
        "add": rounded + other.float(),
        "mul_row": rounded * other[:1].float(),
        "add_row": rounded + other[:1].float(),
    }[kind].bfloat16()  # fmt: skip
    column = 8 if kind in GATED else 16

    def main():
        weft.init()
        out = torch.full(expected.shape, float("nan"), dtype=torch.bfloat16)
        work[(1,)](product, other, out, m, n, kind)
        torch.testing.assert_close(out[16:, column:], expected[16:, column:], rtol=0.01, atol=1e-3)
        assert out[:16].isnan().all() and out[:, :column].isnan().all()

    ranks(main, 1)
