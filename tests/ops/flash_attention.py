"""torch's FlashAttention on the CPU, in plain torch: baselines call it where they run on GPUs."""

from __future__ import annotations

import torch


def attend(q, k, v, scale: float, causal: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """One sequence: (mean, lse) of q [tokens, heads, d]; causal: q's last token is k's last."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q.double(), keys) * scale
    if causal:
        hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
    mean = torch.einsum("hij,jhd->ihd", scores.softmax(-1), values)
    # Without keys theirs is +inf.
    lse = scores.logsumexp(-1) if len(k) else torch.full(scores.shape[:2], torch.inf)
    return mean.to(q.dtype), lse.float()


def forward(
    q, k, v, q_ends, k_ends, most_queries, most_keys, dropout, causal, debug, *, scale,
    seqused_k=None,
):  # fmt: skip
    """`torch.ops.aten._flash_attention_forward`, of [batch, tokens, ..] or of rows by `ends`."""
    assert not dropout and not debug
    if q_ends is None:
        found = [attend(*one, scale, causal) for one in zip(q, k, v, strict=True)]
        return torch.stack([one[0] for one in found]), torch.stack([one[1] for one in found])
    means, lses = [], []
    for b, (begin, end) in enumerate(zip(q_ends.tolist(), q_ends[1:].tolist(), strict=False)):
        first, last = k_ends[b : b + 2].tolist()
        assert end - begin <= most_queries and last - first <= most_keys
        keys = slice(first, last if seqused_k is None else first + int(seqused_k[b]))
        mean, lse = attend(q[begin:end], k[keys], v[keys], scale, causal)
        means.append(mean)
        lses.append(lse)
    return torch.cat(means), torch.cat(lses, 1)
