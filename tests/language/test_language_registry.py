"""Declarations and implementations: same names, same parameters; docs; the cache key."""

from __future__ import annotations

import re

import language_kernels as kernels
import pytest
import torch
import triton
import triton.language as tl

import weft.language as wl
from weft.base.errors import UnsupportedError, UsageError
from weft.language import registry, triton_api, wait_report, world_layout
from weft.language.registry import PRIMITIVES, coverage, gap, implement

HEADINGS = ("Shapes", "Dtypes", "Units", "Sync", "Raises", "Cost", "Source")


@pytest.fixture
def declared(monkeypatch):
    """A primitive that exists for this test only."""
    monkeypatch.setattr(registry, "PRIMITIVES", {})

    def shout(world, words, *, to):
        """Say words loudly."""

    return registry.declare()(shout)


@triton.jit
def shout(world, words, to):
    pass


@triton.jit
def whisper(world, words, to):
    pass


def test_an_implementation_joins(declared):
    implement(declared, "cuda")(shout)
    assert declared.primitive.implementation("cuda") is shout


def test_names_and_parameters_are_compared(declared):
    with pytest.raises(UsageError, match=r"whisper\(world, words, to\).*shout\(world, words, to\)"):
        implement(declared, "cuda")(whisper)

    other = triton.jit(_other_parameters())
    with pytest.raises(UsageError, match=r"shout\(world, to, words\) in .* does not implement"):
        implement(declared, "cuda")(other)


def _other_parameters():
    def shout(world, to, words):
        pass

    return shout


def test_one_implementation_per_target(declared):
    implement(declared, "cuda")(shout)
    with pytest.raises(UsageError, match="implemented twice for cuda"):
        implement(declared, "cuda")(shout)
    with pytest.raises(UsageError, match="no target 'vulkan'"):
        implement(declared, "vulkan")(shout)


def test_a_gap_has_a_reason(declared):
    with pytest.raises(UnsupportedError, match=r"nobody has written it in language/hip"):
        declared.primitive.implementation("hip")
    gap(declared, "hip", "AMD GPUs do not shout")
    with pytest.raises(UnsupportedError, match="AMD GPUs do not shout"):
        declared.primitive.implementation("hip")


def test_every_cell_of_the_coverage_table_is_filled_or_explained():
    table = coverage()
    assert "not written yet" not in {cell for row in table.values() for cell in row.values()}
    assert set(table) <= set(wl.__all__)


@pytest.mark.parametrize("name", coverage())
def test_docstrings_have_the_form(name):
    """A sentence; a formula; the headings that have something to say, in their order."""
    doc = PRIMITIVES[name].doc
    assert doc.splitlines()[0].endswith((".", "?", ".  "))
    found = re.findall(rf"^({'|'.join(HEADINGS)})\b", doc, re.MULTILINE)
    assert found == [heading for heading in HEADINGS if heading in found]
    assert "Cost" in found


def test_primitives_are_for_kernels():
    with pytest.raises(ValueError, match="triton.jit"):
        wl.wait(None, 1)


@triton.jit
def _helper(flags):
    wl.wait(flags, 1)


@triton.jit
def _kernel(flags):
    _helper(flags)


@triton.jit
def _without(flags):
    tl.store(flags, 1)


def test_the_languages_source_enters_the_cache_key(monkeypatch):
    """Also of a kernel that has no world argument and uses the language in a helper only."""

    def keys(version):
        monkeypatch.setattr(registry, "language_version", lambda: version)
        stamp = triton_api.tracing._SourceStamp
        monkeypatch.setattr(stamp, "cache_key", property(lambda self: version))
        for function in (_helper, _kernel, _without):
            function.hash = None
        return _kernel.cache_key, _without.cache_key

    before, plain_before = keys("one")
    after, plain_after = keys("two")
    assert before != after
    assert plain_before == plain_after
    for function in (_helper, _kernel, _without):
        function.hash = None


def test_one_binary_for_every_rank():
    """Ordinary launches: rank is in the table, so ranks share what was compiled."""
    launches = []
    undo = triton_api.take_launches(launches.append, num_sms=4)
    try:
        for rank in range(3):
            table = torch.zeros(world_layout.table_words(4), dtype=torch.int64)
            table[world_layout.RANK] = rank
            world = wl.WorldArg(table, tl.constexpr(4), tl.constexpr(wl.language_version()))
            kernels.observe[(1,)](world, *torch.zeros(2, 1024), torch.zeros(4, dtype=torch.int32))
    finally:
        undo()
    assert len(launches) == 3
    (cache,) = kernels.observe.device_caches.values()
    assert len(cache[0]) == 1  # what was compiled, by specialisation


def test_a_report_survives_its_packing():
    words = [0] * world_layout.REPORT_WORDS
    words[world_layout.REPORT_RANK] = 3
    words[world_layout.REPORT_EXPECTED], words[world_layout.REPORT_SEEN] = 5, -2
    words[world_layout.REPORT_PROGRAM : world_layout.REPORT_PROGRAM + 3] = [7, 8, 9]
    name = "consume_rows_with_a_rather_long_name"
    start = world_layout.REPORT_NAME
    words[start : start + 4] = wait_report.pack_name(name)
    words[world_layout.REPORT_LINE] = 42
    words[world_layout.REPORT_REASON] = world_layout.REASON_DEADLINE
    total = world_layout.REPORT_MAGIC + sum(words)
    words[world_layout.REPORT_CHECK] = (total + 2**63) % 2**64 - 2**63
    garbled = [*words[:4], words[4] + 1, *words[5:]]
    blank = [0] * world_layout.REPORT_WORDS
    (report,) = wait_report.read_reports([*blank, *words, *garbled])
    assert report == wait_report.WaitReport(3, name[:32], 42, (7, 8, 9), 0, 5, -2, True)
