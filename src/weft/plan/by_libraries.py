"""Attention and tokens' ways to experts, unfused: weft's collectives, and torch for the rest.

What operators without a plan of library calls run as transport="unfused"; it is measured beside
what is fused. The host waits for nothing.
"""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch

from weft.base.providers import provider
from weft.compiler.attending import merge, weigh
from weft.compiler.experts import Tables, choose, tables
from weft.plan.sequence_shards import Shards, padded, shards_in

# Heads of so many elements are what the library's kernel takes.
FLASH_ELEMENTS = 8
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _has_flash(q: torch.Tensor) -> bool:
    return q.is_cuda and q.dtype.itemsize == 2 and q.shape[-1] % FLASH_ELEMENTS == 0


def _gather(x: torch.Tensor, world: Any, m: int | None = None) -> torch.Tensor:
    return provider("collectives").all_gather(x.contiguous(), world=world, m=m)


# ---------------------------------------------------------------------------------------------
# Attention


def attention(
    world: Any, problem: Any, q: Any, k: Any, v: Any, cu_seqlens: Any, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse) of ag_attention, of keys and values that are gathered first."""
    if problem.zigzag:
        k, v = (padded(one, problem.m, world.num_ranks) for one in (k, v))
    k, v = (_gather(one, world, problem.gathered_rows) for one in (k, v))
    scale = problem.d**-0.5 if scale is None else scale
    first, end = problem.shard(world.rank)
    token = torch.arange(problem.m, device=q.device)
    own = token[first:end]
    if problem.zigzag:
        lie = shards_in(world, problem.m, True, cu_seqlens)
        k, v = (one.index_select(0, lie.places()) for one in (k, v))
        own, _ = lie.positions(world.rank)
    # Before the first sequence it is none, behind the last one as well.
    ends = token.new_tensor([0, problem.m]) if cu_seqlens is None else cu_seqlens.to(token.dtype)
    sequence = torch.searchsorted(ends, token, right=True)
    of_own = sequence.index_select(0, own)
    is_in_one = (of_own > 0) & (of_own < len(ends))
    if _has_flash(q):
        # A sequence's queries are the last of its keys: causal, keys behind own tokens are none.
        begins = ((ends.clamp(first, end) - first), ends.clamp(max=end) if problem.causal else ends)
        used = None
        if problem.zigzag:
            begins, used = _parts(lie, world.rank, problem.causal)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, *(one.int() for one in begins), end - first, problem.m, 0.0, problem.causal,
            False, scale=scale, seqused_k=used,
        )  # fmt: skip
        lse = lse.view(problem.q_heads, -1).t().masked_fill(~is_in_one[:, None], -torch.inf)
        return out.masked_fill(~is_in_one[:, None, None], 0), lse
    is_seen = (of_own[:, None] == sequence) & is_in_one[:, None]
    if problem.causal:
        is_seen &= own[:, None] >= token
    out, lse = weigh(q, k, v, is_seen, scale)
    return out.to(q.dtype), lse


def _parts(lie: Shards, rank: int, causal: bool) -> tuple[tuple[Any, Any], Any]:
    """Each of a rank's two parts of each sequence as one of the library's: where their queries
    begin, where their keys begin, and how many of these they see."""
    row, front, count, back = lie.table[rank].unbind(0)
    end, begin = lie.ends[1:], lie.ends[:-1]
    rest = row.diff() - count[:-1]
    queries = torch.cat([torch.stack([row[:-1], row[:-1] + count[:-1]], 1).flatten(), row[-1:]])
    keys = torch.cat([begin.repeat_interleave(2), end[-1:]])
    if causal:
        ends = torch.stack([front[:-1] + count[:-1], back[:-1] + rest], 1)
    else:
        ends = end[:, None].expand(-1, 2)
    return (queries, keys), (ends - begin[:, None]).flatten().int()


def decode(
    world: Any, problem: Any, q: Any, k_cache: Any, v_cache: Any, lengths: Any, block_table: Any,
    scale: float,
) -> torch.Tensor:  # fmt: skip
    """flash_decode: of own keys means and lse, which all ranks get and merge."""
    if block_table is not None:
        k_cache, v_cache = (one[block_table.long()].flatten(1, 2) for one in (k_cache, v_cache))
    lengths = lengths.clamp(max=problem.n)
    if problem.n and _has_flash(q):
        mean, lse = attend_once(q, k_cache, v_cache, lengths, scale)
    else:
        is_seen = torch.arange(problem.n, device=q.device) < lengths[:, None, None]
        mean, lse = (one[:, 0] for one in weigh(q[:, None], k_cache, v_cache, is_seen, scale))
    parts = torch.cat([mean.float(), lse[..., None]], -1)
    parts = _gather(parts, world).unflatten(0, (problem.num_ranks, -1))
    return merge(parts[..., :-1], parts[..., -1]).to(q.dtype)


def attend_once(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, lse) of one query a sequence by the library: [batch, heads, d] and fp32 [batch,
    heads]. `lengths` None: all keys are there."""
    batch, heads, d = q.shape
    kernel = torch.ops.aten._flash_attention_forward
    if lengths is None:
        out, lse, *_ = kernel(
            q[:, None], k, v, None, None, 1, k.shape[1], 0.0, False, False, scale=scale
        )
        return out.view(batch, heads, d), lse.view(batch, heads)
    first = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
    out, lse, *_ = kernel(
        q, k.flatten(0, 1), v.flatten(0, 1), first, first * k.shape[1], 1, k.shape[1], 0.0, False,
        False, scale=scale, seqused_k=lengths,
    )  # fmt: skip
    # Of sequences of any lengths: [heads, all queries], and +inf where there are no keys.
    lse = lse.view(heads, batch).t()
    return out, torch.where(lengths[:, None] > 0, lse, -torch.inf)


