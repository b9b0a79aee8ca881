"""The post-compile check of lines (wl.put_lines): is each moved whole?

A line of 128 bytes arrives at once when eight neighbouring threads of one warp store it by one
instruction, 16 bytes each, and is seen whole when it is loaded so. Which thread holds what is
Triton's choice; here it is read, in TTGIR the layout, in PTX the width and the way past caches.
"""

from __future__ import annotations

import re

from weft.verify import events, ptx, ttgir
from weft.verify.findings import TORN_LINE, CompiledReport
from weft.verify.places import Key, Loc
from weft.verify.stages import Stages

# Every tile load and store of this file of the language is one of lines.
FILE = "language/cuda/lines.py"
THREAD_BYTES = 16

_LAYOUT = re.compile(r"^(#\w+) = #ttg\.(blocked|linear)<\{(.*)\}>", re.MULTILINE)
_REMEDY = (
    "give the tile a power of two of lines, at least 4 for each warp of the launch, or use "
    "wl.put_packets, which needs no layout"
)


def is_line(loc: Loc) -> bool:
    return bool(loc) and loc[0][0].endswith(FILE)


def check(stages: Stages, report: CompiledReport) -> None:
    """Layouts of line accesses, then their instructions."""
    if "ttgir" not in stages.texts:
        return
    layouts = {name: (kind, text) for name, kind, text in _LAYOUT.findall(stages.texts["ttgir"])}
    places: dict[Key, Loc] = {}
    for operation in stages.latest.kernel.walk():
        if not is_line(operation.loc) or not _is_tile_access(operation):
            continue
        places[stages.key(operation.loc)] = operation.loc
        names = re.findall(r"#\w+", operation.text.split(" loc(")[0])
        kind, text = layouts.get(names[-1] if names else "", ("another", ""))
        if not _keeps_lines(kind, text):
            _torn(report, "ttgir", operation.loc, f"Triton gave its tile the layout {kind} {text}")
    if isinstance(stages.program, ptx.Program):
        _check_instructions(stages.program, places, report)


def _is_tile_access(operation: ttgir.Operation) -> bool:
    name = events.base_name(operation)
    return "tensor<" in operation.text and (name in events.LOADS or name in events.STORES)


def _keeps_lines(kind: str, text: str) -> bool:
    """Two neighbouring words to a thread, eight neighbouring threads to a line of 16 words?"""
    if kind == "blocked":
        extents = {
            name: [int(extent) for extent in re.findall(r"\d+", values)]
            for name, values in re.findall(r"(\w+) = \[([\d, ]*)\]", text)
        }
        return (
            extents.get("sizePerThread", [])[1:] == [2]
            and extents.get("threadsPerWarp", [])[1:] == [8]
            and extents.get("order") == [1, 0]
        )
    register = re.search(r"register = \[\[0, 1\]", text)
    lanes = re.search(r"lane = \[\[0, 2\], \[0, 4\], \[0, 8\]", text)
    return kind == "linear" and bool(register and lanes)


def _check_instructions(
    program: ptx.Program, places: dict[Key, Loc], report: CompiledReport
) -> None:
    found: set[Key] = set()
    for one in program.instructions:
        keys = one.keys & places.keys()
        if not keys or not one.is_global or one.base not in ("ld", "st"):
            continue
        found |= keys
        loc = places[min(keys)]
        if one.bytes != THREAD_BYTES:
            _torn(report, "ptx", loc, f"{one.opcode} moves {one.bytes} bytes for each thread")
        elif not {"volatile", "relaxed", "wt"} & set(one.parts):
            _torn(report, "ptx", loc, f"{one.opcode} may stay in a cache")
    for key in places.keys() - found:
        _torn(report, "ptx", places[key], "no instruction of the PTX has its place")


def _torn(report: CompiledReport, stage: str, loc: Loc, how: str) -> None:
    report.add(
        TORN_LINE,
        stage,
        f"a line of 128 bytes is not moved by one instruction of a warp: {how}",
        (loc, "moves lines"),
        remedy=_REMEDY,
    )
