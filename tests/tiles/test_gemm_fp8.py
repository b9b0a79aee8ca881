"""fp8 products with scales: generic variant on the emulator, both compiled, sm90's on a GPU."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import weft
from weft.base.dtypes import tolerance
from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.tiles import descriptors_sm90, gemm, gemm_sm90, swizzle, tile_scheduler

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = ("tensor", "rows", "blocks")
BLOCK = gemm.BLOCK_K.value


def quantised(m: int, n: int, k: int, kind: str, dtype=E4M3, device="cpu"):
    """a [m, k], b [n, k], their scales and what they stand for: scaled as torch._scaled_mm does."""
    torch.manual_seed(0)
    a = torch.randn(m, k, device=device)
    b = torch.randn(n, k, device=device) * 0.1
    shape_a = {"tensor": (1, 1), "rows": (m, 1), "blocks": (m, -(-k // BLOCK))}[kind]
    shape_b = {
        "tensor": (1, 1), "rows": (n, 1), "blocks": (-(-n // BLOCK), -(-k // BLOCK)),
    }[kind]  # fmt: skip
    scale_a = torch.rand(shape_a, device=device) + 0.5
    scale_b = torch.rand(shape_b, device=device) + 0.5
    a, b = a.to(dtype), b.to(dtype)

    def spread(scale, rows, per_row):
        if kind != "blocks":
            return scale
        return scale.repeat_interleave(per_row, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :k]

    product = (a.float() * spread(scale_a, m, 1)) @ (b.float() * spread(scale_b, n, BLOCK)).t()
    return a, b, scale_a, scale_b, product


def scaled_args(scale_a, scale_b, shape, kind):
    """gemm.Scaled of scales that lie as `quantised` gives them."""
    steps = [(s.stride(0) if s.shape[0] > 1 else 0, s.stride(1) if s.shape[1] > 1 else 0)
             for s in (scale_a, scale_b)]  # fmt: skip
    (a_row, a_k), (b_column, b_k) = steps
    return gemm.Scaled(scale_a, scale_b, shape, a_row, a_k, b_column, b_k,
                       BLOCK if kind == "blocks" else 1)  # fmt: skip


@triton.jit
def scaled_gemm(a, b, c, scale_a, scale_b, a_row, a_k, b_column, b_k, block_n, shape, tile,
                per_block: tl.constexpr):  # fmt: skip
    gemm.gemm(
        b, shape, tile, tl.cdiv(shape.m, tile.m), tl.program_id(0), tl.num_programs(0),
        swizzle.grouped, (4,),
        gemm.ready_always, gemm.Always(a, shape.m),
        gemm.emit_store, gemm.Stored(c, shape),
        scales=gemm.scales_of,
        scales_args=gemm.Scaled(scale_a, scale_b, shape, a_row, a_k, b_column, b_k, block_n),
        per_block=per_block,
    )  # fmt: skip


@gluon.jit
def scaled_gemm_sm90(a, b, c, partials, summed, e, scale_a, scale_b, a_row, a_k, b_column, b_k,
                     block_n, shape, tile_m: gl.constexpr, tile_n: gl.constexpr,
                     tile_k: gl.constexpr, stages: gl.constexpr,
                     per_block: gl.constexpr):  # fmt: skip
    order: gl.constexpr = swizzle.grouped
    ready: gl.constexpr = gemm.ready_always
    emit: gl.constexpr = gemm.emit_store
    scales: gl.constexpr = gemm.scales_of
    gemm_sm90.gemm(
        a, b, c, shape, gl.cdiv(shape.m, tile_m), gl.program_id(0), gl.num_programs(0),
        gemm_sm90.Shared(partials, summed, e, None),
        tile_m, tile_n, tile_k, stages, gemm_sm90.chunk_columns(tile_n), True,
        order, (8,), ready, gemm.Always(a, shape.m), emit, gemm.Stored(c, shape),
        scales=scales, per_block=per_block,
        scales_args=gemm.Scaled(scale_a, scale_b, shape, a_row, a_k, b_column, b_k, block_n),
    )  # fmt: skip


@pytest.mark.few(7)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("b_is_nk", [True, False])
def test_scales_are_applied(kind, dtype, b_is_nk):
    m, n, k = 72, 150, 272

    def main():
        a, b, scale_a, scale_b, product = quantised(m, n, k, kind, dtype)
        right = b if b_is_nk else b.t().contiguous()
        c = torch.full((m, n), float("nan"), dtype=torch.bfloat16)
        shape = gemm.Shape(m, n, k, k, k if b_is_nk else n, n)
        tile = gemm.Tile.of(32, 64, 64, size_k=k, b_is_nk=b_is_nk).as_constexpr()
        args = scaled_args(scale_a, scale_b, shape, kind)
        scaled_gemm[(3,)](a, right, c, args.a, args.b, *args[3:], shape, tile,
                          per_block=kind == "blocks")  # fmt: skip
        return c, product

    with weft.emulated(ranks=1) as ranks:
        ((c, product),) = ranks.run(main)
    error = (c.float() - product).norm() / product.norm()
    assert error <= tolerance("bfloat16", k)


def scalars(**more: str) -> dict:
    names = ("a_row", "a_k", "b_column", "b_k", "block_n")
    return {"scale_a": "*fp32", "scale_b": "*fp32", **dict.fromkeys(names, "i32"), **more}


@pytest.mark.slow
@pytest.mark.parametrize("per_block", [False, True])
def test_products_of_fp8_run_on_hoppers_tensor_cores(per_block):
    cut, target = gemm_sm90.PROMOTED, TARGETS["cuda:90"]
    chunk = gemm_sm90.chunk_of(cut.tile_m, cut.tile_n, 1)
    assert chunk == (64, 64)

    def operand(block, word, size):
        layout = descriptors_sm90.block_layout(block, size)
        return f"tensordesc<{word}[{block[0]}, {block[1]}],{layout!r}>"

    record = KernelRecord(
        name="scaled_gemm_sm90",
        signature={
            "a": operand((cut.tile_m, cut.tile_k), "fp8e4nv", 1),
            "b": operand((cut.tile_n, cut.tile_k), "fp8e4nv", 1),
            "c": operand(chunk, "bf16", 2),
            "partials": "*fp32", "summed": "*i64", "e": "i64",
            **scalars(shape=["i32"] * 6),
        },
        constants={
            "shape": gemm.Shape(*[None] * 6), "tile_m": cut.tile_m, "tile_n": cut.tile_n,
            "tile_k": cut.tile_k, "stages": cut.num_stages, "per_block": per_block,
        },
        options={"num_warps": cut.num_warps},
        divisible_by_16=("partials", "summed"),
    )  # fmt: skip
    binary = triton_api.compile_kernel(scaled_gemm_sm90, record, target)
    ptx = binary.asm["ptx"]
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in ptx
    assert "ld.local" not in ptx and "st.local" not in ptx
    assert binary.metadata.shared <= target.shared_bytes


@pytest.mark.few(1)
@pytest.mark.parametrize("per_block", [False, True])
@pytest.mark.parametrize(
    "target",
    [
        "cuda:90",
        "hip:gfx942",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("cuda:100", "hip:gfx950")),
    ],
)
def test_the_generic_variant_compiles(target, per_block):
    element = "fp8e5" if target == "hip:gfx942" else "fp8e4nv"
    tile = gemm.Tile.of(64, 128, 128, size_k=4096, b_is_nk=True)
    record = KernelRecord(
        name="scaled_gemm",
        signature={"a": f"*{element}", "b": f"*{element}", "c": "*bf16",
                   **scalars(shape=["i32"] * 6, tile=["constexpr"] * 6)},
        constants={"shape": gemm.Shape(*[None] * 6), "tile": tile, "per_block": per_block},
        options={"num_warps": 4, "num_stages": 3},
        divisible_by_16=("a", "b", "c", *(f"shape.{name}" for name in gemm.Shape._fields)),
    )  # fmt: skip
    assert triton_api.compile_kernel(scaled_gemm, record, TARGETS[target]).asm


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(2048, 2560, 1024), (200, 144, 1168)], ids=str)
def test_multiplies_fp8_as_the_generic_variant(shape, kind):
    m, n, k = shape
    cut, programs = gemm_sm90.PROMOTED, 132
    a, b, scale_a, scale_b, product = quantised(m, n, k, kind, device="cuda")
    c = torch.full((m, n), float("nan"), device="cuda", dtype=torch.bfloat16)
    plain = c.clone()
    elements = tile_scheduler.partial_elements(cut.tile_m, cut.tile_n, programs)
    partials = torch.empty(elements, device="cuda")
    summed = torch.zeros(2 * programs, device="cuda", dtype=torch.int64)
    extents = gemm.Shape(m, n, k, k, k, n)
    args = scaled_args(scale_a, scale_b, extents, kind)
    chunk = gemm_sm90.chunk_of(cut.tile_m, cut.tile_n, 1)
    scaled_gemm_sm90[(programs,)](
        descriptors_sm90.descriptor(a, (cut.tile_m, cut.tile_k)),
        descriptors_sm90.descriptor(b, (cut.tile_n, cut.tile_k)),
        descriptors_sm90.descriptor(c, chunk), partials, summed, 2,
        args.a, args.b, *args[3:], extents, cut.tile_m, cut.tile_n, cut.tile_k, cut.num_stages,
        kind == "blocks", num_warps=cut.num_warps,
    )  # fmt: skip
    tile = gemm.Tile.of(64, 64, 64, size_k=k, b_is_nk=True).as_constexpr()
    scaled_gemm[(programs,)](a, b, plain, args.a, args.b, *args[3:], extents, tile,
                             per_block=kind == "blocks")  # fmt: skip
    for found in (c, plain):
        error = (found.float() - product).norm() / product.norm()
        assert error <= tolerance("bfloat16", k)
