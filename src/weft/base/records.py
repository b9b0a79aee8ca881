"""A compiled kernel as a plain record that JSON can hold."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from typing import Any

# Of the plan that `weft compile -o` writes: it changes when what a loader must know does.
PLAN_FORMAT = 4


@dataclass(frozen=True)
class KernelRecord:
    """One kernel specialised for one target.

    `signature` maps each argument name to Triton's type word ("*bf16", "i32", "constexpr",
    or a nested list for a tuple); `constants` maps argument names to values.
    `divisible_by_16` names arguments, or "argument.field" of a named tuple among the constants.
    """

    name: str
    signature: dict[str, object]
    constants: dict[str, object] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    divisible_by_16: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        """Functions and dtypes among the constants by their names."""
        return plain(vars(self))

    def to_plan(self) -> dict[str, object]:
        """As `to_json`, but for a loader that has no named tuples: fields by their places."""
        by_places = [
            ".".join([path.partition(".")[0], *map(str, self.places_of(path))])
            for path in self.divisible_by_16
        ]
        return {**self.to_json(), "divisible_by_16": by_places}

    def places_of(self, path: str) -> list[int]:
        """Of the fields behind an argument's name: `world.table` -> 0."""
        name, *fields = path.split(".")
        value, places = self.constants.get(name), []
        for one in fields:
            names = getattr(value, "_fields", None)
            places.append(names.index(one) if names else int(one))
            value = value[places[-1]] if isinstance(value, tuple) else None
        return places

    def __str__(self) -> str:
        """What is compiled: `row *fp32:16, n i32, size=64`."""
        words = []
        for name, kind in self.signature.items():
            word = _word(kind, self.constants.get(name))
            aligned = ":16" if name in self.divisible_by_16 else ""
            words.append(f"{name}={word}" if kind == "constexpr" else f"{name} {word}{aligned}")
        return ", ".join(words + [f"{name}={value}" for name, value in self.options.items()])


def _word(kind: object, value: object) -> str:
    """A type, or the constant in its place; of a tuple all of them."""
    if not isinstance(kind, (tuple, list)):
        return _written(value) if kind == "constexpr" else str(kind)
    values = value if isinstance(value, (tuple, list)) else [None] * len(kind)
    words = ", ".join(map(_word, kind, values))
    name = {"WorldArg": "world", "SlotArg": "slot"}.get(type(value).__name__)
    return name or f"({words})"


def _written(value: object) -> str:
    return str(getattr(value, "__name__", value))


def plain(value: Any) -> Any:
    """What JSON can hold of it."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(one) for one in value]
    return value if value is None or isinstance(value, (bool, int, float, str)) else _written(value)


def plan_digest(kernels: Any) -> str:
    """By which a loader sees that what a plan says of its kernels is as it was written."""
    return hashlib.sha256(json.dumps(kernels, sort_keys=True, default=str).encode()).hexdigest()
