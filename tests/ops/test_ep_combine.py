"""ep_combine: sums of the reference, the same bits always; and layers of experts on all ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from effort import slow_but

import weft
from weft.base.errors import CapacityError, ShapeError
from weft.base.target import TARGETS
from weft.compiler.experts import Routing, Tables, scatter_rows
from weft.language import triton_api
from weft.ops.ep_combine import Config, Problem, ep_combine, op
from weft.ops.ep_dispatch import ep_dispatch
from weft.ops.moe_route import moe_route
from weft.verify import compiled

ELSEWHERE = ("cuda:100", "hip:gfx942")
SMALL = Config(channels=3, block=32, tokens=2, batch=4)
WAYS = (SMALL, Config(transport="unfused", channels=2))


def call_once(ranks, problem, config=SMALL, **options):
    inputs = [op.make_inputs(problem, rank) for rank in range(problem.num_ranks)]
    expected = op.reference(problem, inputs)

    def main():
        world = weft.init()
        out = op.run(world, problem, inputs[world.rank], config)
        assert torch.equal(out, expected[world.rank])
        return out

    return ranks(main, problem.num_ranks, **options)


@pytest.mark.few(2)
@pytest.mark.parametrize("by_choice", [False, True])
@pytest.mark.parametrize(
    ("dtype", "weighted"), [("float16", True), ("bfloat16", False), ("float32", True)]
)
def test_sums_are_the_references_bit_by_bit(ranks, dtype, weighted, by_choice):
    sizes = {"experts": 6, "top_k": 4, "tile_m": 4, "weighted": weighted, "by_choice": by_choice}
    call_once(ranks, Problem(9, 40, 2, dtype, **sizes))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("num_ranks", "m", "n", "experts", "top_k"),
    [(4, 9, 7, 5, 3), (4, 1, 16, 2, 1), (3, 5, 24, 2, 2), (1, 6, 16, 3, 3), (2, 0, 16, 2, 1)],
)
def test_awkward_sizes(ranks, num_ranks, m, n, experts, top_k):
    problem = Problem(m, n, num_ranks, "float32", experts=experts, top_k=top_k)
    call_once(ranks, problem)
    call_once(ranks, replace(problem, by_choice=True))


@pytest.mark.few(1)
@pytest.mark.parametrize("by_choice", [False, True])
@pytest.mark.parametrize("nodes", [(3,), pytest.param((2, 1), marks=pytest.mark.slow)], ids=str)
def test_called_in_turns_recorded_and_replayed_on_one_slot(ranks, nodes, by_choice, monkeypatch):
    monkeypatch.setenv("WEFT_SLOTS", "1")
    sizes = {"experts": 5, "top_k": 2, "tile_m": 4, "by_choice": by_choice}
    problem = Problem(17, 10, 3, "float32", nodes, **sizes)
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
            for one in (other, replace(other, by_choice=True)):
                op.run(world, one, op.make_inputs(one, world.rank), SMALL)
        world.close()

    ranks(main, 3, nodes=nodes)


def rows_of_slots(handle, made, starts, first):
    """y of a rank whose experts begin at `first`: what each has made of its tokens, NaN where no
    token is."""
    tables, rows = handle.tables, handle.problem.rows
    counts = tables.counts.sum(0)
    experts = first + torch.arange(len(counts)).repeat_interleave(counts)
    places = tables.token_of[: len(experts)].long()
    tokens = torch.tensor(starts)[places // rows] + places % rows
    y = torch.full((len(tables.token_of), made.shape[2]), torch.nan, dtype=made.dtype)
    y[: len(experts)] = made[tokens, experts]
    return y


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("counts", "top_k", "weighted"),
    slow_but([((11,), 3, True), ((0, 5, 6), 1, False), ((3, 0, 6, 2), 3, True)],
             [(counts, *how) for counts in ((11,), (4, 7), (0, 5, 6), (3, 0, 6, 2))
              for how in ((1, False), (3, True))]),
)  # fmt: skip
def test_by_choice_bits_are_those_of_one_rank(ranks, counts, top_k, weighted):
    """Whatever the number of ranks: as scatter_rows adds up all tokens' choices in one place."""
    m, n, experts = sum(counts), 40, 5
    generator = torch.Generator().manual_seed(top_k)
    weights = torch.rand(m, top_k, generator=generator)
    ids = torch.rand(m, experts, generator=generator).topk(top_k).indices.int()
    ids[2, -1] = ids[9, 0] = ids[5] = -1
    made = torch.randn(m, experts, n, generator=generator).bfloat16()
    made[4] = -0.0  # it keeps its sign
    chosen = made[torch.arange(m)[:, None], ids.long()].masked_fill((ids < 0)[..., None], 0)
    shares = weights.masked_fill(ids < 0, 0).flatten() if weighted else torch.ones(m * top_k)
    places = torch.arange(m * top_k).view(m, top_k)
    routing = Routing(Tables(*[None] * 9)._replace(slot_of=places, weight_of=shares), 0)
    wanted = scatter_rows(chosen.flatten(0, 1), routing)
    starts = [sum(counts[:rank]) for rank in range(len(counts))]

    def main():
        world = weft.init()
        mine = slice(starts[world.rank], starts[world.rank] + counts[world.rank])
        asked = (torch.zeros(counts[world.rank], 1), ids[mine], weights[mine], experts)
        _, handle = ep_dispatch(*asked, world=world, max_tokens=max(counts), tile_m=4)
        y = rows_of_slots(handle, made, starts, handle.problem.first_expert(world.rank))
        for config in WAYS:
            asked = {"weighted": weighted, "by_choice": True, "config": config}
            out = ep_combine(y, handle, world=world, **asked)
            world.synchronize()
            assert torch.equal(out.view(torch.int16), wanted[mine].view(torch.int16)), config

    ranks(main, len(counts))


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


@pytest.mark.few(1)
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


@pytest.mark.slow
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
        y = torch.ones(there.shape)
        ways = [(by_choice, config) for by_choice in (False, True) for config in WAYS]
        outs = [
            ep_combine(y, handle, world=world, by_choice=by_choice, config=config)
            for by_choice, config in ways
        ]
        return [out[:, 0].tolist() for out in outs]

    # Expert 0 has room for all four rows, expert 1 for the first.
    assert ranks(main, 2) == [4 * [[1, 1, 0, 1]], 4 * [[1, 0, 0, 1]]]


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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "target",
    ["cuda:90", *(pytest.param(one, marks=pytest.mark.slow) for one in ELSEWHERE)],
)
@pytest.mark.parametrize("by_choice", [False, True])
def test_compiles_and_keeps_its_waits(target, by_choice):
    sizes = {"experts": 256, "top_k": 8, "by_choice": by_choice}
    problem = Problem(4096, 7168, 4, "bfloat16", **sizes)
    few = replace(problem, m=128)
    for fn, record in (x for p in (problem, few) for x in op.kernels(p, None, TARGETS[target])):
        binary = triton_api.compile_kernel(fn, record, TARGETS[target])
        report = compiled(binary, TARGETS[target])
        assert report.ok, "\n".join(map(str, report.findings))
        if TARGETS[target].backend == "cuda":
            ptx = binary.asm["ptx"]
            assert "st.local" not in ptx
            assert "ld.global.v4" in ptx and "st.global.v4" in ptx
            # Products are rounded before they are added, as on one rank.
            assert not (by_choice and "fma." in ptx)
