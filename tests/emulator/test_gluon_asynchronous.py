"""Gluon kernels of one partition: TMA, wgmma and mbarriers, and what goes wrong with them."""

import sys

import pytest
import torch
from gluon_kernels import (
    _barriers,
    copy_by_own_descriptors,
    descriptor,
    emulate,
    line_in,
    load_tile,
    pipelined_copy,
    pipelined_gemm,
    product_of_registers,
    sides,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.blackwell import tma as blackwell_tma
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

ROWS, TILES = 16, 5


def line(name):
    return line_in(sys.modules[__name__ if name.startswith("rows") else "gluon_kernels"], name)


def copied(fault, stages=3, seed=0):
    def main():
        x = torch.randn(ROWS * TILES - 3, 24).half()
        out = torch.zeros_like(x)
        source, target = descriptor(x, (ROWS, 32)), descriptor(out, (ROWS, 32))
        pipelined_copy[(1,)](source, target, TILES, stages, fault)
        return x, out

    findings, (x, out) = emulate(main, seed)
    return findings, torch.equal(out, x * 2)


@pytest.mark.parametrize("stages, seed", [(1, 0), (2, 1), (3, 2)])
def test_a_pipelined_copy_is_right(stages, seed):
    findings, is_right = copied("", stages, seed)
    assert not findings and is_right


def test_a_wait_on_the_wrong_parity_lets_the_read_come_too_early():
    findings, is_right = copied("parity")
    races = [finding for finding in findings if finding.kind == "race"]
    assert {line("copy: reads"), line("copy: first loads")} in map(sides, races)
    assert not is_right


def test_a_buffer_refilled_before_it_is_read():
    findings, _ = copied("early")
    assert [finding.kind for finding in findings] == ["race"]
    assert sides(findings[0]) == {line("copy: early"), line("copy: reads")}


def test_a_store_without_its_fence():
    findings, _ = copied("fence")
    assert [finding.kind for finding in findings] == ["race"]
    assert sides(findings[0]) == {line("copy: writes"), line("copy: stores")}
    assert "no fence" in findings[0].message and "fence_async_shared" in findings[0].remedy


def test_a_buffer_written_while_a_store_reads_it():
    findings, _ = copied("store wait")
    write, end = findings
    assert write.kind == end.kind == "race"
    assert sides(write) == {line("copy: writes"), line("copy: stores")}
    assert "after the read" in write.message
    assert sides(end) == {line("copy: stores")} and "ends before a copy by TMA" in end.message


def test_bytes_that_nobody_loads():
    findings, _ = copied("bytes")
    assert [finding.kind for finding in findings] == ["deadlock"]
    assert sides(findings[0]) == {line("copy: waits")}
    assert "full@rank0[0, 0]" in findings[0].message
    assert "1 of 1 arrival, 1024 bytes to come" in findings[0].message


def test_descriptors_that_the_kernel_makes():
    def main():
        x = torch.randn(20, 24).half()
        out = torch.zeros_like(x)
        layout = gl.NVMMASharedLayout.get_default_for([16, 16], gl.float16)
        copy_by_own_descriptors[(1,)](x, out, 20, 24, 8, 16, layout)
        return x, out

    findings, (x, out) = emulate(main)
    assert not findings
    assert torch.equal(out[8:, :16], x[8:, :16]) and not out[:8].any() and not out[:, 16:].any()


def multiplied(fault, k=56, seed=0):
    def main():
        a, b = torch.randn(61, k).half(), torch.randn(k, 16).half()
        c = torch.zeros(61, 16).half()
        blocks = descriptor(a, (64, 16)), descriptor(b, (16, 16)), descriptor(c, (64, 16))
        pipelined_gemm[(1,)](*blocks, k, fault)
        return c, a.float() @ b.float()

    findings, (c, expected) = emulate(main, seed)
    return findings, torch.allclose(c.float(), expected, atol=2e-2, rtol=2e-3)


@pytest.mark.parametrize("k, seed", [(8, 0), (56, 1), (64, 2)])
def test_a_pipelined_product_is_right(k, seed):
    findings, is_right = multiplied("", k, seed)
    assert not findings and is_right


@pytest.mark.parametrize("twice", [False, True])
def test_a_product_of_registers_is_waited_for_at_once(twice):
    def main():
        a, b = torch.randn(64, 32).half(), torch.randn(32, 16).half()
        c = torch.zeros(64, 16)
        product_of_registers[(1,)](a, b, c, twice)
        return c, (1 + twice) * (a.float() @ b.float())

    findings, (c, expected) = emulate(main)
    assert not findings
    torch.testing.assert_close(c, expected)


def test_sums_used_before_the_product_is_over():
    findings, is_right = multiplied("mma wait")
    assert [finding.kind for finding in findings] == ["race"]
    assert sides(findings[0]) == {line("gemm: uses"), line("gemm: multiplies")}
    assert not is_right


def test_a_stage_refilled_while_a_product_reads_it():
    findings, _ = multiplied("refill")
    assert {finding.kind for finding in findings} == {"race"}
    assert {line("gemm: refills"), line("gemm: multiplies")} in map(sides, findings)


@gluon.jit
def shuffled_rows(source, target, rows, to, column, layout: gl.constexpr, fault: gl.constexpr):
    """Rows of `source` by TMA to other rows of `target`; those outside are 0, or not written."""
    wide: gl.constexpr = gl.SliceLayout(0, gl.BlockedLayout([1, 4], [32, 1], [1, 4], [1, 0]))
    tile = gl.allocate_shared_memory(source.dtype, [8, 16], layout)
    full = _barriers(1, 1)
    mbarrier.expect(full.index(0), 8 * 16 * 4)
    at = gl.arange(0, 8, wide)
    # rows: gathers
    blackwell_tma.async_gather(source, gl.load(rows + at), column, full.index(0), tile)
    if fault != "wait":
        mbarrier.wait(full.index(0), 0)
    # rows: scatters
    blackwell_tma.async_scatter(target, gl.load(to + at), column, tile)
    tma.store_wait(0)
    if fault == "wait":
        mbarrier.wait(full.index(0), 0)


def shuffled(fault):
    def main():
        x, out = torch.randn(12, 24), torch.zeros(12, 24)
        rows, to = torch.tensor([3, 0, 11, 5, 12, 7, 2, 4]), torch.tensor([1, 0, 2, 5, 6, 99, 9, 4])
        blocks = descriptor(x, (1, 16), (8, 16)), descriptor(out, (1, 16), (8, 16))
        layout = blocks[0].layout
        shuffled_rows[(1,)](*blocks, rows.int(), to.int(), 8, layout, fault)
        wanted = torch.zeros(12, 24)
        for row, place in zip(rows, to, strict=True):
            if place < 12 and row < 12:
                wanted[place, 8:] = x[row, 8:]
        return torch.equal(out, wanted)

    return emulate(main)


def test_rows_by_their_numbers():
    findings, is_right = shuffled("")
    assert not findings and is_right


def test_rows_that_are_scattered_before_they_are_there():
    findings, _ = shuffled("wait")
    races = [sides(finding) for finding in findings if finding.kind == "race"]
    assert {line("rows: gathers"), line("rows: scatters")} in races


@gluon.jit
def added_tiles(source, target, fault: gl.constexpr):
    """Every program adds the tile of `source` to that of `target`, by TMA."""
    tile = gl.allocate_shared_memory(source.dtype, source.block_type.shape, source.layout)
    full = _barriers(1, 1)
    mbarrier.expect(full.index(0), source.block_type.nbytes)
    load_tile(source, [0, 0], full.index(0), tile)
    mbarrier.wait(full.index(0), 0)
    # rows: adds
    tma.async_atomic_add(target, [0, 0], tile)
    if fault == "wait":
        layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
        # rows: overwrites
        tile.store(gl.zeros([16, 16], source.dtype, layout))
    tma.store_wait(0)


@pytest.mark.skipif(not hasattr(tma, "async_atomic_add"), reason="came with Triton 3.9")
@pytest.mark.parametrize("fault", ["", "wait"])
def test_a_reduction_by_tma(fault):
    def main():
        x, out = torch.randint(-8, 8, (16, 16)).float(), torch.ones(16, 16)
        added_tiles[(3,)](descriptor(x, (16, 16)), descriptor(out, (16, 16)), fault)
        return not fault and torch.equal(out, 1 + 3 * x)

    findings, is_right = emulate(main)
    races = [sides(finding) for finding in findings if finding.kind == "race"]
    if fault:
        assert {line("rows: adds"), line("rows: overwrites")} in races
    else:
        assert not races and is_right
