"""Of what crosses from node to node: rows once to each node, counted in the emulator."""

from __future__ import annotations

import pytest
import torch
from multiplying import EMU, call_every_way, check, config_for

import weft
from weft.base.dtypes import tolerance
from weft.base.topology import Topology, text_of
from weft.compiler import Settings, Shard, Tensor, all_gather, all_reduce, reduce_scatter, silu_mul
from weft.ops import cards

NODES = [(2, 2), (4, 4), (3, 1), (3, 2)]
# Where the quick tests look: equal nodes, and one with a rank alone.
QUICK = (NODES[0], NODES[2])
N, K = 24, 16
WIDE = 120  # rows of so many columns are worth a relay of their sums
SUMS = ("gemm_rs", "gemm_ar")


def on_nodes(even: int, uneven: int) -> pytest.MarkDecorator:
    """Each of NODES with m rows, which ranks have alike or not; most of them slow."""
    found = [(nodes, m) for nodes in NODES for m in (even, uneven)]
    return pytest.mark.parametrize(("nodes", "m"), [
        pytest.param(nodes, m, id=f"{text_of(nodes)}-{m}",
                     marks=() if nodes in QUICK and m == uneven else pytest.mark.slow)
        for nodes, m in found
    ])  # fmt: skip


def crossing(nodes: tuple[int, ...], main) -> dict[tuple[int, int], int]:
    """Bytes from node to node while all ranks run `main`."""
    with weft.emulated(nodes=nodes) as session:
        session.run(main)
        return dict(session.traffic.between_nodes(session.topology))


def rows_of(nodes: tuple[int, ...], m: int) -> list[int]:
    """Of each node, as torch.chunk splits them over ranks."""
    topology, found = Topology(nodes), [0] * len(nodes)
    for rank, part in enumerate(torch.arange(m).chunk(sum(nodes))):
        found[topology.seat(rank).node] += len(part)
    return found


def pairs(nodes: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(i, j) for i in range(len(nodes)) for j in range(len(nodes)) if i != j]


@pytest.mark.few(1)
@on_nodes(160, 61)
def test_gathered_rows_cross_once(nodes, m):
    op, num_ranks = cards()["ag_gemm"], sum(nodes)
    problem = op.problem(m=m, n=N, k=K, num_ranks=num_ranks, dtype="float32", nodes=nodes)
    config = op.choose(problem, EMU)

    def main():
        world = weft.init()
        check(op, op.run(world, problem, op.make_inputs(problem, world.rank), config), problem,
              world.rank)  # fmt: skip

    rows = rows_of(nodes, m)
    assert config.transport == "relay"
    assert crossing(nodes, main) == {(i, j): rows[i] * K * 4 for i, j in pairs(nodes)}


@pytest.mark.parametrize("split_experts", [False, True], ids=["columns", "experts"])
@pytest.mark.parametrize(
    "nodes", [*NODES[:1], *(pytest.param(one, marks=pytest.mark.slow) for one in NODES[1:])],
    ids=text_of,
)  # fmt: skip
def test_gathered_tokens_cross_once(nodes, split_experts):
    """Whatever their experts; also where no tile has any of a rank's tokens."""
    op, num_ranks = cards()["ag_moe"], sum(nodes)
    problem = op.problem(
        m=29, n=N, k=K, num_ranks=num_ranks, dtype="float32", nodes=nodes, experts=2 * num_ranks,
        top_k=2, tile_m=16, split_experts=split_experts,
    )  # fmt: skip
    config = next(iter(op.candidates(problem, EMU)))

    def main():
        world = weft.init()
        check(op, op.run(world, problem, op.make_inputs(problem, world.rank), config), problem,
              world.rank)  # fmt: skip

    rows = rows_of(nodes, problem.m)
    assert config.transport == "relay"
    assert crossing(nodes, main) == {(i, j): rows[i] * K * 4 for i, j in pairs(nodes)}


