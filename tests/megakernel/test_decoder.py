"""A decode step as one kernel a rank: two layers, caches written in place, step after step."""

from __future__ import annotations

from dataclasses import replace

import decoder
import pytest
import torch
from ir_reader import read
from test_run import of_rank

import weft
from weft.base.dtypes import tolerance
from weft.compiler import libraries, program
from weft.ir import task
from weft.ir.task import show
from weft.megakernel import Persistent
from weft.megakernel.extents import chosen
from weft.megakernel.folding import fold
from weft.megakernel.sequences import split_keys
from weft.tools.schedule import traced
from weft.tune import tile_times


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "cache"))


def main(made, how: Persistent, num_ranks: int, b: int) -> None:
    """Steps with caches that stay, the last of them replayed."""
    world = weft.init()
    placed = made.stages.tasks["place"]

    def mine(whole):
        return {
            name: of_rank(placed.task(name).type, one, {"b": b}, world.rank, num_ranks).clone()
            for name, one in whole.items()
        }

    def check(results, wanted):
        for name, result, want in zip(placed.results, results, wanted):
            part = of_rank(placed.task(name).type, want, {"b": b}, world.rank, num_ranks)
            assert result.shape == part.shape
            assert (result - part).norm() <= 8 * tolerance("float32", 64) * want.norm(), name

    made = made.options(lowering=how)
    whole = decoder.inputs(made, b, 0)
    kept = mine(whole)
    for step in range(2):
        now = decoder.inputs(made, b, step)
        for name in ("x", "lengths"):
            whole[name] = now[name] + step if name == "x" else now[name]
            kept[name].copy_(whole[name])
        if step == 0:
            results = made(*kept.values(), world=world, b=b)
            with world.record() as recording:
                recorded = made(*kept.values(), world=world, b=b)
        else:
            recording.replay()
            results = recorded
        wanted = libraries.reference(placed, whole)
        check(results, wanted)
        for name, want in zip(("keys_1", "values_1", "keys_2", "values_2"), wanted[1:]):
            whole[name] = want
    world.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "b", "how"),
    [
        (2, 3, Persistent(num_workers=4)),
        pytest.param(1, 17, Persistent(num_workers=3), marks=pytest.mark.slow),
        pytest.param(2, 1, Persistent(), marks=pytest.mark.slow),
        pytest.param(3, 2, Persistent(num_workers=2), marks=pytest.mark.slow),
        pytest.param(4, 5, Persistent(num_workers=2), marks=pytest.mark.slow),
    ],
    ids=lambda one: getattr(one, "num_workers", None),
)
def test_two_layers(ranks, monkeypatch, num_ranks, b, how):
    if num_ranks > 2:
        monkeypatch.setattr(decoder, "KV_HEADS", num_ranks)
        monkeypatch.setattr(decoder, "HEADS", 2 * num_ranks)
    made = decoder.compiled()
    ranks(lambda: main(made, how, num_ranks, b), num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "b", "split_k"),
    [(2, 3, 3), pytest.param(1, 2, 2, marks=pytest.mark.slow),
     pytest.param(2, 17, 0, marks=pytest.mark.slow)],
)  # fmt: skip
def test_two_layers_in_parts_along_k(ranks, monkeypatch, num_ranks, b, split_k):
    """Of queries, keys, values and the second sum, whose k no step divides."""
    monkeypatch.setattr(decoder, "HIDDEN", 152)
    monkeypatch.setattr(decoder, "INNER", 304)
    made = program(mesh="tp", **decoder.parameters("float32"))(decoder.decoder)
    how = Persistent(num_workers=5, split_k=split_k)
    if split_k:
        cut = chosen(fold(made.tiled, {"b": b}, num_ranks), {"b": b}, num_ranks, 5, split_k=split_k)
        assert sum(one.split_k > 1 for one in cut.tasks) == (6 if num_ranks == 1 else 8)
    ranks(lambda: main(made, how, num_ranks, b), num_ranks)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "b", "max_kv", "splits"),
    [
        (2, 3, 150, 2),  # of 1, 76 and 150 keys, in tiles of 64
        (1, 2, 5, 40),
        (1, 3, 2200, 33),  # more than are merged at a time
        pytest.param(2, 1, 300, 0, marks=pytest.mark.slow),
    ],
)
def test_splits_of_the_keys(ranks, monkeypatch, num_ranks, b, max_kv, splits):
    """Which may have no keys."""
    monkeypatch.setattr(decoder, "MAX_KV", max_kv)
    how = Persistent(num_workers=8, splits=splits)
    ranks(lambda: main(decoder.compiled(), how, num_ranks, b), num_ranks)


