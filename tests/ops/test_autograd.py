"""Gradients of operators: those of torch on global tensors, bit by bit where sums are exact."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from differentiating import gradients, leaf, same, shard, whole

import weft
from weft import ops
from weft.base.errors import DtypeError, UsageError
from weft.compiler import libraries
from weft.plan import operations

SLOW = partial(pytest.param, marks=pytest.mark.slow)


def on_ranks(ranks, num_ranks, main):
    """Each rank's results, of a world that every rank makes and closes."""

    def run():
        with weft.init() as world:
            return main(world)

    return ranks(run, num_ranks)


@pytest.mark.parametrize(("num_ranks", "m"), [(2, 8), (3, 5), SLOW(1, 5), SLOW(4, 5)])
def test_rows_that_move(ranks, num_ranks, m):
    """all_gather, reduce_scatter, all_to_all: what comes of a row's copies goes back to the row."""
    x = whole(m, 2, 3, seed=1)
    parts = [whole(m, 2, 3, seed=10 + rank) for rank in range(num_ranks)]

    def main(world):
        rank = world.rank
        own, mine = leaf(shard(x, rank, num_ranks)), leaf(parts[rank])
        got = gradients(lambda a: ops.all_gather(a, world=world, m=m), [own], parts[rank])
        same(got, [x, shard(sum(parts), rank, num_ranks)])
        given = shard(x, rank, num_ranks)
        got = gradients(lambda a: ops.reduce_scatter(a, world=world), [mine], given)
        same(got, [shard(sum(parts), rank, num_ranks), x])
        mine.grad = None
        got = gradients(lambda a: ops.all_reduce(a, world=world), [mine], x)
        same(got, [sum(parts), x])
        mine.grad = None
        theirs = torch.cat([shard(one, rank, num_ranks) for one in parts])
        got = gradients(lambda a: ops.all_to_all(a, world=world), [mine], theirs * 2)
        same(got, [theirs, parts[rank] * 2])

    on_ranks(ranks, num_ranks, main)


@pytest.mark.parametrize("capacity", [12, 5])
def test_rows_by_splits(ranks, capacity):
    """What found no room, or was not sent, has a gradient of zeros."""
    splits = torch.tensor([[1, 2, 0], [3, 0, 1], [2, 1, 1]])
    parts = [whole(4, 2, seed=rank) for rank in range(3)]

    def main(world):
        x, given = leaf(parts[world.rank]), whole(capacity, 2, seed=20 + world.rank)
        out, received = ops.all_to_all(x, world=world, splits=splits[world.rank], capacity=capacity)
        assert not received.requires_grad and torch.equal(received, splits[:, world.rank])
        (out * given).sum().backward()
        return x.grad

    found = on_ranks(ranks, 3, main)
    for source, gradient in enumerate(found):
        expected, row = torch.zeros(4, 2), 0
        for to in range(3):
            first = int(splits[:source, to].sum())
            given = whole(capacity, 2, seed=20 + to)
            for place in range(int(splits[source, to])):
                if first + place < capacity:
                    expected[row] = given[first + place]
                row += 1
        assert torch.equal(gradient, expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "m", "is_nk"),
    [(2, 16, False), (3, 9, True), SLOW(3, 9, False), SLOW(1, 9, True), SLOW(4, 9, True)],
)
def test_products(ranks, num_ranks, m, is_nk):
    """ag_gemm, gemm_rs, gemm_ar; bitwise as torch's of all ranks' tensors together."""
    n, k = 24, 16
    a = whole(m, k, seed=1).requires_grad_()
    bs = [whole(k, n, seed=2 + rank).requires_grad_() for rank in range(num_ranks)]
    summed = [whole(m, k, seed=20 + rank).requires_grad_() for rank in range(num_ranks)]
    given = [whole(m, n, seed=40 + rank) for rank in range(num_ranks)]
    sum(((a @ b) * g).sum() for b, g in zip(bs, given, strict=True)).backward()
    gathered = (a.grad, [b.grad for b in bs])
    for b in bs:
        b.grad = None
    (sum(x @ b for x, b in zip(summed, bs, strict=True)) * given[0]).sum().backward()

    def main(world):
        rank = world.rank
        b = bs[rank].detach()
        b = leaf(b.t().contiguous().t() if is_nk else b)
        own = leaf(shard(a, rank, num_ranks))
        got = gradients(lambda a, b: ops.ag_gemm(a, b, world=world, m=m), [own, b], given[rank])
        same(got, [a @ bs[rank], shard(gathered[0], rank, num_ranks), gathered[1][rank]])
        total = sum(x.detach() @ b.detach() for x, b in zip(summed, bs, strict=True))
        wanted = [summed[rank].grad, bs[rank].grad]
        for op, rows in ((ops.gemm_rs, lambda x: shard(x, rank, num_ranks)), (ops.gemm_ar, None)):
            b.grad, x = None, leaf(summed[rank])
            part = rows or (lambda x: x)
            got = gradients(lambda a, b, op=op: op(a, b, world=world), [x, b], part(given[0]))
            same(got, [part(total), *wanted])

    on_ranks(ranks, num_ranks, main)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_sums_with_a_norm(ranks, num_ranks):
    parts = [torch.randn(6, 16, generator=torch.Generator().manual_seed(r)) for r in range(9)]
    residual, weight, *given = (parts.pop(), parts.pop()[0], parts.pop(), parts.pop())
    mine = [leaf(one) for one in parts[:num_ranks]]
    rest = [leaf(residual), leaf(weight)]
    total = sum(mine) + rest[0]
    normed = torch.nn.functional.rms_norm(total, (16,), rest[1], 1e-6)
    (normed * given[0] + total * given[1]).sum().backward()

    def main(world):
        leaves = [leaf(one) for one in (mine[world.rank], *rest)]
        got = gradients(lambda *x: ops.all_reduce_rms_norm(*x, world=world), leaves, given)
        wanted = [normed, total, mine[world.rank].grad, *(one.grad for one in rest)]
        for one, other in zip(got, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)

    on_ranks(ranks, num_ranks, main)


