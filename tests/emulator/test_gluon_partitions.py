"""Warp-specialised Gluon kernels: partitions hand tiles on, and what goes wrong between them."""

import pytest
import torch
from gluon_kernels import (
    descriptor,
    emulate,
    line,
    sides,
    specialised_copy,
    specialised_gemm,
    store_tile,
)
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

ROWS, TILES = 16, 5


def copied(fault, stages=2, seed=0):
    def main():
        x = torch.randn(ROWS * TILES, 24).half()
        out = torch.zeros_like(x)
        specialised_copy[(1,)](descriptor(x, (ROWS, 32)), out, TILES, 24, stages, fault)
        return torch.equal(out, x * 2)

    return emulate(main, seed)


@pytest.mark.parametrize("stages, seed", [(1, 0), (2, 1), (2, 2), (3, 3)])
def test_a_producer_and_a_consumer(stages, seed):
    findings, is_right = copied("", stages, seed)
    assert not findings and is_right


@pytest.mark.parametrize("seed", range(3))
def test_a_credit_before_the_tile_is_read(seed):
    findings, _ = copied("credit before", seed=seed)
    races = [finding for finding in findings if finding.kind == "race"]
    assert {line("partitions: loads"), line("partitions: reads")} in map(sides, races)
    assert any(side.kernel == "specialised_copy, partition 0" for side in races[0].sides)


def test_no_credit_ends_in_a_deadlock_of_the_partitions():
    findings, _ = copied("no credit")
    assert {finding.kind for finding in findings} == {"deadlock"}
    waits = {finding.first.place.outermost.line for finding in findings}
    assert waits == {line("partitions: waits for room"), line("partitions: waits for tiles")}
    table = findings[0].message
    assert "specialised_copy, partition 0(0, 0, 0) waits for" in table
    assert "to end its phase 0, which is at 0 of 1 arrival" in table
    assert "to end its phase 1, which is at 0 of 1 arrival" in table


def test_a_producer_that_begins_with_the_wrong_parity():
    findings, _ = copied("first parity")
    assert {finding.kind for finding in findings} == {"deadlock"}
    assert line("partitions: waits for room") in {f.first.place.outermost.line for f in findings}


def test_a_barrier_that_expects_nobody():
    findings, _ = copied("no expect")
    assert {finding.kind for finding in findings} == {"deadlock"}
    assert "0 of 1 arrival, -1024 bytes to come" in findings[0].message


def test_more_arrivals_than_a_phase_has():
    findings, _ = copied("two credits")
    assert findings[0].kind == "doubled signal"
    assert sides(findings[0]) == {line("partitions: two credits")}
    assert "2 arrivals at" in findings[0].message and "0 of 1 arrival" in findings[0].message


def multiplied(fault, k=72, seed=0, stages=2):
    def main():
        a, b = torch.randn(64, k).half(), torch.randn(k, 24).half()
        c = torch.zeros(64, 24).half()
        blocks = descriptor(a, (64, 16)), descriptor(b, (16, 32)), descriptor(c, (64, 32))
        specialised_gemm[(1,)](*blocks, k, stages, fault)
        return torch.allclose(c.float(), a.float() @ b.float(), atol=2e-2, rtol=2e-3)

    return emulate(main, seed)


@pytest.mark.parametrize("k, stages, seed", [(8, 2, 0), (72, 2, 1), (72, 3, 2)])
def test_a_specialised_product(k, stages, seed):
    findings, is_right = multiplied("", k, seed, stages)
    assert not findings and is_right


@pytest.mark.parametrize("seed", range(3))
def test_a_credit_for_a_stage_that_a_product_still_reads(seed):
    findings, _ = multiplied("own credit", seed=seed)
    races = {frozenset(sides(finding)) for finding in findings if finding.kind == "race"}
    assert {line("mma: loads a"), line("mma: multiplies")} in races


@gluon.jit
def _doubled(x, out, layout: gl.constexpr, shared: gl.constexpr):
    own = gl.allocate_shared_memory(gl.float32, [32], shared)
    own.store(gl.load(x + gl.arange(0, 32, layout)) * 2)
    gl.store(out + gl.arange(0, 32, layout), own.load(layout))


@gluon.jit
def partitions_with_memory_of_their_own(x, out, n):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    narrow: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    gl.warp_specialize(
        [
            (_doubled, (x, out, layout, shared)),
            (_doubled, (x + 32, out + 32, narrow, shared)),
            (_doubled, (x + 64, out + 64, narrow, shared)),
        ],
        [1, 1],
        [40, 40],
    )
    at = gl.program_id(0) * 96 + gl.arange(0, 32, layout)
    gl.store(out + 96 + at, gl.load(out + 64 + at) + n)


def test_partitions_are_joined_and_have_memory_of_their_own():
    def main():
        x, out = torch.randn(96), torch.zeros(128)
        partitions_with_memory_of_their_own[(1,)](x, out, 3)
        return torch.equal(out, torch.cat([x * 2, x[64:] * 2 + 3]))

    findings, is_right = emulate(main)
    assert not findings and is_right


@gluon.jit
def _store_ones(target, tile, layout: gl.constexpr, waits: gl.constexpr):
    tile.store(gl.full(tile.shape, 1, gl.float16, layout))
    fence_async_shared()
    store_tile(target, [0, 0], tile)
    if waits:
        tma.store_wait(0)


@gluon.jit
def _nothing():
    pass


@gluon.jit
def stores_that_partitions_begin(target, waits: gl.constexpr, names: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [2, 16], [4, 1], [1, 0])
    tile = gl.allocate_shared_memory(gl.float16, target.block_type.shape, target.layout)
    gl.warp_specialize([(_store_ones, (target, tile, layout, waits)), (_nothing, ())], [1], [40])
    tma.store_wait(0)
    if names:
        tile.store(gl.full(tile.shape, 2, gl.float16, layout))


@pytest.mark.parametrize("names", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_nobody_names_behind_partitions_is_free_where_they_end(waits, names):
    """Triton puts there what it needs: a wait behind them is too late, unless it is named."""

    def main():
        out = torch.zeros(16, 32).half()
        stores_that_partitions_begin[(1,)](descriptor(out, (16, 32)), waits, names)
        return bool((out == 1).all())

    findings, is_right = emulate(main)
    assert is_right
    assert [one.kind for one in findings] == ["race"] * (not waits and not names)
    for one in findings:
        assert "partitions end before a copy by TMA" in one.message
        assert "tma.store_wait(0) for stores" in one.remedy
