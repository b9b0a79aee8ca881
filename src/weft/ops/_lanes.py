"""Names of plan/ that operators still know by this one."""

from __future__ import annotations

from typing import Any

from weft.plan.call_cache import (
    by_place,
    check_out,
    check_shard,
    described,
    find_call,
    is_on_heap,
    out_dtype_of,
    place_at,
)
from weft.plan.exchanges import Config as Lanes
from weft.plan.problems import (
    Rows,
    make_problem,
    nodes_of,
    random_rows,
)
from weft.plan.vectors import (
    PACKET_BYTES,
    VECTOR_BYTES,
    as_words,
    elements_in_vector,
    power_of_two,
    width_of,
    words_in_vector,
)

__all__ = [
    "Lanes",
    "PACKET_BYTES",
    "Rows",
    "VECTOR_BYTES",
    "as_words",
    "by_place",
    "check_out",
    "check_shard",
    "described",
    "elements_in_vector",
    "find_call",
    "is_on_heap",
    "make_problem",
    "nodes_of",
    "out_dtype_of",
    "place_at",
    "power_of_two",
    "random_rows",
    "width_of",
    "word_bytes",
    "words_in_vector",
]


def word_bytes(problem: Any) -> int:
    return min(8, width_of(problem.row_bytes))
