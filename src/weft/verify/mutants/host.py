"""Mutants of what the host queues: launches, copies, words behind copies, waits and tokens of
streams.

A site is a kind of work and the host's lines that queue it; all that these lines queue changes.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.emulator.device import Stream, Work
from weft.emulator.works import (
    CopyWork,
    EventRecord,
    EventWait,
    KernelWork,
    TokenWork,
    WordCopyWork,
)
from weft.verify.mutants.records import HOST, LAUNCH, Mutant, Site, lines_of

NAMES = {
    CopyWork: "copy",
    WordCopyWork: "copy_word",
    TokenWork: "take_token",
    EventRecord: "record",
    EventWait: "wait",
}


def site_of(work: Work) -> Site | None:
    """Where the host queues `work`; None of work that orders nothing for others."""
    if isinstance(work, KernelWork):
        return Site(HOST, f"{LAUNCH}{work.kernel.name}", lines_of(work.place))
    name = NAMES.get(type(work))
    return None if name is None else Site(HOST, name, lines_of(work.place))


def mutations(work: Work, stream: Stream) -> Iterator[Mutant]:
    """The mutants of one piece of work that is about to be queued."""
    site = site_of(work)
    if site is None:
        return
    if not isinstance(work, EventRecord):  # a wait without its record is no program
        yield Mutant(site, "drop")
    if isinstance(work, WordCopyWork):
        yield Mutant(site, "value+1")
        yield Mutant(site, "value-1")
    if _orders_what_is_before(work, stream):
        yield Mutant(site, "swap")


def _orders_what_is_before(work: Work, stream: Stream) -> bool:
    """Does it matter to others that `work` comes behind the work before it?"""
    if not stream.queue:
        return False
    before = stream.queue[-1]
    if isinstance(work, (WordCopyWork, EventRecord)):
        return isinstance(before, (CopyWork, KernelWork, TokenWork))
    if isinstance(work, KernelWork):
        return isinstance(before, (CopyWork, TokenWork))
    return isinstance(work, CopyWork) and isinstance(before, TokenWork)


def position(work: Work, stream: Stream, mutant: Mutant) -> int | None:
    """Where a work goes in its stream under `mutant`; it may be changed."""
    last = len(stream.queue)
    if site_of(work) != mutant.site:
        return last
    if mutant.kind == "drop":
        return None
    if mutant.kind == "swap":
        return last - 1 if _orders_what_is_before(work, stream) else last
    if isinstance(work, WordCopyWork):
        work.change = int(mutant.kind.removeprefix("value"))
    return last
