"""What holds a world's memory: as a record, and as the message of a heap that is full."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from weft.runtime.heap import HeapAllocator, Wanted

# Kinds of holders: a workspace's slots, those it has outgrown, what the user has allocated.
SLOTS, OUTGROWN, TENSOR, GONE = "slots", "outgrown", "tensor", "freed signals"
# What holds memory of the heap: its kind, in words, and the allocations.
Holding = tuple[str, str, Sequence[torch.Tensor]]
# Holders that a message lists.
MOST_LISTED = 8

REMEDY = (
    "Pass a larger heap_bytes to weft.init, or a heap_limit up to which it may grow, or set "
    "WEFT_HEAP_BYTES or WEFT_HEAP_LIMIT. Or use less: world.free() what "
    "world.empty(), zeros() and signals() gave and is done with; call with the largest sizes "
    "before anything is recorded, since a recording keeps the slots it was made with; let go of "
    "recordings and CUDA graphs that are not replayed any more, and of Slots that are held; "
    "WEFT_SLOTS=1 gives each workspace one slot instead of two"
)


class Holder(NamedTuple):
    """Of the heap: how much, and who holds it; `kind` is "slots", "outgrown", "tensor" or "freed
    signals"."""

    nbytes: int
    kind: str
    what: str


class Kept(NamedTuple):
    """How many a cache holds, and how many at most."""

    count: int
    most: int


@dataclass(frozen=True)
class MemoryReport:
    """What one rank's memory and caches hold: `world.memory()`.

    Units   heap_bytes: what there is now, heap_limit: what it may grow to; scratch_bytes and
            recordings_bytes: of the device, beside the heap
    """

    world: str
    heap_bytes: int
    heap_limit: int
    free_bytes: int
    largest_free_bytes: int
    held: tuple[Holder, ...]
    scratch_bytes: int
    calls: Kept
    recordings: Kept
    recordings_bytes: int

    def by_kind(self) -> dict[str, int]:
        """Bytes of the heap by kind of holder."""
        found: dict[str, int] = {}
        for one in self.held:
            found[one.kind] = found.get(one.kind, 0) + one.nbytes
        return found

    def __str__(self) -> str:
        free = f"of {self.heap_bytes:,}, up to {self.heap_limit:,}"
        rows = [
            *self.held,
            (self.free_bytes, "free", f"{free}; {self.largest_free_bytes:,} in one piece"),
            (self.scratch_bytes, "scratch", "beside the heap, between the steps of calls"),
            (
                self.recordings_bytes,
                "recordings",
                "{} of {} calls' launches".format(*self.recordings),
            ),
            (0, "calls", "{} of {} kinds".format(*self.calls)),
        ]
        lines = [f"{nbytes:>16,}  {kind:13}  {what}" for nbytes, kind, what in rows]
        return "\n".join([f"memory of world {self.world!r}, in bytes", *lines])


def holders(
    heap: HeapAllocator, holdings: Iterable[Holding], offset_of: Callable[[torch.Tensor], int]
) -> list[Holder]:
    """Of all the heap holds, the largest first."""
    sizes = {block.offset: block.end - block.offset for block in heap.blocks}
    names = {block.offset: block.name for block in heap.blocks}
    found: list[Holder] = []
    for kind, text, tensors in holdings:
        found.append(Holder(sum(sizes.pop(offset_of(one)) for one in tensors), kind, text))
    found += [Holder(size, TENSOR, f"tensor {names[at]!r}") for at, size in sizes.items()]
    held_bytes = heap.capacity_bytes - heap.free_bytes
    if gone_bytes := held_bytes - sum(one.nbytes for one in found):
        text = "words of freed signals, which are never used again"
        found.append(Holder(gone_bytes, GONE, text))
    return sorted(found, reverse=True)


def describe_full(
    heap: HeapAllocator,
    wanted: Sequence[Wanted],
    holdings: Iterable[Holding],
    offset_of: Callable[[torch.Tensor], int],
) -> str:
    """The message of an OutOfMemoryError: what of `wanted` has no room, what holds the heap, the
    largest first, and the remedy. `holdings` are those of workspaces."""
    found = holders(heap, holdings, offset_of)
    held_bytes = heap.capacity_bytes - heap.free_bytes
    lines = [_lack(heap, wanted), f"What holds {held_bytes:,} bytes, the largest first:"]
    lines += [f"  {one.nbytes:>14,}  {one.what}" for one in found[:MOST_LISTED]]
    if others := found[MOST_LISTED:]:
        lines.append(f"  {sum(one.nbytes for one in others):>14,}  {len(others)} others")
    return "\n".join([*lines, REMEDY])


def _lack(heap: HeapAllocator, wanted: Sequence[Wanted]) -> str:
    """What cannot be allocated; where it is one of several, with their sum."""
    first = next(i for i in range(len(wanted)) if not heap.has_room(wanted[: i + 1]))
    lack = heap.describe_lack(wanted[first].nbytes, wanted[first].name)
    if len(wanted) == 1:
        return lack
    return f"{lack}; it is one of {len(wanted)} parts of {sum(one.nbytes for one in wanted)} bytes"
