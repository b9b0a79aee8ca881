"""Lines: right under all schedules, wrong uses found, and whole in the code of each GPU."""

from __future__ import annotations

import re

import language_kernels as kernels
import line_kernels
import pytest
import torch
import triton
import triton.language as tl
from language_kernels import CUDA, HIP, machine_text

import weft
import weft.language as wl
from weft.base.errors import (
    DtypeError,
    FarPointerError,
    FindingError,
    ShapeError,
    UnsupportedError,
    UsageError,
)
from weft.language.cuda import lines as on_cuda
from weft.verify import compiled

LINES, CALLS = 16, 4
PER_LINE = {torch.float32: 30, torch.float16: 60, torch.bfloat16: 60}


def sums(dtype=torch.float32, n=None, calls=CALLS, slots=2, step=1, look=0, zeroed=True):
    n = n or LINES * PER_LINE[dtype]

    def main():
        world = weft.init()
        make = world.zeros if zeroed else world.empty
        inbox = make((slots, world.num_ranks, LINES, 16), torch.int64, name="inbox")
        torch.manual_seed(world.rank)
        values = torch.randn(calls, n).to(dtype)
        out = torch.zeros(calls, n)
        line_kernels.sum_of_all[(1,)](
            world.arg, values, inbox, out, calls, n, LINES=LINES, SLOTS=slots, STEP=step, LOOK=look
        )
        world.synchronize()
        return values.float(), out

    return main


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("dtype", PER_LINE)
def test_everyone_sums_what_everyone_sent(ranks, dtype, num_ranks, seed):
    results = ranks(sums(dtype), num_ranks, seed=seed)
    expected = sum((values for values, _ in results[1:]), results[0][0])
    for _, out in results:
        assert torch.equal(out, expected)


@pytest.mark.parametrize("n", [1, 30, 31, 479])
def test_ragged_ends(ranks, n):
    """The lines behind the last one are neither written nor waited for."""
    results = ranks(sums(n=n), 2)
    expected = results[0][0] + results[1][0]
    assert all(torch.equal(out, expected) for _, out in results)


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.float16, torch.float32, torch.int64, torch.float64]
)
def test_every_width_by_pointers(ranks, dtype):
    n = LINES * 120 // dtype.itemsize

    def main():
        world = weft.init()
        inbox = world.zeros((LINES, 16), torch.int64, name="inbox")
        values = (torch.arange(n) % 100 + world.rank).to(dtype)
        out = torch.zeros(n, dtype=dtype)
        line_kernels.from_pointers[(1,)](world.arg, values, inbox, out, 7, LINES=LINES)
        world.synchronize()
        return values, out

    results = ranks(main, 3)
    for rank, (_, out) in enumerate(results):
        assert torch.equal(out, results[(rank - 1) % 3][0])


@pytest.mark.parametrize(
    "change, kinds",
    [
        # A fast rank overwrites what a slow one reads.
        ({"slots": 1}, {"race", "deadlock", "unsatisfiable wait"}),
        ({"step": 0}, {"stale flag"}),  # the flag does not change from call to call
        ({"look": 1}, {"race"}),  # one flag says nothing of the other lines
        ({"zeroed": False}, {"uninitialised"}),  # what memory held may look like a line
    ],
    ids=["one half", "one flag", "one line's flag", "not zeroed"],
)
@pytest.mark.parametrize("seed", range(3))
def test_every_mutant_is_found(ranks, change, kinds, seed):
    report = ranks(sums(**change), 2, collect=True, seed=seed)
    assert kinds & {finding.kind for finding in report.findings}, str(report)


def test_a_line_may_not_lie_across_two(ranks):
    def main():
        world = weft.init()
        inbox = world.zeros(((LINES + 1) * 16,), torch.int64, name="inbox")
        values = torch.zeros(LINES * 30)
        line_kernels.from_pointers[(1,)](
            world.arg, values, inbox[8:], torch.zeros(LINES * 30), 7, LINES=LINES
        )
        world.synchronize()

    with pytest.raises(UsageError, match="inbox at an address that 128 does not divide"):
        ranks(main, 1)


def test_lines_stay_within_a_node(ranks):
    with pytest.raises(FarPointerError, match="another node"):
        ranks(sums(), 2, nodes=2)


def test_a_line_that_never_comes_is_a_deadlock(ranks):
    def main():
        world = weft.init()
        inbox = world.zeros((32, 16), torch.int64, name="inbox")
        line_kernels.unbounded[(1,)](inbox, torch.zeros(32 * 60, dtype=torch.float16).view(-1))
        world.synchronize()

    with pytest.raises(FindingError, match="for a packet of flag 3"):
        ranks(main, 1)


# ---------------------------------------------------------------------------------------------
# Emitted code


