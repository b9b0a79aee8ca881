"""The attention template: right on the emulator, pipelined and without spills where compiled."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

import weft
from weft.base.dtypes import tolerance
from weft.tiles import attention as tiles


@triton.jit
def cut(at, args):
    """args: (k, v, rows, rows of a segment)"""
    return tl.cdiv(args[2], args[3])


@triton.jit
def ready_backwards(at, here, segment, args):
    """The last segment first. args: as `cut`"""
    first = (tl.cdiv(args[2], args[3]) - 1 - segment) * args[3]
    end = tl.minimum(first + args[3], args[2])
    return tiles.Segment(args[0], args[1], first, end, first)


@triton.jit
def attend(q, k, v, out, lse, cu_seqlens, shape, tile, count, steps, rows, length,
           causal: tl.constexpr):  # fmt: skip
    seen = tiles.seen_by(cu_seqlens, count, steps, 0, rows)
    tiles.attention(
        q, out, lse, shape, tile, tl.program_id(0), tl.num_programs(0), seen, causal,
        cut, ready_backwards, (k, v, rows, length),
    )  # fmt: skip


def reference(q, k, v, cu_seqlens, causal):
    """(out, lse) in fp64, sequence by sequence."""
    out, lse = torch.zeros(q.shape, dtype=torch.float64), torch.full(q.shape[:2], -torch.inf)
    group = q.shape[1] // k.shape[1]
    for first, end in zip(cu_seqlens, cu_seqlens[1:], strict=False):
        one = slice(first, end)
        keys = k[one].double().repeat_interleave(group, 1)
        values = v[one].double().repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q[one].double(), keys) * q.shape[2] ** -0.5
        if causal:
            scores += torch.full(scores.shape[1:], -torch.inf).triu(1)
        out[one] = torch.einsum("hqk,khd->qhd", scores.softmax(2), values)
        lse[one] = scores.logsumexp(2).t().float()
    return out, lse


def call(tokens, heads, d, tile, cu_seqlens, *, causal, dtype="float32", length=0, programs=3):
    """The template on one emulated rank, keys in segments of `length`; held to the reference."""
    q_heads, kv_heads = heads
    kind = getattr(torch, dtype)
    q = torch.randn(tokens, q_heads, d).to(kind)
    k, v = (torch.randn(tokens, kv_heads, d).to(kind) for _ in range(2))
    out, lse = torch.full_like(q, torch.nan), torch.full((tokens, q_heads), torch.nan)
    shape = tiles.Shape.of(tokens, q_heads, kv_heads, d)
    table = torch.tensor(cu_seqlens, dtype=torch.int32)
    count = len(cu_seqlens) - 1
    attend[(programs,)](
        q, k, v, out, lse, table, shape, tile.as_constexpr(), count, (count + 1).bit_length(),
        tokens, length or tokens, causal,
    )  # fmt: skip
    wanted, wanted_lse = reference(q, k, v, cu_seqlens, causal)
    error = (out.double() - wanted).norm() / wanted.norm()
    assert error <= tolerance(dtype, tokens)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    return out


def run(*args, **options):
    with weft.emulated(ranks=1) as ranks:
        (out,) = ranks.run(lambda: call(*args, **options))
    return out


# ---- on the emulator


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("length", [0, 7], ids="segments of {}".format)
def test_segments_in_any_order(length, causal):
    """Keys that all queries of a tile see, before them and behind them."""
    tile = tiles.Tile.of(16, 16, d=16)
    run(72, (2, 1), 16, tile, [0, 72], causal=causal, length=length)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "cu_seqlens", [[0, 3, 3, 40, 57], [0, 0, 1, 2, 57, 57], [5, 20, 50]], ids=str
)
def test_sequences_of_any_lengths(cu_seqlens, causal):
    """Tiles hold queries of several; what is in none has no output and no sum."""
    out = run(57, (2, 2), 16, tiles.Tile.of(16, 16, d=16), cu_seqlens, causal=causal, length=24)
    assert not out[: cu_seqlens[0]].any() and not out[cu_seqlens[-1] :].any()


@pytest.mark.parametrize(
    ("heads", "pack", "tokens"), [((6, 2), 3, None), ((4, 1), 2, None), ((8, 1), 8, 1)], ids=str
)
def test_groups_of_heads_share_their_keys(heads, pack, tokens):
    """Groups that divide no tile, halves of groups, tiles that are not full."""
    tile = tiles.Tile.of(16, 16, d=16, pack=pack, tokens=tokens)
    run(19, heads, 16, tile, [0, 19], causal=True)


@pytest.mark.parametrize("d", [1, 20])
def test_heads_of_any_length(d):
    run(20, (2, 1), d, tiles.Tile.of(16, 16, d=d), [0, 20], causal=True)


@pytest.mark.parametrize("dtype", [pytest.param("float16", marks=pytest.mark.slow), "bfloat16"])
def test_half_precision(dtype):
    tile = tiles.Tile.of(16, 32, d=32)
    run(70, (2, 1), 32, tile, [0, 30, 70], causal=True, dtype=dtype)


def test_one_token_and_more_programs_than_tiles():
    out = run(1, (2, 1), 16, tiles.Tile.of(16, 16, d=16), [0, 1], causal=True, programs=4)
    assert out.shape == (1, 2, 16)
