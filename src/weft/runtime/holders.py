"""What holds a symmetric heap that is full, and what can be done about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from weft.runtime.heap import HeapAllocator, Wanted

# Holders that a message lists.
MOST_LISTED = 8

REMEDY = (
    "Pass a larger heap_bytes to weft.init, or set WEFT_HEAP_BYTES. Or use less: world.free() what "
    "world.empty(), zeros() and signals() gave and is done with; call with the largest sizes "
    "before anything is recorded, since a recording keeps the slots it was made with; let go of "
    "recordings and CUDA graphs that are not replayed any more, and of Slots that are held; "
    "WEFT_SLOTS=1 gives each workspace one slot instead of two"
)


def describe_full(
    heap: HeapAllocator,
    wanted: Sequence[Wanted],
    holdings: Iterable[tuple[str, Sequence[torch.Tensor]]],
    offset_of: Callable[[torch.Tensor], int],
) -> str:
    """The message of an OutOfMemoryError: what of `wanted` has no room, what holds the heap, the
    largest first, and the remedy. `holdings` are allocations of workspaces, in words."""
    sizes = {block.offset: block.end - block.offset for block in heap.blocks}
    names = {block.offset: block.name for block in heap.blocks}
    found: list[tuple[int, str]] = []
    for text, tensors in holdings:
        found.append((sum(sizes.pop(offset_of(one)) for one in tensors), text))
    found += [(size, f"tensor {names[offset]!r}") for offset, size in sizes.items()]
    held_bytes = heap.capacity_bytes - heap.free_bytes
    if gone_bytes := held_bytes - sum(size for size, _ in found):
        found.append((gone_bytes, "words of freed signals, which are never used again"))
    found.sort(reverse=True)
    lines = [_lack(heap, wanted), f"What holds {held_bytes:,} bytes, the largest first:"]
    lines += [f"  {size:>14,}  {text}" for size, text in found[:MOST_LISTED]]
    if others := found[MOST_LISTED:]:
        lines.append(f"  {sum(size for size, _ in others):>14,}  {len(others)} others")
    return "\n".join([*lines, REMEDY])


def _lack(heap: HeapAllocator, wanted: Sequence[Wanted]) -> str:
    """What cannot be allocated; where it is one of several, with their sum."""
    first = next(i for i in range(len(wanted)) if not heap.has_room(wanted[: i + 1]))
    lack = heap.describe_lack(wanted[first].nbytes, wanted[first].name)
    if len(wanted) == 1:
        return lack
    return f"{lack}; it is one of {len(wanted)} parts of {sum(one.nbytes for one in wanted)} bytes"
