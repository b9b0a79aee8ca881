"""Packages that models and serving stand on, which are imported when they are needed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from weft.base.errors import UsageError


def needed(module: str) -> Any:
    """The module of this name.

    Raises  UsageError: its package is not installed, with how to install it
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(
            f"models and serving need {error.name}, which is not installed: pip install "
            "'weft[serve]'"
        ) from error
