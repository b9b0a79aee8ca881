"""Products in parts along k: their readers add the parts up, and nothing else changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from ir_reader import read
from test_dropped_waits import in_memory, of_many_workers, waits_of
from test_run import cache, of_rank
from test_scoreboard_mutants import bumps_mutated

import weft
from weft.base.dtypes import tolerance
from weft.base.errors import UnsupportedError, UsageError
from weft.compiler import (
    Replicate,
    Shard,
    Tensor,
    Times,
    all_reduce,
    kv_append,
    program,
    rms_norm,
    rope,
    rope_by_table,
)
from weft.compiler.libraries import reference
from weft.ir import task as task_ir
from weft.ir.task import show
from weft.megakernel import Persistent
from weft.megakernel.bodies import bodies
from weft.megakernel.check import check
from weft.megakernel.extents import chosen
from weft.megakernel.folding import fold
from weft.megakernel.graph import build
from weft.megakernel.memory import PARTS
from weft.megakernel.tables import tables
from weft.verify.laggards import chooser_of
from weft.verify.mutants import Bounds, Run, WrongAnswer, search

assert cache  # a fixture
HEAD, HEADS, MAX_KV = 8, 24, 5
# Four steps of 32, the last one of 4.
K, N = 100, HEAD * HEADS


def step(x, lengths, table, gain, wq, wk, wv, wo, cache, before):
    """Every task that adds parts up, and sums over ranks with something added and without."""
    keys = kv_append(cache, x @ wv, lengths)
    turned = rope(x @ wk, lengths, head=HEAD) + rope_by_table(x @ wq, lengths, table, head=HEAD)
    normed = rms_norm(x @ wo, gain, head=HEAD) * turned
    total = all_reduce(normed @ before)
    return total, all_reduce(turned @ before) + x, keys, turned


def tiled(function, types: dict[str, Tensor]):
    return program(mesh="tp", **types)(function).tiled


def types_of(dtype: str) -> dict[str, Tensor]:
    return {
        "x": Tensor(dtype, ("b", K), Replicate()),
        "lengths": Tensor("int32", (1, "b"), Replicate()),
        "table": Tensor("float32", (MAX_KV + 1, HEAD), Replicate()),
        "gain": Tensor(dtype, (1, HEAD), Replicate()),
        **{name: Tensor(dtype, (K, N), Shard(1)) for name in ("wq", "wk", "wv", "wo")},
        "cache": Tensor(dtype, (Times("b", MAX_KV), N), Shard(1)),
        "before": Tensor(dtype, (N, K), Shard(0)),
    }


def tensors_of(types: dict[str, Tensor], b: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, kind in types.items():
        shape = [
            size.by * b if isinstance(size, Times) else b if size == "b" else size
            for size in kind.sizes
        ]
        found[name] = torch.randn(*shape, generator=generator).to(getattr(torch, kind.dtype))
    return {**found, "lengths": (torch.arange(b) % MAX_KV + 1).to(torch.int32)[None]}


def in_parts(made, sizes, num_ranks: int, split_k: int = 3, num_workers: int = 132):
    """As it is run."""
    folded = fold(made, sizes, num_ranks)
    return chosen(folded, sizes, num_ranks, num_workers, split_k=split_k)


def results_of(made, whole, how: Persistent, num_ranks: int, is_nk: bool = False) -> list[tuple]:
    """Results on this rank of two calls on one slot, beside what they mean. `is_nk`: weights lie as
    [n, k]."""
    world = weft.init()
    sizes = {"b": len(whole["x"])}

    def part(name: str, one: torch.Tensor) -> torch.Tensor:
        return of_rank(made.task(name).type, one, sizes, world.rank, num_ranks)

    mine = {name: part(name, one).clone() for name, one in whole.items()}
    if is_nk:
        for one in made.tasks:
            if one.kind == "matmul":
                mine[one.operands[1]] = mine[one.operands[1]].t().contiguous().t()
    wanted = [
        part(name, one) for name, one in zip(made.results, reference(made, whole), strict=True)
    ]
    found = []
    for _ in range(2):
        results = how.run_persistent(made, mine, sizes, world=world)
        found += zip([one.clone() for one in results], wanted, strict=True)
    world.close()
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "b", "dtype", "split_k", "parts"),
    [
        (1, 1, "float32", 2, [2] * 4),
        (2, 3, "bfloat16", 4, [4, 4, 4, 4, 3, 3]),
        (3, 17, "float32", 3, [2] * 6),  # of four steps two parts have all
        (2, 1, "float32", 8, [4, 4, 4, 4, 3, 3]),
    ],
)
def test_it_means_what_whole_products_mean(ranks, num_ranks, b, dtype, split_k, parts):
    """Whose k no number of parts divides; b are fewer rows than a tile has, or more."""
    made = tiled(step, types_of(dtype))
    tasks = in_parts(made, {"b": b}, num_ranks, split_k).tasks
    assert [one.split_k for one in tasks if one.split_k > 1] == parts
    whole = tensors_of(types_of(dtype), b, 0)
    how = Persistent(num_workers=3, split_k=split_k)
    is_nk = b > 1
    for results in ranks(lambda: results_of(made, whole, how, num_ranks, is_nk), num_ranks):
        for result, want in results:
            error = (result.float() - want).norm() / want.float().norm()
            assert error <= 8 * tolerance(dtype, K)


@pytest.mark.slow
def test_bits_depend_on_the_number_of_parts_alone(ranks):
    """Not on workers, on which rank it is, on the order in which parts come, nor on the call."""
    types = types_of("bfloat16")
    made, whole = tiled(step, types), tensors_of(types, 3, 1)

    def calls():
        several = (1, 2, 7, 40)
        return [
            [result for result, _ in results_of(made, whole, Persistent(n, split_k=3), 2)]
            for n in several
        ]

    by_seed = [ranks(calls, 2, seed=seed) for seed in range(2)]
    for found in by_seed:
        for mine in found:
            for results in mine:
                assert all(map(torch.equal, results, mine[0]))
                assert all(map(torch.equal, results[:4], results[4:]))
        for one, other in zip(found[0][0][:2], found[1][0][:2]):
            assert torch.equal(one, other)
        assert all(map(torch.equal, found[1][0], by_seed[0][1][0]))


def heads(x, lengths, table, gain, wq, wk, wv, wo, cache):
    """Each task that adds parts up and rounds them."""
    keys = kv_append(cache, x @ wv, lengths)
    turned = rope(x @ wk, lengths, head=HEAD)
    by_table = rope_by_table(x @ wq, lengths, table, head=HEAD)
    return keys, turned, by_table, rms_norm(x @ wo, gain, head=HEAD)


def test_of_whole_numbers_parts_give_the_bits_of_whole_products(ranks):
    """Each part is added once, and their sum is rounded, once, before anything is done with it."""
    types = {name: kind for name, kind in types_of("bfloat16").items() if name != "before"}
    made, whole = tiled(heads, types), tensors_of(types, 3, 2)
    for name in ("x", "wq", "wk", "wv", "wo"):
        whole[name] = (whole[name].float() * 4).round().to(torch.bfloat16)
    exact = whole["x"].double() @ whole["wq"].double()
    assert (exact.to(torch.bfloat16) != exact).any() and exact.abs().max() < 1 << 24

    def both():
        found = [results_of(made, whole, Persistent(3, split_k=n), 2) for n in (1, 4)]
        return [[result for result, _ in results] for results in found]

    for whole_products, parts in ranks(both, 2):
        assert all(map(torch.equal, parts, whole_products))


def graph_of(num_ranks: int, b: int, split_k: int = 2):
    types = types_of("float32")
    made = tiled(step, types)
    return build(in_parts(made, {"b": b}, num_ranks, split_k), {"b": b}, num_ranks, rest=0)


@pytest.mark.few(1)
@pytest.mark.parametrize(("num_ranks", "b"), [(1, 1), (2, 3), (3, 17)])
def test_graphs_are_sound_and_no_wait_is_idle(num_ranks: int, b: int):
    graph = graph_of(num_ranks, b)
    for num_workers in (1, 3, len(graph.tasks)):
        assert check(replace(graph, num_workers=num_workers)) == []
    parts = [task for task in graph.tasks if task.part >= 0]
    assert {task.part for task in parts} == {0, 1} and str(parts[1]).endswith(" part 1@0")
    for task in parts:
        assert graph.ranks[task.rank].buffer(task.writes[0].buffer).dtype == PARTS
    if num_ranks < 3:
        alone = of_many_workers(graph)
        needless = [task for task, which in waits_of(alone) if not in_memory(alone, task, which)]
        assert waits_of(alone) and not needless


def test_no_wrong_bump_reaches_the_device():
    graph = replace(graph_of(2, 1), num_workers=3)
    mutants = list(bumps_mutated(graph))
    assert len(mutants) > 50
    assert not [told for told, mutant in mutants if not check(mutant, ("signals",))]


def test_a_part_that_is_not_made_is_told():
    """Where a task adds up one part less than there are, or two write the same."""
    graph = graph_of(1, 1)
    parts = [task for task in graph.tasks if task.part == 1]
    for changed in (replace(parts[0], writes=()), replace(parts[0], writes=graph.tasks[
        graph.tasks.index(parts[0]) - 1
    ].writes)):  # fmt: skip
        tasks = tuple(changed if one == parts[0] else one for one in graph.ranks[0].tasks)
        wrong = replace(graph, ranks=(replace(graph.ranks[0], tasks=tasks),))
        assert "made" in {one.rule for one in check(wrong)}


def test_parts_without_a_step_are_zeros(ranks):
    """Four steps in three parts: two, two, and none."""
    types = types_of("float32")
    made = tiled(step, types)
    whole = tensors_of(types, 3, 4)
    cut = in_parts(made, {"b": 3}, 2, 4)
    steps = {one.name: one.tile[2] for one in cut.tasks if one.split_k > 1}
    assert {K // -size for size in steps.values()} == {-4}
    uneven = replace(cut, tasks=tuple(
        replace(one, split_k=3) if one.split_k == 4 else one for one in cut.tasks
    ))  # fmt: skip
    settled = [one.name for one in cut.tasks]
    how = Persistent(num_workers=3)

    def main():
        world = weft.init()
        mine = {
            name: of_rank(types[name], one, {"b": 3}, world.rank, 2).clone()
            for name, one in whole.items()
        }
        results = how.run_persistent(uneven, mine, {"b": 3}, world=world, settled=settled)
        world.close()
        return results

    wanted = reference(made, whole)
    for rank, results in enumerate(ranks(main, 2)):
        for name, result, one in zip(made.results, results, wanted):
            want = of_rank(made.task(name).type, one, {"b": 3}, rank, 2)
            assert (result - want).norm() <= 8 * tolerance("float32", K) * want.norm()


@pytest.mark.parametrize("is_result", [False, True])
def test_what_reads_parts_without_adding_them_is_refused(is_result: bool):
    """Another task, or the caller."""
    made = tiled(step, types_of("float32"))
    product = next(one for one in made.tasks if one.kind == "matmul")
    (gate,) = [one for one in made.tasks if one.kind == "mul"]
    tasks = [replace(one, split_k=2) if one == product else one for one in made.tasks]
    if not is_result:
        (i,) = [i for i, one in enumerate(tasks) if one == gate]
        tasks[i] = replace(gate, operands=(gate.operands[0], product.name))
    results = (*made.results, product.name) if is_result else made.results
    wrong = replace(made, results=results, tasks=tuple(tasks))
    with pytest.raises(UnsupportedError, match="split_k=2, but not all that read it") as told:
        build(wrong, {"b": 1}, 2)
    assert told.value.place.frames[0].file.endswith("test_split_k.py")


def test_there_are_no_fewer_parts_than_none():
    with pytest.raises(UsageError, match="split_k is -1; it must be 0 or more"):
        Persistent(split_k=-1)


def heads_of(x, lengths, wq, wk, wv, wo, cache):
    """The products of a decode step's attention."""
    keys = kv_append(cache, x @ wv, lengths)
    return rope(x @ wk, lengths, head=128) + rope(x @ wq, lengths, head=128), keys, x @ wo


