"""Operations that can begin at the same time stand side by side."""

from __future__ import annotations

import decoder
import pytest
from persistent_programs import random_program

from weft.compiler import Replicate, Tensor, decode_attention, kv_append, program
from weft.megakernel.ordering import by_depth
from weft.megakernel.tiles import refuse


def test_products_of_the_same_rows_come_before_what_reads_them():
    ordered = by_depth(decoder.compiled().tiled)
    kinds = [one.kind for one in ordered.tasks if one.kind != "input"]
    assert kinds[:4] == ["rms_norm", "matmul", "matmul", "matmul"]
    assert sorted(kinds[4:7]) == ["kv_append", "rope", "rope"]
    assert kinds[7:10] == ["kv_append", "decode_attention", "matmul"]


@pytest.mark.parametrize("seed", range(5))
def test_each_task_stays_behind_what_it_reads(seed: int):
    made = random_program(seed, 2).stages.tasks["place"]
    ordered = by_depth(made)
    assert {*ordered.tasks} == {*made.tasks} and len(ordered.tasks) == len(made.tasks)
    seen: set[str] = set()
    for task in ordered.tasks:
        assert {*task.operands} <= seen
        seen.add(task.name)
    assert by_depth(ordered) == ordered


def before_and_after(q, cache, x, lengths):
    """What is read before a cache is written in place is as deep as what reads it."""
    once = decode_attention(q, cache, cache, lengths, head=8)
    first = decode_attention(once, cache, cache, lengths, head=8)
    written = kv_append(cache, x, lengths)
    return first, decode_attention(q, written, written, lengths, head=8)


def test_nothing_is_written_in_place_before_others_have_read_it():
    kind = Tensor("float32", (2, 8), Replicate())
    made = program(mesh="tp", q=kind, cache=Tensor("float32", (10, 8), Replicate()), x=kind,
                   lengths=Tensor("int32", (1, 2), Replicate()))(before_and_after)  # fmt: skip
    ordered = by_depth(made.tiled)
    kinds = [one.kind for one in ordered.tasks if one.kind != "input"]
    assert kinds == ["decode_attention"] * 2 + ["kv_append", "decode_attention"]
    refuse(ordered, {}, 1)
