"""How launches specialise kernels, on every Triton: one binary for all m, and when it is made."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import triton
import triton.language as tl

from weft.base.target import TARGETS
from weft.language import triton_api

ALIGNED, ODD, ONE = 4096, 4097, 1


class Shape(NamedTuple):
    m: int
    n: int


@triton.jit
def scale(out, shape, rows, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at * shape.n, at, mask=(at < shape.m) & (at < rows))


@pytest.fixture
def kernel(tmp_path, monkeypatch):
    """Makes the kernel anew, without compiled forms: of weft's own, or of somebody else."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def make(module):
        scale.fn.__module__ = module
        return triton_api.renamed(scale, "scale")

    yield make
    scale.fn.__module__ = __name__


def compiled_for(fn, sizes):
    """The names that are compiled by launches of m rows, for each of `sizes`."""
    import torch

    names, out = [], torch.empty(1, dtype=torch.int32, device="meta")
    with (
        triton_api.watched_compilations(names.append),
        triton_api.compiling_for(TARGETS["cuda:90"]),
    ):
        for m in sizes:
            launch = triton_api.LeftOut(fn, (out, Shape(m, 64), m), {"BLOCK": 16})
            triton_api.compile_launch(launch)
    return names


def test_kernels_of_weft_have_one_binary_for_all_m(kernel):
    assert compiled_for(kernel("weft_generated"), (ALIGNED, ODD, ONE)) == ["scale"]


def test_a_second_process_finds_it_in_the_cache_and_compiles_nothing(kernel):
    compiled_for(kernel("weft_generated"), (ALIGNED,))
    assert compiled_for(kernel("weft_generated"), (ODD,)) == []


def test_kernels_of_others_are_specialised_as_triton_does(kernel):
    import torch

    own, other = kernel("weft_generated"), kernel("model")
    out = torch.empty(1, dtype=torch.int32, device="meta")
    hints = {
        m: [
            triton_api.LeftOut(fn, (out, Shape(m, 64), m), {"BLOCK": 16}).record()
            for fn in (own, other)
        ]
        for m in (ALIGNED, ONE)
    }
    (weft_aligned, others_aligned), (weft_one, others_one) = hints[ALIGNED], hints[ONE]
    assert set(others_aligned.divisible_by_16) == {"out", "shape.m", "shape.n", "rows"}
    assert set(weft_aligned.divisible_by_16) == {"out", "shape.n"}
    assert others_one.signature["shape"] == ("constexpr", "i32")
    assert weft_one.signature["shape"] == ("i32", "i32")
    assert (others_one.signature["rows"], weft_one.signature["rows"]) == ("constexpr", "i32")
    assert weft_one.constants["BLOCK"] == 16


def test_the_record_of_a_launch_is_what_the_launch_asks_the_cache_for(kernel):
    import torch

    fn, out = kernel("weft_generated"), torch.empty(1, dtype=torch.int32, device="meta")
    with triton_api.described_launches() as found:
        fn[(4,)](out, Shape(ALIGNED, 64), ALIGNED, BLOCK=16, num_warps=8)
    (launch,) = found
    record = launch.record()
    assert record.name == "scale" and dict(record.options) == {"num_warps": 8}
    with triton_api.compiling_for(TARGETS["cuda:90"]):
        launched = triton_api.compile_launch(launch)
    ahead = triton_api.compile_kernel(fn, record, TARGETS["cuda:90"])
    assert ahead.asm["ptx"] == launched.asm["ptx"]
