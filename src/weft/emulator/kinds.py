"""Every kind of finding: what it means, how it comes about, what to do. docs/findings.md shows it.

A kind is a short stable word: programs may compare it, files may keep it.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.base.errors import (
    DeadlockError,
    DeterminismError,
    EndlessLoopError,
    FarPointerError,
    FindingError,
    NotSymmetricError,
    OutOfBoundsError,
    PeerError,
    RaceError,
    ResidencyError,
    SignalError,
    UninitializedError,
    UsageError,
)


@dataclass(frozen=True)
class Kind:
    """`error` is what a session raises for it, `example` a program of tests/verify/wrong."""

    name: str
    error: type[Exception]
    means: str
    how: str
    remedy: str
    example: str = ""


_KINDS = [
    Kind(
        "race", RaceError,
        "Two accesses to one element, at least one of them a write, that nothing orders, whatever"
        " the values were in this run. Two atomics race where a scope does not include both.",
        "A missing signal or wait, one that is too weak (relaxed, of the device's scope), one for"
        " another tile, a missing credit before a buffer is used again, a missing event between"
        " streams. Where the two are of different launches of one kernel, the report says of which:"
        " a faster rank has overwritten what a slower one still uses.",
        "Signal (release) after the access that must come first and wait for it (acquire) before"
        " the other, both with a scope that covers the two; before a buffer is used again wait for"
        " its readers. Either of the two may come first in a run: the report says which must, by"
        " what lay in memory before the write. A read that found nothing there needs the write; one"
        " of what an earlier call had left may want either, and both remedies are named.",
        "missing_wait",
    ),
    Kind(
        "deadlock", DeadlockError,
        "Nobody can go on, and those who wait, wait for each other: a party that is left could"
        " signal, but only behind its own wait.",
        "A cycle of waits, calls in different order on different ranks, a barrier that not all"
        " enter, an event that is recorded after the wait for it.",
        "Let one of them signal before it waits; make the same calls in the same order.",
        "cyclic_wait",
    ),
    Kind(
        "unsatisfiable wait", DeadlockError,
        "Nobody can go on, and no program that runs, waits or is queued can signal this word any"
        " more.",
        "A missing signal, one to another rank or word, a count that is too large, a value that a"
        " graph has frozen.",
        "See who has signalled so far, and how often; then signal once more, or wait for less.",
        "missing_notify",
    ),
    Kind(
        "residency", ResidencyError,
        "Programs that run wait for programs that cannot start: the grid would have to be on the"
        " device at once, and is larger.",
        "A barrier per tile, a full grid of consumers launched before its producer.",
        "Launch as many programs as fit, each for several tiles; launch the producer first; launch"
        " cooperatively, so that it is refused at once.",
        "barrier_per_tile",
    ),
    Kind(
        "lost signal", SignalError,
        "A signal is gone before anybody could have seen it: another party's SET took its place,"
        " or the word was reset.",
        "One word for several sources, a flag that the consumer clears before it waits.",
        "Give each source its own word, or let all of them ADD; do not reset, count on.",
        "lost_signal",
    ),
    Kind(
        "doubled signal", SignalError,
        "A signal is given twice: two parties SET one word to one value and neither knows of the"
        " other, or a program ADDs again with nothing done in between, and the word ends above all"
        " that anybody waits for.",
        "A signal in a loop and once more behind it, two owners of one flag.",
        "Signal once; give each source its own word.",
        "doubled_signal",
    ),
    Kind(
        "unused signal", SignalError,
        "An array of signals was signalled, and no word of it was ever waited for, tested or read,"
        " on any rank. Quiet where a wait stands in a kernel and was not reached.",
        "A wait that was forgotten, or a signal that is left over from an earlier design.",
        "Wait for it, or leave it out.",
        "signal_without_wait",
    ),
    Kind(
        "epoch not advanced", SignalError,
        "A later call SETs a word to a value that it holds already, or to a smaller one: whoever"
        " waits cannot tell this call from an earlier one.",
        "A constant flag, an epoch that the host counts and a graph freezes, two code paths with"
        " epochs of their own.",
        "Take the epoch from the device: wl.slot_epoch, or a word that each call advances.",
        "epoch_not_advanced",
    ),
    Kind(
        "unbounded wait", SignalError,
        "A stream takes a token that another rank has set. Nothing bounds a stream's wait: if that"
        " rank fails, this one hangs, and no report says for what.",
        "world.take_token for a peer's signal.",
        "Wait for peers in a kernel, by wl.wait; set tokens on the rank that takes them.",
        "token_of_a_peer",
    ),
    Kind(
        "stale signal", SignalError,
        "A wait is satisfied by what memory held before it was allocated: nobody has written the"
        " word since.",
        "Signals in recycled memory, with a reset that is queued behind the wait.",
        "Take signals from world.signals or a workspace: zeroed, and never recycled.",
        "recycled_signal_memory",
    ),
    Kind(
        "stale flag", SignalError,
        "A packet is put over one with the same flag: the old one passes for the new.",
        "A constant flag, or flag 0 in zeroed memory.",
        "Give every round another flag.",
        "packet_flag_repeated",
    ),
    Kind(
        "plain spin", SignalError,
        "A loop waits with plain loads: a compiler may read the word once, and nothing behind the"
        " loop is ordered.",
        "A hand-written wait without atomics.",
        "Use wl.wait, or poll with an acquiring atomic.",
        "plain_spin",
    ),
    Kind(
        "unfinished transfer", SignalError,
        "A program ends with a put_nbi or get_nbi under way, with no fence or quiet behind it.",
        "A transfer that does not block, taken for one that does.",
        "End with wl.quiet(world), or with wl.fence(world) and a signal.",
        "transfer_never_completed",
    ),
    Kind(
        "nondeterministic result", DeterminismError,
        "Results differ bitwise between schedules where they are said to be equal. Where floats"
        " were added in order of arrival, the report names the two additions.",
        "Float atomics from several parties, places given out by a ticket.",
        "Let every party write its part to a place of its own, and add up in a fixed order.",
        "sum_by_arrival",
    ),
    Kind(
        "wrong answer", FindingError,
        "All checks pass, and an operator's result is not its reference's.",
        "A wrong index, a part that is left out or taken twice.",
        "Compare with the reference, element by element.",
    ),
    Kind(
        "error", FindingError,
        "A script raised an error on a rank.",
        "What the error says: ranks that allocate or call in different order, for instance.",
        "See its message.",
    ),
    Kind(
        "uninitialised", UninitializedError,
        "An element is read that nothing has written. Fresh memory is NaN, or stands out.",
        "Rows of a rank that sent none, a read before the wait, a buffer that is larger than what"
        " is filled.",
        "Write it first, or wait for the rank that does.",
        "uninitialised_row",
    ),
    Kind(
        "out of bounds", OutOfBoundsError,
        "An access outside every tensor, or an index that wrapped in 32 bits.",
        "A missing mask at a ragged tail, wrong strides.",
        "Mask the access; check sizes and strides.",
        "ragged_tail",
    ),
    Kind(
        "misaligned", UsageError,
        "An access to an address that the element's size does not divide. GPUs fault.",
        "Pointer casts, byte offsets.",
        "Check them.",
    ),
    Kind(
        "far pointer", FarPointerError,
        "A load or store through the pointer of a rank on another node.",
        "A kernel written for one node.",
        "Use wl.put, wl.get or wl.put_signal, or ask wl.is_near first.",
        "far_pointer",
    ),
    Kind(
        "peer", PeerError,
        "A rank outside 0 .. num_ranks - 1.",
        "A neighbour that is not taken modulo the number of ranks, a mask that is missing.",
        "Compute the peer modulo wl.num_ranks(world).",
        "peer_out_of_range",
    ),
    Kind(
        "not symmetric", NotSymmetricError,
        "A pointer that is not on the symmetric heap has no address on a peer.",
        "An ordinary tensor, a pointer of another world.",
        "Allocate it with world.empty or world.signals of this world.",
    ),
    Kind(
        "endless loop", EndlessLoopError,
        "A loop that touches no memory goes round and round.",
        "A condition that never becomes false.",
        "Check what ends it; if it does end, set WEFT_ENDLESS_TURNS higher.",
    ),
    Kind(
        "assertion", AssertionError,
        "A kernel's own device_assert failed.",
        "What the assertion says.",
        "See its values.",
    ),
]  # fmt: skip

KINDS = {kind.name: kind for kind in _KINDS}


def error_of(kind: str) -> type[Exception]:
    """What a session raises for a finding of this kind; kinds of other checkers have none here."""
    return KINDS[kind].error if kind in KINDS else FindingError
