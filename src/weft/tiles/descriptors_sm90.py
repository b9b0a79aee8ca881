"""How kernels in Gluon for Hopper are given tensors that TMA reads and stores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.base.fields import copied
from weft.tiles.blocking import TMA_BYTES


def descriptor(tensor: Any, block: Sequence[int]) -> TensorDescriptor:
    """A TMA descriptor of a 2-D tensor for blocks of `block`; a kernel takes it as an argument."""
    shape, strides, block = tensor.shape, tensor.stride(), tuple(block)
    key = tensor.dtype, strides, block
    known = _checked.get(key)
    if known is None or tensor.data_ptr() % TMA_BYTES or 0 in shape:
        layout = block_layout(block, tensor.element_size())
        made = TensorDescriptor.from_tensor(tensor, list(block), layout)
        _checked[key] = copied(made, base=None, shape=None)
        return made
    # What Triton's checks read is as it was: they take longer than all else.
    return copied(known, base=tensor, shape=shape)


# By dtype, strides and block: descriptors without memory and extents.
_checked: dict[tuple, TensorDescriptor] = {}


@cache
def block_layout(block: tuple[int, ...], itemsize: int) -> gl.NVMMASharedLayout:
    """How TMA lays a block out in shared memory: swizzled as widely as its rows allow."""
    element = {1: gl.float8e4nv, 2: gl.bfloat16, 4: gl.float32}[itemsize]
    return gl.NVMMASharedLayout.get_default_for(list(block), element)
