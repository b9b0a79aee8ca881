"""Attention of tokens that are split over the ranks, by ring, gathered keys and Ulysses, zigzag and
in order: held to attention in fp32 of all tokens, forward, backward, recorded and replayed."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import weft
from weft.base.dtypes import tolerance
from weft.layers import ring_attention, ulysses_attention, zigzag_join
from weft.ops import ag_attention
from weft.plan.sequence_shards import shards_of

# Tokens of all ranks, heads of queries and of keys, elements of a head, where sequences begin and
# end, causal, zigzag, dtypes. Few kernels: each is compiled anew for a length of heads and a dtype.
HALF, BOTH = (torch.bfloat16,), (torch.bfloat16, torch.float32)
CASES = [
    (1997, 8, 2, 128, None, True, True, HALF),
    (2048, 4, 4, 64, None, True, False, BOTH),
    (700, 6, 3, 80, [0, 1, 1, 300, 650], True, True, HALF),
    (301, 4, 1, 128, [0, 100, 301], False, True, HALF),
    (3, 2, 1, 64, None, True, True, BOTH),
]
# With fewer tokens libraries have kernels of their own, or none.
FOR_LIBRARIES = 64


def expected(
    tensors: list[torch.Tensor], starts: list[int], causal: bool, slope: torch.Tensor
) -> list[torch.Tensor]:
    """(out, dq, dk, dv) of all tokens."""
    leaves = [one.float().clone().requires_grad_() for one in tensors]
    q, k, v = leaves
    group, rows = q.shape[1] // k.shape[1], [torch.zeros_like(q[: starts[0]])]
    for first, end in zip(starts, starts[1:], strict=False):
        one = slice(first, end)
        keys, values = (x[one].repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q[one], keys) * q.shape[2] ** -0.5
        if causal:
            hidden = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
            scores = scores.masked_fill(hidden, -torch.inf)
        rows.append(torch.einsum("hij,jhd->ihd", scores.softmax(-1), values))
    out = torch.cat([*rows, torch.zeros_like(q[starts[-1] :])])
    out.backward(slope.float())
    return [out.detach(), *(one.grad for one in leaves)]


def by_ulysses(q: Any, k: Any, v: Any, *, world: Any, causal: bool, **_: Any) -> torch.Tensor:
    return ulysses_attention(q, k, v, world=world, causal=causal)


def check(found: list[torch.Tensor], wanted: list[torch.Tensor], place: Any, what: Any) -> None:
    for got, whole in zip(found, wanted, strict=True):
        error = (got.float() - whole[place]).norm()
        most = 2 * tolerance(str(got.dtype), len(whole)) * whole.norm()
        assert error <= most, (what, error, most)


def main() -> None:
    world, cases = weft.init(), 0
    torch.backends.cuda.matmul.allow_tf32 = False
    ways = {
        "ring": ring_attention, "gathered": ag_attention,
        "ring by the library": partial(ring_attention, local="library"), "ulysses": by_ulysses,
    }  # fmt: skip
    for m, q_heads, kv_heads, d, starts, causal, zigzag, dtypes in CASES:
        if world.target.backend == "emu":  # which takes minutes for the full sizes
            m, d, starts = m // 16 + 2, 16, starts and [one // 16 for one in starts]
        for dtype in dtypes:
            drawn = torch.Generator().manual_seed(m)
            q, k, v, slope = (
                torch.randn(m, n, d, generator=drawn).to(world.device, dtype)
                for n in (q_heads, kv_heads, kv_heads, q_heads)
            )
            lengths = None
            if starts is not None:
                lengths = torch.tensor(starts, dtype=torch.int32, device=world.device)
            wanted = expected([q, k, v], starts or [0, m], causal, slope)
            shards = shards_of(m, world.num_ranks, zigzag, lengths, world.device)
            place, _ = shards.positions(world.rank)
            leaves = [one[place].requires_grad_() for one in (q, k, v)]
            way = {"causal": causal, "zigzag": zigzag, "cu_seqlens": lengths, "m": m}
            for name, attend in ways.items():
                is_library = attend not in (ring_attention, ag_attention)
                is_taken = m >= FOR_LIBRARIES and dtype == torch.bfloat16 and starts is None
                if is_library and not is_taken:
                    continue
                if attend is by_ulysses and (zigzag or m % world.num_ranks):
                    continue

                def call(attend=attend, leaves=leaves, way=way, slope=slope[place]):
                    out = attend(*leaves, world=world, **way)
                    return [out.detach(), *torch.autograd.grad(out, leaves, slope)]

                what, found = (name, m, d, dtype), call()
                check(found, wanted, place, what)
                with world.record() as recording:
                    recorded = call()
                for _ in range(3):
                    for one in recorded:
                        one.fill_(torch.nan)
                    recording.replay()
                    world.synchronize()
                    check(recorded, wanted, place, what)
                    if not is_library:  # whose sums may come in any order
                        assert all(map(torch.equal, recorded, found)), what
                if zigzag:
                    joined = zigzag_join(found[0], world=world, cu_seqlens=lengths, m=m)
                    assert torch.equal(joined[place], found[0]), what
                cases += 1
    rank, num_ranks = world.rank, world.num_ranks
    world.close()
    print(f"rank {rank} of {num_ranks}: {cases} cases", flush=True)


main()
