"""Attention as a program: tokens that are split, keys gathered; heads that are split."""

from __future__ import annotations

import random

import pytest
import torch
from random_programs import of_rank
from test_unfused import run

import weft
import weft.ops
from weft.base.errors import ShapeError, WeftError
from weft.compiler import (
    Compiled,
    Facts,
    Replicate,
    Shard,
    Tensor,
    all_gather,
    attending,
    attention,
    libraries,
    program,
    reduce_scatter,
    silu,
)
from weft.ir.device import Call

HEAD = 8


def of(columns: int, at=Shard(0), rows="m") -> Tensor:
    return Tensor("float32", (rows, columns), at)


def by_tokens(causal: bool):
    @program(mesh="sp", q=of(4 * HEAD), k=of(2 * HEAD), v=of(2 * HEAD))
    def attend(q, k, v):
        return attention(q, all_gather(k), all_gather(v), head=HEAD, causal=causal)

    return attend


def by_heads(causal: bool):
    heads = Shard(1)

    @program(mesh="tp", q=of(8 * HEAD, heads), k=of(4 * HEAD, heads), v=of(4 * HEAD, heads))
    def attend(q, k, v):
        return attention(q, k, v, head=HEAD, causal=causal)

    return attend


@pytest.mark.few(3)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("make", "num_ranks", "m", "lowering"),
    [
        (by_tokens, 1, 5, "unfused"),
        (by_tokens, 3, 10, "unfused"),
        (by_tokens, 3, 10, "overlapped"),
        (by_heads, 2, 9, "overlapped"),
    ],
)
def test_a_program_equals_its_meaning(ranks, make, num_ranks, m, lowering, causal):
    made = make(causal)
    placed = made.stages.tasks["place"]
    generator = torch.Generator().manual_seed(0)
    whole = {
        task.name: torch.randn(m, task.type.sizes[1], generator=generator)
        for task in placed.tasks
        if task.kind == "input"
    }
    (wanted,) = libraries.reference(placed, whole)

    def main():
        world = weft.init()
        sizes = {"m": m}
        mine = [
            of_rank(placed.task(name).type, one, sizes, world.rank, num_ranks).clone()
            for name, one in whole.items()
        ]
        got = made.options(lowering=lowering)(*mine, world=world, m=m)
        kind = placed.task(placed.results[0]).type
        torch.testing.assert_close(got, of_rank(kind, wanted, sizes, world.rank, num_ranks))

    ranks(main, num_ranks)


def test_no_rows_have_gradients_too(ranks):
    """Of zeros, as torch's: else ranks would differ in which tensors have one."""

    def main():
        world = weft.init()
        made = by_tokens(True)
        inputs = [task.type for task in made.stages.tasks["place"].tasks if task.kind == "input"]
        given = [torch.zeros(0, one.sizes[1]).requires_grad_() for one in inputs]
        made(*given, world=world, m=0).sum().backward()
        assert all(one.grad is not None and one.grad.shape == one.shape for one in given)
        world.close()

    ranks(main, 2)


def random_block(seed: int, num_ranks: int) -> Compiled:
    """A transformer's block over split tokens: attention, then products whose rows are gathered."""
    chooser = random.Random(seed)
    head, causal = chooser.choice([2, 4, 6]), chooser.random() < 0.7
    kv_heads, group = chooser.choice([1, 2, 3]), chooser.choice([1, 2])
    width, hidden = chooser.choice([8, 12]), 2 * num_ranks * chooser.choice([1, 3])
    wide = (group * kv_heads * head, kv_heads * head, kv_heads * head)
    weights = {f"w{i}": Tensor("float32", (width, n), Replicate()) for i, n in enumerate(wide)}
    gives_keys = chooser.random() < 0.3

    @program(
        mesh="sp", x=of(width), **weights, wo=Tensor("float32", (wide[0], width), Replicate()),
        up=Tensor("float32", (width, hidden), Shard(1)),
        down=Tensor("float32", (hidden, width), Shard(0)),
    )  # fmt: skip
    def block(x, w0, w1, w2, wo, up, down):
        keys = all_gather(x @ w1)
        attended = attention(x @ w0, keys, all_gather(x @ w2), head=head, causal=causal)
        x = x + attended @ wo
        x = x + reduce_scatter(silu(all_gather(x) @ up) @ down)
        return (x, keys) if gives_keys else x

    return block


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_random_blocks(ranks, num_ranks):
    seeds = range(4 * num_ranks, 4 * num_ranks + 4)
    blocks = {seed: random_block(seed, num_ranks) for seed in seeds}

    def main():
        world = weft.init()
        for seed, block in blocks.items():
            for m in (seed % 5 + 1, 30 + seed):
                run(world, block, {"m": m}, seed, lowering="overlapped")
        world.close()

    ranks(main, num_ranks)
    facts = Facts({"m": 40}, num_ranks)
    made = {
        call.function for one in blocks.values() for call in one.overlapped(facts).plan.of(Call)
    }
    assert {"ag_attention", "attention"} <= made


def test_gathers_become_part_of_the_operator():
    """One call instead of three; not where somebody else reads the keys."""
    facts = Facts({"m": 64}, 4)
    made = by_tokens(True)
    (call,) = made.overlapped(facts).plan.of(Call)
    assert (call.function, call.reads, call.head, call.causal) == (
        "ag_attention", ("q", "k", "v"), HEAD, True
    )  # fmt: skip

    @program(mesh="sp", q=of(4 * HEAD), k=of(2 * HEAD), v=of(2 * HEAD))
    def keys_too(q, k, v):
        keys = all_gather(k)
        return attention(q, keys, all_gather(v), head=HEAD), keys

    names = [one.function for one in keys_too.overlapped(facts).plan.of(Call)]
    assert names == ["all_gather", "all_gather", "attention"]


@pytest.mark.parametrize("causal", [True, False])
def test_what_it_means(causal):
    """Beside torch's own, with keys of each head for its group of queries."""
    m, q, k = 7, torch.randn(7, 4 * HEAD), torch.randn(7, 2 * HEAD)
    v = torch.randn(7, 2 * HEAD)
    heads = [one.view(m, -1, HEAD).transpose(0, 1) for one in (q, k, v)]
    keys, values = (one.repeat_interleave(2, 0) for one in heads[1:])
    wanted = torch.nn.functional.scaled_dot_product_attention(
        heads[0], keys, values, is_causal=causal
    )
    got = attending.attention(q, k, v, HEAD, causal)
    torch.testing.assert_close(got, wanted.transpose(0, 1).flatten(1))
    # A part of the queries, which begins at token 3.
    got = attending.attention(q[3:], k, v, HEAD, causal, first=3)
    torch.testing.assert_close(got, wanted.transpose(0, 1).flatten(1)[3:])


def test_keys_that_are_not_gathered():
    with pytest.raises(WeftError, match=r"k must be Replicate\(\): all_gather\(k, dim=0\)"):

        @program(mesh="sp", q=of(4 * HEAD), k=of(2 * HEAD), v=of(2 * HEAD))
        def attend(q, k, v):
            return attention(q, k, v, head=HEAD)


def test_heads_that_ranks_would_share(ranks):
    made = by_heads(True)

    def main():
        world = weft.init()
        part = [torch.ones(4, columns).chunk(3, 1)[world.rank] for columns in (64, 32, 32)]
        with pytest.raises(ShapeError, match="attention takes heads of 8 columns"):
            made(*part, world=world, m=4)

    ranks(main, 3)
