"""What libraries do of a decode step: positions turned into queries and keys, a cache, attention.

    rope(x, lengths)[i]              x[i] turned by the angles of position lengths[i] - 1
    rope_by_table(x, positions, t)[i]    x[i] turned by row positions[i] of a table
    kv_append(cache, x, lengths)     row lengths[i] - 1 of sequence i's part of cache becomes x[i]
    decode_attention(q, k, v, lengths)[i] = softmax over j < lengths[i] of (q[i] . k[j]) @ v[j]
    merge_parts(attention_parts(q, k, v, lengths, splits), splits)   the same, by splits of the keys

A row of x, q is one sequence's new token, its columns are heads of `head` elements; a cache has
max_kv rows for each sequence, one behind the other, and as many heads as keys have.

Shapes  x: [sequences, heads * head]; cache, k, v: [sequences * max_kv, kv_heads * head];
        lengths: int32 [1, sequences], the new token counted
"""

from __future__ import annotations

import torch

from weft.compiler.attending import merge, weigh


def rope(x: torch.Tensor, lengths: torch.Tensor, head: int, base: float) -> torch.Tensor:
    """Halves of a head are turned against each other, by position * base ** (-2 j / head)."""
    half = head // 2
    speed = base ** (-torch.arange(half, device=x.device, dtype=torch.float32) * 2 / head)
    angle = (lengths[0].float() - 1)[:, None] * speed
    return _turned(x, angle.cos(), angle.sin())


def rope_by_table(
    x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, head: int
) -> torch.Tensor:
    """The same by rows of a table [positions, head]: cosines, then sines."""
    cos, sin = table[positions[0].long()].split(head // 2, dim=1)
    return _turned(x, cos, sin)


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Halves of heads, by [rows, columns of a half] each."""
    heads = x.shape[1] // (2 * cos.shape[1])
    first, second = x.float().unflatten(1, (heads, 2, cos.shape[1])).unbind(2)
    cos, sin = cos[:, None], sin[:, None]
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
    ends = lengths[0].long()
    return _attended(q, k, v, torch.zeros_like(ends), ends, head)[0].to(q.dtype)


def attention_parts(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: torch.Tensor, head: int, splits: int
) -> torch.Tensor:
    """fp32 [sequences * splits, 2 * columns]: of each split of a sequence's keys, head by head, the
    mean of its values and, in the first of as many columns, the log of its sum. Which keys a split
    has is the kernel's affair: here they are of equal parts."""
    ends, parts = lengths[0].long(), []
    each = (ends + splits - 1) // splits
    for split in range(splits):
        first = torch.minimum(split * each, ends)
        mean, lse = _attended(q, k, v, first, torch.minimum(first + each, ends), head)
        wide = lse.new_zeros(*lse.shape, head)
        wide[..., 0] = lse
        parts.append(torch.stack((mean.view_as(wide), wide), dim=2).flatten(1))
    return torch.stack(parts, dim=1).flatten(0, 1)


def merge_parts(parts: torch.Tensor, head: int, splits: int) -> torch.Tensor:
    """Means weighted by the sums that they are of: fp32 [sequences, columns]."""
    sequences, heads = len(parts) // splits, parts.shape[1] // (2 * head)
    mean, lse = parts.float().view(sequences, splits, heads, 2, head).transpose(0, 1).unbind(3)
    return merge(mean, lse[..., 0]).flatten(1)


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, first: torch.Tensor, end: torch.Tensor,
    head: int,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """(mean of the values, log of the sum) of keys first .. end - 1 of each sequence, in fp32:
    [sequences, columns] and [sequences, heads]."""
    sequences = len(q)
    if not q.numel():
        return q.float(), q.new_empty(sequences, q.shape[1] // head, dtype=torch.float32)
    queries, keys, values = (
        one.view(sequences, -1, one.shape[1] // head, head) for one in (q, k, v)
    )
    j = torch.arange(keys.shape[1], device=q.device)
    is_seen = (j >= first[:, None]) & (j < end[:, None])
    mean, lse = weigh(queries, keys, values, is_seen[:, None], head**-0.5)
    return mean.reshape(q.shape), lse.flatten(1)
