"""`torch.ops.symm_mem` of emulated ranks: what torch has compiled for CUDA, said in its own words.

Operations that torch writes in Python run as they are. The compiled ones are made here of copies,
sums and barriers of a handle, in order on the current stream, so that what they read and write is
seen. Multicast (`multimem_*`) has no place on this machine.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import reduce
from typing import Any

import torch
import torch.distributed._symmetric_memory as torch_module

from weft.base.errors import UsageError
from weft.base.user_place import user_place
from weft.emulator.actors import address_of
from weft.emulator.context import context_of_rank
from weft.emulator.torch_symmetric_memory import SymmetricMemory
from weft.emulator.works import WordWait, WordWork

# By operation: torch's own function, which it has for CUDA tensors.
IN_PYTHON = {
    "fused_all_gather_matmul": "_fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul": "_fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter": "_fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter": "_fused_scaled_matmul_reduce_scatter",
    "_low_contention_all_gather": "_low_contention_all_gather",
    "_low_contention_reduce_scatter": "_low_contention_reduce_scatter",
    "get_remote_tensors": "_get_remote_tensors_default",
}


def _handle(tensor: torch.Tensor, group_name: str | None = None) -> SymmetricMemory:
    handle = SymmetricMemory.rendezvous(tensor, group_name)
    if handle is None:
        raise UsageError(
            "this operation takes a tensor of symm_mem.empty; call symm_mem.rendezvous on it first",
            place=user_place(),
        )
    return handle


def _parts(tensor: torch.Tensor, group_name: str | None = None) -> list[torch.Tensor]:
    """The tensor as each rank of the group has it."""
    handle = _handle(tensor, group_name)
    return [handle.peers(tensor, rank) for rank in range(handle.world_size)]


def _total(parts: list[torch.Tensor], reduce_op: str) -> torch.Tensor:
    total = reduce(operator.add, [part.float() for part in parts])
    if reduce_op not in ("sum", "avg"):
        raise UsageError(f"reduce_op {reduce_op!r} is not emulated", place=user_place())
    return (total / len(parts) if reduce_op == "avg" else total).to(parts[0].dtype)


def one_shot_all_reduce(input, reduce_op, group_name):
    handle = _handle(input, group_name)
    handle.barrier()
    total = _total(_parts(input, group_name), reduce_op)
    handle.barrier()
    return total


def one_shot_all_reduce_out(input, reduce_op, group_name, out):
    return out.copy_(one_shot_all_reduce(input, reduce_op, group_name))


def one_shot_all_reduce_copy(symm_buffer, local_input, reduce_op, group_name):
    symm_buffer = symm_buffer.view(-1)[: local_input.numel()].view(local_input.shape)
    symm_buffer.copy_(local_input)
    return one_shot_all_reduce(symm_buffer, reduce_op, group_name)


def one_shot_all_reduce_copy_out(symm_buffer, local_input, reduce_op, group_name, out):
    return out.copy_(one_shot_all_reduce_copy(symm_buffer, local_input, reduce_op, group_name))


def two_shot_all_reduce(input, reduce_op, group_name):
    """In place: each rank adds up its part, and hands it to all."""
    handle = _handle(input, group_name)
    parts = [part.view(-1) for part in _parts(input, group_name)]
    step = -(-input.numel() // handle.world_size)
    own = slice(handle.rank * step, (handle.rank + 1) * step)
    handle.barrier()
    total = _total([part[own] for part in parts], reduce_op)
    for part in parts:
        part[own].copy_(total)
    handle.barrier()
    return input


def two_shot_all_reduce_out(input, reduce_op, group_name, output):
    return output.copy_(two_shot_all_reduce(input, reduce_op, group_name))


def reduce_scatter_out(input, group_name, split_last_dim, output):
    handle = _handle(input, group_name)
    dim = -1 if split_last_dim else 0
    parts = [part.chunk(handle.world_size, dim) for part in _parts(input, group_name)]
    handle.barrier()
    output.copy_(_total([chunks[handle.rank] for chunks in parts], "sum"))
    handle.barrier()
    return output


# ---- what torch has of NVSHMEM, whose peers are numbered in the world


def nvshmem_put(tensor, peer):
    _parts(tensor)[peer].copy_(tensor)


def nvshmem_get(tensor, peer):
    tensor.copy_(_parts(tensor)[peer])


def nvshmem_put_with_signal(tensor, sigpad, signal, peer):
    """A copy to `peer`, and behind it the word."""
    nvshmem_put(tensor, peer)
    address, dtype = _word(sigpad, peer)
    place = user_place()
    context_of_rank("symm_mem").enqueue(lambda: WordWork(address, signal, dtype, place=place))


def nvshmem_wait_for_signal(sigpad, signal, peer):
    """The stream waits until its own word is `signal`."""
    address, dtype = _word(sigpad)
    place = user_place()
    context_of_rank("symm_mem").enqueue(
        lambda: WordWait(address, dtype, signal, operator.eq, f"= {signal}", place=place)
    )


def _word(sigpad: torch.Tensor, peer: int | None = None) -> tuple[int, Any]:
    """Address and dtype of the first word of a signal pad, or of a symmetric tensor."""
    if peer is not None:
        handle = SymmetricMemory.rendezvous(sigpad, or_pad=True)
        sigpad = sigpad if handle is None else handle.peers(sigpad, peer)
    return address_of(sigpad), torch.empty(0, dtype=sigpad.dtype).numpy().dtype


def nvshmem_broadcast(input, root, group_name):
    handle = _handle(input, group_name)
    handle.barrier()
    if handle.rank != root:
        input.copy_(_parts(input, group_name)[root])
    handle.barrier()
    return input


def nvshmem_all_to_all(input, out, group_name):
    handle = _handle(out, group_name)
    chunks = [part.chunk(handle.world_size)[handle.rank] for part in _parts(out, group_name)]
    handle.barrier()
    for chunk, values in zip(chunks, input.chunk(handle.world_size), strict=True):
        chunk.copy_(values)
    handle.barrier()
    return out


def stream_write_value32(input, offset, val):
    SymmetricMemory.stream_write_value32(input, offset, val)
    return input


def memset32(input, offset, val, count):
    SymmetricMemory.memset32(input, offset, val, count)
    return input


OPERATIONS: dict[str, Callable] = {
    function.__name__: function
    for function in (
        one_shot_all_reduce, one_shot_all_reduce_out, one_shot_all_reduce_copy,
        one_shot_all_reduce_copy_out, two_shot_all_reduce_out, reduce_scatter_out, nvshmem_put,
        nvshmem_get, nvshmem_put_with_signal, nvshmem_wait_for_signal, nvshmem_broadcast,
        nvshmem_all_to_all,
    )
} | {
    "two_shot_all_reduce_": two_shot_all_reduce,
    "stream_write_value32_": stream_write_value32,
    "memset32_": memset32,
}  # fmt: skip


def intercept_symmetric_ops() -> Callable[[], None]:
    """Give torch.ops.symm_mem its operations of emulated ranks; returns the undo."""
    library = torch.library.Library("symm_mem", "IMPL", "CPU")
    for name, function in OPERATIONS.items():
        if hasattr(torch.ops.symm_mem, name):
            library.impl(name, function)
    for name, its in IN_PYTHON.items():
        if hasattr(torch.ops.symm_mem, name) and hasattr(torch_module, its):
            library.impl(name, getattr(torch_module, its))
    return library._destroy
