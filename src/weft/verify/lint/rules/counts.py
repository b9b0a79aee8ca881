"""Signals that come less often than somebody waits for."""

from __future__ import annotations

from collections.abc import Iterator

from weft.verify.lint.order import exclusive
from weft.verify.lint.problem import ERROR, WARNING
from weft.verify.lint.registry import Hit, Kernel, at, pointer_text, rule
from weft.verify.lint.values import (
    DATA,
    NUM_PROGRAMS,
    NUM_RANKS,
    OFFSET_RANK,
    PROGRAM,
    RANK,
    TICKET,
    TILE_DATA,
    Frame,
    Op,
)


def by_signal(kernel: Kernel, *kinds: str) -> dict[str, list[Op]]:
    """Operations by the parameter that they touch."""
    found: dict[str, list[Op]] = {}
    for op in kernel.ops:
        if op.kind in kinds or (op.waits and "wait" in kinds):
            for root in op.pointer.roots:
                found.setdefault(root, []).append(op)
    return found


@rule(
    "notify-on-data",
    WARNING,
    "A notify that depends on the values of a tile, for a wait that does not.",
    remedy="notify in every case, and send what was found as data",
)
def notify_on_data(kernel: Kernel) -> Iterator[Hit]:
    waits = by_signal(kernel, "wait")
    for key, notifies in by_signal(kernel, "notify").items():
        firm = [op for op in waits.get(key, ()) if not _on_data(op) and not op.expected.has(DATA)]
        if not firm or any(not _on_data(op) for op in notifies):
            continue
        for op in notifies:
            line = firm[0].node.lineno  # type: ignore[attr-defined]
            yield at(op, f"{pointer_text(op)} is raised only where the data says so, and the wait "
                         f"in line {line} counts on it always")  # fmt: skip


def sets(op: Op) -> bool:
    """SET by name, or where put_signal is left to its default."""
    words = getattr(op.node, "keywords", ())
    said = [getattr(word.value, "attr", "") for word in words if word.arg == "op"]
    return said == ["SET"] or (not said and op.name.startswith("wl.put_signal"))


def _on_data(op: Op) -> bool:
    return any(frame.test.has(TILE_DATA) and not frame.test.has(TICKET) for frame in op.branches())


@rule(
    "count-not-met",
    WARNING,
    "A wait for as many arrivals as there are ranks, or programs, where not each of them notifies.",
    remedy="wait for as many as come (num_ranks - 1), or let every one notify",
)
def count_not_met(kernel: Kernel) -> Iterator[Hit]:
    notifies = by_signal(kernel, "notify", "atomic", "opaque")
    for key, waits in by_signal(kernel, "wait").items():
        made = [op for op in notifies.get(key, ()) if not op.waits]
        if len(made) != 1 or not _is_one_arrival(made[0]):
            continue
        for op in waits:
            for form, asks, who in _PARTIES:
                # On the two sides of one branch, those who wait are among those who do not notify.
                apart = exclusive(made[0], op) and not made[0].loops()
                if op.expected.form == form and asks(made[0]) and (apart or not asks(op)):
                    line = made[0].node.lineno  # type: ignore[attr-defined]
                    yield at(op, f"this waits for {form} arrivals at {pointer_text(op)}, and the "
                                 f"notify in line {line} is not made by, or for, every "
                                 f"{who}")  # fmt: skip


def _is_one_arrival(op: Op) -> bool:
    return op.kind == "notify" and op.value.number == 1 and not sets(op)


def _on_rank(op: Op) -> bool:
    return any(frame.test.has(RANK) or frame.test.has(OFFSET_RANK) for frame in op.branches())


def _on_program(op: Op) -> bool:
    return any(frame.test.has(PROGRAM) and not frame.test.has(TICKET) for frame in op.branches())


_PARTIES = ((NUM_RANKS, _on_rank, "rank"), (NUM_PROGRAMS, _on_program, "program"))


@rule(
    "divergent-barrier",
    ERROR,
    "A barrier of the world in a branch that not every rank takes.",
    remedy="call it outside the branch, or on both sides of it",
)
def divergent_barrier(kernel: Kernel) -> Iterator[Hit]:
    barriers = [op for op in kernel.of("barrier") if op.name == "wl.barrier"]
    for op in barriers:
        for frame in op.branches():
            if not (frame.test.has(RANK) or frame.test.has(OFFSET_RANK)):
                continue
            if not any(_on_other_side(one, frame) for one in barriers):
                line = frame.node.lineno  # type: ignore[attr-defined]
                yield at(op, f"only ranks for which the condition in line {line} decides so "
                             "come here, and a barrier waits for every rank")  # fmt: skip
                break


def _on_other_side(op: Op, frame: Frame) -> bool:
    return any(one.node is frame.node and one.kind != frame.kind for one in op.branches())


@rule(
    "one-word-for-many",
    WARNING,
    "Several ranks SET one word of a peer: each takes the place of the others' signals.",
    remedy="give each rank a word (signal + wl.rank(world)), or let them ADD to one",
)
def one_word_for_many(kernel: Kernel) -> Iterator[Hit]:
    for op in kernel.of("notify"):
        if not (sets(op) and op.releases and op.to is not None and op.pointer.remote):
            continue
        is_one_peer = isinstance(op.to.number, int)
        offset = op.pointer.offset
        mine = offset is not None and (offset.has(RANK) or bool(offset.params))
        is_asked = any(frame.own is not None for frame in op.path) or not _on_rank(op)
        # Of two ranks only one is "every rank but 0": a wait must speak of their number.
        waited = any(
            one.waits
            and one.pointer.roots & op.pointer.roots
            and (one.expected.has(NUM_RANKS) or one.count.has(NUM_RANKS))
            for one in kernel.ops
        )
        if is_one_peer and not mine and not is_asked and waited:
            yield at(op, f"every rank that comes here SETs {pointer_text(op)} of rank "
                         f"{op.to.number}, and its wait sees one of them")  # fmt: skip
