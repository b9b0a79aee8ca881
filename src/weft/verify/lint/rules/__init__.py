"""The rules, a file for each family; importing a file registers its rules."""

from __future__ import annotations

import importlib

FAMILIES = (
    "scopes",
    "spins",
    "loops",
    "releases",
    "peers",
    "usage",
)


def load_rules() -> None:
    """Register every rule; the second time does nothing."""
    for family in FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
