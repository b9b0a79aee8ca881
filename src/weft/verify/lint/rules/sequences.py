"""Steps of a kernel in an order in which they do not work."""

from __future__ import annotations

from collections.abc import Iterator

from weft.verify.lint.order import before_without, exclusive
from weft.verify.lint.problem import ERROR, WARNING
from weft.verify.lint.registry import Hit, Kernel, at, pointer_text, rule
from weft.verify.lint.values import LOOP, NUM_RANKS, PROGRAM, RANK, TICKET, Frame, Op


def _line(op: Op) -> int:
    return getattr(op.node, "lineno", 0)


@rule(
    "store-after-notify",
    WARNING,
    "A put to a peer behind the last signal: nobody is told of it.",
    remedy="put first, notify then; or put a barrier behind it",
)
def store_after_notify(kernel: Kernel) -> Iterator[Hit]:
    for index, op in enumerate(kernel.ops):
        if op.kind not in ("put", "store") or not op.pointer.remote:
            continue
        if op.name == "wl.put_packets":
            continue  # each word carries its own flag
        later = [one for one in kernel.ops[index:] if not exclusive(one, op) and _tells(one)]
        early = [
            one for one in kernel.ops[:index]
            if one.kind == "notify" and one.pointer.remote and not exclusive(one, op)
        ]  # fmt: skip
        if early and not later:
            yield at(op, f"the last signal to a peer is raised in line {_line(early[-1])}, "
                         "before this write: whoever waits for it may not see it")  # fmt: skip


def _tells(op: Op) -> bool:
    """Can anybody hear of what was written before it? What lint does not know may tell."""
    return op.releases or op.kind in ("notify", "barrier", "opaque", "wait", "test", "assembly")


@rule(
    "late-wait",
    WARNING,
    "A wait at the end of a kernel, behind the reads that it should guard.",
    remedy="wait before what peers write is read",
)
def late_wait(kernel: Kernel) -> Iterator[Hit]:
    written = _written_by_peers(kernel)
    for index, wait in enumerate(kernel.ops):
        if wait.kind != "wait" or _something_follows(kernel, index):
            continue
        for op in kernel.ops[:index]:
            reads = op.kind == "get" or (op.kind == "load" and op.pointer.roots & written)
            if reads and not exclusive(op, wait) and not _acquired(kernel, op):
                message = f"nothing comes behind this wait for {pointer_text(wait)}, and line "
                yield at(wait, message + f"{_line(op)} reads before it what peers write")
                break


def _written_by_peers(kernel: Kernel) -> set[str]:
    far = [op for op in kernel.of("put", "store") if op.pointer.remote]
    return {root for op in far for root in op.pointer.roots}


def _something_follows(kernel: Kernel, index: int) -> bool:
    wait = kernel.ops[index]
    loops = [frame.node for frame in wait.loops()]
    return bool(loops) or any(not exclusive(wait, op) for op in kernel.ops[index + 1 :])


def _acquired(kernel: Kernel, read: Op) -> bool:
    before = kernel.ops[: kernel.ops.index(read)]
    return any(op.acquires and not exclusive(op, read) for op in before)


@rule(
    "source-reused",
    ERROR,
    "The source of a transfer that does not block, written before it is complete.",
    remedy="put wl.quiet(world) before the write; fence and notify do not complete a put here",
)
def source_reused(kernel: Kernel) -> Iterator[Hit]:
    for put, store in before_without(
        kernel.ops,
        lambda op: op.name == "wl.put_nbi" and bool(op.value.roots),
        lambda op: op.kind == "get" or (op.kind == "store" and not op.pointer.remote),
        lambda op: op.name in ("wl.quiet", "wl.barrier"),
    ):
        written = store.value if store.kind == "get" else store.pointer
        if written.roots & put.value.roots:
            yield at(store, f"the transfer of line {_line(put)} may still read "
                            f"{', '.join(sorted(put.value.roots))}")  # fmt: skip


@rule(
    "speaks-for-all",
    WARNING,
    "One program of a grid signals what all of them have stored, without having met them.",
    remedy="take a ticket with wl.atomic_add and let the last program notify, or wl.barrier_grid",
)
def speaks_for_all(kernel: Kernel) -> Iterator[Hit]:
    for put, notify in before_without(kernel.ops, _by_every_program, _by_one, _meets):
        yield at(notify, f"each program writes its part in line {_line(put)}, and one program "
                         f"raises {pointer_text(notify)}: the others may not have come so "
                         "far")  # fmt: skip


def _by_every_program(op: Op) -> bool:
    offset = op.pointer.offset
    far = op.kind in ("put", "store") and op.pointer.remote
    return far and offset is not None and offset.has(PROGRAM) and not _asks_program(op)


def _by_one(op: Op) -> bool:
    is_far = op.kind == "notify" and op.pointer.remote
    mine = op.pointer.offset is not None and op.pointer.offset.has(PROGRAM)
    return is_far and not mine and any(_is_one_program(frame) for frame in op.branches())


def _is_one_program(frame: Frame) -> bool:
    """`if program == K`: one program of the grid, and nothing else that is asked."""
    test = frame.test
    other = test.has(RANK) or test.has(LOOP) or test.has(TICKET) or test.has(NUM_RANKS)
    return frame.kind == "if" and test.has(PROGRAM) and not other and not test.params


def _asks_program(op: Op) -> bool:
    return any(frame.test.has(PROGRAM) for frame in op.branches())


def _meets(op: Op) -> bool:
    """Programs can have heard of each other through it."""
    return op.kind in ("barrier", "atomic", "wait", "test", "opaque", "assembly")


@rule(
    "reset-before-wait",
    ERROR,
    "A signal word set to zero right before it is waited for: the signal may have come already.",
    remedy="reset it after the wait, with a barrier before the next signal; or count up",
)
def reset_before_wait(kernel: Kernel) -> Iterator[Hit]:
    for reset, wait in before_without(
        kernel.ops, _resets, lambda op: op.waits, lambda op: op.kind == "barrier"
    ):
        if reset.pointer.roots & wait.pointer.roots:
            yield at(reset, f"{pointer_text(wait)} is waited for in line {_line(wait)}, and a "
                            "signal that has come before this reset is lost")  # fmt: skip


def _resets(op: Op) -> bool:
    is_write = op.kind == "store" or op.name in ("wl.store", "tl.atomic_xchg", "tl.atomic_store")
    return is_write and not op.pointer.remote and op.value.number == 0


@rule(
    "transfer-never-completed",
    ERROR,
    "A transfer that does not block, and nothing behind it that completes it.",
    remedy="end with wl.quiet(world), or with a notify or a barrier of the world",
)
def transfer_never_completed(kernel: Kernel) -> Iterator[Hit]:
    if not kernel.launches:
        return  # who calls it may complete it
    for index, op in enumerate(kernel.ops):
        if op.name not in ("wl.put_nbi", "wl.get_nbi"):
            continue
        later = [one for one in kernel.ops[index + 1 :] if not exclusive(one, op)]
        # In a loop, what stands before it in the text comes behind it in the next turn, but
        # not behind the last turn.
        if not any(_completes_transfer(one, op) for one in later):
            yield at(op, "the kernel ends, and nobody has waited for this transfer")


def _completes_transfer(op: Op, transfer: Op) -> bool:
    if op.name in ("wl.quiet", "wl.barrier") or op.kind == "opaque":
        return True
    return transfer.name == "wl.put_nbi" and (op.kind == "notify" or op.name == "wl.fence")
