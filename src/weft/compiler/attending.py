"""What libraries do of attention over whole sequences of tokens.

    attention(q, k, v)[i] = softmax over visible j of (q[i] . k[j] / sqrt(head)) @ v[j]

A row is a token of one sequence; its columns are heads of `head` elements, and heads of q share
those of k in groups. Causal: j is no later than i. Row 0 of q is token `first` of k's.

Shapes  q: [own tokens, heads * head]; k, v: [tokens, kv_heads * head]
"""

from __future__ import annotations

import torch


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int, causal: bool, first: int = 0
) -> torch.Tensor:
    """Scores and sums in fp32, a head after the other."""
    tokens, keys = len(q), len(k)
    group = q.shape[1] // k.shape[1] if q.numel() else 1
    hidden = torch.ones(tokens, keys, dtype=torch.bool, device=q.device).triu(first + 1)
    out = torch.zeros_like(q, dtype=torch.float32)
    for column in range(0, q.shape[1] if q.numel() else 0, head):
        of_q = slice(column, column + head)
        of_k = slice(column // head // group * head, (column // head // group + 1) * head)
        scores = q[:, of_q].float() @ k[:, of_k].float().t() * head**-0.5
        if causal:
            scores = scores.masked_fill(hidden, float("-inf"))
        out[:, of_q] = scores.softmax(1) @ v[:, of_k].float()
    return out.to(q.dtype)
