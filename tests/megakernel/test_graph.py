"""Tasks wait for exactly those that make what they read, and for nobody's memory in vain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from persistent_programs import (
    before_by_counters,
    cells,
    closed,
    in_program_order,
    mlp,
    needed_by_cells,
    random_graph,
    tiled,
    tiled_mlp,
)

from weft.base.errors import UnsupportedError, UsageError
from weft.compiler import (
    Partial,
    Replicate,
    Shard,
    Tensor,
    all_gather,
    all_reduce,
    gather_rows,
    moe_route,
    reduce_scatter,
)
from weft.megakernel.extents import chosen
from weft.megakernel.graph import build
from weft.megakernel.memory import NEVER, REST
from weft.megakernel.records import COPY, GATHER, REDUCE, SEND

RANKS = (1, 2, 3, 4)


def graphs(seeds, num_ranks, **options):
    found = [random_graph(seed, num_ranks, **options) for seed in seeds]
    return [one for one in found if one is not None]


@pytest.mark.parametrize("num_ranks", RANKS)
def test_who_waits_for_whom_is_what_cells_say(num_ranks: int):
    """Of random programs in random tiles, where no memory is used again: neither less nor more."""
    several = graphs(range(12), num_ranks, rest=NEVER)
    assert len(several) >= 6 and sum(len(one.tasks) for one in several) > 100
    for graph in several:
        made, used, _ = needed_by_cells(graph)
        assert used == made
        assert before_by_counters(graph) == closed(made, in_program_order(graph)), graph.program


@pytest.mark.parametrize("num_ranks", RANKS)
def test_memory_that_is_used_again_is_waited_for(num_ranks: int):
    several = graphs(range(20, 32), num_ranks)
    saved = 0
    for graph in several:
        _, used, _ = needed_by_cells(graph)
        before = before_by_counters(graph)
        for key, needed in used.items():
            assert needed <= before[key], (graph.program, key)
        apart = build(graph.program, graph.sizes, num_ranks, rest=NEVER)
        saved += apart.local_bytes > graph.local_bytes
    assert saved, "no program has used memory again"


@pytest.mark.parametrize("num_ranks", RANKS)
def test_results_are_whole(num_ranks: int):
    def outer(x, w, s):
        h = all_gather(x)
        return h, all_reduce(h @ w), reduce_scatter(s)

    program = tiled(outer, {
        "x": Tensor("float32", ("m", 4), Shard(0)), "w": Tensor("float32", (4, 6), Partial()),
        "s": Tensor("float32", ("m", 4), Partial()),
    }, default=(4, 2))  # fmt: skip
    graph = build(program, {"m": 7}, num_ranks)
    *_, writers = needed_by_cells(graph)
    for rank in graph.ranks:
        for name in graph.results:
            buffer = rank.buffer(name)
            assert buffer.role == "result"
            written = [cell for cell in writers if cell[:2] == (name, rank.rank)]
            assert len(written) == 2 * buffer.rows * buffer.columns
    assert sum(rank.buffer(graph.results[2]).rows for rank in graph.ranks) == 7


def test_collectives_by_hand():
    """7 rows on 2 ranks, 4 and 3, in tiles of 4: rank 1's own tile is rows 4 to 6 of the whole."""
    program = tiled(mlp, {
        "x": Tensor("bfloat16", ("m", 4), Shard(0)), "w1": Tensor("bfloat16", (4, 8), Shard(1)),
        "w2": Tensor("bfloat16", (4, 4), Shard(0)),
    }, default=(4, 4))  # fmt: skip
    graph = build(program, {"m": 7}, 2)
    tasks = {str(task): task for task in graph.tasks}
    gather = tasks["gathered gather[0, 0]@1"]
    assert gather.reads[0].region == (0, 3, 0, 4) and [one.rank for one in gather.writes] == [0, 1]
    assert {one.region for one in gather.writes} == {(4, 7, 0, 4)}
    send = tasks["scattered send[0, 0] of 1@0"]
    assert send.kind == SEND and send.reads[0].region == (4, 7, 0, 4)
    assert [(one.rank, one.region) for one in send.writes] == [(1, (0, 3, 0, 4))]
    total = tasks["scattered reduce[0, 0]@1"]
    assert total.kind == REDUCE and total.owner == 1
    assert [one.buffer for one in total.reads] == ["product_2", "scattered_partials"]
    # What is summed stays unrounded where it is; what travels is rounded.
    dtypes = {one.name: one.dtype for one in graph.ranks[0].buffers}
    assert dtypes["product_2"] == "float32" and dtypes["scattered_partials"] == "bfloat16"


def test_sums_begin_with_their_owner():
    def summed(x):
        return all_reduce(x)

    program = tiled(summed, {"x": Tensor("float32", (6, 4), Partial())}, default=(4, 4))
    graph = build(program, {}, 3)
    for task in graph.tasks:
        if task.kind == REDUCE:
            assert task.owner == task.rank and task.reads[0].buffer == "x"
            assert [one.rank for one in task.writes] == [0, 1, 2]
    assert any(task.kind == COPY for task in graph.tasks)


