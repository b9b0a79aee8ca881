"""What is installed, by its name."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def version_of(package: str) -> str:
    """Its version; empty where it is not installed, as what runs from its source."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
