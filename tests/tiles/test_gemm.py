"""The GEMM template: right on the emulator, pipelined and without spills where it is compiled."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.base.dtypes import parse_dtype, tolerance
from weft.base.records import KernelRecord
from weft.base.target import TARGETS, Target
from weft.language import triton_api
from weft.tiles import blocking, fragments, gemm, swizzle


@triton.jit
def plain_gemm(a, b, c, shape, tile, group_m: tl.constexpr):
    gemm.gemm(
        b, shape, tile, tl.cdiv(shape.m, tile.m), tl.program_id(0), tl.num_programs(0),
        swizzle.grouped, (group_m,),
        gemm.ready_always, gemm.Always(a, shape.m),
        gemm.emit_store, gemm.Stored(c, shape),
    )  # fmt: skip


@triton.jit
def add_tile(at, cells, value, args):
    """What another rank would have summed. args: (fp32 [m, n], shape)"""
    i, j = cells.row + fragments.index(value, 0), cells.column + fragments.index(value, 1)
    shape = args[1]
    mask = (i < shape.m)[:, None] & (j < shape.n)[None, :]
    return value + tl.load(args[0] + i[:, None] * shape.n + j[None, :], mask=mask, other=0.0)


@triton.jit
def tell(at, part, args):
    wl.notify(args[1], args[0] + at.i_n + part, to=0)


@triton.jit
def count_program(args):
    wl.notify(args[1], args[0], to=0)


@triton.jit
def gemm_with_all_hooks(a, b, c, d, told, ended, shape, tile, world):
    gemm.gemm(
        b, shape, tile, tl.cdiv(shape.m, tile.m), tl.program_id(0), tl.num_programs(0),
        swizzle.grouped, (2,),
        gemm.ready_always, gemm.Always(a, shape.m),
        gemm.emit_store, gemm.Stored(c, shape),
        add_tile, (d, shape), tell, (told, world), count_program, (ended, world),
    )  # fmt: skip


# ---- on the emulator


def test_every_hook_runs_once_where_it_should():
    m, n, k, programs = 40, 24, 32, 3

    def main():
        world = weft.init()
        a, b, d = torch.randn(m, k), torch.randn(k, n), torch.randn(m, n)
        c = torch.empty(m, n)
        told, ended = world.signals(2), world.signals(1)
        shape, tile = gemm.Shape(m, n, k, k, n, n), gemm.Tile.of(16, 16, 16, size_k=k)
        gemm_with_all_hooks[(programs,)](
            a, b, c, d, told, ended, shape, tile.as_constexpr(), world.arg
        )
        torch.testing.assert_close(c, a @ b + d, rtol=1e-5, atol=1e-5)
        # Rows of tiles, each of which told of this column of tiles.
        assert told.tolist() == [3, 3]
        assert ended.tolist() == [programs]

    with weft.emulated(ranks=1) as ranks:
        ranks.run(main)


def multiply(m: int, n: int, k: int, dtype: torch.dtype, *, b_is_nk: bool, tma: bool):
    torch.manual_seed(0)
    a = torch.randn(m, k).to(dtype)
    b = torch.randn(n, k).to(dtype).t() if b_is_nk else torch.randn(k, n).to(dtype)
    c = torch.full((m, n), float("nan"), dtype=dtype)
    tile = gemm.Tile.of(32, 16, 16, size_k=k, b_is_nk=b_is_nk, tma=tma)
    shape = gemm.Shape(m, n, k, k, k if b_is_nk else n, n)
    left, right, result = a, b, c
    if tma:
        left = blocking.descriptor(a, (32, 16))
        right = (
            blocking.descriptor(b.t(), (16, 16)) if b_is_nk else blocking.descriptor(b, (16, 16))
        )
        result = blocking.descriptor(c, (32, 16))
    plain_gemm[(3,)](left, right, result, shape, tile.as_constexpr(), group_m=2)
    return a, b, c


@pytest.mark.few(9)
@pytest.mark.parametrize("tma", [True, False])
@pytest.mark.parametrize("b_is_nk", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("shape", [(64, 32, 32), (72, 40, 48), (1, 8, 8)], ids=str)
def test_multiplies(shape, dtype, b_is_nk, tma):
    def main():
        return multiply(*shape, getattr(torch, dtype), b_is_nk=b_is_nk, tma=tma)

    with weft.emulated(ranks=1) as ranks:
        ((a, b, c),) = ranks.run(main)
    reference = a.float() @ b.float()
    error = (c.float() - reference).norm() / reference.norm()
    assert error <= tolerance(dtype, shape[2])


def test_multiplies_where_nothing_divides():
    with weft.emulated(ranks=1) as ranks:
        ((a, b, c),) = ranks.run(
            lambda: multiply(37, 19, 23, torch.float32, b_is_nk=False, tma=False)
        )
    torch.testing.assert_close(c, a @ b, rtol=1e-5, atol=1e-5)


# ---- compiled


def compiled(target: Target, dtype: str, *, b_is_nk: bool, m=8192, n=2560, k=8192):
    word = parse_dtype(dtype).triton
    size = parse_dtype(dtype).itemsize
    tma = blocking.can_use_tma(target, [k * size, n * size])
    cut = next(blocking.candidates(m, n, k, dtype, target))

    def operand(rows: int, columns: int) -> str:
        return f"tensordesc<{word}[{rows}, {columns}]>" if tma else f"*{word}"

    right = (cut.tile_n, cut.tile_k) if b_is_nk else (cut.tile_k, cut.tile_n)
    record = KernelRecord(
        name="plain_gemm",
        signature={
            "a": operand(cut.tile_m, cut.tile_k),
            "b": operand(*right),
            "c": operand(cut.tile_m, cut.tile_n),
            "shape": ["i32"] * 6,
            "tile": ["constexpr"] * 6,
        },
        constants={
            "shape": gemm.Shape(*[None] * 6),
            "tile": gemm.Tile.of(
                cut.tile_m, cut.tile_n, cut.tile_k, size_k=k, b_is_nk=b_is_nk, tma=tma
            ),
            "group_m": 8,
        },
        options={"num_warps": cut.num_warps, "num_stages": cut.num_stages},
        divisible_by_16=("a", "b", "c", *(f"shape.{name}" for name in gemm.Shape._fields)),
    )
    return triton_api.compile_kernel(plain_gemm, record, target)


HALF = pytest.param("float16", marks=pytest.mark.slow)  # compiled as bfloat16 is


@pytest.fixture(scope="module", params=[HALF, "bfloat16", "float32"])
def dtype(request) -> str:
    return request.param


@pytest.mark.few(3)
@pytest.mark.parametrize("b_is_nk", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", [t for t in TARGETS.values() if t.backend == "cuda"], ids=str)
def test_is_pipelined_and_spills_nothing_on_nvidia(target, dtype, b_is_nk):
    kernel = compiled(target, dtype, b_is_nk=b_is_nk)
    ptx, ttgir = kernel.asm["ptx"], kernel.asm["ttgir"]
    assert "ld.local" not in ptx and "st.local" not in ptx
    if target.has_tma:
        assert "cp.async.bulk.tensor" in ptx, "operands do not come by TMA"
        # One stage's loads are under way while another is multiplied.
        assert any("async_tma_copy" in line for line in inner_loop(ttgir))
    else:
        assert "cp.async.cg" in ptx and any("async_copy" in line for line in inner_loop(ttgir))
        assert "st.global.v4" in ptx
    if dtype != "float32":
        instruction = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}[target.arch]
        assert instruction in ptx


@pytest.mark.parametrize("b_is_nk", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("target", [t for t in TARGETS.values() if t.backend == "hip"], ids=str)
def test_is_wide_and_spills_nothing_on_amd(target, dtype, b_is_nk):
    text = compiled(target, dtype, b_is_nk=b_is_nk).asm["amdgcn"]
    assert re.search(r"\.vgpr_spill_count:\s*0\b", text)
    assert "v_mfma" in text or "v_fma" in text
    if dtype != "float32":  # Triton 3.9 takes fp32 to shared memory a word at a time
        assert re.search(r"(global|buffer)_load_(lds_)?dwordx4", text)
    # gfx942 stores fp16 results as its matrix cores hold them: 64 bits in a row.
    assert re.search(r"global_store_dwordx[24]", text) and "global_store_short" not in text


def inner_loop(ttgir: str) -> Iterator[str]:
    """Lines of the innermost scf.for."""
    depth_of_loop, lines, inside = 0, [], []
    for line in ttgir.splitlines():
        indent = len(line) - len(line.lstrip())
        if "scf.for" in line:
            depth_of_loop, lines = indent, []
        elif lines is not None and depth_of_loop and indent <= depth_of_loop and "}" in line:
            inside = inside or lines
            depth_of_loop = 0
        elif depth_of_loop:
            lines.append(line)
    yield from inside


def test_the_outer_loop_is_not_flattened_into_the_inner_one():
    ttgir = compiled(TARGETS["cuda:90"], "bfloat16", b_is_nk=False).asm["ttgir"]
    assert ttgir.count("scf.for") == 2