def test_a_row_of_tiles_is_one_counter():
    """A product needs whole rows: one counter for each, whatever the number of columns."""
    graph = build(tiled_mlp(), {"m": 64}, 2, rest=NEVER)
    products = [task for task in graph.ranks[0].tasks if task.op == "product"]
    assert len(products) == 4 * 4
    assert {task.waits for task in products if task.i_m == 1} == {products[4].waits}
    assert len({task.waits for task in products}) == 4
    # Two tiles of columns of each row, pushed by whoever has it.
    assert all(wait.at_least == 2 for task in products for wait in task.waits)
    gathers = [task for task in graph.ranks[0].tasks if task.kind == GATHER]
    assert all(len(task.bumps) == 2 for task in gathers)


@pytest.mark.parametrize("wide, waits, bumps", [("product", 1, 1), ("gated", 1, 1)])
def test_what_is_cut_otherwise_bumps_once_or_waits_once(wide: str, waits: int, bumps: int):
    """A tile of 64 columns and eight of 8: of the many, each waits once, or bumps once."""
    extents = {"product": (16, 16), "gated": (16, 8), wide: (16, 64)}
    graph = build(tiled_mlp(f=128, extents=extents), {"m": 16}, 1, rest=NEVER)
    gated = [task for task in graph.tasks if task.op == "gated"]
    product = [task for task in graph.tasks if task.op == "product"]
    assert {len(task.waits) for task in gated} == {waits}
    assert {len(task.bumps) for task in product} == {bumps}


def test_what_follows_is_not_waited_for():
    """x is read by the last task too, long after whoever made it has been waited for."""

    def residual(x, w):
        h = all_gather(x)
        return (h @ w) @ w + h

    parameters = {
        "x": Tensor("float32", ("m", 16), Shard(0)),
        "w": Tensor("float32", (16, 16), Replicate()),
    }
    graph = build(tiled(residual, parameters), {"m": 16}, 2, rest=NEVER)
    (total,) = (task for task in graph.ranks[0].tasks if task.op == "total" or task.kind == "add")
    assert len(total.waits) == 1 and total.waits[0].at_least == 1


def test_peers_wait_for_memory_of_others():
    """`scattered_partials` lies where `gathered` lay: who sends waits for the readers there."""
    graph = build(tiled_mlp(), {"m": 37}, 2, rest=0)
    rank = graph.ranks[0]
    assert rank.buffer("scattered_partials").offset == rank.buffer("gathered").offset
    readers = [task for task in rank.tasks if task.op == "product"]
    assert {bump.rank for task in readers for bump in task.bumps} == {0, 1}


def test_nothing_to_do():
    graph = build(tiled_mlp(), {"m": 0}, 2)
    assert all(not task.kind.startswith("matmul") for task in graph.tasks)
    assert [*cells(graph, graph.tasks[0].writes[0])] == [] if graph.tasks else True


def test_what_no_tasks_are_made_of():
    def columns(x):
        return reduce_scatter(x, dim=1)

    x = Tensor("float32", ("m", 4), Partial())
    with pytest.raises(
        UnsupportedError, match="over columns is not made of tasks.*overlapped"
    ) as told:
        build(tiled(columns, {"x": x}), {"m": 4}, 2)
    assert "test_graph.py" in str(told.value) and "dim=1" in str(told.value)

    def experts(x, logits):
        return gather_rows(x, moe_route(logits, top_k=2))

    given = {
        "x": Tensor("float32", ("m", 8), Replicate()),
        "logits": Tensor("float32", ("m", 4), Shard(0)),
    }
    for make in (build, lambda *call: chosen(*call, num_workers=8)):
        with pytest.raises(UnsupportedError, match="moe_route routing is not made of tasks"):
            make(tiled(experts, given), {"m": 4}, 2)
    with pytest.raises(UsageError, match="experts is at stage placed, for 2 ranks; tasks are made"):
        build(replace(tiled(experts, given), stage="placed"), {"m": 4}, 2)
    with pytest.raises(UsageError, match=r"size m, but given are \{'rows': 4\}"):
        build(tiled_mlp(), {"rows": 4}, 2)


def test_memory_that_has_rested_is_seldom_waited_for():
    """Four layers: less memory, and few signals more than where none is used again."""

    def layers(x, w1, w2):
        for _ in range(4):
            x = mlp(x, w1, w2)
        return x

    program = tiled(layers, {
        "x": Tensor("float32", ("m", 16), Shard(0)), "w1": Tensor("float32", (16, 64), Shard(1)),
        "w2": Tensor("float32", (32, 16), Shard(0)),
    })  # fmt: skip
    never, rested, at_once = (build(program, {"m": 40}, 2, rest=n) for n in (NEVER, REST, 0))
    extra = num_signals(rested) - num_signals(never)
    assert 0 <= 2 * extra < num_signals(at_once) - num_signals(never)
    assert never.local_bytes > rested.local_bytes > at_once.local_bytes


def num_signals(graph) -> int:
    return sum(len(task.waits) + len(task.bumps) for task in graph.tasks)