def model_of(hidden: int, columns: int):
    weight = Tensor("bfloat16", (hidden, columns), Shard(1))
    return tiled(heads_of, {
        "x": Tensor("bfloat16", ("b", hidden), Replicate()),
        "lengths": Tensor("int32", (1, "b"), Replicate()),
        **dict.fromkeys(("wq", "wk", "wv", "wo"), weight),
        "cache": Tensor("bfloat16", (Times("b", 1024), columns), Shard(1)),
    })  # fmt: skip


@pytest.mark.parametrize("workers", [64, 132, 148])
def test_few_tiles_are_split_for_as_many_workers_as_there_are(workers: int):
    made = model_of(4096, 2048)
    for b, split_k in ((1, 0), (1, 1), (4096, 0)):
        cut = chosen(made, {"b": b}, 4, workers, split_k=split_k)
        products = [one for one in cut.tasks if one.kind == "matmul"]
        shapes = {(one.tile, one.split_k) for one in products[:3]}
        assert len(shapes) == 1  # those whose parts are added up, chosen together
        ((tile, splits),) = shapes
        assert products[3].split_k == 1  # a result
        if (b, split_k) == (1, 0):
            tasks = 3 * -(-512 // tile[1]) * splits
            assert splits > 1 and 0.8 * workers <= tasks
        else:
            assert splits == 1
    assert read(task_ir, show(cut)) == cut
    settled = [one.name for one in made.tasks if one.kind == "matmul"]
    kept = chosen(made, {"b": 1}, 4, workers, settled=settled, split_k=0)
    assert {one.split_k for one in kept.tasks} == {1}


def test_the_table_says_which_part():
    """Parts of a tile differ in that alone, and in their signals."""
    graph = graph_of(2, 1)
    found = bodies(graph)
    tasks, *_ = tables(graph, 1, found)
    rows = [tasks[i : i + 20] for i in range(0, len(tasks), 20)]
    parts = [row[9] for row, task in zip(rows, graph.ranks[1].tasks) if task.part >= 0]
    assert {*parts} == {0, 1} and parts.count(0) == parts.count(1)
    for row, task in zip(rows, graph.ranks[1].tasks, strict=True):
        assert row[9] == max(task.part, 0)


def summed(x, w, before):
    return all_reduce(x @ w) + before


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_signal_of_the_kernel_is_needed(monkeypatch):
    """But that a sum which all ranks make tells them in another order: they are told alike."""
    monkeypatch.setenv("WEFT_SLOTS", "1")
    types = {
        "x": Tensor("float32", ("b", 128), Shard(1)),
        "w": Tensor("float32", (128, 40), Shard(0)),
        "before": Tensor("float32", ("b", 40), Replicate()),
    }
    made = tiled(summed, types)
    how = Persistent(num_workers=2, split_k=2)
    given = []
    for seed, b in enumerate((20, 5, 20, 5, 5)):
        generator = torch.Generator().manual_seed(seed)
        given.append({
            name: torch.randn(*(b if size == "b" else size for size in kind.sizes),
                              generator=generator)
            for name, kind in types.items()
        })  # fmt: skip
    assert max(one.split_k for one in in_parts(made, {"b": 5}, 2, 2).tasks) == 2

    def main():
        world = weft.init()
        results = []
        for whole in given:
            sizes = {"b": len(whole["x"])}
            mine = {name: of_rank(types[name], one, sizes, world.rank, 2)
                    for name, one in whole.items()}  # fmt: skip
            results += how.run_persistent(made, mine, sizes, world=world)
        for result, whole in zip(results, given):
            if not torch.allclose(result, whole["x"] @ whole["w"] + whole["before"], atol=1e-3):
                raise WrongAnswer
        world.close()

    def run(seed, rewrite):
        with weft.emulated(
            2, seed=seed, collect=True, rewrite=rewrite, chooser=chooser_of(seed)
        ) as session:
            session.run(main)
        return session.report

    runs, bounds = [Run("split along k", run)], Bounds(schedules=8, census=2, jobs=1)
    report = search(runs, bounds, subject="split_k", ranks=2)
    print(report)
    missed = [one for one in report.missed if "peer+1 of signal_at" not in str(one.mutant)]
    assert not missed and not report.mistakes and report.caught >= 30, str(report)
