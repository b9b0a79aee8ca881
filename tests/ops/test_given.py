"""Calls that are given DTensors, tensors of a class of one's own, or torch.autocast."""

from __future__ import annotations

import pytest
import torch
from differentiating import gradients, leaf, same, shard, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import weft
from weft import ops
from weft.base.errors import DtypeError, PlacementError
from weft.compiler import Tensor, all_gather, rms_norm
from weft.ir import tensor as ir

RANKS = 2
ROWS, COLUMNS, SUM, ALIKE = Shard(0), Shard(1), Partial(), Replicate()


def on_ranks(ranks, main, num_ranks=RANKS):
    """Each rank's `main(world, mesh)`, of a world that every rank makes and closes."""

    def run():
        with weft.init() as world:
            return main(world, init_device_mesh("cpu", (num_ranks,)))

    return ranks(run, num_ranks)


CALLS = {
    "all_gather": (ops.all_gather, [(ROWS, (4, 3))]),
    "reduce_scatter": (ops.reduce_scatter, [(SUM, (4, 3))]),
    "all_reduce": (ops.all_reduce, [(SUM, (4, 3))]),
    "all_to_all": (ops.all_to_all, [(ROWS, (8, 3))]),
    "ag_gemm": (ops.ag_gemm, [(ROWS, (4, 8)), (COLUMNS, (8, 6))]),
    "gemm_rs": (ops.gemm_rs, [(COLUMNS, (4, 8)), (ROWS, (8, 6))]),
    "gemm_ar": (ops.gemm_ar, [(COLUMNS, (4, 8)), (ROWS, (8, 6))]),
    "ag_wgrad": (ops.ag_wgrad, [(ROWS, (4, 6)), (COLUMNS, (4, 8))]),
    "ag_wgrad, y": (
        lambda x, y, world: ops.ag_wgrad(x, y, world=world, gathered="y"),
        [(COLUMNS, (4, 6)), (ROWS, (4, 8))],
    ),
    "all_reduce_rms_norm": (
        ops.all_reduce_rms_norm, [(SUM, (4, 8)), (ALIKE, (4, 8)), (ALIKE, (8,))],
    ),
    "ag_attention": (ops.ag_attention, [(ROWS, (8, 2, 16))] * 3),
    "moe_route": (
        lambda logits, world: ops.moe_route(logits, 2, world=world).tables.weights,
        [(ROWS, (8, 4))],
    ),
}  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("name", CALLS)
def test_a_dtensor_stands_for_the_ranks_part_of_it(ranks, name):
    """Results are the parts' results, and gradients lie as the DTensors do."""
    call, arguments = CALLS[name]

    def main(world, mesh):
        parts = []
        for i, (placement, shape) in enumerate(arguments):
            seed = 10 * i + (world.rank if placement == SUM else 0)
            one = whole(*shape, seed=seed)
            if placement in (ROWS, COLUMNS):
                one = one.chunk(world.num_ranks, placement.dim)[world.rank]
            parts.append(leaf(one.contiguous()))
        spread = [
            DTensor.from_local(part.detach(), mesh, [placement]).requires_grad_()
            for part, (placement, _) in zip(parts, arguments, strict=True)
        ]
        wanted = call(*parts, world=world)
        given = [
            torch.ones_like(one) for one in (wanted if isinstance(wanted, tuple) else (wanted,))
        ]
        got = gradients(lambda *tensors: call(*tensors, world=world), spread, given)
        count = len(given)
        for one, (placement, _) in zip(got[count:], arguments, strict=True):
            assert one.placements == ((ALIKE,) if placement == SUM else (placement,))
        wanted = gradients(lambda *tensors: call(*tensors, world=world), parts, given)
        same([*got[:count], *(one.to_local() for one in got[count:])], wanted)
        with torch.no_grad():
            again = call(*spread, world=world)
        same(again if isinstance(again, tuple) else (again,), wanted[:count])

    on_ranks(ranks, main)


