"""A heap that each rank allocates itself, with its peers' by HIP's handles, over MPI; a kernel
finds a peer's object by its distance from the heap's base.

The fault: the signal to a peer is added at one device's scope, which is Triton's default.
"""

import ctypes
import sys

import numpy as np
import torch
import triton
import triton.language as tl
from mpi4py import MPI

FAULT = "--fault" in sys.argv
hip = ctypes.cdll.LoadLibrary("libamdhip64.so")


class Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_char * 64)]


@triton.jit
def there(pointer, bases, rank, peer):
    offset = tl.cast(pointer, tl.uint64) - tl.load(bases + rank)
    at = tl.cast(tl.load(bases + peer), tl.pointer_type(tl.int8)) + offset
    return tl.cast(at, pointer.dtype)


@triton.jit
def push(x, inbox, words, bases, rank, ranks, N: tl.constexpr, SCOPE: tl.constexpr):
    """To each peer one program."""
    peer, at = tl.program_id(0), tl.arange(0, N)
    tl.store(there(inbox + rank * N + at, bases, rank, peer), tl.load(x + at))
    tl.debug_barrier()
    tl.atomic_add(there(words, bases, rank, peer), 1, sem="release", scope=SCOPE)  # FAULT


@triton.jit
def total(inbox, out, words, ranks, N: tl.constexpr):
    while tl.atomic_add(words, 0, sem="acquire", scope="sys") < ranks:
        pass
    at, value = tl.arange(0, N), tl.zeros((N,), tl.float32)
    for peer in range(ranks):
        value += tl.load(inbox + peer * N + at)
    tl.store(out + at, value)


def shared(heap, world):
    """The address of each rank's heap here."""
    handle, base = Handle(), ctypes.c_void_p(heap.data_ptr())
    assert hip.hipIpcGetMemHandle(ctypes.byref(handle), base) == 0
    node = world.Split_type(MPI.COMM_TYPE_SHARED)
    handles = np.empty((world.Get_size(), 64), np.uint8)
    node.Allgather(sendbuf=np.frombuffer(handle, np.uint8), recvbuf=handles)
    node.Free()
    bases = []
    for peer, found in enumerate(handles):
        at, copied = ctypes.c_void_p(), Handle.from_buffer_copy(found.tobytes())
        if peer != world.Get_rank():
            assert hip.hipIpcOpenMemHandle(ctypes.byref(at), copied, ctypes.c_uint(1)) == 0
        bases.append(heap.data_ptr() if peer == world.Get_rank() else at.value)
    return torch.tensor(bases, dtype=torch.uint64, device="cuda")


def main():
    world = MPI.COMM_WORLD
    rank, ranks = world.Get_rank(), world.Get_size()
    heap = torch.empty(4096, dtype=torch.int8, device="cuda")
    bases = shared(heap, world)
    inbox = heap[: ranks * 64].view(torch.float32)
    words = heap[2048:2052].view(torch.int32)
    words.zero_()
    torch.cuda.synchronize()
    world.Barrier()
    x, out = torch.full((16,), rank + 1.0, device="cuda"), torch.empty(16, device="cuda")
    push[(ranks,)](x, inbox, words, bases, rank, ranks, 16, "gpu" if FAULT else "sys")
    total[(1,)](inbox, out, words, ranks, 16)
    torch.testing.assert_close(out.cpu(), torch.full((16,), float(sum(range(1, ranks + 1)))))


if __name__ == "__main__":
    main()
