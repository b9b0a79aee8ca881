"""Cards: problems by the names of their sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from weft.base.card import sized


@dataclass(frozen=True)
class Problem:
    m: int
    num_ranks: int
    dtype: str
    nodes: tuple[int, ...] = ()
    tile_m: int = 128
    causal: bool = True

    usual: ClassVar[dict[str, int]] = {"tile_m": 16}


def test_sizes_are_fields_by_their_names():
    """What no field has is another card's; a truth is one; what is usual stands in for defaults."""
    made = sized(Problem, 2, {"m": 40, "causal": 0, "sequences": 3}, "float16", (1, 1))
    assert made == Problem(40, 2, "float16", (1, 1), 16, False)
    assert made.causal is False
    assert sized(Problem, 2, {"m": 1, "tile_m": 64}, "float16").tile_m == 64