@pytest.mark.parametrize("num_warps", [1, 4, 8])
@pytest.mark.parametrize("target", CUDA)
@pytest.mark.parametrize("kernel", [line_kernels.lines, line_kernels.unbounded])
def test_it_compiles_and_the_check_finds_nothing(kernel, target, num_warps):
    report = compiled(kernels.compiled(kernel, target, num_warps=num_warps))
    assert report.ok, str(report)


@pytest.mark.parametrize("target", CUDA)
def test_a_line_is_eight_accesses_of_16_bytes_past_the_caches(target):
    code = machine_text(line_kernels.lines, target)
    stores = re.findall(r"\bst\.global\.wt\S*", code)
    loads = re.findall(r"\bld\.volatile\.global\S*", code)
    assert set(stores) == {"st.global.wt.v2.b64"}
    assert set(loads) == {"ld.volatile.global.v2.b64"}
    # Two waits, each with a first look and a loop; every one with its warp together.
    assert len(re.findall(r"bar\.warp\.sync", code)) >= 6


@triton.jit
def too_few(world, x, flags64, n):
    """What the language refuses: eight lines for four warps, past its checks."""
    at, is_data = wl.line_elements(8, tl.float32)
    mine = tl.load(x + at, mask=is_data, other=0)
    on_cuda.put_lines(world, flags64, mine, n, 1, None)
    tl.store(x + at, on_cuda.wait_lines(flags64, n, 8, None, None, tl.float32, None), mask=is_data)


def test_the_check_finds_a_line_in_pieces():
    report = compiled(kernels.compiled(too_few, "cuda:90"))
    found = report.of("torn line")
    # The store and the loads, whose looks have one line.
    assert len(found) == 2 and all("test_lines.py" in str(finding) for finding in found)
    assert "sizePerThread = [1, 1], threadsPerWarp = [2, 16]" in str(report)
    assert compiled(kernels.compiled(too_few, "cuda:90", num_warps=2)).ok


@pytest.mark.parametrize(
    "stage, old, new, message",
    [
        ("ttgir", "threadsPerWarp = [4, 8]", "threadsPerWarp = [2, 16]", "layout blocked"),
        ("ttgir", "order = [1, 0]", "order = [0, 1]", "layout blocked"),
        ("ptx", "st.global.wt.v2.b64", "st.global.v2.b64", "may stay in a cache"),
        ("ptx", "ld.volatile.global.v2.b64", "ld.volatile.global.b64", "moves 8 bytes"),
    ],
)
def test_the_check_finds_every_way_to_part_a_line(stage, old, new, message):
    texts = dict(kernels.compiled(line_kernels.lines, "cuda:90").asm)
    assert old in texts[stage]
    report = compiled({**texts, stage: texts[stage].replace(old, new)}, "cuda:90")
    assert any(message in finding.message for finding in report.of("torn line")), str(report)


@pytest.mark.parametrize("target", HIP)
def test_amd_has_no_lines(target):
    with pytest.raises(UnsupportedError, match="use put_packets"):
        kernels.compiled(line_kernels.lines, target)


# ---------------------------------------------------------------------------------------------
# Bad input


@triton.jit
def few_lines(world, x, flags64):
    at, _ = wl.line_elements(8, tl.float32)
    wl.put_lines(world, flags64, x + at, 1, to=0)


@triton.jit
def flat_data(world, x, flags64):
    wl.put_lines(world, flags64, tl.load(x + tl.arange(0, 512)), 1, to=0)


@triton.jit
def into_a_tile(world, x, flags64):
    at, _ = wl.line_elements(16, tl.float32)
    wl.put_lines(world, flags64 + at, x + at, 1, to=0)


@triton.jit
def into_words(world, x, flags):
    at, _ = wl.line_elements(16, tl.float32)
    wl.put_lines(world, flags, x + at, 1, to=0)


@triton.jit
def odd_lines(world, flags64):
    wl.wait_lines(flags64, 1, 24)


@triton.jit
def as_booleans(world, flags64):
    wl.wait_lines(flags64, 1, 16, dtype=tl.int1)


@pytest.mark.parametrize("target", ["cuda:90", "emu"])
@pytest.mark.parametrize(
    "kernel, error, message",
    [
        (few_lines, ShapeError, "a tile of 8 lines, and 4 warps hold 16"),
        (flat_data, ShapeError, r"pass \[lines, 32\]: 128 bytes a line"),
        (into_a_tile, ShapeError, "pass a scalar pointer"),
        (into_words, DtypeError, "lines are 16 words of int64 each"),
        (odd_lines, UsageError, "pass a constant power of two"),
        (as_booleans, DtypeError, "values of 8 to 64 bits"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_lines_cannot_be(kernel, error, message, target):
    with pytest.raises(error, match=message):
        kernels.compiled(kernel, target)
