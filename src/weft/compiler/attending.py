"""What libraries do of attention: over whole sequences of tokens, and to any keys that are seen.

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
    """A head after the other: memory holds the scores of one."""
    if not q.numel():
        return q + 0 * (k.sum() + v.sum())  # so that all three have a gradient
    is_seen = seen(q, k, causal, first)
    heads = q.shape[1] // head
    group = heads // (k.shape[1] // head)
    out = torch.empty_like(q)
    for one in range(heads):
        queries = q[:, None, one * head : (one + 1) * head]
        of_k = slice(one // group * head, (one // group + 1) * head)
        mean, _ = weigh(queries, k[:, None, of_k], v[:, None, of_k], is_seen, head**-0.5)
        out[:, one * head : (one + 1) * head] = mean[:, 0]
    return out


def seen(q: torch.Tensor, k: torch.Tensor, causal: bool, first: int = 0) -> torch.Tensor:
    """Which keys each query sees, as of one sequence."""
    every = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    return every.tril(first) if causal else every


def weigh(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_seen: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(means of v weighted by exp(scores), log of the sums of weights), in fp32.

    Queries that see no key have zeros, and -inf. What no query sees may be no number.

    Shapes  q: [.., queries, heads, d]; k, v: [.., keys, kv_heads, d]; is_seen: [.., queries, keys];
            means as q, logs [.., queries, heads]
    """
    found = scores(q, k, is_seen, scale)
    log = found.logsumexp(-1)
    share = (found - _or_0(log)[..., None]).exp()
    there = v.float().masked_fill(~is_seen.any(-2)[..., None, None], 0)
    mean = torch.einsum("...hgij,...jhd->...ihgd", share, there)
    return mean.flatten(-3, -2), log.flatten(-3, -2).transpose(-1, -2)


def scores(q: torch.Tensor, k: torch.Tensor, is_seen: torch.Tensor, scale: float) -> torch.Tensor:
    """[.., kv_heads, group, queries, keys]; -inf where a key is not seen."""
    grouped = q.float().unflatten(-2, (k.shape[-2], -1))
    found = torch.einsum("...ihgd,...jhd->...hgij", grouped, k.float()) * scale
    return found.masked_fill(~is_seen[..., None, None, :, :], -torch.inf)


def merge(means: torch.Tensor, logs: torch.Tensor) -> torch.Tensor:
    """What `weigh` gives of all keys, by its results of each part of them: fp32 [parts, .., d] and
    [parts, ..]."""
    share = (logs - _or_0(logs.logsumexp(0))).exp()
    return (means * share[..., None]).sum(0)


def _or_0(log: torch.Tensor) -> torch.Tensor:
    """Where there are no keys, -inf less something is to be -inf."""
    return log.masked_fill(log == -torch.inf, 0)
