"""Sizes that users pass: whole numbers, and shapes of them."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from weft.base.errors import ShapeError, WeftError


def whole_number(
    what: str, value: Any, at_least: int = 0, error: type[WeftError] = ShapeError
) -> int:
    """`value` as an int; `what` names it in the error.

    Raises  ShapeError, or `error`: 2.5, 4.0 or "4", or below `at_least`
    """
    try:
        number = operator.index(value)
    except TypeError:
        remedy = "; use // or int()" if isinstance(value, (float, str)) else ""
        raise error(f"{what} is {value!r}, not a whole number{remedy}") from None
    if number < at_least:
        raise error(f"{what} is {number}; it must be {at_least} or more")
    return number


def extents_of(what: str, shape: Any) -> tuple[int, ...]:
    """A shape as a tuple of ints; one number is a shape of one dimension.

    Raises  ShapeError: naming the shape, the dimension and the value
    """
    if type(shape) is tuple:
        for extent in shape:
            if type(extent) is not int or extent < 0:
                break
        else:  # as most are, without the words of an error
            return shape
    if not isinstance(shape, Iterable) or isinstance(shape, (str, bytes)):
        return (whole_number(what, shape),)
    try:
        extents = tuple(shape)
    except TypeError:  # what torch calls an iterable and has no dimension
        return (whole_number(what, shape),)
    return tuple(
        whole_number(f"{what}: dimension {at} of the shape {extents!r}", extent)
        for at, extent in enumerate(extents)
    )
