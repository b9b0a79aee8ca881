"""Attention to blocks of keys: which each query sees of whose block; compiled without spills."""

from __future__ import annotations

import pytest
import torch

import weft
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.plan.attention_blocks import BlockAttention
from weft.plan.attention_by_library import merge
from weft.plan.sequence_shards import Shards, shards_in, shards_of
from weft.tiles.attention_blocks import lay_out
from weft.tools.binaries import FORMATS, stack_bytes
from weft.verify import compiled

SLOW = pytest.mark.slow


@pytest.mark.few(3)
@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 3, 4])
def test_it_is_laid_out_as_by_torch(num_ranks, zigzag):
    """Many sequences, of which a program has some at a time; empty ones; ranks without tokens."""
    many = torch.randint(0, 4, (300,), generator=torch.Generator().manual_seed(1)).cumsum(0)
    lists = [None, [0, 1], [0, 0], [2, 2, 9, 9, 20], many.tolist()]

    def main():
        world = weft.init()
        for starts in lists:
            lengths = None if starts is None else torch.tensor(starts, dtype=torch.int32)
            for m in (starts[-1] if starts else 30, 700):
                wanted = shards_of(m, num_ranks, zigzag, lengths, world.device)
                with world.record() as recording:
                    found = shards_in(world, m, zigzag, lengths)
                recording.replay()
                world.synchronize()
                assert torch.equal(found.ends, wanted.ends)
                assert torch.equal(found.table, wanted.table), (starts, m)
        world.close()

    with weft.emulated(ranks=num_ranks) as ranks:
        ranks.run(main)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("zigzag", [True, False])
@pytest.mark.parametrize("starts", [[0, 41], [3, 3, 20, 21, 38]], ids=str)
def test_rows_that_queries_see_are_those_that_they_may(starts, zigzag, causal):
    """By the positions of all ranks' tokens; as ranges they never fall, which tiles go by."""
    m, n = 41, 3
    lengths = torch.tensor(starts, dtype=torch.int32)

    def main():
        world = weft.init()
        shards = shards_of(m, n, zigzag, lengths, world.device)
        of = torch.bucketize(torch.arange(m), torch.tensor(starts), right=True)
        is_none = (of == 0) | (of == len(starts))
        for rank in range(n):
            own, _ = shards.positions(rank)
            blocks = BlockAttention(
                torch.empty(len(own), 1, 16), 1, shards, rank=rank, causal=causal, scale=None,
                target=world.target,
            )  # fmt: skip
            for source in range(n):
                blocks.see(source)
                keys, _ = shards.positions(source)
                seen = (of[own][:, None] == of[keys][None]) & ~is_none[own][:, None]
                if causal:
                    seen &= keys[None] <= own[:, None]
                row = torch.arange(len(keys))
                assert torch.equal((row >= blocks.lo[:, None]) & (row < blocks.hi[:, None]), seen)
                for bound in (blocks.lo, blocks.hi):
                    assert torch.equal(bound, bound.cummax(0).values)

    with weft.emulated(ranks=1) as ranks:
        ranks.run(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "dtype", "d"),
    [
        ("cuda:90", "bfloat16", 128),
        pytest.param("cuda:90", "float32", 64, marks=SLOW),
        pytest.param("cuda:90", "float16", 256, marks=SLOW),
        pytest.param("cuda:80", "bfloat16", 128, marks=SLOW),
        pytest.param("cuda:100", "bfloat16", 128, marks=SLOW),
        pytest.param("hip:gfx942", "bfloat16", 128, marks=SLOW),
    ],
)
def test_compiles_without_spills(target, dtype, d):
    there = TARGETS[target]
    q = torch.empty(512, 8, d, dtype=getattr(torch, dtype), device="meta")
    k, lse = q[:, :2].contiguous(), torch.empty(512, 8, device="meta")
    of_q, of_k = (torch.empty_like(one, dtype=torch.float32) for one in (q, k))
    table = torch.empty(2, 4, 5, dtype=torch.int32, device="meta")
    shards = Shards(1024, 2, True, table[0, 0], table)
    blocks = BlockAttention(q, 2, shards, rank=0, causal=True, scale=None, target=there)
    with triton_api.described_launches() as found:
        for step in range(3):
            blocks.see(step % 2)
            blocks.attend(k, k, of_q, lse, q, is_first=step == 0, is_last=step == 2)
        given = blocks.given(k, k, q, q, lse)
        for adds in (False, True):
            blocks.queries(given, of_q, adds=adds)
            blocks.keys(given, of_k, of_k, adds=adds)
        merge(of_q, lse, q, lse.t())
        for zigzag in (False, True):
            lay_out[(2,)](table[0, 0], table[0, 1], table, 1024, 5, 2, zigzag, 128, num_warps=4)
    assert len(found) == 3 + 3 + 4 + 1 + 2
    code, text = FORMATS[there.backend]
    for one in found:
        binary = triton_api.compile_kernel(one.fn, one.record(), there)
        report = compiled(binary, there)
        assert report.ok, "\n".join(map(str, report.findings))
        most = 8 if target == "cuda:100" else 0  # of a state that is read and stored in part
        assert (stack_bytes(there, binary.asm[code], binary.asm[text]) or 0) <= most, one
