"""Arithmetic of spans: against the same asked of every point."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.base.spans import intersection, total, union, without

SPANS = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), max_size=6)


def points(spans):
    return {at for start, end in spans for at in range(start, end)}


def test_spans_joined_and_in_common():
    first = union([(5.0, 7.0), (0.0, 2.0), (1.0, 3.0), (4.0, 4.0)])
    assert first == [(0.0, 3.0), (5.0, 7.0)]
    assert intersection(first, [(2.0, 6.0)]) == [(2.0, 3.0), (5.0, 6.0)]


@pytest.mark.parametrize("covered, left", [
    ([], [(10, 20)]),
    ([(0, 30)], []),
    ([(0, 12), (14, 16)], [(12, 14), (16, 20)]),
    ([(5, 10), (20, 25)], [(10, 20)]),
    ([(12, 14)], [(10, 12), (14, 20)]),
    ([(25, 30)], [(10, 20)]),
])  # fmt: skip
def test_what_is_not_covered(covered, left):
    assert without((10, 20), covered) == left


@pytest.mark.slow
@given(SPANS, SPANS, st.tuples(st.integers(0, 12), st.integers(0, 12)))
def test_what_holds_of_every_point(some, others, span):
    first, second = union(some), union(others)
    for joined in (first, intersection(first, second), without(span, first)):
        # Disjoint, in order, and none is empty.
        bounds = [at for pair in joined for at in pair]
        assert bounds == sorted(set(bounds))
    assert points(first) == points(some)
    assert total(first) == len(points(some))
    assert points(intersection(first, second)) == points(first) & points(second)
    assert points(without(span, first)) == points([span]) - points(first)
