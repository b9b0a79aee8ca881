"""A hook is one function for both languages, and moves 16 bytes at a time in each."""

from __future__ import annotations

import re

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

import weft
from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.tiles import descriptors_sm90, fragments
from weft.tiles.hooks import epilogue

ROWS, COLUMNS = 64, 128


@triton.jit
def gated(cells, fragment, x, out, num_rows, num_columns):
    """A hook: silu_mul of the fragment, + x."""
    value = epilogue.silu_mul(epilogue.load(fragment), tl.bfloat16)
    cells = epilogue.halved(cells)
    value = epilogue.add(x, cells, value, num_rows, num_columns)
    epilogue.store(out, cells, value, num_rows, num_columns)


@triton.jit
def in_triton(product, x, out, num_rows, num_columns, rows: tl.constexpr, columns: tl.constexpr):
    i, j = tl.arange(0, rows), tl.arange(0, columns)
    there = (i < num_rows)[:, None] & (j < 2 * num_columns)[None, :]
    value = tl.load(product + i[:, None] * 2 * num_columns + j[None, :], mask=there, other=0.0)
    gated(fragments.Cells(0, 0, 0, True), value, x, out, num_rows, num_columns)


@gluon.jit
def in_gluon(x, out, num_rows, num_columns, rows: gl.constexpr, columns: gl.constexpr,
             layout: gl.constexpr):  # fmt: skip
    """The fragment lies in shared memory, as the template for Hopper hands it to `emit`."""
    chunk = gl.allocate_shared_memory(gl.bfloat16, [rows, columns], layout)
    registers: gl.constexpr = fragments.layout_of_rows(columns, 8)
    chunk.store(gl.full([rows, columns], 1.0, gl.bfloat16, registers))
    fence_async_shared()
    gated(fragments.Cells(0, 0, 0, True), chunk, x, out, num_rows, num_columns)


@pytest.mark.parametrize("kernel", [in_triton, in_gluon], ids=["triton", "gluon"])
def test_one_hook_is_compiled_in_both(kernel):
    constants = {"rows": ROWS, "columns": COLUMNS}
    if kernel is in_gluon:
        constants["layout"] = descriptors_sm90.block_layout((ROWS, COLUMNS), 2)
    names = [name for name in ("product", "x", "out") if name in kernel.arg_names]
    numbers = dict.fromkeys(("num_rows", "num_columns"), "i32")
    record = KernelRecord(
        kernel.__name__, {**dict.fromkeys(names, "*bf16"), **numbers}, constants,
        {"num_warps": 4}, (*names, "num_columns"),
    )  # fmt: skip
    ptx = triton_api.compile_kernel(kernel, record, TARGETS["cuda:90"]).asm["ptx"]
    assert len(re.findall(r"st\.global\S*\.v4", ptx)) == ROWS * COLUMNS // 2 // 128 // 8
    assert not re.findall(r"st\.global\S*\.b16", ptx)


def test_the_hook_does_what_torch_does(ranks):
    rows, columns = 13, 20
    product, x = torch.randn(rows, 2 * columns).bfloat16(), torch.randn(rows, columns).bfloat16()
    gate, up = product.float()[:, 0::2], product.float()[:, 1::2]
    expected = (torch.nn.functional.silu(gate) * up).bfloat16() + x

    def main():
        weft.init()
        out = torch.full((rows, columns), float("nan"), dtype=torch.bfloat16)
        in_triton[(1,)](product, x, out, rows, columns, 16, 64)
        torch.testing.assert_close(out, expected, rtol=0.01, atol=1e-2)

    ranks(main, 1)
