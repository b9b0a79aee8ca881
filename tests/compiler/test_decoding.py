"""A decode step's operations by libraries: positions, caches, attention; heads that are split."""

from __future__ import annotations

import pytest
import torch
from random_programs import of_rank

import weft
import weft.ops
from weft.base.errors import ShapeError
from weft.compiler import (
    Replicate,
    Shard,
    Tensor,
    Times,
    decode_attention,
    decoding,
    kv_append,
    libraries,
    program,
    rope,
)

HEAD, MAX_KV = 8, 6


def of(*sizes, dtype="float32", at=Shard(1)) -> Tensor:
    return Tensor(dtype, sizes, at)


def attention(q_heads: int, kv_heads: int):
    @program(
        mesh="tp",
        q=of("b", q_heads * HEAD), k=of("b", kv_heads * HEAD), v=of("b", kv_heads * HEAD),
        k_cache=of(Times("b", MAX_KV), kv_heads * HEAD),
        v_cache=of(Times("b", MAX_KV), kv_heads * HEAD),
        lengths=of(1, "b", dtype="int32", at=Replicate()),
    )  # fmt: skip
    def step(q, k, v, k_cache, v_cache, lengths):
        keys = kv_append(k_cache, rope(k, lengths, head=HEAD), lengths)
        values = kv_append(v_cache, v, lengths)
        return decode_attention(rope(q, lengths, head=HEAD), keys, values, lengths, head=HEAD), keys

    return step


def inputs(made, b: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for task in made.stages.tasks["place"].tasks:
        if task.kind == "input":
            rows, columns = task.type.sizes
            rows = b * MAX_KV if isinstance(rows, Times) else rows
            shape = [b if size == "b" else size for size in (rows, columns)]
            found[task.name] = torch.randn(*shape, generator=generator)
    found["lengths"] = (torch.arange(b, dtype=torch.int32) % MAX_KV + 1)[None]
    return found


@pytest.mark.parametrize(("num_ranks", "b"), [(1, 7), (2, 3)])
def test_a_step_equals_its_meaning(ranks, num_ranks: int, b: int):
    made = attention(4, 2)
    placed = made.stages.tasks["place"]

    def main():
        world = weft.init()
        whole = inputs(made, b)
        mine = {
            name: of_rank(placed.task(name).type, one, {"b": b}, world.rank, num_ranks).clone()
            for name, one in whole.items()
        }
        got = made.options(lowering="unfused")(*mine.values(), world=world, b=b)
        assert got[1] is mine["k_cache"]  # in place
        for name, result, want in zip(placed.results, got, libraries.reference(placed, whole)):
            part = of_rank(placed.task(name).type, want, {"b": b}, world.rank, num_ranks)
            torch.testing.assert_close(result, part, rtol=1e-4, atol=1e-5)
        world.close()

    ranks(main, num_ranks)


def test_attention_is_torchs():
    b, heads, kv_heads = 3, 4, 2
    q, k, v = (torch.randn(*shape) for shape in ((b, heads * HEAD), *[(b * MAX_KV, 16)] * 2))
    lengths = torch.tensor([[1, 4, 6]], dtype=torch.int32)
    got = decoding.decode_attention(q, k, v, lengths, head=HEAD)
    for i, length in enumerate(lengths[0].tolist()):
        keys, values = (
            one.view(b, MAX_KV, kv_heads, HEAD)[i, :length].transpose(0, 1).repeat_interleave(2, 0)
            for one in (k, v)
        )
        queries = q[i].view(heads, 1, HEAD)
        want = torch.nn.functional.scaled_dot_product_attention(queries, keys, values)
        torch.testing.assert_close(got[i], want.flatten(), rtol=1e-4, atol=1e-5)


def test_what_is_not_seen_may_be_anything():
    cache = torch.full((MAX_KV, HEAD), float("nan"))
    cache[0] = 1
    lengths = torch.tensor([[1]], dtype=torch.int32)
    got = decoding.decode_attention(torch.ones(1, HEAD), cache, cache, lengths, head=HEAD)
    assert torch.equal(got, torch.ones(1, HEAD))


def test_a_turn_keeps_lengths_and_begins_with_none():
    x = torch.randn(2, 2 * HEAD)
    got = decoding.rope(x, torch.tensor([[1, 9]], dtype=torch.int32), head=HEAD, base=100.0)
    assert torch.equal(got[0], x[0])
    torch.testing.assert_close(
        got.view(2, 2, HEAD).norm(dim=2), x.view(2, 2, HEAD).norm(dim=2)
    )  # fmt: skip
    assert not torch.allclose(got[1], x[1])


def test_heads_are_not_torn(ranks):
    made = attention(3, 3)

    def main():
        world = weft.init()
        whole = inputs(made, 2)
        with pytest.raises(ShapeError, match="heads of 8 columns, but of 24 columns of .* has 12"):
            made(*(one[:, :12] if one.shape[1] == 24 else one for one in whole.values()),
                 world=world)  # fmt: skip
        world.close()

    ranks(main, 2)
