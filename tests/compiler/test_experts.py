"""Mixture of experts as programs: tables made on the device, held against what they mean."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ir_reader import read
from random_programs import of_rank
from test_unfused import run

import weft
from weft.base.errors import PlacementError, ShapeError
from weft.compiler import (
    ByExpert,
    Compiled,
    Partial,
    Replicate,
    Shard,
    Tensor,
    all_gather,
    all_reduce,
    ep_combine,
    ep_dispatch,
    experts,
    gather_rows,
    grouped_matmul,
    libraries,
    moe_route,
    program,
    reduce_scatter,
    scatter_rows,
    silu,
    silu_mul,
)
from weft.ir import device, task

# Rows of one expert and one rank differ, so that rows that are taken for others do not fit.
E, K, F, TOP_K = 4, 8, 12, 2


def layer(dtype: str = "float32", top_k: int = TOP_K) -> Compiled:
    """Tokens to all ranks, each of which has columns of every expert."""

    @program(
        mesh="tp",
        x=Tensor(dtype, ("m", K), Shard(0)),
        logits=Tensor(dtype, ("m", E), Shard(0)),
        w1=Tensor(dtype, (E, K, 2 * F), Shard(2)),
        w2=Tensor(dtype, (E, F, K), Shard(1)),
    )
    def moe(x, logits, w1, w2):
        routing = moe_route(logits, top_k=top_k)
        h = silu_mul(grouped_matmul(gather_rows(all_gather(x), routing), w1, routing))
        return reduce_scatter(scatter_rows(grouped_matmul(h, w2, routing), routing))

    return moe


def dispatched(split_experts: bool = False) -> Compiled:
    """Tokens to the ranks that have their experts, whole ones; by a router within, whose tables
    may be of these."""

    @program(
        mesh="ep",
        x=Tensor("float32", ("m", K), Shard(0)),
        router=Tensor("float32", (K, E)),
        w1=Tensor("float32", (E, K, 2 * F), Shard(0)),
        w2=Tensor("float32", (E, F, K), Shard(0)),
    )
    def moe(x, router, w1, w2):
        routing = moe_route(x @ router, top_k=TOP_K, split_experts=split_experts)
        h = silu_mul(grouped_matmul(ep_dispatch(x, routing), w1, routing))
        return ep_combine(grouped_matmul(h, w2, routing), routing)

    return moe


def split(experts: int = E) -> Compiled:
    """Tokens to all ranks, each of which multiplies those of its own experts, whole ones."""

    @program(
        mesh="ep",
        x=Tensor("float32", ("m", K), Shard(0)),
        logits=Tensor("float32", ("m", experts), Shard(0)),
        w1=Tensor("float32", (experts, K, 2 * F), Shard(0)),
        w2=Tensor("float32", (experts, F, K), Shard(0)),
    )
    def moe(x, logits, w1, w2):
        routing = moe_route(logits, top_k=TOP_K, split_experts=True)
        h = silu_mul(grouped_matmul(gather_rows(all_gather(x), routing), w1, routing))
        return reduce_scatter(scatter_rows(grouped_matmul(h, w2, routing), routing))

    return moe


def replicated() -> Compiled:
    """As where one token of each sequence is decoded: all ranks have all tokens, and get them."""

    @program(
        mesh="tp",
        x=Tensor("float32", ("m", K)),
        router=Tensor("float32", (K, E)),
        w1=Tensor("float32", (E, K, F), Shard(2)),
        w2=Tensor("float32", (E, F, K), Shard(1)),
    )
    def moe(x, router, w1, w2):
        routing = moe_route(x @ router, top_k=TOP_K)
        h = silu(grouped_matmul(gather_rows(x, routing), w1, routing))
        return all_reduce(scatter_rows(grouped_matmul(h, w2, routing), routing))

    return moe


@pytest.mark.few(1)
@pytest.mark.parametrize("made", [layer, dispatched, partial(dispatched, True), replicated])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_layer_equals_its_reference(ranks, made, num_ranks: int):
    """Ragged m, fewer tokens than ranks, none at all; more ranks than experts have."""
    compiled = made()

    def main():
        world = weft.init()
        for m in (7, 1, 0):
            run(world, compiled, {"m": m}, seed=m)
        world.close()

    ranks(main, num_ranks)


def chosen(tokens: int, which: str) -> torch.Tensor:
    """Logits by which some experts have no token, or one rank's experts have all."""
    logits = torch.randn(tokens, E, generator=torch.Generator().manual_seed(3))
    logits[:, {"last": slice(0, 2), "first": slice(2, 4), "ends": slice(1, 3)}[which]] -= 100
    return logits