# ---------------------------------------------------------------------------------------------
# Tokens and their experts


def route(world: Any, problem: Any, logits: torch.Tensor, bias: torch.Tensor | None) -> Tables:
    """moe_route's tables, of all ranks' logits, which are gathered first."""
    whole = _gather(logits, world, problem.m)
    chosen, share = choose(whole, problem.top_k, problem.scoring, bias)
    return tables(problem, world.rank, chosen, share)


def rows_of_slots(
    world: Any, problem: Any, rows: torch.Tensor, out: torch.Tensor, made: Tables
) -> None:
    """Of all ranks' rows, which all ranks get, those of own slots; zeros behind the last one."""
    if not rows.shape[1]:
        return
    rows, out = (one.view(WORDS[one.element_size()]) for one in (rows, out))  # bit by bit
    padded = rows.new_zeros(problem.rows, rows.shape[1])
    padded[: len(rows)] = rows
    whole = _gather(padded, world)
    torch.index_select(whole, 0, made.token_of.clamp(min=0), out=out)
    out.masked_fill_((made.token_of < 0)[:, None], 0)


def sums_of_slots(
    world: Any, problem: Any, y: torch.Tensor, out: torch.Tensor, made: Tables
) -> None:
    """Of all ranks' tokens the sums of own slots, which ranks then reduce-scatter."""
    share = y.new_zeros(problem.num_tokens, problem.n, dtype=torch.float32)
    for slots in made.slot_of.t() if len(y) else ():
        is_own, slots = (slots >= 0) & (slots < len(y)), slots.clamp(0, len(y) - 1)
        one = y.index_select(0, slots).float()
        if problem.weighted:
            one = one * made.weight_of.index_select(0, slots)[:, None]
        # Not times zero: what is not there may be no number.
        share += torch.where(is_own[:, None], one, 0.0)
    sums = provider("collectives").reduce_scatter(share.to(y.dtype), world=world)
    out.copy_(sums[: len(out)])


def sums_of_choices(
    world: Any, problem: Any, y: torch.Tensor, out: torch.Tensor, made: Tables
) -> None:
    """The same by choice: ranks reduce-scatter rows of choices, of which one rank has each, and the
    token's rank adds these up."""
    slots = made.slot_of.flatten()
    # Of other ranks' choices: adding -0 changes nothing.
    rows = y.new_full((len(slots), problem.n), -0.0)
    if len(y):
        own = y.index_select(0, slots.clamp(0, len(y) - 1))
        rows = torch.where((slots >= 0)[:, None], own, rows)
    rows.masked_fill_((slots >= len(y))[:, None], 0.0)
    rows = provider("collectives").reduce_scatter(rows, world=world)
    rows = rows.view(-1, problem.top_k, problem.n)[: len(out)]

    def chosen(k: int) -> torch.Tensor:
        value = rows[:, k].float()
        value = value * made.weights[:, k, None] if problem.weighted else value
        return value.masked_fill((made.ids[:, k] < 0)[:, None], 0.0)

    out.copy_(reduce(torch.add, map(chosen, range(problem.top_k))))