def test_keys_are_split_where_workers_would_be_idle():
    """Whatever that is called; and of a cache that no tile of keys fills, never."""
    tiled = decoder.compiled().tiled
    assert split_keys(tiled, {"b": 1}, 2, 132) == tiled
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoder, "MAX_KV", 1024)
        tiled = decoder.compiled().tiled
    for b, workers, wanted in ((1, 132, 16), (1, 16, 16), (3, 24, 8), (8, 24, 3), (24, 24, 1)):
        split = split_keys(tiled, {"b": b}, 2, workers)
        parts = [one for one in split.tasks if one.kind == "attention_parts"]
        merged = [one.name for one in split.tasks if one.kind == "merge_parts"]
        if wanted == 1:
            assert split == tiled
        else:
            assert [one.splits for one in parts] == [wanted] * 2
            assert merged == ["attended", "attended_2"]
    taken = replace(tiled, tasks=(
        *tiled.tasks, replace(tiled.tasks[0], name="attended_parts")
    ))  # fmt: skip
    assert "attended_parts_2" in [one.name for one in split_keys(taken, {"b": 1}, 2, 132).tasks]


def test_split_attention_means_what_attention_means():
    tiled = decoder.compiled().tiled
    whole = decoder.inputs(decoder.compiled(), 3, 1)
    split = split_keys(tiled, {"b": 3}, 2, 8, splits=3)
    assert read(task, show(split)) == split
    for made, wanted in zip(*(libraries.reference(one, whole) for one in (split, tiled))):
        torch.testing.assert_close(made, wanted)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("num_ranks", "b"), [(2, 3), (1, 2), pytest.param(2, 17, marks=pytest.mark.slow)]
)
def test_gates_and_sums_are_folded_into_what_makes_them(ranks, num_ranks, b):
    """Where nobody has settled tiles; bits are those of two tasks."""
    made = program(mesh="tp", **decoder.parameters("float32"))(decoder.decoder)
    folded = fold(made.tiled, {"b": b}, num_ranks)
    kinds = [one.kind for one in folded.tasks]
    assert kinds.count("matmul_silu_mul") == 2 and kinds.count("all_reduce_add") == 4
    assert not {"silu_mul", "all_reduce", "add"} & {*kinds}
    assert read(task, show(folded)) == folded
    ranks(lambda: main(made, Persistent(num_workers=4), num_ranks, b), num_ranks)


@pytest.mark.slow
def test_tasks_write_down_when_they_waited_and_worked(ranks):
    """In a world that keeps a trace: each by its number, which has a name."""
    made = program(mesh="tp", **decoder.parameters("float32"))(decoder.decoder)
    how, b = Persistent(num_workers=3, splits=2), 2

    def main():
        world = weft.init(trace_tiles=1000)
        placed = made.stages.tasks["place"]
        mine = [
            of_rank(placed.task(name).type, one, {"b": b}, world.rank, 2).clone()
            for name, one in decoder.inputs(made, b, 0).items()
        ]
        made.options(lowering=how)(*mine, world=world, b=b)
        records, names = world.trace.tolist(), how.task_names(made.tiled, {"b": b}, world=world)
        world.close()
        return tile_times.read(records, world.rank, names=names), names

    for rank, (tiles, names) in enumerate(ranks(main, 2)):
        assert sorted(one.what for one in tiles) == sorted(names)
        assert any(one.startswith("attended_parts[") for one in names)
        assert {one.program for one in tiles} == {0, 1, 2} and {one.rank for one in tiles} == {rank}
        for one in tiles:
            (part,) = one.parts
            assert one.start < one.start + one.waited <= part.begun < part.summed < part.end
        spans = traced.spans_of(tiles)
        assert {one.name.split(": ")[1] for one in spans} >= {"work", "store and announce"}


def test_what_is_not_folded():
    """What the user has settled, or asked for; products that others read; pairs on two ranks."""
    tiled = program(mesh="tp", **decoder.parameters("float32"))(decoder.decoder).tiled
    (gate, *_) = [one for one in tiled.tasks if one.kind == "silu_mul"]
    (total, *_) = [one for one in tiled.tasks if one.kind == "add"]
    (product,) = gate.operands
    for settled in ([gate.name, total.name], [product, *total.operands]):
        assert {gate, total} <= {*fold(tiled, {"b": 3}, 2, settled).tasks}
    twice = replace(total, operands=(total.operands[0],) * 2)
    tasks = tuple(twice if one == total else one for one in tiled.tasks)
    assert twice in fold(replace(tiled, tasks=tasks), {"b": 3}, 2).tasks
    asked = replace(tiled, results=(*tiled.results, product))
    read = replace(tiled, tasks=(
        *tiled.tasks, replace(gate, name="other", kind="silu", operands=gate.operands)
    ))  # fmt: skip
    for other in (asked, read):
        assert gate in fold(other, {"b": 3}, 2).tasks
    assert gate in fold(tiled, {"b": 3}, 5).tasks
