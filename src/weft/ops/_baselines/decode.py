"""Flash-decode by torch and NCCL: parts that are gathered and merged, and caches that are gathered.

Each function takes a benchmark's case and returns a Variant. Attention is FlashAttention-2 as torch
has it, which splits keys over SMs where there are few sequences. Buffers are made beforehand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.tune.case import Case
from weft.tune.variants import Variant


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, lse) of one query a sequence: [batch, heads, d] and fp32 [batch, heads].

    `lengths` None: all keys are there.
    """
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


def merge(means: torch.Tensor, lses: torch.Tensor) -> torch.Tensor:
    """All ranks' parts in one: [ranks, batch, heads, d] and [ranks, batch, heads], in fp32."""
    high = lses.amax(0)
    weight = torch.exp(lses - torch.where(high == -torch.inf, 0.0, high))
    total = weight.sum(0)
    mean = (means * weight[..., None]).sum(0)
    return mean / torch.where(total == 0, 1.0, total)[..., None]


class _Parts:
    """One set of inputs, and what is gathered of it."""

    def __init__(self, case: Case, inputs: Any) -> None:
        self.case, self.problem = case, case.problem
        self.q, self.k, self.v = (inputs[name] for name in ("q", "k_cache", "v_cache"))
        self.lengths = inputs["lengths"] if case.problem.variable else None

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(self.q, self.k, self.v, self.lengths, self.problem.scale)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """[ranks, ..] of every rank's x."""
        out = torch.empty((self.problem.num_ranks, *x.shape), dtype=x.dtype, device=x.device)
        dist.all_gather_into_tensor(out, x.contiguous(), group=self.case.group)
        return out

    def merged(self) -> torch.Tensor:
        """Mean and lse travel together, in fp32, as weft's do."""
        mean, lse = self.attend()
        both = self.gather(torch.cat([mean.float(), lse[..., None]], -1))
        return merge(both[..., :-1], both[..., -1]).to(mean.dtype)

    def whole(self) -> torch.Tensor:
        """Every rank's keys and values, then one attention over each rank's, and no traffic."""
        keys, values = self.gather(self.k), self.gather(self.v)
        if self.lengths is None:
            # A sequence's keys, of all ranks one behind the other.
            whole = [x.transpose(0, 1).flatten(1, 2) for x in (keys, values)]
            return attend(self.q, *whole, None, self.problem.scale)[0]
        lengths = self.gather(self.lengths)
        parts = [
            attend(self.q, keys[r], values[r], lengths[r], self.problem.scale)
            for r in range(self.problem.num_ranks)
        ]
        means, lses = map(torch.stack, zip(*parts, strict=True))
        return merge(means.float(), lses).to(self.q.dtype)


def gathered_parts(case: Case) -> Variant:
    """Attention over own keys, NCCL's all-gather of means and lse's, torch's merge."""
    calls = [_Parts(case, inputs).merged for inputs in case.sets]
    return Variant("attention_nccl_merge", calls)


def gathered_caches(case: Case) -> Variant:
    """NCCL's all-gather of all keys and values, then attention over all."""
    return Variant("nccl_cache_attention", [_Parts(case, one).whole for one in case.sets])


def alone(case: Case) -> Variant:
    """Attention over own keys, without the others': what communication is measured by."""
    calls = [_Parts(case, inputs).attend for inputs in case.sets]
    return Variant("attention_alone", calls, answers=False)
