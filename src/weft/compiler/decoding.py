"""What libraries do of a decode step: positions turned into queries and keys, a cache, attention.

    rope(x, lengths)[i]              x[i] turned by the angles of position lengths[i] - 1
    kv_append(cache, x, lengths)     row lengths[i] - 1 of sequence i's part of cache becomes x[i]
    decode_attention(q, k, v, lengths)[i] = softmax over j < lengths[i] of (q[i] . k[j]) @ v[j]

A row of x, q is one sequence's new token, its columns are heads of `head` elements; a cache has
max_kv rows for each sequence, one behind the other, and as many heads as keys have.

Shapes  x: [sequences, heads * head]; cache, k, v: [sequences * max_kv, kv_heads * head];
        lengths: int32 [1, sequences], the new token counted
"""

from __future__ import annotations

import torch


def rope(x: torch.Tensor, lengths: torch.Tensor, head: int, base: float) -> torch.Tensor:
    """Halves of a head are turned against each other, by position * base ** (-2 j / head)."""
    half = head // 2
    speed = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) * 2 / head)
    angle = ((lengths[0].float() - 1)[:, None] * speed)[:, None]
    first, second = x.float().unflatten(1, (-1, 2, half)).unbind(2)
    cos, sin = angle.cos(), angle.sin()
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=2)
    return turned.flatten(1).to(x.dtype)


def kv_append(cache: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """In place: the result is the cache."""
    if len(x):
        first = torch.arange(len(x), device=x.device) * (len(cache) // len(x))
        cache[first + lengths[0].long() - 1] = x
    return cache


def appended(cache: torch.Tensor, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """What kv_append means."""
    return kv_append(cache.clone(), x, lengths)


def decode_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, head: int
) -> torch.Tensor:
    """Sums in fp32; query heads share those of the cache in groups."""
    sequences, kv_heads = len(q), k.shape[1] // head
    if not q.numel():
        return torch.empty_like(q)
    queries = q.float().view(sequences, kv_heads, -1, head)
    keys, values = (one.float().view(sequences, -1, kv_heads, head) for one in (k, v))
    scores = torch.einsum("bgqd,bjgd->bgqj", queries, keys) * head**-0.5
    seen = torch.arange(keys.shape[1], device=q.device) < lengths[0].long()[:, None]
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    # What is not seen may be anything.
    values = values.masked_fill(~seen[:, :, None, None], 0)
    share = scores.softmax(-1).nan_to_num()
    return torch.einsum("bgqj,bjgd->bgqd", share, values).reshape(q.shape).to(q.dtype)
