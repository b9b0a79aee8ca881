"""What the primitives become on each target: they compile, and order is kept in the output."""

from __future__ import annotations

import itertools
import re

import language_kernels as kernels
import pytest
from language_kernels import BULK, CUDA, GPUS, HIP, machine_text, text

from weft.base.target import TARGETS
from weft.language.triton_api import HAS_ORDERED_STORES

GAPS = {(kernels.compare_and_swap, target) for target in HIP}  # see test_tracing_errors
EVERYTHING = [
    pytest.param(kernel, target, id=f"{kernel.__name__}-{target}")
    for kernel, target in itertools.product(kernels.ALL, TARGETS)
    if (kernel, target) not in GAPS
]


@pytest.mark.few(3)
@pytest.mark.parametrize("kernel, target", EVERYTHING)
def test_every_primitive_compiles(kernel, target):
    assert kernels.compiled(kernel, target).asm


BARRIER = r"gpu\.barrier|ttg\.barrier"  # in Triton's IR, by version


def positions(pattern: str, code: str) -> list[int]:
    return [match.start() for match in re.finditer(pattern, code)]


@pytest.mark.parametrize("target", CUDA)
def test_notify_is_barrier_then_release(target):
    code = machine_text(kernels.publish, target)
    (release,) = positions(r"(atom|red)\.global\.sys\.release", code)
    stores = positions(r"st\.global", code)
    barrier = max(at for at in positions(r"bar\.sync|barrier\.sync", code) if at < release)
    assert max(stores) < barrier < release


@pytest.mark.parametrize("target", CUDA)
def test_a_signal_that_is_set_is_a_store_where_triton_has_one(target):
    """From 3.9 on; before, an exchange: see docs/decisions/007."""
    code = machine_text(kernels.announce, target)
    data = max(positions(r"st\.global", code))
    if HAS_ORDERED_STORES:
        (fence,) = positions(r"fence\.(release|acq_rel)\.sys", code)
        (signal,) = positions(r"st\.relaxed\.sys\.global\.b64", code)
        assert not positions(r"\b(atom|red)\.", code)
    else:
        (signal,) = positions(r"(atom|red)\.global\.sys\.release\.exch\.b64", code)
        fence = signal
    barrier = max(at for at in positions(r"bar\.sync|barrier\.sync", code) if at < fence)
    assert data < barrier < fence <= signal


@pytest.mark.parametrize("target", CUDA)
def test_notify_all_is_barrier_then_fence_then_atomics(target):
    code = machine_text(kernels.publish_to_all, target)
    (fence,) = positions(r"fence\.acq_rel\.sys", code)
    atomics = positions(r"(atom|red)\.global\.sys\.relaxed\.add", code)
    barrier = max(at for at in positions(r"bar\.sync|barrier\.sync", code) if at < fence)
    assert max(positions(r"st\.global", code)) < barrier < fence < min(atomics)


@pytest.mark.parametrize("target", CUDA)
def test_notify_completes_asynchronous_stores_where_there_are_any(target):
    code = machine_text(kernels.publish, target)
    if target in BULK:
        (complete,) = positions(r"cp\.async\.bulk\.wait_group 0", code)
        assert "fence.proxy.async.global" in code[complete:]
        assert complete < max(positions(r"bar\.sync|barrier\.sync", code))
    else:
        assert "cp.async.bulk" not in code
        assert "fence.proxy" not in code


@pytest.mark.parametrize("target", HIP)
def test_notify_waits_for_every_wave_on_amd(target):
    code = machine_text(kernels.publish, target)
    (complete,) = positions(r"ASMSTART\s+s_waitcnt vmcnt\(0\)", code)
    assert max(positions("global_store_dwordx4|buffer_store_dwordx4", code)) < complete
    barrier = next(at for at in positions("s_barrier", code) if at > complete)
    atomic = next(at for at in positions(r"global_atomic_add|flat_atomic_add", code))
    assert barrier < atomic
    assert "buffer_wbl2 sc0 sc1" in code[barrier:atomic]  # a release to the system


@pytest.mark.few(3)
@pytest.mark.parametrize("kernel", [kernels.observe, kernels.observe_unbounded])
@pytest.mark.parametrize("target", CUDA)
def test_wait_polls_with_acquire_then_barrier_then_loads(kernel, target):
    code = machine_text(kernel, target)
    polls = positions(r"ld\.acquire\.sys\.global\.b32", code)
    assert len(polls) >= 2  # the first look, and the loop
    barrier = max(positions(r"bar\.sync|barrier\.sync", code))
    loads = positions(r"ld\.global\.v4", code)
    assert loads
    assert max(polls[0], barrier) < min(loads) or _jumps_back(code, barrier, loads)
    assert ("fence.proxy.async.global" in code) == (target in BULK)