def test_rows_that_do_not_divide_are_counted_by_the_dtensor(ranks):
    """A plain shard does not say how many rows all ranks have: m= does."""
    x, weight = whole(5, 8, seed=1), whole(8, 6, seed=2)

    def main(world, mesh):
        rows = distribute_tensor(x, mesh, [ROWS])
        columns = distribute_tensor(weight, mesh, [COLUMNS])
        own = weight.chunk(3, 1)[world.rank]
        assert torch.equal(ops.ag_gemm(rows, columns, world=world), x @ own)
        assert torch.equal(ops.all_gather(rows, world=world), x)

    on_ranks(ranks, main, 3)


@pytest.mark.slow
def test_a_dtensor_in_what_is_compiled(ranks):
    x, weight = whole(4, 8, seed=1), whole(8, 6, seed=2)

    def main(world, mesh):
        rows, columns = (
            distribute_tensor(x, mesh, [ROWS]),
            distribute_tensor(weight, mesh, [COLUMNS]),
        )
        call = torch.compile(
            lambda a, b: ops.ag_gemm(a, b, world=world) + 1, backend="aot_eager", fullgraph=True
        )
        assert torch.equal(call(rows, columns), x @ weight.chunk(RANKS, 1)[world.rank] + 1)

    on_ranks(ranks, main)
    torch._dynamo.reset()


def test_a_dtensor_that_lies_otherwise_is_refused_by_the_placement_that_is_needed(ranks):
    x, weight = whole(4, 8, seed=1), whole(8, 6, seed=2)

    def main(world, mesh):
        rows = distribute_tensor(x, mesh, [ROWS])
        with pytest.raises(
            PlacementError, match=r"ag_gemm: b is .*\[Shard\(dim=0\)\].*b as Shard\(1\)"
        ):
            ops.ag_gemm(rows, distribute_tensor(weight, mesh, [ROWS]), world=world)
        with pytest.raises(PlacementError, match=r"x as Partial\(\).*redistribute"):
            ops.all_reduce(rows, world=world)
        flat = init_device_mesh("cpu", (RANKS, 1))
        with pytest.raises(PlacementError, match=r"mesh of shape \(2, 1\)"):
            ops.all_gather(distribute_tensor(x, flat, [ROWS, ALIKE]), world=world)
        with pytest.raises(PlacementError, match=r"out is a DTensor.*out\.to_local\(\)"):
            for out in (torch.empty_like(x), distribute_tensor(x, mesh, [ALIKE])):
                ops.all_gather(rows.to_local(), world=world, out=out)
        own = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("row", "column"))["column"]
        with pytest.raises(
            PlacementError, match=r"mesh of the ranks \[\d\].*of the ranks \[0, 1\]"
        ):
            ops.all_gather(distribute_tensor(x, own, [ROWS]), world=world)

    on_ranks(ranks, main)


@pytest.mark.slow
def test_calls_that_take_no_dtensor_say_so(ranks):
    def main(world, mesh):
        q = torch.zeros(2, 2, 16)
        cache, lengths = torch.zeros(2, 4, 2, 16), torch.ones(2, dtype=torch.int32)
        spread = distribute_tensor(cache, mesh, [ALIKE])
        with pytest.raises(PlacementError, match=r"k_cache is a DTensor"):
            for one in (cache, spread):
                ops.flash_decode(q, one, one, lengths, world=world)
        x, ids = torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int32)
        weights = torch.ones(4, 1)
        sent = ops.ep_dispatch(x, ids, weights, RANKS, world=world)
        with pytest.raises(PlacementError, match=r"y is a DTensor"):
            ops.ep_combine(distribute_tensor(sent.x, mesh, [ALIKE]), sent.handle, world=world)

    on_ranks(ranks, main)


def test_tokens_of_a_dtensor_are_dispatched(ranks):
    x = whole(8, 8, seed=1)
    ids = torch.arange(8, dtype=torch.int32)[:, None] % RANKS

    def main(world, mesh):
        rank, weights = world.rank, torch.ones(4, 1)
        own = shard(ids, rank, RANKS).contiguous()
        rows = distribute_tensor(x, mesh, [ROWS]).requires_grad_()
        sent = ops.ep_dispatch(rows, own, weights, RANKS, world=world)
        back = ops.ep_combine(sent.x * 2, sent.handle, world=world)
        assert torch.equal(back, 2 * shard(x, rank, RANKS))
        back.sum().backward()
        assert rows.grad.placements == (ROWS,)
        assert torch.equal(rows.grad.to_local(), torch.full((4, 8), 2.0))

    on_ranks(ranks, main)


