"""Raw atomics that release: what must come before them, and Triton does not add."""

from __future__ import annotations

from collections.abc import Iterator

from weft.verify.lint.order import before_without
from weft.verify.lint.problem import ERROR
from weft.verify.lint.registry import Hit, Kernel, at, pointer_text, rule
from weft.verify.lint.values import Op


def _is_raw_release(op: Op) -> bool:
    """A release by Triton's own atomics to another rank; 3.9's atomic_store has its barrier."""
    if op.kind != "atomic" or not op.is_raw or op.is_tile_access or op.name == "tl.atomic_store":
        return False
    return op.releases and op.poll is None and (op.pointer.remote or op.scope == "sys")


@rule(
    "release-without-barrier",
    ERROR,
    "A raw release behind the stores of a block, with no block barrier between.",
    remedy="put tl.debug_barrier() before it, or use wl.notify, which contains it",
)
def release_without_barrier(kernel: Kernel) -> Iterator[Hit]:
    for store, release in before_without(kernel.ops, _stores, _is_raw_release, _joins_block):
        line = getattr(store.node, "lineno", 0)
        yield at(release, f"Triton puts no block barrier before {release.name}, so it orders "
                          f"the stores of one thread; line {line} stores by all of "
                          "them")  # fmt: skip


def _stores(op: Op) -> bool:
    return op.kind in ("store", "put") and op.is_tile_access


def _joins_block(op: Op) -> bool:
    if op.kind in ("block barrier", "barrier", "fence"):
        return True
    return op.kind in ("notify", "wait") or (op.kind == "atomic" and op.name.startswith("wl."))


@rule(
    "unfinished-store",
    ERROR,
    "A TMA store, then a raw release before the store is complete.",
    remedy="put wl.complete_stores() and tl.debug_barrier() before it, or use wl.notify",
)
def unfinished_store(kernel: Kernel) -> Iterator[Hit]:
    def stores(op: Op) -> bool:
        return op.kind == "descriptor store"

    def releases(op: Op) -> bool:
        # On one GPU the store is as late as between two, where the release is meant as one.
        said = op.kind == "atomic" and op.is_raw and op.releases and "sem" in op.options
        return _is_raw_release(op) or (said and not op.is_tile_access and op.poll is None)

    for store, release in before_without(kernel.ops, stores, releases, _completes):
        line = getattr(store.node, "lineno", 0)
        yield at(release, f"the descriptor store in line {line} is asynchronous, and up to "
                          f"Triton 3.7 {release.name} on {pointer_text(release)} is seen "
                          "before it is written")  # fmt: skip


def _completes(op: Op) -> bool:
    if op.kind in ("complete", "notify", "barrier", "fence"):
        return True
    return op.kind == "atomic" and op.name.startswith("wl.") and op.releases
