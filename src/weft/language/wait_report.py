"""What a wait that gave up leaves behind: packing of names, and decoding of whole records."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from weft.language import world_layout as layout

NAME_WORDS = 4
_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class WaitReport:
    """One program's wait that ended without its signal.

    `function` is the device function that waited, `line` its line in the source file;
    `expired` tells a wait whose own time was up from one that followed another's abort.
    """

    rank: int
    function: str
    line: int
    program: tuple[int, int, int]
    signal_address: int
    expected: int
    seen: int
    expired: bool


def pack_name(name: str) -> tuple[int, ...]:
    """The first 32 bytes of `name` as four signed 64-bit words."""
    raw = name.encode()[: 8 * NAME_WORDS].ljust(8 * NAME_WORDS, b"\0")
    return tuple(
        int.from_bytes(raw[start : start + 8], "little", signed=True)
        for start in range(0, len(raw), 8)
    )


def unpack_name(words: Sequence[int]) -> str:
    raw = b"".join((word & _MASK).to_bytes(8, "little") for word in words)
    return raw.rstrip(b"\0").decode(errors="replace")


def read_reports(words: Sequence[int]) -> list[WaitReport]:
    """The whole records among `words`, a snapshot of a report buffer; others are skipped."""
    reports = []
    for start in range(0, len(words), layout.REPORT_WORDS):
        record = [int(word) for word in words[start : start + layout.REPORT_WORDS]]
        if _is_whole(record):
            reports.append(_decode(record))
    return reports


def _is_whole(record: Sequence[int]) -> bool:
    check, *rest = record
    return (layout.REPORT_MAGIC + sum(rest)) & _MASK == check & _MASK


def _decode(record: Sequence[int]) -> WaitReport:
    name = record[layout.REPORT_NAME : layout.REPORT_NAME + NAME_WORDS]
    x, y, z = record[layout.REPORT_PROGRAM : layout.REPORT_PROGRAM + 3]
    return WaitReport(
        rank=record[layout.REPORT_RANK],
        function=unpack_name(name),
        line=record[layout.REPORT_LINE],
        program=(x, y, z),
        signal_address=record[layout.REPORT_SIGNAL] & _MASK,
        expected=record[layout.REPORT_EXPECTED],
        seen=record[layout.REPORT_SEEN],
        expired=record[layout.REPORT_REASON] == layout.REASON_DEADLINE,
    )