@pytest.mark.few(1)
@pytest.mark.parametrize("made", [layer, dispatched, partial(dispatched, True)])
def test_experts_without_tokens(ranks, made):
    compiled = made()
    placed = compiled.stages.program

    def main():
        world = weft.init()
        for which in ("last", "first", "ends"):
            generator = torch.Generator().manual_seed(5)
            whole = {}
            for one in placed.tasks:
                if one.kind == "input":
                    shape = [9 if size == "m" else size for size in one.type.sizes]
                    whole[one.name] = torch.randn(shape, generator=generator)
            if "logits" in whole:
                whole["logits"] = chosen(9, which)
            else:  # tokens of whom the router makes those logits
                whole["router"] = torch.eye(K)[:, :E].contiguous()
                whole["x"][:, :E] = chosen(9, which)
            parts = [
                of_rank(placed.task(name).type, tensor, {"m": 9}, world.rank, 2)
                for name, tensor in whole.items()
            ]
            got = compiled.options(lowering="unfused")(*parts, world=world, m=9)
            (want,) = libraries.reference(placed, whole)
            want = of_rank(placed.tasks[-1].type, want, {"m": 9}, world.rank, 2)
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
        world.close()

    ranks(main, 2)


def test_a_layer_in_bfloat16(ranks):
    """By the library's product of groups, whose rows are aligned, and without it."""

    def main():
        world = weft.init()
        for top_k in (1, 4):
            compiled = layer("bfloat16", top_k)
            placed = compiled.stages.program
            generator = torch.Generator().manual_seed(7)
            whole = {
                one.name: torch.randn(
                    [6 if size == "m" else size for size in one.type.sizes], generator=generator
                ).bfloat16()
                for one in placed.tasks
                if one.kind == "input"
            }
            parts = [
                of_rank(placed.task(name).type, tensor, {"m": 6}, world.rank, 2)
                for name, tensor in whole.items()
            ]
            got = compiled.options(lowering="unfused")(*parts, world=world)
            (want,) = libraries.reference(placed, whole)
            want = of_rank(placed.tasks[-1].type, want, {"m": 6}, world.rank, 2)
            assert float((got.float() - want).norm() / want.norm()) < 0.02
        world.close()

    ranks(main, 2)


@pytest.mark.parametrize("columns", [8, 3])
def test_products_of_groups(columns: int):
    """By the library where rows are aligned, else one after the other; some experts empty."""
    generator = torch.Generator().manual_seed(1)
    routing = experts.route(chosen(9, "ends"), TOP_K)
    rows, b = torch.randn(18, K, generator=generator), torch.randn(E, K, columns)
    of_slot = torch.arange(E).repeat_interleave(routing.tables.counts[0])
    wanted = torch.einsum("sk,skn->sn", rows, b[of_slot])
    torch.testing.assert_close(experts.grouped_matmul(rows, b, routing), wanted)
    begin = int(routing.tables.counts[0, :2].sum())
    own = experts.grouped_matmul(rows[begin:].contiguous(), b[2:], routing, first=2)
    torch.testing.assert_close(own[: 18 - begin], wanted[begin:])


