"""Heaps that grow: addresses reserved at once for every near rank's, memory mapped there in pieces.

A pointer into this rank's heap and the same place of a peer's differ by one number, which kernels
read from the world's table. So that this stays so when the heap grows, each rank reserves one range
of addresses for its own heap and one for each near peer's. A piece is torch's symmetric memory,
exchanged as any; it is mapped a second time, at the same offset of each range.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weft.runtime.backends.cuda_driver import Driver


class ReservedAddresses:
    """One range of `span_bytes` for each rank that is near; `own` is this one.

    The tensor of the own range holds this; what is mapped goes when nobody holds either any more.
    """

    def __init__(
        self, driver: Driver, near: Sequence[bool], own: int, device: torch.device, span_bytes: int
    ) -> None:
        self._driver, self._own, self._device, self._span = driver, own, device, span_bytes
        self._mapped: list[tuple[int, int]] = []
        self.starts = [driver.reserve(span_bytes) if is_near else 0 for is_near in near]
        self.__cuda_array_interface__ = {
            "shape": (span_bytes,),
            "typestr": "|u1",
            "data": (self.starts[own], False),
            "version": 3,
        }

    def map(self, offset: int, pieces: Sequence[torch.Tensor | None]) -> None:
        """Each rank's piece is at `offset` of its range, too."""
        for start, piece in zip(self.starts, pieces, strict=True):
            if piece is not None:
                address = start + offset
                size = self._driver.map_again(piece.data_ptr(), address, self._device.index)
                self._mapped.append((address, size))

    def tensors(self) -> list[torch.Tensor | None]:
        """The ranges as flat bytes; to be asked for once the own one begins with a piece."""
        return [
            None
            if not start
            else torch.as_tensor(self, device=self._device)
            if rank == self._own
            else self._of_peer(start)
            for rank, start in enumerate(self.starts)
        ]

    def _of_peer(self, start: int) -> torch.Tensor:
        # As `as_tensor` sees it, a peer's memory is of the peer's device, and it would be copied.
        storage = torch._C._construct_storage_from_data_pointer(start, self._device, self._span)
        empty = torch.empty(0, dtype=torch.uint8, device=self._device)
        return empty.set_(storage, 0, (self._span,), (1,))

    def __del__(self) -> None:
        for address, size in self._mapped:
            self._driver.unmap(address, size)
        for start in filter(None, self.starts):
            self._driver.unreserve(start, self._span)
