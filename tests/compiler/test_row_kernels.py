"""Rows that are summed over ranks and worked on: what is done where, and what is refused."""

from __future__ import annotations

import pytest

from weft.base.errors import UnsupportedError
from weft.compiler import Partial, Replicate, Tensor, all_reduce, rms_norm, silu
from weft.compiler.facts import Facts
from weft.compiler.frontend import trace
from weft.compiler.lower import kernels
from weft.compiler.lower.supported import refusal
from weft.compiler.passes.place import place
from weft.compiler.pipeline import overlap
from weft.ir import core
from weft.ir.device import Launch


def launch_of(function, columns: int = 64):
    """(plan, its launch on rows) for h, Partial, and the replicated r and w."""
    types = {
        "h": Tensor("bfloat16", ("m", columns), Partial()),
        "r": Tensor("bfloat16", ("m", columns), Replicate()),
        "w": Tensor("bfloat16", (1, columns), Replicate()),
    }
    plan = overlap(place(trace(function, "tp", types)), Facts({"m": 100})).plan
    found = [one for one in plan.of(Launch) if one.template == "rows"]
    return plan, found[0] if found else None


def hooks_of(kernel: core.Kernel, slot: str) -> list[str]:
    return [one.function for one in kernel.at(slot) if isinstance(one, core.Hook)]


def twice(h, r, w):
    """Two norms of a value that is no result: it travels."""
    total = silu(all_reduce(h)) * r
    normed = rms_norm(total, w, eps=1e-5)
    return rms_norm(normed, w, eps=1e-3), normed


def test_what_is_before_the_value_that_travels_is_done_once():
    plan, launch = launch_of(twice)
    kernel = kernels.lower_launch(plan, launch)
    before = ["add_partials", "silu_rows", "mul_rows", "rms_norm", "rounded"]
    assert hooks_of(kernel, "combine") == before
    assert hooks_of(kernel, "result") == ["store_rows", "rms_norm", "store_rows"]
    numbers = {one.name: one.by for one in kernel.of(core.Param) if one.sort == "number"}
    assert sorted(numbers.values()) == ["0.001", "1e-05"] and "eps" in numbers


def apart(h, r, w):
    total = all_reduce(h)
    return silu(total) * total


def test_what_is_no_chain_is_refused_at_the_users_line():
    plan, launch = launch_of(apart)
    error = refusal(plan, launch)
    assert isinstance(error, UnsupportedError) and "behind" in str(error)
    assert error.place.frames[0].file.endswith("test_row_kernels.py")


def test_rows_that_fit_no_tile_are_refused():
    plan, launch = launch_of(twice, columns=1 << 16)
    assert "65536 columns; a row is one tile, of up to 32768" in str(refusal(plan, launch))
    with pytest.raises(UnsupportedError):
        kernels.lower_launch(plan, launch)