def mlp(x, up, down, world, m):
    """Up and gate in neighbouring columns, down; fused."""
    hidden = libraries.LOCAL["silu_mul"](ops.ag_gemm(x, up, world=world, m=m))
    return ops.gemm_rs(hidden, down, world=world)


def mlp_unfused(x, up, down, world, m):
    hidden = libraries.LOCAL["silu_mul"](ops.all_gather(x, world=world, m=m) @ up)
    return ops.reduce_scatter(hidden @ down, world=world)


def trained(forward, x, target, weights, steps=2):
    """The weights after steps of descent on the squared error of these rows."""
    weights = [leaf(one) for one in weights]
    for _ in range(steps):
        (forward(x, *weights) - target).square().sum().backward()
        with torch.no_grad():
            for one in weights:
                one -= 1e-3 * one.grad
                one.grad = None
    return [one.detach() for one in weights]


def test_an_mlp_learns_as_on_one_rank(ranks):
    """Two steps; the same bits in every schedule, and as close to the unfused way's as to one's."""
    m, generator = 10, torch.Generator().manual_seed(0)
    x, target = (torch.randn(m, 16, generator=generator) for _ in range(2))
    up, down = (torch.randn(16, n, generator=generator) / 4 for n in (64, 32))
    down = down.t().contiguous()
    alone = trained(lambda a, b, c: libraries.LOCAL["silu_mul"](a @ b) @ c, x, target, [up, down])

    def main(world):
        rank, found = world.rank, []
        rows = [shard(one, rank, 2) for one in (x, target)]
        own = [up.chunk(2, 1)[rank].contiguous(), down.chunk(2)[rank]]
        for way in (mlp, mlp_unfused):
            found.append(trained(lambda *given, way=way: way(*given, world, m), *rows, own))
        return found

    def run(seed):
        return ranks(lambda: main(weft.init()), 2, seed=seed)

    first, again = run(0), run(1)
    for rank in range(2):
        same(first[rank][0], again[rank][0])
        wanted = [alone[0].chunk(2, 1)[rank], alone[1].chunk(2)[rank]]
        for found in first[rank]:
            for got, want in zip(found, wanted, strict=True):
                torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("is_nk", [False, SLOW(True)])