@weft.program(
    mesh="tp",
    x=Tensor("float32", ("m", 16), ir.Shard(0)),
    w=Tensor("float32", (16, 32), ir.Shard(1)),
    scale=Tensor("float32", (1, 16), ir.Replicate()),
)
def normed_product(x, w, scale):
    return all_gather(rms_norm(x, scale)) @ w


@pytest.mark.few(1)
@pytest.mark.parametrize("lowering", ["unfused", "overlapped"])
def test_a_program_takes_dtensors_and_keeps_its_dtypes(ranks, lowering):
    """It declares both: how its inputs lie, and of what dtype they are, autocast or not."""
    x, w, scale = whole(5, 16, seed=1), whole(16, 32, seed=2), torch.arange(1.0, 17.0)[None]

    def main(world, mesh):
        spread = [
            distribute_tensor(one, mesh, [placement]).requires_grad_()
            for one, placement in ((x, ROWS), (w, COLUMNS), (scale, ALIKE))
        ]
        alone = [leaf(one.detach().to_local().contiguous()) for one in spread]
        made, options = normed_product.options(lowering=lowering), {"world": world}
        wanted = made(*alone, **options, m=5)
        wanted.sum().backward()
        with narrow():
            got = made(*spread, **options)
        got.sum().backward()
        assert torch.equal(got, wanted)
        for one, other in zip(spread, alone, strict=True):
            assert one.grad.placements == one.placements
            assert torch.equal(one.grad.to_local(), other.grad)
        with pytest.raises(PlacementError, match=r"normed_product takes w as Shard\(1\)"):
            made(spread[0], distribute_tensor(w, mesh, [ROWS]), spread[2], **options)
        with pytest.raises(PlacementError, match=r"scale is a DTensor placed as \[Shard"):
            made(*spread[:2], distribute_tensor(scale, mesh, [COLUMNS]), **options)

    on_ranks(ranks, main)


class Named(torch.Tensor):
    """A class of a user's own."""


def test_a_tensor_of_a_class_of_ones_own(ranks):
    x = whole(4, 8, seed=1)

    def main(world, mesh):
        mine = shard(x, world.rank, RANKS).as_subclass(Named)
        assert torch.equal(ops.all_gather(mine, world=world), x)
        ids = torch.zeros(2, 1, dtype=torch.int32)
        sent = ops.ep_dispatch(mine, ids, torch.ones(2, 1), RANKS, world=world)
        back = ops.ep_combine(sent.x.as_subclass(Named), sent.handle, world=world)
        assert torch.equal(back, mine)

    on_ranks(ranks, main)


# ---------------------------------------------------------------------------------------------
# torch.autocast


def narrow(dtype=torch.bfloat16):
    return torch.autocast("cpu", dtype)


NARROWED = [
    name
    for name in CALLS
    if name.partition(",")[0] in ("ag_gemm", "gemm_rs", "gemm_ar", "ag_wgrad", "ag_attention")
]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", NARROWED)
def test_products_and_attention_cast_as_torchs_do(ranks, name):
    """The result is of autocast's dtype, gradients of the tensors' own: as after .to(..)."""
    call, arguments = CALLS[name]

    def main(world, mesh):
        parts = [
            leaf(whole(*shape, seed=i).chunk(RANKS, placement.dim)[world.rank].contiguous())
            for i, (placement, shape) in enumerate(arguments)
        ]
        alone = [leaf(part) for part in parts]
        with torch.no_grad(), narrow():
            made = call(*parts, world=world)
        assert made.dtype == torch.bfloat16
        given = torch.ones_like(made)

        def cast(*tensors):
            return call(*(one.to(torch.bfloat16) for one in tensors), world=world)

        def auto(*tensors):
            with narrow():
                return call(*tensors, world=world)

        wanted = gradients(cast, alone, given)
        same(gradients(auto, parts, given), wanted)
        assert all(part.grad.dtype == torch.float32 for part in parts)
        assert torch.equal(made, wanted[0])
        with narrow():  # backward within it, too
            for part in parts:
                part.grad = None
            same(gradients(lambda *tensors: call(*tensors, world=world), parts, given), wanted)

    on_ranks(ranks, main)


