"""The post-compile check against assembly in which one line is wrong."""

from __future__ import annotations

import re

import compiled_kernels as kernels
import pytest
from compiled_kernels import BULK, EVERY, NVIDIA, build, line_of
from effort import slow_but

from weft.language.triton_api import TRITON_VERSION
from weft.verify import compiled
from weft.verify.findings import (
    DELETED_ATOMIC,
    HOISTED_LOAD,
    LOST_WAIT,
    NO_BARRIER,
    UNFINISHED_STORE,
    WEAK_ORDER,
)

# The patterns below are those of one compiler's text.
pytestmark = pytest.mark.skipif(TRITON_VERSION >= (3, 8), reason="written for Triton 3.6 and 3.7")


def stages(target: str, **options) -> dict[str, str]:
    options = {"BULK_LOAD": True, "BULK_STORE": False, **options}
    asm = build(kernels.fused, target, **options).asm
    return {stage: text for stage, text in asm.items() if isinstance(text, str)}


def kinds(texts: dict[str, str], target: str) -> set[str]:
    return {finding.kind for finding in compiled(texts, target).findings}


def without_lines(text: str, pattern: str, *, last: bool = False) -> str:
    """`text` without the lines that match, or without the last of them."""
    lines = text.splitlines()
    found = [i for i, line in enumerate(lines) if re.search(pattern, line)]
    assert found, pattern
    drop = set(found[-1:] if last else found)
    return "\n".join(line for i, line in enumerate(lines) if i not in drop)


def before(text: str, pattern: str) -> tuple[str, str]:
    at = re.search(pattern, text).start()
    return text[:at], text[at:]


@pytest.mark.few(1)
@pytest.mark.parametrize(*EVERY)
def test_unchanged_it_is_clean(target):
    assert not kinds(stages(target), target)


@pytest.mark.parametrize(*NVIDIA)
def test_ptx_without_the_barrier_before_the_release(target):
    texts = stages(target)
    head, tail = before(texts["ptx"], r"@%p\d+ atom\.global\.sys\.release")
    texts["ptx"] = without_lines(head, r"^\s*bar\.sync", last=True) + "\n" + tail
    assert kinds(texts, target) == {NO_BARRIER}


@pytest.mark.parametrize(("target",), slow_but([("cuda:90",)], zip(BULK)))
@pytest.mark.parametrize("weaker", ["", "cp.async.bulk.wait_group.read 0", "wait_group 1"])
def test_ptx_without_the_completion_of_bulk_stores(target, weaker):
    texts = stages(target, BULK_STORE=True)
    assert not kinds(texts, target)
    replacement = weaker if "cp" in weaker else weaker and f"cp.async.bulk.{weaker}"
    texts["ptx"], count = re.subn(
        r"cp\.async\.bulk\.wait_group 0;", f"{replacement};" if weaker else "", texts["ptx"]
    )
    assert count == 1
    assert kinds(texts, target) == {UNFINISHED_STORE}


@pytest.mark.parametrize(*NVIDIA)
def test_ptx_with_less_scope_or_order(target):
    texts = stages(target)
    for pattern, weaker in (
        (r"atom\.global\.sys\.release", "atom.global.gpu.release"),
        (r"atom\.global\.sys\.release", "atom.global.sys.relaxed"),
    ):
        ptx = re.sub(pattern, weaker, texts["ptx"])
        assert ptx != texts["ptx"]
        assert WEAK_ORDER in kinds({**texts, "ptx": ptx}, target)
    ptx = re.sub(r"ld\.acquire\.sys", "ld.relaxed.sys", texts["ptx"])
    assert kinds({**texts, "ptx": ptx}, target) == {DELETED_ATOMIC}


def test_ptx_whose_spin_does_not_turn():
    texts = stages("cuda:90")
    ptx = re.sub(r"ld\.acquire\.sys\.global", "mov", texts["ptx"])
    assert LOST_WAIT in kinds({**texts, "ptx": ptx}, "cuda:90")


@pytest.mark.parametrize(*NVIDIA)
def test_ptx_with_a_load_before_the_wait(target):
    """A copy of the first asynchronous load, with its place, at the kernel's beginning."""
    texts = stages(target)
    lines = texts["ptx"].splitlines()
    load = next(i for i, line in enumerate(lines) if re.search(r"cp\.async.*shared.*global", line))
    place = next(lines[i] for i in range(load, 0, -1) if lines[i].strip().startswith(".loc"))
    start = next(i for i, line in enumerate(lines) if "%bb.0" in line)
    texts["ptx"] = "\n".join([*lines[: start + 1], place, lines[load], *lines[start + 1 :]])
    report = compiled(texts, target)
    (finding,) = report.findings
    assert finding.kind == HOISTED_LOAD and finding.stage == "ptx"


def test_ttgir_without_the_wait():
    texts = stages("hip:gfx942")
    ttgir = re.sub(r"tt\.atomic_rmw add, acquire, sys", "some.thing", texts["ttgir"])
    report = compiled({**texts, "ttgir": ttgir}, "hip:gfx942")
    assert report.of(LOST_WAIT)[0].stage == "ttgir"


def test_ttgir_with_a_load_before_the_wait():
    """The first load of the pipeline, moved up in front of the persistent loop."""
    texts = stages("cuda:90")
    lines = texts["ttgir"].splitlines()
    load = next(line for line in lines if "async_tma_copy_global_to_local" in line)
    # What the loop defines is not there yet; the descriptor is.
    descriptor, *_ = re.findall(r"%\w+", load)
    load = re.sub(r"%\w+", lambda one: descriptor if one[0] == descriptor else "%c0_i32", load)
    loop = next(i for i, line in enumerate(lines) if line.strip().startswith("scf.for"))
    texts["ttgir"] = "\n".join([*lines[:loop], load, *lines[loop:]])
    report = compiled(texts, "cuda:90")
    (finding,) = report.findings
    assert finding.kind == HOISTED_LOAD and finding.stage == "ttgir"


def test_the_line_of_a_finding_is_the_users():
    texts = stages("cuda:90")
    head, tail = before(texts["ptx"], r"@%p\d+ atom\.global\.sys\.release")
    texts["ptx"] = without_lines(head, r"^\s*bar\.sync", last=True) + "\n" + tail
    (finding,) = compiled(texts, "cuda:90").findings
    assert finding.second.line == line_of("fused store")
    assert finding.first.file.endswith("compiled_kernels.py")
