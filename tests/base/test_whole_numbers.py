"""Sizes that users pass."""

import numpy as np
import pytest
import torch

from weft.base.errors import ShapeError, UsageError
from weft.base.whole_numbers import extents_of, whole_number


@pytest.mark.parametrize(
    ("shape", "extents"),
    [
        (4, (4,)), ((), ()), ([2, np.int64(3)], (2, 3)), (torch.Size((1, 2)), (1, 2)),
        (torch.tensor(5), (5,)), (torch.tensor([5, 6]), (5, 6)), ((0,), (0,)),
    ],
)  # fmt: skip
def test_what_torch_takes_as_a_shape_is_one(shape, extents):
    found = extents_of("x", shape)
    assert found == extents and all(type(one) is int for one in found)


@pytest.mark.parametrize(
    ("shape", "said"),
    [
        (4.0, "x is 4.0, not a whole number; use // or int()"),
        ("44", "x is '44', not a whole number"),
        (None, "x is None, not a whole number$"),
        ((2, 3.5), r"x: dimension 1 of the shape \(2, 3\.5\) is 3\.5, not a whole number"),
        ((2, (3,)), r"x: dimension 1 .* is \(3,\), not a whole number"),
        ((-2, 3), r"x: dimension 0 of the shape \(-2, 3\) is -2; it must be 0 or more"),
    ],
)
def test_what_is_no_shape_is_refused_with_the_value(shape, said):
    with pytest.raises(ShapeError, match=said):
        extents_of("x", shape)


def test_a_number_may_have_a_least_value_and_another_error():
    assert whole_number("n", 1, 1) == 1
    with pytest.raises(UsageError, match="n is 0; it must be 1 or more"):
        whole_number("n", 0, 1, UsageError)
