"""The post-compile check: it finds every trap that compilers set, and nothing in sound kernels."""

from __future__ import annotations

import re

import compiled_kernels as kernels
import pytest
from compiled_kernels import BULK, CUDA, EVERY, NVIDIA, SAFE, build, check, line_of

from weft.base.errors import UsageError
from weft.base.records import KernelRecord
from weft.language.triton_api import TRITON_VERSION
from weft.verify import compiled
from weft.verify.findings import (
    DELETED_ATOMIC,
    EARLY_WAIT,
    HOISTED_LOAD,
    LOST_WAIT,
    NO_BARRIER,
    PURE_WAIT,
    UNFINISHED_STORE,
    UNORDERED_WAIT,
)

mended = pytest.mark.skipif(
    TRITON_VERSION >= (3, 8),
    reason="newer Tritons put barriers before releases and keep what these lose",
)


def kinds(report) -> set[str]:
    return {finding.kind for finding in report.findings}


def only(report, kind: str):
    assert kinds(report) == {kind}, str(report)
    return report.findings[0]


# ---------------------------------------------------------------------------------------------
# Sound kernels


@pytest.mark.few(1)
@pytest.mark.parametrize(*EVERY)
@pytest.mark.parametrize("bulk_store", [False, True])
def test_a_sound_persistent_kernel_is_clean(target, bulk_store):
    notify = "" if bulk_store else "barrier"
    report = check(
        kernels.persistent, target, **{**SAFE, "BULK_STORE": bulk_store, "NOTIFY": notify}
    )
    assert report.ok, str(report)
    assert (
        set(report.waits.values()) == {1}
        and list(report.waits) == ["ttir", "ttgir", "ptx"][: 3 if target in CUDA else 2]
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(*EVERY)
def test_a_wait_before_a_pipelined_loop_is_clean(target):
    report = check(kernels.pointers, target, HOW="atomic, barrier", IN_LOOP=False)
    assert report.ok, str(report)
    assert "async_copy" in build(
        kernels.pointers, "cuda:80", HOW="atomic, barrier", IN_LOOP=False
    ).asm["ttgir"]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize(*NVIDIA)
def test_an_asm_wait_before_the_loop_is_fine_on_nvidia(target):
    assert check(kernels.pointers, target, HOW="asm", IN_LOOP=False).ok


@pytest.mark.parametrize("how", ["atomic, barrier", "asm, barrier"])
def test_a_wait_with_a_barrier_in_the_loop_is_ordered(how):
    assert check(kernels.pointers, "cuda:90", HOW=how, IN_LOOP=True).ok


def test_a_flattened_loop_that_is_not_pipelined_is_ordered():
    """With a barrier the wait stops the pipeliner: flattened, slow and right."""
    report = check(kernels.persistent, "cuda:90", **{**SAFE, "FLATTEN": True})
    assert report.ok, str(report)


@pytest.mark.few(6)
@pytest.mark.parametrize("target", ["cuda:90", "hip:gfx942"])
@pytest.mark.parametrize(
    "kernel",
    [
        kernels.unrolled_waits,
        kernels.waits_in_branches,
        kernels.early_return,
        kernels.lock,
        kernels.many_words_in_one_loop,
        kernels.last_one_reduces,
        kernels.work_counter,
        kernels.split_k,
    ],
)
def test_sound_odd_shapes_are_clean(kernel, target):
    report = check(kernel, target)
    assert report.ok, str(report)
    expected = {"unrolled_waits": 4, "waits_in_branches": 2, "work_counter": 0, "split_k": 0,
                "last_one_reduces": 0}  # fmt: skip
    assert report.waits["ttir"] == expected.get(kernel.__name__, 1)


@pytest.mark.few(1)
@pytest.mark.parametrize(*EVERY)
@pytest.mark.parametrize("bulk", [(False, False), (True, True)], ids=["pointers", "bulk"])
def test_wefts_primitives_around_a_gemm_are_clean(target, bulk):
    report = check(kernels.fused, target, BULK_LOAD=bulk[0], BULK_STORE=bulk[1])
    assert report.ok, str(report)
    assert set(report.waits.values()) == {1}
    assert not report.notes


@pytest.mark.few(1)
@pytest.mark.parametrize(*EVERY)
def test_every_other_primitive_is_clean(target):
    report = check(kernels.primitives, target)
    assert report.ok, str(report)
    assert report.waits["ttir"] == 4 and len(set(report.waits.values())) == 1
    assert not report.notes


# ---------------------------------------------------------------------------------------------
# Traps: waits and loads


@pytest.mark.slow
def test_warp_specialize_on_hopper_drops_the_wait():
    report = check(
        kernels.persistent,
        "cuda:90",
        num_warps=4,
        **{**SAFE, "HOW": "asm", "SPECIALIZE": True, "NOTIFY": ""},
    )
    finding = only(report, LOST_WAIT)
    assert finding.stage == "ttgir" and finding.first.line == line_of("persistent wait")
    assert report.waits == {"ttir": 1, "ttgir": 0, "ptx": 0}


@pytest.mark.few(1)
@pytest.mark.parametrize(*NVIDIA)
def test_a_pure_asm_wait_is_dropped(target):
    finding = only(check(kernels.pointers, target, HOW="pure asm", IN_LOOP=False), PURE_WAIT)
    assert finding.first.line == line_of("wait before the loop")
    assert "was dropped" in finding.message and "is_pure=False" in finding.remedy


@pytest.mark.few(1)
@mended
@pytest.mark.parametrize(*NVIDIA)
def test_an_atomic_look_whose_result_is_unused_is_deleted(target):
    finding = only(check(kernels.pointers, target, HOW="one look", IN_LOOP=False), DELETED_ATOMIC)
    assert finding.stage == "ptx" and finding.first.line == line_of("wait before the loop")


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90"])
def test_an_asm_wait_in_a_pipelined_loop_comes_after_its_loads(target):
    report = check(kernels.pointers, target, HOW="asm", IN_LOOP=True)
    finding = only(report, HOISTED_LOAD)
    assert finding.stage == "ttgir"
    assert finding.first.line == line_of("load of a") and finding.first.tensor == "a"
    assert finding.second.line == line_of("wait in the loop")
    assert len(report.findings) == 2  # a and b


@pytest.mark.parametrize("how", ["atomic", "asm"])
def test_a_flattened_loop_waits_a_round_ahead(how):
    report = check(
        kernels.persistent, "cuda:90", **{**SAFE, "HOW": how, "FLATTEN": True, "NOTIFY": ""}
    )
    (finding,) = report.of(EARLY_WAIT)
    assert finding.first.line == line_of("persistent wait")
    assert finding.second.line == line_of("tile store")
    assert "flatten=False" in finding.remedy


@pytest.mark.few(1)
@pytest.mark.parametrize(*EVERY)
def test_a_volatile_spin_orders_nothing(target):
    finding = only(check(kernels.pointers, target, HOW="volatile", IN_LOOP=False), UNORDERED_WAIT)
    assert finding.first.line == line_of("wait before the loop")


def test_a_load_before_a_wait_is_not_one_behind_it():
    """The same address is read on both sides of the wait: only the second is guarded."""
    assert check(kernels.reused_signal, "cuda:90", HOW="atomic, barrier").ok


# ---------------------------------------------------------------------------------------------
# Traps: releases


@pytest.mark.few(1)
@mended
@pytest.mark.parametrize(*NVIDIA)
def test_a_release_without_a_block_barrier(target):
    finding = only(check(kernels.persistent, target, **{**SAFE, "NOTIFY": "bare"}), NO_BARRIER)
    assert finding.first.line == line_of("bare")
    assert finding.second.line == line_of("tile store")
    assert "tl.debug_barrier()" in finding.remedy


@mended
@pytest.mark.parametrize(*NVIDIA)
def test_a_release_whose_address_is_an_argument(target):
    finding = only(check(kernels.shared_word, target), NO_BARRIER)
    assert finding.first.line == line_of("bare release")
    assert finding.second.line == line_of("unseen store")


@pytest.mark.skipif(TRITON_VERSION >= (3, 7), reason="Gluon's barrier has another name")
def test_a_gluon_kernel():
    report = check(kernels.gluon_copy, "cuda:90", num_warps=4, HOW="barrier")
    assert report.ok and report.waits == {"ttgir": 1, "ptx": 1}, str(report)
    report = check(kernels.gluon_copy, "cuda:90", num_warps=4, HOW="bare")
    finding = only(report, NO_BARRIER)
    assert finding.first.line == line_of("gluon release")
    assert finding.second.line == line_of("gluon store")


@pytest.mark.parametrize(
    "text",
    [
        "red.release.sys.global.add.s32 [$1], 1; mov.u32 $0, 0;",
        "fence.acq_rel.sys; st.relaxed.sys.global.s32 [$1], 1; mov.u32 $0, 0;",
        "membar.sys; st.volatile.global.s32 [$1], 1; mov.u32 $0, 0;",
    ],
)
def test_a_release_in_assembly_needs_the_barrier_too(text):
    finding = only(check(kernels.asm_release, "cuda:90", HOW="bare", TEXT=text), NO_BARRIER)
    assert finding.first.line == line_of("asm release")
    assert check(kernels.asm_release, "cuda:90", HOW="barrier", TEXT=text).ok
    inside = "bar.sync 0; " + text
    assert check(kernels.asm_release, "cuda:90", HOW="bare", TEXT=inside).ok


@pytest.mark.few(1)
@mended
@pytest.mark.parametrize("target", BULK)
@pytest.mark.parametrize("notify, mark", [("bare", "bare"), ("barrier", "behind barrier")])
def test_a_release_before_a_bulk_store_is_written(target, notify, mark):
    report = check(kernels.persistent, target, **{**SAFE, "BULK_STORE": True, "NOTIFY": notify})
    (finding,) = report.of(UNFINISHED_STORE)
    assert finding.first.line == line_of(mark) and finding.second.line == line_of("bulk")
    assert "cp.async.bulk.wait_group 0" in finding.remedy


# ---------------------------------------------------------------------------------------------
# Orders


@pytest.mark.few(1)
@pytest.mark.parametrize(*NVIDIA)
def test_cas_is_as_written_on_nvidia(target):
    assert check(kernels.pointers, target, HOW="cas", IN_LOOP=False).ok


def test_the_gemms_store_through_at_is_wide():
    """Triton does not know what divides the distance of two heaps; wl.at says so by a hint."""
    assembly = build(kernels.fused, "cuda:90", BULK_LOAD=True, BULK_STORE=False).asm["ptx"]
    stores = re.findall(r"\bst\.global\.(\S+)", assembly)
    assert "v4.b32" in stores and "b16" not in stores


# ---------------------------------------------------------------------------------------------
# The front door


@mended
def test_kernel_and_record_are_compiled_on_the_way():
    record = KernelRecord("shared_word", {"a": "*bf16", "c": "*bf16", "signal": "*i32"})
    reports = [
        compiled(kernels.shared_word, "cuda:90", record),
        compiled((kernels.shared_word, record), "cuda:90"),
        compiled(build(kernels.shared_word, "cuda:90")),
        compiled(dict(build(kernels.shared_word, "cuda:90").asm), "cuda:90"),
    ]
    for report in reports:
        assert kinds(report) == {NO_BARRIER} and report.target == "cuda:90"


def test_bad_input_says_what_is_needed():
    with pytest.raises(UsageError, match="KernelRecord"):
        compiled(kernels.shared_word, "cuda:90")
    with pytest.raises(UsageError, match="TTIR"):
        compiled({"ptx": "..."}, "cuda:90")
    with pytest.raises(UsageError, match="cuda:75"):
        compiled({"ttir": "module {}"}, "cuda:75")


@mended
def test_the_report_in_words_and_json():
    report = check(kernels.shared_word, "cuda:90")
    text = str(report)
    assert "shared_word for cuda:90" in text and "[ptx] release without barrier" in text
    assert f"compiled_kernels.py:{line_of('bare release')}" in text and "remedy:" in text
    values = report.to_json()
    assert values["ok"] is False and values["waits"] == {"ttir": 1, "ttgir": 1, "ptx": 1}
    (finding,) = values["findings"]
    assert finding["first"]["line"] == line_of("bare release") and finding["stage"] == "ptx"


def test_without_line_information_the_check_says_what_it_left_out():
    asm = dict(build(kernels.shared_word, "cuda:90").asm)
    asm["ptx"] = "\n".join(line for line in asm["ptx"].splitlines() if ".loc" not in line)
    report = compiled(asm, "cuda:90")
    assert report.ok and "no line information" in report.notes[0]
