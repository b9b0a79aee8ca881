"""Fields of a record that says how a call is done: what each may be, checked the same way in all.
Records and other objects with some fields changed.

Raises  ConfigError: with the operator, the field, its value and what it may be
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar

from weft.base.errors import ConfigError

Kept = TypeVar("Kept")


def copied(one: Kept, **changed: Any) -> Kept:
    """One of its class with all that it has, but for what is changed: as dataclasses.replace, of
    frozen ones too, without its checks of all that stays. Calls of a new m ask it."""
    found = object.__new__(type(one))
    vars(found).update(vars(one), **changed)
    return found


def check_one_of(op: str, config: Any, name: str, known: Collection[Any]) -> None:
    """The field is one of these values."""
    if (value := getattr(config, name)) not in known:
        words = ", ".join(map(str, known))
        raise ConfigError(f"{op}: {name}={value!r}; it must be one of {words}")


def check_powers_of_two(op: str, config: Any, *names: str, least: int = 16) -> None:
    """The fields are powers of two from `least` on."""
    for name in names:
        value = getattr(config, name)
        if value < least or value & (value - 1):
            raise ConfigError(f"{op}: {name}={value}; it must be a power of two from {least} on")


def check_ranges(op: str, config: Any, **ranges: tuple[int, int]) -> None:
    """The fields are in their ranges, both ends included."""
    for name, (least, most) in ranges.items():
        if not least <= (value := getattr(config, name)) <= most:
            raise ConfigError(f"{op}: {name}={value}; it must be from {least} to {most}")
