"""What an index of a signal array stands for, in words."""

from __future__ import annotations

import json
import pickle

from weft.base.elements import Element

ROWS = (("from rank", 4), ("chunk", 2))
TILES = (("tile row", 3), ("tile column", 5), ("part", 1), ("from rank", 4))


def test_an_element_says_what_it_stands_for():
    assert str(Element(5, ROWS)) == "chunk 1 from rank 2"
    assert f"ready[{Element((2 * 5 + 4) * 4 + 3, TILES)}]" == (
        "ready[tile row 2, tile column 4 from rank 3]"
    )


def test_one_that_is_none_of_the_axes_is_a_number():
    """Slots have room for larger calls, of which this one's axes say nothing."""
    assert str(Element(8, ROWS)) == "8" and str(Element(3)) == "3"
    assert str(Element(0, (("chunk", 1),))) == "0"


def test_it_is_an_index_to_programs():
    element = Element(5, ROWS)
    assert element == 5 and json.dumps({"index": element}) == '{"index": 5}'
    again = pickle.loads(pickle.dumps(element))
    assert again == 5 and str(again) == str(element)
