"""A decoder of two layers: one step of each sequence, heads and columns split over the ranks."""

from __future__ import annotations

import torch

from weft.compiler import (
    Replicate,
    Settings,
    Shard,
    Tensor,
    Times,
    all_reduce,
    decode_attention,
    kv_append,
    program,
    rms_norm,
    rope,
    silu_mul,
)

HEAD, HEADS, KV_HEADS, MAX_KV, HIDDEN, INNER = 8, 4, 2, 5, 16, 24


def layer(x, lengths, first_norm, wq, wk, wv, k_cache, v_cache, wo, norm, w1, w2):
    h = rms_norm(x, first_norm)
    keys = kv_append(k_cache, rope(h @ wk, lengths, head=HEAD), lengths)
    values = kv_append(v_cache, h @ wv, lengths)
    queries = rope(h @ wq, lengths, head=HEAD)
    attended = decode_attention(queries, keys, values, lengths, head=HEAD)
    x = all_reduce(attended @ wo) + x
    h = rms_norm(x, norm)
    return all_reduce(silu_mul(h @ w1) @ w2) + x, keys, values


def decoder(
    x, lengths, norm_1, wq_1, wk_1, wv_1, keys_1, values_1, wo_1, norm_2, up_1, down_1,
    norm_3, wq_2, wk_2, wv_2, keys_2, values_2, wo_2, norm_4, up_2, down_2,
):  # fmt: skip
    x, first_keys, first_values = layer(
        x, lengths, norm_1, wq_1, wk_1, wv_1, keys_1, values_1, wo_1, norm_2, up_1, down_1
    )
    x, keys, values = layer(
        x, lengths, norm_3, wq_2, wk_2, wv_2, keys_2, values_2, wo_2, norm_4, up_2, down_2
    )
    return x, first_keys, first_values, keys, values


def parameters(dtype: str, max_kv: int = 0) -> dict[str, Tensor]:
    columns, kv_columns = HEADS * HEAD, KV_HEADS * HEAD
    cache = Tensor(dtype, (Times("b", max_kv or MAX_KV), kv_columns), Shard(1))
    found = {
        "x": Tensor(dtype, ("b", HIDDEN), Replicate()),
        "lengths": Tensor("int32", (1, "b"), Replicate()),
    }
    for i in (1, 2):
        norm = Tensor(dtype, (1, HIDDEN), Replicate())
        found |= {
            f"norm_{2 * i - 1}": norm,
            f"wq_{i}": Tensor(dtype, (HIDDEN, columns), Shard(1)),
            f"wk_{i}": Tensor(dtype, (HIDDEN, kv_columns), Shard(1)),
            f"wv_{i}": Tensor(dtype, (HIDDEN, kv_columns), Shard(1)),
            f"keys_{i}": cache,
            f"values_{i}": cache,
            f"wo_{i}": Tensor(dtype, (columns, HIDDEN), Shard(0)),
            f"norm_{2 * i}": norm,
            f"up_{i}": Tensor(dtype, (HIDDEN, 2 * INNER), Shard(1)),
            f"down_{i}": Tensor(dtype, (INNER, HIDDEN), Shard(0)),
        }
    return found


def compiled(dtype: str = "float32"):
    """The program, in tiles of 16 x 16."""
    given = parameters(dtype)
    untiled = program(mesh="tp", **given)(decoder)
    kinds = {task.name: task.kind for task in untiled.stages.tasks["place"].tasks}
    sequences = ("input", "kv_append", "decode_attention")
    tiles = {name: (16, 16) for name, kind in kinds.items() if kind not in sequences}
    return program(mesh="tp", settings=Settings(tiles=tiles), **given)(decoder)


def inputs(made, b: int, step: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Whole tensors; sequences differ in length, and each is `step` tokens further."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for task in made.stages.tasks["place"].tasks:
        if task.kind == "input":
            rows, columns = task.type.sizes
            rows = b * rows.by if isinstance(rows, Times) else rows
            shape = [b if size == "b" else size for size in (rows, columns)]
            found[task.name] = torch.randn(*shape, generator=generator) * 0.3
    lengths = (torch.arange(b) % 3 * (MAX_KV // 2) + 1 + step).clamp(max=MAX_KV)
    return {**found, "lengths": lengths.to(torch.int32)[None]}
