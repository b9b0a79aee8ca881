"""A sequence's attention waits for what is appended to its own part of the caches alone."""

from __future__ import annotations

import decoder
import pytest
from persistent_programs import before_by_counters

from weft.compiler.passes.tile import tile
from weft.megakernel.check import check
from weft.megakernel.graph import build


@pytest.mark.parametrize("num_ranks, b", [(1, 1), (1, 17), (2, 3)])
def test_attention_waits_for_its_own_sequence(num_ranks: int, b: int):
    made = decoder.compiled()
    program = tile(made.stages.tasks["place"], made.settings.tiles)
    graph = build(program, {"b": b}, num_ranks)
    assert check(graph) == []
    before = before_by_counters(graph)
    tasks = {(task.rank, task.id): task for task in graph.tasks}
    attended = [task for task in graph.tasks if task.op == "attended"]
    kv_heads = decoder.KV_HEADS // num_ranks
    assert len(attended) == num_ranks * kv_heads * b
    for task in attended:
        appends = [tasks[key] for key in before[task.rank, task.id]]
        appends = [one for one in appends if one.kind == "kv_append"]
        assert {one.i_m for one in appends} == {task.i_m} and len(appends) == 2
        first, head = task.i_m * decoder.MAX_KV, task.i_n * decoder.HEAD
        wanted = (first, first + decoder.MAX_KV, head, head + decoder.HEAD)
        assert [read.region for read in task.reads[1:3]] == [wanted, wanted]
    for task in graph.tasks:
        if task.kind == "kv_append":
            assert task.reads[1].region[:2] == (task.i_m, task.i_m + 1)