def _jumps_back(code: str, barrier: int, loads: list[int]) -> bool:
    """LLVM may lay the polling loop out after the code behind it: same block as the barrier."""
    block = code[barrier : min(loads)] if barrier < min(loads) else ""
    return bool(block) and "bra" not in block


@pytest.mark.parametrize("target", GPUS)
def test_nothing_is_loaded_before_the_wait(target):
    """In Triton's own IR, where its pipeliner has already moved what it moves."""
    code = text(kernels.observe, target, "ttgir")
    poll = "ld.acquire.sys" if target in CUDA else "atomic_rmw add, acquire, sys"
    barrier = max(positions(BARRIER, code))
    guarded = positions(r"tt\.load .*tensor<|amdgpu\.buffer_load|amdg\.buffer_load", code)
    assert code.find(poll) < barrier < min(guarded)


@pytest.mark.few(1)
@pytest.mark.parametrize("target", GPUS)
def test_a_wait_in_the_outer_loop_keeps_the_inner_loop_pipelined(target):
    """Where Triton pipelines the kernel without a wait, it does so with one."""
    copy = r"async_copy_global_to_local|tt\.load [^\n]*tensor<64x64|buffer_load[^\n]*tensor<64x64"
    code = text(kernels.gemm, target, "ttgir")
    poll = code.index("ld.acquire.sys" if target in CUDA else "atomic_rmw add, acquire, sys")
    copies = positions(copy, code)
    assert poll < min(copies)
    plain = text(kernels.gemm_without_wait, target, "ttgir")
    assert len(copies) == len(positions(copy, plain))
    if target in CUDA:
        assert len(copies) >= 3  # two ahead of the loop, one in it


@pytest.mark.parametrize("target", BULK)
def test_tma_loads_and_stores_stay_on_their_side(target):
    code = text(kernels.gemm_tma, target, "ttgir")
    poll = code.index("ld.acquire.sys")
    loads = positions("async_tma_copy_global_to_local", code)
    assert loads and poll < min(loads)
    (store,) = positions("async_tma_copy_local_to_global", code)
    complete = code.index("cp.async.bulk.wait_group 0", store)
    barrier = next(at for at in positions(BARRIER, code) if at > complete)
    assert barrier < code.index("tt.atomic_rmw", complete)


@pytest.mark.parametrize("target", CUDA)
def test_stores_through_at_are_128_bits_wide(target):
    code = machine_text(kernels.publish, target)
    tile_stores = re.findall(r"\n\s*(?:@%p\d+ )?st\.global\S*", code)
    assert tile_stores and all(".v4.b32" in store for store in tile_stores)


@pytest.mark.parametrize("target", HIP)
def test_stores_through_at_are_128_bits_wide_on_amd(target):
    code = machine_text(kernels.publish, target)
    tile_stores = re.findall(r"(?:global|buffer|flat)_store_\w+", code)
    assert tile_stores and all(store.endswith("dwordx4") for store in tile_stores)


@pytest.mark.parametrize("target", CUDA)
def test_giving_up_contains_no_barrier(target):
    """Threads of a block may differ there: between clock and abort no barrier may be met."""
    code = machine_text(kernels.observe, target)
    start = code.index("%globaltimer")
    end = code.index("relaxed.exch", start) if "relaxed.exch" in code else code.index("atom", start)
    assert not positions(r"bar\.sync|barrier\.sync", code[start:end])


def test_a_wait_without_a_world_has_no_clock():
    assert "%globaltimer" not in machine_text(kernels.observe_unbounded, "cuda:90")


def test_the_emulator_sees_symbols():
    code = text(kernels.world_and_signals, "emu", "ttir")
    symbols = re.findall(r'symbol = "(weft\.[^"]+)"', code)
    assert "weft.notify:set.release.sys" in symbols  # from a nested helper, in a loop
    assert "weft.notify:add.release.gpu" in symbols
    assert "weft.notify:add.relaxed.sys" in symbols
    assert "weft.wait_bounded:acquire.sys" in symbols
    assert "weft.wait_bounded:relaxed.sys" in symbols
    assert {"weft.at", "weft.translate", "weft.test:acquire.sys"} <= set(symbols)
    assert "weft.wait:acquire.sys" in text(kernels.observe_unbounded, "emu", "ttir")
