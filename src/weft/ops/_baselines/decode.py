"""Flash-decode by torch and NCCL: parts that are gathered and merged, and caches that are gathered.

Each function takes a benchmark's case and returns a Variant. Attention is FlashAttention-2 as torch
has it, which splits keys over SMs where there are few sequences. Buffers are made beforehand.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from weft.compiler.attending import merge
from weft.plan.by_libraries import attend_once
from weft.tune.case import Case
from weft.tune.variants import Variant


class _Parts:
    """One set of inputs, and what is gathered of it."""

    def __init__(self, case: Case, inputs: Any) -> None:
        self.case, self.problem = case, case.problem
        self.q, self.k, self.v = (inputs[name] for name in ("q", "k_cache", "v_cache"))
        self.lengths = inputs["lengths"] if case.problem.variable else None

    def attend(self) -> tuple[torch.Tensor, torch.Tensor]:
        return attend_once(self.q, self.k, self.v, self.lengths, self.problem.scale)

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
            return attend_once(self.q, *whole, None, self.problem.scale)[0]
        lengths = self.gather(self.lengths)
        parts = [
            attend_once(self.q, keys[r], values[r], lengths[r], self.problem.scale)
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