def test_layers_survive_as_text():
    for compiled in (layer(), dispatched(), dispatched(True)):
        for stage in compiled.stages.tasks.values():
            assert read(task, task.show(stage)) == stage
        assert read(device, device.show(compiled.plan)) == compiled.plan
    placed = task.show(layer().stages.tasks["place"])
    assert "routing: table[m, 2, 4] @ Replicate() = moe_route(logits, top_k=2" in placed
    assert "routing = buffer(table, (m, 2, 4), role=tables)" in device.show(layer().plan)


def placed_as(x, w, body):
    """A program of x, w and tables."""

    @program(
        mesh="tp", x=Tensor("float32", ("m", K), x), w=Tensor("float32", (E, K, F), w),
        logits=Tensor("float32", ("m", E), Shard(0)),
    )  # fmt: skip
    def moe(x, w, logits):
        return body(x, w, moe_route(logits, top_k=TOP_K))

    return moe.stages.program


@pytest.mark.parametrize(
    ("x", "w", "result"),
    [
        (Replicate(), Replicate(), Replicate()),
        (Replicate(), Shard(2), Shard(1)),
        (Shard(1), Shard(1), Partial()),
        (Replicate(), Partial(), Partial()),
    ],
)
def test_where_products_lie(x, w, result):
    """Each row of the table, in numbers on two ranks."""

    def body(x, w, routing):
        rows = gather_rows(x, routing)
        return scatter_rows(grouped_matmul(rows, w, routing), routing)

    placed = placed_as(x, w, body)
    assert placed.tasks[-1].type.placement == result
    generator = torch.Generator().manual_seed(2)
    whole_x, whole_w = torch.randn(5, K, generator=generator), torch.randn(E, K, F)
    routing = experts.route(torch.randn(5, E, generator=generator), TOP_K)
    parts = []
    for rank in range(2):
        mine = [of_rank(placed.task(n).type, t, {"m": 5}, rank, 2)
                for n, t in (("x", whole_x), ("w", whole_w))]  # fmt: skip
        rows = experts.gather_rows(mine[0], routing)
        parts.append(experts.scatter_rows(experts.grouped_matmul(rows, mine[1], routing), routing))
    wanted = experts.scatter_rows(
        experts.grouped_matmul(experts.gather_rows(whole_x, routing), whole_w, routing), routing
    )
    found = {Replicate(): parts[0], Partial(): sum(parts)}.get(result)
    torch.testing.assert_close(torch.cat(parts, 1) if found is None else found, wanted)


@pytest.mark.parametrize(
    ("x", "w", "body", "told"),
    [
        (Shard(0), Replicate(), lambda x, w, t: gather_rows(x, t),
         r"gather_rows cannot take x @ Shard\(0\).*; x must be Replicate\(\): all_gather\(x, dim"),
        (Shard(0), Shard(0), lambda x, w, t: grouped_matmul(ep_dispatch(x, t), w, t) + x,
         "sizes must be equal"),
        (Replicate(), Shard(0), lambda x, w, t: grouped_matmul(gather_rows(x, t), w, t),
         r"w must be Replicate\(\): all_gather\(w, dim=0\) or declare it so"),
        (Shard(0), Shard(2), lambda x, w, t: grouped_matmul(ep_dispatch(x, t), w, t),
         r"w must be Shard\(0\): declare it so"),
        (Shard(0), Shard(0), lambda x, w, t: ep_combine(ep_dispatch(x, t) + ep_dispatch(x, t), t),
         None),
        (Replicate(), Replicate(), lambda x, w, t: t, "returns routing, tables of moe_route"),
        (Replicate(), Replicate(), lambda x, w, t: x @ w, "w is float32.*must have two dimensions"),
        (Replicate(), Replicate(), lambda x, w, t: gather_rows(t, t), "it must be a tensor"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_told_with_the_remedy(x, w, body, told: str | None):
    if told is None:
        assert placed_as(x, w, body).task("total").type.placement == ByExpert()
        return
    with pytest.raises((PlacementError, ShapeError), match=told) as caught:
        placed_as(x, w, body)
    assert caught.value.place.frames
