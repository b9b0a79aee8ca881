"""torch tensors as the emulator's actors take them: addresses, shapes and strides in bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from weft.emulator.memory import Span

# The checker looks at bytes: for it an element is an unsigned integer of the same size.
CELLS = {size: np.dtype(f"u{size}") for size in (1, 2, 4, 8)}
CELLS[16] = np.dtype(np.complex128)

# torch's own method: while a session is on, Tensor.data_ptr also tells the checker.
address_of = torch._C.TensorBase.data_ptr


def span_of(tensor: torch.Tensor) -> Span:
    """(address, shape, strides in bytes, dtype) of a strided tensor; repeats are left out."""
    size = tensor.element_size()
    shape, strides = tuple(tensor.shape), tensor.stride()
    if 0 in strides:
        shape = tuple(min(n, 1) if s == 0 else n for n, s in zip(shape, strides, strict=True))
    return address_of(tensor), shape, tuple(s * size for s in strides), CELLS[size]


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in tuples and lists of whatever depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from tensors_in(one)


def spans_of(tensor: torch.Tensor, chosen: torch.Tensor) -> list[Span]:
    """The elements of `tensor` where `chosen` holds, those that lie side by side as one span."""
    size, address = tensor.element_size(), address_of(tensor)
    places = (chosen.nonzero() * torch.tensor(tensor.stride(), dtype=torch.int64)).sum(1)
    offsets = np.unique(places.numpy())
    runs = np.split(offsets, np.flatnonzero(np.diff(offsets) != 1) + 1)
    return [
        (address + int(run[0]) * size, (len(run),), (size,), CELLS[size])
        for run in runs
        if len(run)
    ]
