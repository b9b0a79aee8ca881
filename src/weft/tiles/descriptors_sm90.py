"""How kernels in Gluon for Hopper are given tensors that TMA reads and stores."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


def descriptor(tensor: Any, block: Sequence[int]) -> TensorDescriptor:
    """A TMA descriptor of a 2-D tensor for blocks of `block`; a kernel takes it as an argument."""
    layout = block_layout(tuple(block), tensor.element_size())
    return TensorDescriptor.from_tensor(tensor, list(block), layout)


@cache
def block_layout(block: tuple[int, ...], itemsize: int) -> gl.NVMMASharedLayout:
    """How TMA lays a block out in shared memory: swizzled as widely as its rows allow."""
    element = {1: gl.float8e4nv, 2: gl.bfloat16, 4: gl.float32}[itemsize]
    return gl.NVMMASharedLayout.get_default_for(list(block), element)
