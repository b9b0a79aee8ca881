"""What every test shares: ranks without a launcher, and marks that say what a test needs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from typing import Any

import pytest

import weft


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip `gpu(n)` tests where there are fewer GPUs; CUDA is asked once, and only if needed."""
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if not wanted:
        return
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in wanted:
        mark = item.get_closest_marker("gpu")
        assert mark is not None
        needed = mark.kwargs.get("n", mark.args[0] if mark.args else 1)
        if there < needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPUs, {there} here"))


@pytest.fixture(autouse=True)
def same_numbers_each_time() -> None:
    """Random data depends on the test alone, not on what ran before it, nor on the day."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(0)
    random.seed(0)


@pytest.fixture
def ranks() -> Callable[..., list[Any]]:
    """`ranks(main, n, **options)` runs `main` on n emulated ranks and returns what each returned.

    With collect=True it returns the report instead of raising what was found.
    """

    def run(main: Callable[..., Any], num_ranks: int = 4, *, collect: bool = False, **options: Any):
        with weft.emulated(ranks=num_ranks, collect=collect, **options) as session:
            results = session.run(main)
        return session.report if collect else results

    return run
