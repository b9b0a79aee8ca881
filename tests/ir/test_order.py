"""The order of moments against what a search of all ways finds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weft.ir.order import Moment, Order

edges = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6), st.booleans()), max_size=14)


def ways(given_edges, start: int) -> set[tuple[int, bool]]:
    """What lies behind `start`, and whether on a way with a far edge."""
    found: set[tuple[int, bool]] = set()
    waiting = [(start, False)]
    while waiting:
        at, far = waiting.pop()
        for first, second, is_far in given_edges:
            reached = (second, far or is_far)
            if first == at and reached not in found:
                found.add(reached)
                waiting.append(reached)
    return found


@given(edges, st.booleans())
def test_all_ways_are_found(drawn, can_be_cyclic: bool):
    if not can_be_cyclic:
        drawn = [(min(i, j), max(i, j), far) for i, j, far in drawn if i != j]
    order, moments = Order(), [Moment(i, "end") for i in range(7)]
    for i, j, far in drawn:
        order.add(moments[i], moments[j], far)
    order.close()
    named = {i for edge in drawn for i in edge[:2]}
    for i in range(7):
        behind = ways(drawn, i)
        assert order.is_cyclic(moments[i]) == (i in {j for j, _ in behind})
        for j in range(7):
            near = {(j, False), (j, True)} & behind or (i == j and i in named)
            assert order.before([moments[i]], [moments[j]]) == bool(near)
            assert order.before([moments[i]], [moments[j]], far=True) == ((j, True) in behind)


def test_what_is_in_no_edge_is_before_nothing():
    order = Order()
    order.close()
    assert not order.before([Moment(1, "end")], [Moment(1, "end")])
