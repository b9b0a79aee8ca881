"""Atomics and signals whose scope or order does not reach another GPU."""

from __future__ import annotations

from collections.abc import Iterator

from weft.verify.lint.order import before_without
from weft.verify.lint.problem import ERROR, WARNING
from weft.verify.lint.registry import Hit, Kernel, at, pointer_text, rule
from weft.verify.lint.values import Op

WORDS = {"cta": "one block", "gpu": "one GPU"}


@rule(
    "device-scope",
    ERROR,
    "An atomic or a signal of one GPU's scope on a word that another rank uses.",
    remedy="say scope='sys' (wl: leave scope out); Triton's default is 'gpu'",
)
def device_scope(kernel: Kernel) -> Iterator[Hit]:
    changed = [op for op in kernel.of("atomic", "notify") if op.pointer.remote]
    shared = {root for op in changed for root in op.pointer.roots}
    for op in kernel.of("atomic", "notify", "wait", "test"):
        if op.scope not in WORDS:
            continue
        default = op.is_raw and "scope" not in op.options
        how = f"scope={op.scope!r}" + (", Triton's default," if default else "")
        if op.pointer.remote:
            yield at(op, f"{pointer_text(op)} is another rank's word, and {how} orders and is "
                         f"atomic within {WORDS[op.scope]} only")  # fmt: skip
        elif op.waits and op.pointer.roots & shared:
            yield at(op, f"other ranks change {pointer_text(op)}, and a wait with {how} "
                         f"acquires from {WORDS[op.scope]} only")  # fmt: skip


@rule(
    "relaxed-signal",
    ERROR,
    "A relaxed signal behind a store to a peer, which it may overtake.",
    remedy="leave the order out (release is the default), or put wl.fence(world) before it",
)
def relaxed_signal(kernel: Kernel) -> Iterator[Hit]:
    for data, signal in before_without(kernel.ops, _stores_far, _is_relaxed, _releases):
        line = getattr(data.node, "lineno", 0)
        yield at(signal, f"{pointer_text(signal)} is raised relaxed, so it may be seen before "
                         f"the data that line {line} writes to the peer")  # fmt: skip


def _stores_far(op: Op) -> bool:
    return op.kind in ("store", "put") and op.pointer.remote


def _is_relaxed(op: Op) -> bool:
    far_word = op.kind == "atomic" and not op.is_tile_access and op.name != "wl.load"
    return (op.kind == "notify" or far_word) and op.pointer.remote and op.order == "relaxed"


def _releases(op: Op) -> bool:
    return op.kind in ("fence", "barrier") or (op.kind in ("atomic", "notify") and op.releases)


@rule(
    "cas-across-gpus",
    WARNING,
    "tl.atomic_cas between GPUs: on AMD it ignores order and scope.",
    remedy="use tl.atomic_add, tl.atomic_xchg, or wl.notify and wl.wait; NVIDIA alone takes it",
)
def cas_across_gpus(kernel: Kernel) -> Iterator[Hit]:
    for op in kernel.of("atomic"):
        if op.name == "tl.atomic_cas" and (op.pointer.remote or op.scope == "sys"):
            yield at(op, f"tl.atomic_cas on {pointer_text(op)} has the scope of the agent and "
                         f"no order on AMD, whatever sem and scope say")  # fmt: skip