def test_what_autocast_leaves_alone(ranks):
    """Rows that move keep their dtype; a given out, doubles, and other devices' autocast too."""
    x, weight = whole(4, 8, seed=1), whole(8, 6, seed=2)

    def main(world, mesh):
        own, columns = shard(x, world.rank, RANKS), weight.chunk(RANKS, 1)[world.rank].contiguous()
        with narrow():
            assert ops.all_gather(own, world=world).dtype == torch.float32
            assert ops.all_reduce(own, world=world).dtype == torch.float32
            out = torch.empty(4, 3)
            assert torch.equal(
                ops.ag_gemm(own, columns, world=world, out=out),
                x @ weight.chunk(RANKS, 1)[world.rank],
            )
            with torch.autocast("cpu", enabled=False):
                assert ops.ag_gemm(own, columns, world=world).dtype == torch.float32
            ids = torch.zeros(2, 1, dtype=torch.int32)
            sent = ops.ep_dispatch(own, ids, torch.ones(2, 1), RANKS, world=world)
            back = ops.ep_combine(sent.x, sent.handle, world=world)
            assert torch.equal(back, own)

    on_ranks(ranks, main)


def test_a_layer_of_mixed_dtypes_under_autocast(ranks):
    """What autocast is for: weights in float32, activations in bfloat16, one norm between."""

    def main(world, mesh):
        x = whole(2, 8, seed=world.rank).requires_grad_()
        up, down = leaf(whole(8, 6, seed=3)), leaf(whole(6, 8, seed=4))
        residual, weight = whole(4, 8, seed=5), leaf(torch.ones(8))
        with pytest.raises(DtypeError):
            ops.ag_gemm(x.bfloat16(), up, world=world)
        with narrow():
            hidden = torch.nn.functional.silu(ops.ag_gemm(x.bfloat16(), up, world=world))
            shares = ops.gemm_ar(hidden, down, world=world)
            assert hidden.dtype == shares.dtype == torch.bfloat16
            normed, total = ops.all_reduce_rms_norm(shares, residual, weight, world=world)
            assert normed.dtype == total.dtype == torch.float32
        normed.sum().backward()
        for one in (x, up, down, weight):
            assert one.grad.dtype == torch.float32 and torch.isfinite(one.grad).all()

    on_ranks(ranks, main)


def test_autocast_in_what_is_compiled(ranks):
    x, weight = whole(4, 8, seed=1), whole(8, 6, seed=2)

    def main(world, mesh):
        own, columns = leaf(shard(x, world.rank, RANKS)), leaf(weight.chunk(RANKS, 1)[world.rank])

        def layer(a, b):
            return ops.ag_gemm(a, b, world=world) * 2

        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        results = []
        for call in (layer, compiled):
            own.grad = columns.grad = None
            with narrow():
                made = call(own, columns)
            made.float().sum().backward()
            results.append((made.detach(), own.grad, columns.grad))
        assert results[0][0].dtype == torch.bfloat16
        same(*results)

    on_ranks(ranks, main)
    torch._dynamo.reset()


def test_decoding_casts_its_query_and_cache(ranks):
    def main(world, mesh):
        q = torch.randn(2, 2, 16, generator=torch.Generator().manual_seed(0))
        cache = torch.randn(2, 2, 4, 2, 16, generator=torch.Generator().manual_seed(world.rank))
        lengths = torch.full((2,), 4, dtype=torch.int32)
        narrowed = (one.bfloat16() for one in (q, *cache))
        wanted = ops.flash_decode(*narrowed, lengths, world=world)
        with narrow():
            got = ops.flash_decode(
                q, cache[0].bfloat16(), cache[1].bfloat16(), lengths, world=world
            )
        assert got.dtype == torch.bfloat16 and torch.equal(got, wanted)

    on_ranks(ranks, main)
