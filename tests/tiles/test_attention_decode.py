"""The decode template: any lengths, any cut, pages; the same bits always; what it compiles to."""

from __future__ import annotations

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
from weft.tiles import attention_decode
from weft.tiles.attention import Shape, Tile
from weft.tiles.attention_decode import Contiguous, Paged, Partials, Stored, pack_of
from weft.verify import compiled


@triton.jit
def decode(q, cache, lengths, out, partials, shape, splits, tile):
    attention_decode.decode(
        q, cache, lengths, shape, splits, tile, partials, tl.program_id(0),
        tl.num_programs(0), attention_decode.emit_store, Stored(out, shape),
    )  # fmt: skip


@triton.jit
def decode_tile(q, cache, lengths, out, shape, tile):
    """A tile to a program, as tasks have them."""
    at = attention_decode.tile_at(tl.program_id(0), shape, tile)
    attention_decode.one_tile(
        at, q, cache, lengths, shape, tile, attention_decode.emit_store, Stored(out, shape)
    )


def inputs(lengths, max_kv, kv_heads, group, d, dtype=torch.float32):
    """q, k, v, lengths; what lies behind a sequence's keys is NaN."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    k, v = (drawn(len(lengths), max_kv, kv_heads, d) for _ in range(2))
    for i, length in enumerate(lengths):
        k[i, length:], v[i, length:] = torch.nan, torch.nan
    return drawn(len(lengths), kv_heads * group, d), k, v, torch.tensor(lengths, dtype=torch.int32)


def expected(q, k, v, lengths, scale):
    out = torch.zeros(q.shape)
    group = q.shape[1] // k.shape[2]
    for i, length in enumerate(lengths.tolist()):
        keys, values = (x[i, :length].float().repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("hd,jhd->hj", q[i].float(), keys) * scale
        out[i] = torch.einsum("hj,jhd->hd", scores.softmax(1), values)
    return out.to(q.dtype)


def run(q, cache, lengths, scale, splits, programs, calls=1):
    batch, heads, d = q.shape
    kv_heads, pack = cache.k.shape[2], pack_of(heads // cache.k.shape[2], 16)
    tiles, shape = batch * heads // pack, Shape.of(batch, heads, kv_heads, d, scale)
    tile = Tile.of(16, 16, d=d, pack=pack, tokens=1)
    sizes = [(tiles * splits, tile.m, tile.d), (tiles * splits, tile.m)]
    tile = tile.as_constexpr()
    come = torch.zeros(tiles, dtype=torch.int32)
    partials = Partials(*(torch.full(size, torch.nan) for size in sizes), come)
    for _ in range(calls):
        out = torch.full_like(q, torch.nan)
        decode[(programs,)](q, cache, lengths, out, partials, shape, splits, tile)
        assert not come.any()
    alone = torch.full_like(q, torch.nan)
    decode_tile[(tiles,)](q, cache, lengths, alone, shape, tile)
    return out, alone


def check(out, q, k, v, lengths, scale):
    wanted = expected(q, k, v, lengths, scale)
    error = (out.double() - wanted.double()).norm() / wanted.double().norm()
    assert error <= tolerance(str(q.dtype).removeprefix("torch."), q.shape[2])
    assert not out[lengths == 0].any()


@pytest.mark.few(3)
@pytest.mark.parametrize(("splits", "programs"), [(1, 2), (3, 4), (8, 3)])
@pytest.mark.parametrize(
    ("lengths", "max_kv", "heads", "dtype"),
    [
        ([70, 0, 33], 70, (2, 3, 24), "float32"),
        ([1, 16, 17, 0], 40, (1, 1, 16), "float32"),
        ([64, 5], 80, (2, 8, 32), "bfloat16"),
        ([50, 0], 50, (1, 16, 40), "float16"),
        ([20, 3], 20, (2, 19, 16), "float32"),
    ],
    ids=str,
)
def test_any_lengths_and_cuts(ranks, lengths, max_kv, heads, dtype, splits, programs):
    q, k, v, lengths = inputs(lengths, max_kv, *heads, getattr(torch, dtype))

    def main():
        return run(q, Contiguous(k, v, max_kv), lengths, 0.3, splits, programs, calls=2)

    ((out, alone),) = ranks(main, 1)
    check(out, q, k, v, lengths, 0.3)
    check(alone, q, k, v, lengths, 0.3)
    assert splits > 1 or torch.equal(out, alone)


def test_lengths_that_no_cache_has(ranks):
    """The device's to know: they end with the cache."""
    q, k, v, lengths = inputs([20, 20, 0], 20, 1, 2, 16)
    wild = torch.tensor([20, 1 << 30, -5], dtype=torch.int32)
    ((out, alone),) = ranks(lambda: run(q, Contiguous(k, v, 20), wild, 0.3, 2, 3), 1)
    check(out, q, k, v, lengths, 0.3)
    check(alone, q, k, v, lengths, 0.3)