@pytest.mark.few(1)
@on_nodes(160, 141)
@pytest.mark.parametrize(
    ("name", "transport"),
    [(name, way) for name in SUMS for way in ("relay", cards()[name].problem.unfused.op)],
)
def test_sums_cross_once(name, transport, nodes, m):
    """Of a node's rows one sum of each other node; all-reduced, the result of these goes back."""
    op, num_ranks = cards()[name], sum(nodes)
    problem = op.problem(m=m, n=WIDE, k=K, num_ranks=num_ranks, dtype="float32", nodes=nodes)
    config = next(one for one in op.candidates(problem, EMU) if one.transport == transport)
    assert (config == op.choose(problem, EMU)) == (transport == "relay")

    def main():
        world = weft.init()
        check(op, op.run(world, problem, op.make_inputs(problem, world.rank), config), problem,
              world.rank)  # fmt: skip

    rows, is_back = rows_of(nodes, m), name == "gemm_ar"
    assert crossing(nodes, main) == {
        (i, j): (rows[j] + is_back * rows[i]) * WIDE * 4 for i, j in pairs(nodes)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize(
    "nodes", [(2, 1), pytest.param((3, 2), marks=pytest.mark.slow)], ids=text_of
)
def test_every_way_of_calling_what_is_relayed(nodes, name):
    op = cards()[name]
    for m in (91, 2):  # ranks without rows
        problem = op.problem(m=m, n=70, k=K, num_ranks=sum(nodes), dtype="float32", nodes=nodes)
        config = config_for(op, problem, "relay")
        with weft.emulated(nodes=nodes) as session:
            session.run(lambda: call_every_way(op, problem, config))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "nodes"),
    [("gemm_rs", (3, 1)), ("gemm_rs", (2, 2)),
     *(pytest.param("moe_rs", nodes, marks=pytest.mark.slow) for nodes in ((3, 1), (2, 2)))],
    ids=str,
)  # fmt: skip
def test_few_programs_relay_many_tiles(name, nodes):
    """Own tiles wait for relays, which take others in an order of their own: where those came
    before, ranks' programs waited for each other."""
    op = cards()[name]
    more = {"experts": 4, "top_k": 1, "tile_m": 16} if name == "moe_rs" else {}
    problem = op.problem(m=384, n=144, k=K, num_ranks=4, dtype="float32", nodes=nodes, **more)
    config = config_for(op, problem, "relay", tile_n=16, tile_k=16)

    def main():
        world = weft.init()
        check(op, op.run(world, problem, op.make_inputs(problem, world.rank), config), problem,
              world.rank)  # fmt: skip

    with weft.emulated(nodes=nodes, num_sms=4) as session:
        session.run(main)


def gemm_rs(a, b):
    return reduce_scatter(a @ b)


def gemm_ar(a, b):
    return all_reduce(a @ b)


def mlp(x, w1, w2):
    return reduce_scatter(silu_mul(all_gather(x) @ w1) @ w2)


HIDDEN = 120  # pairs of columns for 4, 5 and 8 ranks
LAYERS = {
    gemm_rs: {"a": ("m", HIDDEN, Shard(1)), "b": (HIDDEN, WIDE, Shard(0))},
    gemm_ar: {"a": ("m", HIDDEN, Shard(1)), "b": (HIDDEN, WIDE, Shard(0))},
    mlp: {"x": ("m", K, Shard(0)), "w1": (K, 2 * HIDDEN, Shard(1)), "w2": (HIDDEN, WIDE, Shard(0))},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("sums", ["relay", "library"])
@on_nodes(160, 141)
@pytest.mark.parametrize("function", LAYERS)
def test_rows_and_sums_of_programs_cross_once(function, nodes, m, sums):
    """Sums beside the product, tile by tile, or by weft's collective behind it. In float32, as the
    collective sends them."""
    num_ranks = sum(nodes)
    types = {name: Tensor("float32", sizes[:-1], sizes[-1])
             for name, sizes in LAYERS[function].items()}  # fmt: skip
    layer = weft.program(mesh="tp", **types)(function)
    tasks = layer.stages.program.tasks
    by = {"all_gather": "relay", "reduce_scatter": sums, "all_reduce": sums}
    engines = {one.name: by[one.kind] for one in tasks if one.kind in by}
    layer = layer.options(settings=Settings(engines=engines))
    sizes = [[m if size == "m" else size for size in one.sizes] for one in types.values()]
    whole = [torch.randn(*size) for size in sizes]
    dims = [one.placement.dim for one in types.values()]
    wanted = whole[0] @ whole[1]
    if function is mlp:
        wanted = torch.nn.functional.silu(wanted[:, ::2]) * wanted[:, 1::2] @ whole[2]

    def main():
        world = weft.init()
        own = [one.chunk(num_ranks, dim)[world.rank].clone() for one, dim in zip(whole, dims)]
        got = layer(*own, world=world, m=m)
        expected = wanted if function is gemm_ar else wanted.chunk(num_ranks)[world.rank]
        assert (got - expected).norm() <= tolerance("float32", HIDDEN) * expected.norm()

    rows, is_gathered, is_back = rows_of(nodes, m), function is mlp, function is gemm_ar
    assert crossing(nodes, main) == {
        (i, j): (rows[i] * K * is_gathered + (rows[j] + rows[i] * is_back) * WIDE) * 4
        for i, j in pairs(nodes)
    }
