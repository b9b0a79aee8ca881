"""What to do about a race: which of two accesses must come first, and how it is made to.

Nothing orders the two, so that either may come first in a run; the remedy is not that the other one
waits, but that the right one does. What lay in memory before the write decides it. A read that
found nothing, or what an earlier call had left, needs the write; a write over what the same call
had written came before that was read.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

from weft.emulator.clocks import Identity

GIVE_CREDIT = "before a buffer is used again, wait for a credit of each of its readers"
RESET_IT = (
    "world.signals are zero from the start: leave the reset out, or put world.barrier() behind it,"
    " before anybody signals"
)
START_FIRST = (
    "let the stream that waits wait for the one on which the word gets its start: an event, or"
    " wait_stream, behind that"
)
# What to do about a signal that does not order what it seems to.
STRENGTHEN_IT = (
    'there, order RELEASE for a signal, ACQUIRE for a wait, and scope SYSTEM ("sys" in'
    " tl.atomic_*): the defaults of wl.notify and wl.wait"
)
COMPLETE_IT = "complete it before that signal, by wl.complete_stores() or wl.notify"


class Age(enum.Enum):
    """How old a value is that a write comes over."""

    UNKNOWN = enum.auto()
    NOTHING = enum.auto()  # no read can want it
    OLD = enum.auto()  # the script's
    SOME_CALL = enum.auto()  # earlier than the writer's; a copy does not say of which call it is
    EARLIER_CALL = enum.auto()
    SAME_CALL = enum.auto()


class Before(NamedTuple):
    """What lay in memory before a write, in words, and how old that was."""

    text: str = ""
    age: Age = Age.UNKNOWN


def in_block(what: str, kind: str) -> str:
    """The remedy for an access of shared memory that must come after another one, `kind`."""
    return (
        f"let the earlier {kind} end before this {what}: wait for it where it is asynchronous"
        " (mbarrier.wait on its parity, warpgroup_mma_wait, store_wait, wait_group), and between"
        " partitions arrive at an mbarrier behind it"
    )


def put_in_order(what: str, kind: str, now: Identity, then: Identity) -> str:
    """The remedy for an access, `what`, that must come after another one, `kind`."""
    first, second = (f"the {kind}", f"the {what}") if what != kind else (f"one {kind}", "the other")
    remedy = f"signal (release) after {first} and wait for it (acquire) before {second}"
    if any(one.kernel.startswith("torch (") for one in (now, then)):
        if now.rank == then.rank:
            return f"{remedy}, or let one stream wait for the other"
        return f"{remedy}, or put world.barrier() between the two"
    return remedy


def write_behind_read(
    name: str, what: str, writer: Identity, reader: Identity, before: Before
) -> tuple[str, str]:
    """(message, remedy) for a write, or an atomic access, of `name` that nothing orders after a
    read; `before` is what the read found."""
    needed = put_in_order("read", what, reader, writer)
    credit = put_in_order(what, "read", writer, reader)
    message = f"nothing orders this {what} of {name} after the read"
    found = f"{message}, which found {before.text}"
    if before.age is Age.NOTHING:
        needs = f"nothing makes the read of {name} wait for this {what}"
        return f"{needs}: it found {before.text}", needed
    if before.age is Age.SOME_CALL:
        return found, f"{credit}; if the read wants this {what}, the other way round"
    if before.age in (Age.UNKNOWN, Age.SAME_CALL):
        return message, credit
    if before.age is Age.EARLIER_CALL:
        needed += "; if it waits already, let every call signal a value of its own: an epoch"
    other = ": a credit of the reader" if reader.rank != writer.rank else ""
    return found, f"{needed}; if the read wants what was there, the other way round{other}"


def read_behind_write(
    name: str, reader: Identity, writer: Identity, before: Before
) -> tuple[str, str]:
    """(message, remedy) for a read of `name` that nothing orders after a write; `before` is what
    the write came over."""
    message = f"nothing orders this read of {name} after the write"
    remedy = put_in_order("read", "write", reader, writer)
    if before.age is Age.NOTHING or reader.rank == writer.rank:
        return message, remedy
    if before.age is Age.SAME_CALL:
        message = f"{message}, which came over {before.text}"
        return message, f"{GIVE_CREDIT}; if the read wants this write, wait for a signal behind it"
    if "torch (" in reader.kernel + writer.kernel:
        return message, remedy
    return (
        message,
        f"{remedy}; if the write came too early, the other way round: a credit of the reader",
    )
