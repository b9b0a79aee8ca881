"""ep_combine: sums of the reference, the same bits always; and layers of experts on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import weft
from weft.base.errors import CapacityError, ShapeError
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.ops.ep_combine import Config, Problem, ep_combine, op
from weft.ops.ep_dispatch import ep_dispatch
from weft.ops.moe_route import moe_route
from weft.verify import compiled

ELSEWHERE = ("cuda:100", "hip:gfx942")
SMALL = Config(channels=3, block=32, tokens=2, batch=4)


def call_once(ranks, problem, config=SMALL, **options):
    inputs = [op.make_inputs(problem, rank) for rank in range(problem.num_ranks)]
    expected = op.reference(problem, inputs)

    def main():
        world = weft.init()
        out = op.run(world, problem, inputs[world.rank], config)
        assert torch.equal(out, expected[world.rank])
        return out

    return ranks(main, problem.num_ranks, **options)


@pytest.mark.parametrize(
    ("dtype", "weighted"), [("float16", True), ("bfloat16", False), ("float32", True)]
)
def test_sums_are_the_references_bit_by_bit(ranks, dtype, weighted):
    sizes = {"experts": 6, "top_k": 4, "tile_m": 4, "weighted": weighted}
    call_once(ranks, Problem(9, 40, 2, dtype, **sizes))


@pytest.mark.parametrize(
    ("num_ranks", "m", "n", "experts", "top_k"),
    [(4, 9, 7, 5, 3), (4, 1, 16, 2, 1), (3, 5, 24, 2, 2), (1, 6, 16, 3, 3), (2, 0, 16, 2, 1)],
)
def test_awkward_sizes(ranks, num_ranks, m, n, experts, top_k):
    call_once(ranks, Problem(m, n, num_ranks, "float32", experts=experts, top_k=top_k))


@pytest.mark.parametrize("nodes", [(3,), pytest.param((2, 1), marks=pytest.mark.slow)], ids=str)
def test_called_in_turns_recorded_and_replayed_on_one_slot(ranks, nodes, monkeypatch):
    monkeypatch.setenv("WEFT_SLOTS", "1")
    problem = Problem(17, 10, 3, "float32", nodes, experts=5, top_k=2, tile_m=4)
    inputs = [[op.make_inputs(problem, rank, seed) for rank in range(3)] for seed in range(2)]
    expected = [op.reference(problem, one) for one in inputs]
    other = replace(problem, m=30, n=5, top_k=3, capacity=-1)

    def main():
        world = weft.init()
        kept = {name: value.clone() for name, value in inputs[0][world.rank].items()}
        op.run(world, problem, kept, SMALL)  # memory cannot be taken in a recording
        with world.record() as recording:
            out = op.run(world, problem, kept, SMALL)
        for one, wanted in zip(inputs, expected, strict=True):
            for name, value in one[world.rank].items():
                kept[name].copy_(value)
            out.fill_(torch.nan)
            recording.replay()
            assert torch.equal(out.clone(), wanted[world.rank])
            op.run(world, other, op.make_inputs(other, world.rank), SMALL)
        world.close()

    ranks(main, 3, nodes=nodes)


def layer(x, ids, weights, up, down):
    """All experts where all tokens are: what the ranks make of it together."""
    out = torch.zeros_like(x)
    for expert in range(len(up)):
        for k in range(ids.shape[1]):
            mine = ids[:, k] == expert
            inside = torch.nn.functional.silu(x[mine] @ up[expert])
            out[mine] += weights[mine, k, None] * (inside @ down[expert])
    return out


def products(x, handle, b):
    """Rows by slot times their experts', by the tables' tiles; NaN where no slot is."""
    out = torch.full((x.shape[0], b.shape[2]), torch.nan)
    for expert, first, end, *_ in handle.tables.tiles[:, : int(handle.tables.num_tiles)].t():
        out[first:end] = x[first:end] @ b[expert]
    return out


@pytest.mark.parametrize("seed", range(4))
def test_any_layer(ranks, seed):
    """Random sizes and routings: there, two products, and back, against the dense layer."""
    generator = torch.Generator().manual_seed(seed)

    def number(low, high):
        return int(torch.randint(low, high + 1, (1,), generator=generator))

    num_ranks, experts, rows = 1 + seed % 4, number(1, 9), number(1, 9)
    top_k, hidden, inner = number(1, min(experts, 4)), number(3, 20), number(2, 9)
    counts = [number(0, rows) for _ in range(num_ranks)]
    x = [torch.randn(count, hidden) for count in counts]
    skew = torch.randn(experts) * seed
    ids = [(torch.randn(count, experts) + skew).topk(top_k).indices for count in counts]
    weights = [torch.rand(count, top_k) for count in counts]
    up, down = torch.randn(experts, hidden, inner), torch.randn(experts, inner, hidden)
    own = -(-experts // num_ranks)

    def main():
        world = weft.init()
        rank, mine = world.rank, slice(world.rank * own, (world.rank + 1) * own)
        sizes = {"max_tokens": rows, "tile_m": 4}
        asked = (x[rank], ids[rank].int(), weights[rank], experts)
        there, handle = ep_dispatch(*asked, world=world, **sizes)
        inside = torch.nn.functional.silu(products(there, handle, up[mine]))
        out = ep_combine(products(inside, handle, down[mine]), handle, world=world)
        world.synchronize()
        wanted = layer(x[rank], ids[rank], weights[rank], up, down)
        torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-4)

    ranks(main, num_ranks, seed=seed)


def test_behind_the_router(ranks):
    """What moe_route chooses is taken as it is; there and back is the identity."""
    logits, x = torch.randn(10, 6), torch.randn(10, 12)

    def main():
        world = weft.init()
        own = slice(5 * world.rank, 5 * world.rank + 5)
        routed = moe_route(logits[own], 3, world=world).tables
        sizes = {"capacity": 30, "tile_m": 4}
        there, handle = ep_dispatch(
            x[own], routed.ids, routed.weights, 6, world=world, **sizes
        )  # fmt: skip
        same = handle.tables.counts.sum(0) == routed.counts.sum(0).view(2, 3)[world.rank]
        assert same.all()
        back = ep_combine(there, handle, world=world)
        torch.testing.assert_close(back, x[own], rtol=1e-5, atol=1e-6)
        # Without weights it is what a dispatch's gradient is.
        thrice = ep_combine(there, handle, world=world, weighted=False)
        torch.testing.assert_close(thrice, 3 * x[own], rtol=1e-5, atol=1e-6)

    ranks(main, 2)


def test_what_did_not_fit_counts_as_nothing(ranks):
    x, ids = torch.ones(4, 8), torch.tensor([[0], [1], [1], [0]]).int()

    def main():
        world = weft.init()
        sizes = {"capacity": 5, "tile_m": 4}
        there, handle = ep_dispatch(x, ids, torch.ones(4, 1), 4, world=world, **sizes)
        with pytest.raises(CapacityError, match="rank 0 gets 8 rows .* capacity=5"):
            world.synchronize()
        return ep_combine(there, handle, world=world)[:, 0].tolist()

    # Expert 0 has room for all four rows, expert 1 for the first.
    assert ranks(main, 2) == [[1, 1, 0, 1], [1, 0, 0, 1]]


def test_what_does_not_fit(ranks):
    def main():
        world = weft.init()
        asked = (torch.ones(3, 8), torch.zeros(3, 1).int(), torch.ones(3, 1), 4)
        there, handle = ep_dispatch(*asked, world=world)
        with pytest.raises(ShapeError, match="y has 2 rows but the dispatch capacity=6"):
            ep_combine(there[:2], handle, world=world)
        with pytest.raises(ShapeError, match=r"y has shape \(6,\); it must be \[slots, n\]"):
            ep_combine(there[:, 0].contiguous(), handle, world=world)
        with pytest.raises(ShapeError, match=r"out has shape \(6, 8\); the result is \(3, 8\)"):
            ep_combine(there, handle, world=world, out=there)

    ranks(main, 2)


@pytest.mark.parametrize(
    "target",
    ["cuda:90", *(pytest.param(one, marks=pytest.mark.slow) for one in ELSEWHERE)],
)
def test_compiles_and_keeps_its_waits(target):
    problem = Problem(4096, 7168, 4, "bfloat16", experts=256, top_k=8)
    few = replace(problem, m=128)
    for fn, record in (x for p in (problem, few) for x in op.kernels(p, None, TARGETS[target])):
        binary = triton_api.compile_kernel(fn, record, TARGETS[target])
        report = compiled(binary, TARGETS[target])
        assert report.ok, "\n".join(map(str, report.findings))
        if TARGETS[target].backend == "cuda":
            ptx = binary.asm["ptx"]
            assert "st.local" not in ptx
            assert "ld.global.v4" in ptx and "st.global.v4" in ptx