def test_fused_and_unfused_have_the_same_bits(ranks, is_nk):
    """On whole numbers, whose sums are exact in any order."""
    m, x = 9, whole(9, 16, seed=1)
    weights = [whole(16, 24, seed=2), whole(24, 16, seed=3)]

    def fused(a, up, down, world):
        return ops.gemm_rs(ops.ag_gemm(a, up, world=world, m=m), down, world=world)

    def unfused(a, up, down, world):
        rows = ops.all_gather(a, world=world, m=m)
        return ops.reduce_scatter((rows @ up) @ down, world=world)

    def main(world):
        rank, found = world.rank, []
        laid = [one.t().contiguous().t() if is_nk else one for one in weights]
        given = shard(whole(m, 16, seed=4), rank, 3)
        for way in (fused, unfused):
            leaves = [leaf(shard(x, rank, 3)), *map(leaf, laid)]
            found.append(gradients(lambda *a, way=way: way(*a, world), leaves, given))
        same(*found)

    on_ranks(ranks, 3, main)


# ---- what must be so around it


def test_nothing_is_asked_of_torch_where_no_gradient_is(ranks, monkeypatch):
    """Without gradients a call is the operator's own."""
    monkeypatch.setattr(operations, "as_operation", None)
    x = whole(4, 16, seed=1)

    def main(world):
        ops.ag_gemm(x, x.t(), world=world)
        with torch.no_grad():
            ops.ag_gemm(leaf(x), leaf(x.t()), world=world)
            ops.all_reduce(torch.nn.Parameter(x), world=world)
        with pytest.raises(TypeError):  # None is called
            ops.all_reduce(torch.nn.Parameter(x), world=world)

    on_ranks(ranks, 1, main)


def test_out_has_no_gradient(ranks):
    def main(world):
        x, out = leaf(whole(4, 4, seed=1)), torch.empty(4, 4)
        with pytest.raises(UsageError, match=r"all_reduce: out= .* leave out= away, or call under"):
            ops.all_reduce(x, world=world, out=out)
        with torch.no_grad():
            assert ops.all_reduce(x, world=world, out=out) is out

    on_ranks(ranks, 1, main)


def test_fp8_has_no_gradient(ranks):
    def main(world):
        a = whole(16, 16, seed=1).to(torch.float8_e4m3fn)
        one = torch.ones((), requires_grad=True)
        assert not ops.ag_gemm(a, a.t(), world=world, scale_a=one, scale_b=one).requires_grad
        wanted = "float8_e4m3fn operands with scales have no gradient"
        for call in (ops.ag_gemm, ops.gemm_rs, ops.gemm_ar):
            with pytest.raises(DtypeError, match=f"{call.__name__}: .*{wanted}"):
                call(a.detach().requires_grad_(), a.t(), world=world, scale_a=one, scale_b=one)

    on_ranks(ranks, 1, main)


def test_what_is_saved_is_nobodys_slot(ranks, monkeypatch):
    """With one slot every call overwrites the last one's; gradients are of the values then."""
    monkeypatch.setenv("WEFT_SLOTS", "1")
    a, b = whole(8, 16, seed=1), whole(16, 16, seed=2)

    def main(world):
        x, weight = leaf(shard(a, world.rank, 2)), leaf(b)
        first = ops.ag_gemm(x, weight, world=world)
        second = ops.gemm_rs(first, weight, world=world)
        for seed in range(3, 8):
            other = whole(4, 16, seed=seed)
            ops.gemm_rs(ops.ag_gemm(other, whole(16, 16, seed=9), world=world), b, world=world)
        second.sum().backward()
        return x.grad

    want, b = a.clone().requires_grad_(), b
    (2 * (want @ b @ b)).sum().backward()
    found = on_ranks(ranks, 2, main)
    assert torch.equal(torch.cat(found), want.grad)


def test_what_was_saved_and_then_written_is_an_error(ranks):
    """As with torch's own operations; symmetric memory and out= included."""

    def main(world):
        weight = leaf(whole(16, 16, seed=2))
        a = world.empty((4, 16), torch.float32)
        a.copy_(whole(4, 16, seed=1))
        out = ops.ag_gemm(a, weight, world=world)
        ops.all_reduce(whole(4, 16, seed=3), world=world, out=a)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()

    on_ranks(ranks, 2, main)
