"""How kernels in Gluon for Hopper are given tensors that TMA reads and stores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.base.fields import copied
from weft.tiles.blocking import TMA_BYTES


def descriptor(tensor: Any, block: Sequence[int]) -> TensorDescriptor:
    """A TMA descriptor of a 2-D tensor for blocks of `block`; a kernel takes it as an argument."""
    shape, block = tensor.shape, tuple(block)
    if tensor.data_ptr() % TMA_BYTES or 0 in shape:  # Triton says what is wrong
        return _described(tensor, block)
    # What Triton's checks read is as it was: they take longer than all else.
    return copied(_checked(tensor.dtype, tensor.stride(), block), base=tensor, shape=shape)


@lru_cache(maxsize=1024)
def _checked(
    dtype: torch.dtype, strides: tuple[int, ...], block: tuple[int, ...]
) -> TensorDescriptor:
    """That of such tensors, without memory and extents."""
    like = torch.empty_strided((1,) * len(strides), strides, dtype=dtype, device="meta")
    return copied(_described(like, block), base=None, shape=None)


def _described(tensor: Any, block: tuple[int, ...]) -> TensorDescriptor:
    layout = block_layout(block, tensor.element_size())
    return TensorDescriptor.from_tensor(tensor, list(block), layout)


@cache
def block_layout(block: tuple[int, ...], itemsize: int) -> gl.NVMMASharedLayout:
    """How TMA lays a block out in shared memory: swizzled as widely as its rows allow."""
    element = {1: gl.float8e4nv, 2: gl.bfloat16, 4: gl.float32}[itemsize]
    return gl.NVMMASharedLayout.get_default_for(list(block), element)
