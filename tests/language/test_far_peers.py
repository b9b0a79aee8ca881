"""Kernels of worlds with far peers: linked with NVSHMEM's device code, and only these.

A stand-in for that code is linked here: each function leaves its name in the assembly.
"""

from __future__ import annotations

import re

import pytest
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

import weft
import weft.language as wl
from weft.base.records import KernelRecord
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.language.cuda import nvshmem_library
from weft.language.world_arg import far_version, is_far_version


@pytest.fixture
def nowhere(tmp_path, monkeypatch):
    """No device code of NVSHMEM to be found."""
    monkeypatch.setenv(nvshmem_library.FOLDER_VARIABLE, str(tmp_path))
    nvshmem_library.find.cache_clear()
    yield
    nvshmem_library.find.cache_clear()


TYPES = {
    "world": ("*i64", "constexpr", "constexpr"), "x": "*fp32", "bytes_": "*i8", "halves": "*bf16",
    "longs": "*i64", "flag": "*i32", "flag64": "*i64", "to": "i32", "size": "i32",
}  # fmt: skip


def compiled(kernel, version, target="cuda:90"):
    world = wl.WorldArg(None, 4, version)
    record = KernelRecord(
        name=kernel.__name__,
        signature={name: TYPES[name] for name in kernel.arg_names if name in TYPES},
        constants={"world": world},
        options={},
    )
    return triton_api.compile_kernel(kernel, record, TARGETS[target])


def calls(kernel) -> list[str]:
    """NVSHMEM's functions in the order of the assembly."""
    text = compiled(kernel, far_version(nvshmem_library.checksum())).asm["ptx"]
    return re.findall(r"// (nvshmem\w+)", text)


@triton.jit
def put_and_tell(world, x, flag, to, size):
    i = tl.arange(0, 256)
    wl.put(world, x + i, x + i, to=to, mask=i < size)
    wl.notify(world, flag, to=to)


@triton.jit
def one_element(world, x, bytes_, halves, longs, to):
    wl.put(world, x, 1.0, to=to)
    wl.put(world, bytes_, bytes_, to=to)
    wl.put(world, halves, halves, to=to)
    wl.get(world, longs, longs, source=to)


@triton.jit
def set_and_wait(world, flag64, to):
    wl.notify(world, flag64, 7, to=to, op=wl.SignalOp.SET)
    wl.wait(flag64, 7, world=world)


@triton.jit
def fetch(world, halves, to):
    i = tl.arange(0, 256)
    wl.get(world, halves + i, halves + i, source=to)
    wl.fence(world)


@triton.jit
def unordered(world, flag, to):
    wl.notify(world, flag, to=to, order=wl.Order.RELAXED)


def test_a_far_put_is_staged_and_complete_before_its_signal(nvshmem_stand_in):
    assert calls(put_and_tell) == [
        "nvshmemx_putmem_block", "nvshmem_int32_p", "nvshmem_int32_p", "nvshmem_quiet",
        "nvshmem_int32_atomic_add",
    ]  # fmt: skip


def test_each_element_goes_by_its_own_size(nvshmem_stand_in):
    names = ["nvshmem_int32_p", "nvshmem_int8_p", "nvshmem_int16_p", "nvshmem_int64_g"]
    assert calls(one_element) == names


def test_a_64_bit_signal_is_nvshmems_own_and_waits_see_what_a_card_wrote(nvshmem_stand_in):
    expected = ["nvshmem_quiet", "nvshmemx_signal_op", "nvshmem_int64_test"]
    assert calls(set_and_wait) == expected


def test_get_and_fence(nvshmem_stand_in):
    found = calls(fetch)
    assert found[0] == "nvshmemx_getmem_block" and found[-1] == "nvshmem_quiet"
    assert "nvshmem_int16_g" in found


@triton.jit
def in_every_form(world, x, flag, flag64, to):
    i = tl.arange(0, 256)
    v = tl.load(x + i)
    wl.put_signal(world, x + i, v, flag64, 1, to=to)
    wl.put(world, x + i, v, to=to)
    wl.put_signal(world, x + i, v, flag, to=to, op=wl.SignalOp.ADD)
    wl.get(world, x + i, x + i, source=to)


def test_all_forms_of_put_and_get_reach_far(nvshmem_stand_in):
    put, signals = "nvshmemx_putmem_block", ["nvshmemx_signal_op", "nvshmem_int32_atomic_add"]
    expected = {put, "nvshmemx_getmem_block", *signals}
    found = [name for name in calls(in_every_form) if name in expected]
    assert found == [put, signals[0], put, put, signals[1], "nvshmemx_getmem_block"]


def test_a_relaxed_signal_completes_nothing(nvshmem_stand_in):
    assert calls(unordered) == ["nvshmem_int32_atomic_add"]


@pytest.mark.parametrize("kernel", [put_and_tell, one_element, set_and_wait, fetch])
def test_worlds_without_far_peers_need_no_library_and_hold_none_of_it(nowhere, kernel):
    text = compiled(kernel, wl.language_version()).asm["ptx"]
    assert "nvshmem" not in text


def test_a_missing_library_says_what_to_do(nowhere):
    with pytest.raises(weft.UnsupportedError, match=r"libnvshmem_device.bc.*NVSHMEM_LIB_DIR"):
        compiled(put_and_tell, far_version(1))


def test_amd_has_no_way_to_far_peers_and_says_so():
    with pytest.raises(weft.UnsupportedError, match="reaches no far peers on hip"):
        compiled(put_and_tell, far_version(1), "hip:gfx942")
    assert compiled(put_and_tell, wl.language_version(), "hip:gfx942").asm["amdgcn"]


@gluon.jit
def in_gluon(world, x, to):
    i = gl.arange(0, 256, gl.BlockedLayout([2], [32], [4], [0]))
    wl.put(world, x + i, gl.load(x + i), to=to)


@gluon.jit
def signal_in_gluon(world, flag, to):
    wl.notify(world, flag, to=to)


@pytest.mark.slow
def test_gluon_kernels_signal_far_peers_and_put_nothing_there(nvshmem_stand_in):
    assert calls(signal_in_gluon) == ["nvshmem_quiet", "nvshmem_int32_atomic_add"]
    with pytest.raises(weft.UnsupportedError, match="plain Triton kernels only"):
        calls(in_gluon)


def test_modules_with_the_marker_are_initialised_once_loaded(tmp_path, monkeypatch):
    chain = triton.knobs.runtime.kernel_load_end_hook
    monkeypatch.setattr(chain, "calls", list(chain.calls))
    initialised = []
    triton_api.when_loaded(b"state_d", initialised.append)
    for module, code in ((7, b"..state_d.."), (8, b"....")):
        (tmp_path / "k.cubin").write_bytes(code)
        files = {"k.json": str(tmp_path / "k.json"), "k.cubin": str(tmp_path / "k.cubin")}
        chain(module, 1, "k", files, "hash")
    chain(9, 1, "k", {"k.hsaco": str(tmp_path / "k.cubin")}, "hash")
    assert initialised == [7]


def test_the_version_says_whether_there_are_far_peers_and_which_library():
    near, far, other = wl.language_version(), far_version(1), far_version(2)
    assert not is_far_version(near) and is_far_version(far) and is_far_version(other)
    assert len({near, far, other}) == 3 and max(far, other) < 2**63
