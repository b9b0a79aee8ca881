"""Waits by hand: loops that look at a word until somebody has changed it."""

from __future__ import annotations

from collections.abc import Iterator

from weft.verify.lint.order import after_without
from weft.verify.lint.problem import ERROR
from weft.verify.lint.registry import Hit, Kernel, at, pointer_text, rule
from weft.verify.lint.values import Op

READS = ("load", "descriptor load", "get")


@rule(
    "spin-without-acquire",
    ERROR,
    "A wait that acquires nothing, and loads behind it.",
    remedy="use wl.wait, or end the loop on sem='acquire', scope='sys' and tl.debug_barrier()",
)
def spin_without_acquire(kernel: Kernel) -> Iterator[Hit]:
    for wait, load in after_without(kernel.ops, _relaxed_wait, _uses, _acquires):
        line = getattr(load.node, "lineno", 0)
        what = "reads" if load.kind in READS else "tells others"
        yield at(wait, f"the wait for {pointer_text(wait)} is {wait.order}, and what line "
                       f"{line} {what} may be older than what it has waited for")  # fmt: skip


def _relaxed_wait(op: Op) -> bool:
    ordered = op.kind in ("atomic", "wait") or (op.kind == "test" and op.poll is not None)
    # A release that changes the word once it is free is a signal, and its loop no wait for data.
    signals = op.order == "release" and op.name.endswith(("cas", "xchg", "exchange"))
    return ordered and op.waits and op.order in ("relaxed", "release") and not signals


def _uses(op: Op) -> bool:
    """Data, or a signal that hands on what was waited for."""
    return (op.kind in READS and op.poll is None) or (op.kind == "notify" and op.pointer.remote)


def _acquires(op: Op) -> bool:
    return op.acquires and op.kind in ("atomic", "wait", "test", "barrier")


@rule(
    "volatile-wait",
    ERROR,
    "A loop on a volatile load: it orders nothing, and on AMD it may never end.",
    remedy="wait with wl.wait, or spin on tl.atomic_add(p, 0, sem='acquire', scope='sys')",
)
def volatile_wait(kernel: Kernel) -> Iterator[Hit]:
    for op in kernel.of("load"):
        if op.poll is not None and _is_volatile(op):
            yield at(op, f"the loop waits for {pointer_text(op)} by volatile loads, which "
                         "acquire nothing: loads behind it may be older")  # fmt: skip


def _is_volatile(op: Op) -> bool:
    volatile, cached = op.options.get("volatile"), op.options.get("cache_modifier")
    return bool(volatile and volatile.number) or bool(cached and cached.number == ".cv")


@rule(
    "plain-load-wait",
    ERROR,
    "A loop on a plain load: the compiler may look once.",
    remedy="wait with wl.wait, or spin on tl.atomic_add(p, 0, sem='acquire', scope='sys')",
)
def plain_load_wait(kernel: Kernel) -> Iterator[Hit]:
    for op in kernel.of("load"):
        if op.poll is not None and not _is_volatile(op) and not op.is_tile_access:
            yield at(op, f"nothing in the loop changes {pointer_text(op)}, so the compiler may "
                         "load it once and loop for ever; and it acquires nothing")  # fmt: skip


@rule(
    "discarded-look",
    ERROR,
    "A look at a word whose result nobody uses: it waits for nothing, and is deleted.",
    remedy="wait with wl.wait; tl.atomic_add(p, 0) acquires only where its result is used",
)
def discarded_look(kernel: Kernel) -> Iterator[Hit]:
    for op in kernel.of("atomic", "test"):
        if op.used or op.poll is not None:
            continue
        if op.kind == "test":
            yield at(op, "wl.test looks once and says what it saw; here nobody listens, so "
                         "nothing is waited for")  # fmt: skip
        elif op.name == "tl.atomic_add" and op.value.number == 0:
            yield at(op, f"the result of looking at {pointer_text(op)} is not used, so Triton "
                         "3.6 and 3.7 delete the look, and its acquire with it")  # fmt: skip


@rule(
    "pure-wait",
    ERROR,
    "Assembly that waits or signals, declared pure: the compiler may delete or move it.",
    remedy="pass is_pure=False and clobber memory, or use wl.wait and wl.notify",
)
def pure_wait(kernel: Kernel) -> Iterator[Hit]:
    marks = ("ld.acquire", "ld.volatile", "atom.", "red.", "st.release", "multimem.red", "bra ")
    for op in kernel.of("assembly"):
        text, pure = op.options.get("asm"), op.options.get("is_pure")
        if pure is None or pure.number is not True or text is None:
            continue
        found = [mark.strip() for mark in marks if mark in str(text.number or "")]
        if found:
            yield at(op, f"the assembly has {found[0]} in it and says is_pure=True: it may be "
                         "deleted, merged with another, or moved")  # fmt: skip
