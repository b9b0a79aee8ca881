"""The GEMM template for few rows: all shares of all programs, their sums, what it compiles to."""

from __future__ import annotations

from math import ceil

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given
from hypothesis import strategies as st

from weft.base.dtypes import tolerance
from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.tiles import gemm, gemm_small
from weft.verify import compiled


@triton.jit
def small_gemm(a, b, c, sums, come, shape, tile):
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    gemm_small.gemm_small(
        b, shape, tile, gemm_small.Partials(sums, come), program, num_programs,
        gemm.ready_always, gemm.Always(a, shape.m), gemm.emit_store, gemm.Stored(c, shape),
    )  # fmt: skip


def share(units: int, program: int, num_programs: int) -> range:
    return range(*gemm_small.share_of.fn(units, program, num_programs))


@given(units=st.integers(1, 500), num_programs=st.integers(1, 300))
def test_each_unit_is_in_one_share_and_its_holder_is_known(units, num_programs):
    shares = [share(units, program, min(num_programs, units)) for program in range(num_programs)]
    assert not any(shares[units:])
    shares = shares[:units]
    assert [unit for one in shares for unit in one] == list(range(units))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1
    for program, one in enumerate(shares):
        for unit in one:
            assert gemm_small.holder_of.fn(unit, units, len(shares)) == program


def multiply(m, n, k, dtype, num_programs, *, b_is_nk=False, calls=1):
    """a, b and c of `calls` calls with one `partials`."""
    torch.manual_seed(0)
    tile = gemm.Tile.of(16, 16, 16, size_k=k, b_is_nk=b_is_nk)
    sums = torch.full((gemm_small.partial_elements(16, 16, num_programs),), float("nan"))
    come = torch.zeros(ceil(m / 16) * ceil(n / 16), dtype=torch.int32)
    done = []
    for _ in range(calls):
        a, c = torch.randn(m, k).to(dtype), torch.full((m, n), float("nan"), dtype=dtype)
        b = torch.randn(n, k).to(dtype).t() if b_is_nk else torch.randn(k, n).to(dtype)
        shape = gemm.Shape(m, n, k, k, k if b_is_nk else n, n)
        small_gemm[(num_programs,)](a, b, c, sums, come, shape, tile.as_constexpr())
        done.append((a, b, c))
    assert not come.any()
    return done


@pytest.mark.parametrize("b_is_nk", [True, False])
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((16, 64, 48), "float32"), ((5, 40, 50), "float32"), ((1, 16, 16), "bfloat16"),
     ((41, 33, 64), "float16")],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("num_programs", [3, 20])
def test_multiplies(ranks, shape, dtype, num_programs, b_is_nk):
    def main():
        return multiply(*shape, getattr(torch, dtype), num_programs, b_is_nk=b_is_nk, calls=2)

    (done,) = ranks(main, 1)
    for a, b, c in done:
        reference = a.float() @ b.float()
        error = (c.float() - reference).norm() / reference.norm()
        assert error <= tolerance(dtype, shape[2])


def test_sums_are_the_same_in_every_schedule(ranks):
    """Five programs, of which no tile is one's alone: whoever comes last adds up."""
    found = [
        ranks(lambda: multiply(8, 48, 96, torch.float32, 5)[0][2], 1, seed=seed)[0]
        for seed in range(3)
    ]
    assert all(torch.equal(found[0], one) for one in found[1:])


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("target", "tile_m"),
    [("cuda:80", 16), ("cuda:90", 16), ("cuda:90", 64), ("cuda:100", 32), ("hip:gfx942", 16)],
)
def test_weights_are_under_way_while_others_are_multiplied(target, tile_m):
    target = TARGETS[target]
    tma, stages = target.has_tma, 4 if target.backend == "cuda" else 2

    def operand(rows: int, columns: int) -> str:
        return f"tensordesc<bf16[{rows}, {columns}]>" if tma else "*bf16"

    record = KernelRecord(
        name="small_gemm",
        signature={
            "a": operand(tile_m, 128), "b": operand(64, 128),
            "c": operand(tile_m, 64), "sums": "*fp32", "come": "*i32", "shape": ["i32"] * 6,
            "tile": ["constexpr"] * 6,
        },
        constants={
            "shape": gemm.Shape(*[None] * 6),
            "tile": gemm.Tile.of(tile_m, 64, 128, size_k=8192, b_is_nk=True, tma=tma),
        },
        options={"num_warps": 4, "num_stages": stages},
        divisible_by_16=("a", "b", "c", "sums", *(
            f"shape.{name}" for name in gemm.Shape._fields
        )),
    )  # fmt: skip
    binary = triton_api.compile_kernel(small_gemm, record, target)
    assert compiled(small_gemm, target, record).ok
    if target.backend == "cuda":
        ptx = binary.asm["ptx"]
        assert "ld.local" not in ptx and "st.local" not in ptx
        # Shared memory holds the stages: the loop is pipelined.
        assert binary.metadata.shared >= (stages - 1) * (tile_m + 64) * 128 * 2


@given(tiles=st.integers(1, 2000), num_k=st.integers(1, 200), most=st.integers(1, 264))
def test_programs_begin_and_end_with_tiles_where_that_keeps_half_of_them(tiles, num_k, most):
    programs = gemm_small.programs_for(tiles, num_k, most)
    assert 1 <= programs <= most
    if tiles <= most:
        # Each has an equal part of one tile, or as equal as steps allow.
        assert programs % tiles == 0 and programs // tiles <= num_k
        assert 2 * programs > most or programs == tiles * num_k
    else:
        assert ceil(tiles / programs) == ceil(tiles / most)


@pytest.mark.parametrize("n", [2560, 8192, 26624])
@pytest.mark.parametrize("tile_m", [16, 32, 64])
def test_all_that_is_cut_for_few_rows_fits_on_an_sm(tile_m, n):
    for name in ("cuda:80", "cuda:90", "cuda:100"):
        for cut in gemm_small.cuts(tile_m, n, TARGETS[name]):
            cut.check("gemm", "bfloat16", "bfloat16", TARGETS[name].has_tma, TARGETS[name])
            most = gemm_small.most_resident(cut, "bfloat16", "bfloat16", True, TARGETS[name])
            assert most in (TARGETS[name].num_sms, 2 * TARGETS[name].num_sms)
