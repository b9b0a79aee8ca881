"""How wide the accesses of a kernel may be, and tensors as words of that width."""

from __future__ import annotations

import math

import torch

from weft.tiles import mailboxes

VECTOR_BYTES = 16
PACKET_BYTES = mailboxes.PACKET_BYTES.value
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def width_of(row_bytes: int, *tensors: torch.Tensor) -> int:
    """The largest power of two, up to VECTOR_BYTES, at which all rows and all tensors begin."""
    begins = [row_bytes, VECTOR_BYTES]
    for tensor in tensors:
        begins += (tensor.data_ptr(), tensor.storage_offset() * tensor.element_size())
    return math.gcd(*begins)


def as_words(width: int, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The same bytes as integers, so that any dtype is moved alike and bit by bit."""
    word = WORDS[min(width, 8)]
    # A single element is contiguous whatever its stride is; `view` asks for 1.
    flat = [tensor.as_strided((tensor.numel(),), (1,)) for tensor in tensors]
    return tuple(tensor.view(torch.uint8).view(word) for tensor in flat)


def words_in_vector(width: int) -> int:
    """How many words make 16 bytes, where everything begins at 16 bytes; else 1."""
    return width // min(width, 8)


def elements_in_vector(width: int, itemsize: int) -> int:
    """How many elements make 16 bytes, where everything begins at 16 bytes; else 1."""
    return VECTOR_BYTES // itemsize if width == VECTOR_BYTES else 1


def power_of_two(count: int) -> int:
    """The smallest that is not below `count`."""
    return 1 << max(0, count - 1).bit_length()
