"""The template for few rows on Hopper: what is compiled, what it refuses, its twin's results."""

from __future__ import annotations

import pytest
import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from weft.base.dtypes import tolerance
from weft.base.errors import ConfigError
from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.tiles import blocking, gemm, gemm_sm90, gemm_small, gemm_small_sm90
from weft.verify import compiled

HOPPER = TARGETS["cuda:90"]


@gluon.jit
def nothing(args, options: gl.constexpr):
    pass


@gluon.jit
def small_gemm(a, b, c, sums, come, shape, tile_m: gl.constexpr, tile_n: gl.constexpr,
               tile_k: gl.constexpr, stages: gl.constexpr, b_is_nk: gl.constexpr):  # fmt: skip
    begin: gl.constexpr = nothing
    ready: gl.constexpr = gemm.ready_always
    emit: gl.constexpr = gemm_small_sm90.emit_store
    gemm_small_sm90.gemm_small(
        a, b, shape, gemm_small.Partials(sums, come), gl.program_id(0), gl.num_programs(0),
        tile_m, tile_n, tile_k, stages, b_is_nk, begin, (), 0,
        ready, gemm.Always(a, shape.m), emit, gemm.Stored(c, shape),
    )  # fmt: skip


def record_of(tile_m: int, tile_n: int, b_is_nk: bool) -> KernelRecord:
    def operand(*block: int) -> str:
        return f"tensordesc<bf16[{block[0]}, {block[1]}],{gemm_sm90.block_layout(block, 2)!r}>"

    return KernelRecord(
        name="small_gemm",
        signature={
            "a": operand(tile_m, 64), "b": operand(*((tile_n, 64) if b_is_nk else (64, tile_n))),
            "c": "*bf16", "sums": "*fp32", "come": "*i32", "shape": ["i32"] * 6,
            **dict.fromkeys(("tile_m", "tile_n", "tile_k", "stages", "b_is_nk"), "constexpr"),
        },
        constants={
            "shape": gemm.Shape(*[None] * 6), "tile_m": tile_m, "tile_n": tile_n, "tile_k": 64,
            "stages": gemm_small_sm90.most_stages(tile_m, tile_n, 64, HOPPER), "b_is_nk": b_is_nk,
        },
        options={"num_warps": gemm_small_sm90.NUM_WARPS},
        divisible_by_16=("c", "sums", *(f"shape.{name}" for name in gemm.Shape._fields)),
    )  # fmt: skip


@pytest.mark.parametrize("b_is_nk", [True, False])
@pytest.mark.parametrize(("tile_m", "tile_n"), [(16, 128), (64, 128)])
def test_weights_fill_shared_memory_and_nothing_spills(tile_m, tile_n, b_is_nk):
    record = record_of(tile_m, tile_n, b_is_nk)
    binary = triton_api.compile_kernel(small_gemm, record, HOPPER)
    assert compiled(small_gemm, HOPPER, record).ok
    ptx = binary.asm["ptx"]
    assert "ld.local" not in ptx and "st.local" not in ptx
    assert f"m64n{tile_m}k16" in ptx, "few rows are what wgmma takes from the right"
    weights = record.constants["stages"] * tile_n * 64 * 2
    assert 112 << 10 <= weights < binary.metadata.shared <= HOPPER.shared_bytes


@pytest.mark.parametrize(
    ("extents", "words"),
    [((8, 128, 64, 4), "tile 8 x 128 x 64"), ((16, 256, 64, 4), "tile_n=64 or 128"),
     ((64, 128, 64, 10), "take 2 to 9"), ((16, 128, 64, 1), "take 2 to 12")],
)  # fmt: skip
def test_tiles_that_cannot_run(extents, words):
    with pytest.raises(ConfigError, match=words):
        gemm_small_sm90.check("op", *extents, HOPPER)


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("b_is_nk", [True, False])
@pytest.mark.parametrize("shape", [(1, 1024, 512), (16, 7168, 4096), (64, 2504, 1096)], ids=str)
def test_is_right_and_the_same_each_time(shape, b_is_nk):
    m, n, k = shape
    tile_m, tile_n, programs = min(64, max(16, m)), 128, HOPPER.num_sms
    stages = gemm_small_sm90.most_stages(tile_m, tile_n, 64, HOPPER)
    a = torch.randn(m, k, device="cuda").bfloat16()
    b = torch.randn(n, k, device="cuda").bfloat16().t()
    b = b if b_is_nk else b.contiguous()
    tiles = blocking.Blocking(tile_m, tile_n, 64, 4, stages).num_tiles(m, n)
    elements = gemm_small.partial_elements(tile_m, tile_n, programs)
    sums = torch.full((elements,), float("nan"), device="cuda")
    come = torch.zeros(tiles, dtype=torch.int32, device="cuda")
    extents = gemm.Shape(m, n, k, k, k if b_is_nk else n, n)
    left = gemm_sm90.descriptor(a, (tile_m, 64))
    right = gemm_sm90.descriptor(*((b.t(), (tile_n, 64)) if b_is_nk else (b, (64, tile_n))))
    done = []
    for _ in range(3):
        c = torch.full((m, n), float("nan"), device="cuda").bfloat16()
        small_gemm[(programs,)](
            left, right, c, sums, come, extents, tile_m, tile_n, 64, stages, b_is_nk,
            num_warps=gemm_small_sm90.NUM_WARPS,
        )  # fmt: skip
        done.append(c)
    reference = a.float() @ b.float()
    error = (done[0].float() - reference).norm() / reference.norm()
    assert error <= tolerance("bfloat16", k) and not come.any()
    assert all(torch.equal(done[0], one) for one in done)