def test_pages(ranks):
    """In any order; no page behind the last key is looked up."""
    page, width, lengths = 4, 6, [23, 0, 9]
    q, k, v, lengths = inputs(lengths, page * width, 2, 3, 16)
    order = torch.randperm(3 * width)
    table = order.reshape(3, width).to(torch.int32)
    pages = [torch.empty(3 * width, page, 2, 16) for _ in range(2)]
    for to, whole in zip(pages, (k, v), strict=True):
        to[order] = whole.reshape(3 * width, page, 2, 16)
    for i, length in enumerate(lengths.tolist()):
        table[i, -(-length // page) :] = 1 << 30

    def main():
        cache = Paged(*pages, page * width, table, page, width)
        return run(q, cache, lengths, 0.3, 2, 3)

    ((out, alone),) = ranks(main, 1)
    check(out, q, k, v, lengths, 0.3)
    check(alone, q, k, v, lengths, 0.3)


def test_the_same_bits_in_every_schedule(ranks):
    """Whoever comes last merges, in the order of splits."""
    q, k, v, lengths = inputs([60, 49], 60, 1, 2, 16)
    found = [
        ranks(lambda: run(q, Contiguous(k, v, 60), lengths, 0.3, 4, 8)[0], 1, seed=seed)[0]
        for seed in range(3)
    ]
    assert all(torch.equal(found[0], one) for one in found[1:])


@given(length=st.integers(0, 5000), splits=st.integers(1, 40), tile_n=st.sampled_from([16, 64]))
def test_splits_cover_all_keys_in_whole_tiles(length, splits, tile_n):
    keys = attention_decode.keys_of_split.fn(length, splits, tile_n)
    live = attention_decode.splits_with_keys.fn(length, keys, splits)
    assert keys % tile_n == 0 and 1 <= live <= splits
    cuts = [range(i * keys, min((i + 1) * keys, length)) for i in range(live)]
    assert [j for cut in cuts for j in cut] == list(range(length))
    assert length == 0 or all(cuts)


@pytest.mark.parametrize(
    ("target", "rows", "tile_n", "d", "stages"),
    [
        ("cuda:90", 16, 64, 128, 3),
        pytest.param("cuda:100", 128, 32, 256, 2, marks=pytest.mark.slow),
        pytest.param("hip:gfx942", 16, 64, 128, 2, marks=pytest.mark.slow),
    ],
)
def test_keys_are_under_way_while_others_are_used(target, rows, tile_n, d, stages):
    target = TARGETS[target]
    tensors = dict.fromkeys(("q", "out"), "*bf16")
    record = KernelRecord(
        name="decode",
        signature={
            **tensors, "cache": ["*bf16", "*bf16", "i32"], "lengths": "*i32",
            "partials": ["*fp32", "*fp32", "*i32"], "shape": [*["i32"] * 4, "fp32"],
            "splits": "i32", "tile": ["constexpr"] * 6,
        },
        constants={
            "cache": Contiguous(None, None, None), "partials": Partials(None, None, None),
            "shape": Shape(*[None] * 5), "tile": Tile.of(rows, tile_n, d=d, pack=rows, tokens=1),
        },
        options={"num_warps": 4 if rows * d <= 4096 else 8, "num_stages": stages},
        divisible_by_16=("q", "out", "cache.k", "cache.v", "shape.d"),
    )  # fmt: skip
    binary = triton_api.compile_kernel(decode, record, target)
    assert compiled(decode, target, record).ok
    if target.backend == "cuda":
        ptx = binary.asm["ptx"]
        assert "ld.local" not in ptx and "st.local" not in ptx
        # Shared memory holds the stages of keys and values: the loop is pipelined.
        assert binary.metadata.shared >= (stages - 1) * 2 * tile_n * d * 2
