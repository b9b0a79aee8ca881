"""Attention over gathered keys by NCCL and torch: everything is gathered, then FlashAttention-2.

Lengths are read from the device beforehand, and so are buffers made: a call does not wait for the
host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from weft.base.errors import UnsupportedError
from weft.ops._baselines.nccl import Way, padded
from weft.tune.case import Case


class Parts(NamedTuple):
    """The sequences that own tokens belong to: keys from `first` on; where each one's queries and
    keys end, counted from the first's begin."""

    first: int
    queries: tuple[int, ...]
    keys: tuple[int, ...]


def parts_of(ends: Sequence[int], own: tuple[int, int], causal: bool) -> Parts:
    """Own tokens are own[0] .. own[1] - 1. Of each sequence queries are the last of its keys where
    causal: keys behind them are left out. Of all, queries and keys lie one behind the other."""
    first, queries, keys = None, [0], [0]
    for begin, end in zip(ends, ends[1:], strict=False):
        count = min(end, own[1]) - max(begin, own[0])
        if count <= 0:
            continue
        first = begin if first is None else first
        queries.append(queries[-1] + count)
        keys.append(keys[-1] + (min(end, own[1]) if causal else end) - begin)
    return Parts(first or 0, tuple(queries), tuple(keys))


class GatherThenAttend(Way):
    """What is gathered of one set of inputs, and which of that own queries see."""

    names = ("attention_alone", "nccl_gather", "nccl_attention")

    def __init__(self, case: Case, inputs: Any, other: Any = None) -> None:
        super().__init__(case, inputs)
        problem = self.problem
        if problem.itemsize != 2 or problem.d % 8:
            raise UnsupportedError(
                f"torch's FlashAttention takes 16 bits and d in multiples of 8, not "
                f"{problem.dtype} and d={problem.d}"
            )
        if problem.zigzag:
            raise UnsupportedError("torch's FlashAttention takes tokens in order, not zigzag")
        self.q, table = inputs["q"], inputs["cu_seqlens"]
        ends = [0, problem.m] if table is None else table.tolist()
        self.parts = parts_of(ends, problem.shard(case.world.rank), problem.causal)
        both = (self.parts.queries, self.parts.keys)
        self.ends = [torch.tensor(x, dtype=torch.int32, device=self.q.device) for x in both]
        self.most = [
            max((b - a for a, b in zip(one, one[1:], strict=False)), default=0) for one in both
        ]
        self.own = [padded(case, inputs[name]) for name in ("k", "v")]
        rows = problem.rows * problem.num_ranks
        self.all = [one.new_empty(rows, *one.shape[1:]) for one in self.own]

    def move(self) -> None:
        for own, whole in zip(self.own, self.all, strict=True):
            dist.all_gather_into_tensor(whole, own, group=self.case.group)

    def multiply(self) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.q.numel():
            return self.q, self.q.new_empty(self.q.shape[:2], dtype=torch.float32)
        seen = slice(self.parts.first, self.parts.first + self.parts.keys[-1])
        k, v = (one[seen] for one in self.all)
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            self.q, k, v, *self.ends, *self.most, 0.0, self.problem.causal, False,
            scale=self.problem.d**-0.5,
        )  # fmt: skip
        # Of sequences of any lengths: [heads, all queries].
        return out, lse.view(self.problem.q_heads, -1).t()
