"""Grouped products by tables on the device: every slot once, no matter how few experts have any."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import weft
from weft.ops import cards
from weft.ops.moe_route import Problem
from weft.tiles import gemm
from weft.tiles.hooks import table

router = cards()["moe_route"]


@triton.jit
def ready_at_once(at, segment, tile, args):
    """args: (source, token_of)"""
    return table.rows_by_token(args[0], args[1], at)


@triton.jit
def store(at, cells, fragment, args):
    """args: gemm.Stored"""
    table.store_slots(args.c, at, cells, fragment, args.shape.n)


@triton.jit
def plain_grouped(a, b, c, token_of, tiles, turns, num_tiles, shape, room, tile):
    gemm.gemm(
        b, shape, tile, tl.load(num_tiles), tl.program_id(0), tl.num_programs(0),
        table.in_turn, table.Turns(tiles, turns, room, 2),
        ready_at_once, (a, token_of),
        store, gemm.Stored(c, shape),
    )  # fmt: skip


def multiply(logits, *, top_k=2, n=40, k=24, b_is_nk=False, dtype=torch.float32):
    """Two column tiles, the last ragged; three programs. Gives (got, expected)."""
    m, experts = logits.shape
    problem = Problem(m, experts, 1, "float32", top_k=top_k, tile_m=16)
    tables = router.reference(problem, [{"logits": logits}])[0]
    a, b = torch.randn(m, k).to(dtype), torch.randn(experts, k, n).to(dtype)
    c = torch.full((problem.num_slots, n), torch.nan, dtype=dtype)
    laid = b.transpose(1, 2).contiguous() if b_is_nk else b
    shape = gemm.Shape(problem.num_slots, n, k, k, k if b_is_nk else n, n)
    tile = gemm.Tile.of(16, 32, 16, size_k=k, b_is_nk=b_is_nk).as_constexpr()
    plain_grouped[(3,)](
        a, laid, c, tables.token_of, tables.tiles, tables.turns, tables.num_tiles, shape,
        problem.max_tiles, tile,
    )  # fmt: skip
    ids = tables.ids.flatten()[tables.slot_of.flatten().argsort()].long()
    rows = a.float()[tables.token_of.long()]
    return c, torch.einsum("sk,skn->sn", rows, b.float()[ids])


@pytest.mark.parametrize("b_is_nk", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_slot_by_its_expert(dtype, b_is_nk):
    with weft.emulated(ranks=1) as ranks:
        logits = torch.randn(37, 6)
        ((got, expected),) = ranks.run(lambda: multiply(logits, dtype=dtype, b_is_nk=b_is_nk))
    error = (got.float() - expected).norm() / expected.norm()
    assert error <= (1e-6 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("how", ["all to one", "one token", "more experts than tokens"])
def test_experts_without_tokens(how):
    logits = torch.randn(1, 6) if how == "one token" else torch.randn(9, 40)
    if how == "all to one":
        logits = torch.randn(50, 4)
        logits[:, 3] = 9
    with weft.emulated(ranks=1) as ranks:
        ((got, expected),) = ranks.run(lambda: multiply(logits, top_k=1))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_rows_by_index_have_no_tma():
    def main():
        a, table = torch.randn(16, 16), torch.zeros(16, dtype=torch.int32)
        shape = gemm.Shape(16, 16, 16, 16, 16, 16)
        tile = gemm.Tile.of(16, 16, 16, size_k=16, tma=True).as_constexpr()
        plain_grouped[(1,)](a, a, a.clone(), table, table, table, table, shape, 1, tile)

    with pytest.raises(Exception, match="rows by index, and B of several"):
        with weft.emulated(ranks=1) as ranks:
            ranks.run(main)
