"""`torch.distributed._symmetric_memory` of emulated ranks.

What torch asks of its C++ class `_SymmetricMemory` is answered here; all that torch makes of it in
Python (workspaces, pipelined collectives) runs as it is. Memory is that of the process, an
allocation has one number on all ranks, and a signal pad of zeros goes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
import torch.distributed._symmetric_memory as torch_module
from torch._C import _distributed_c10d as torch_classes
from torch.distributed import distributed_c10d as c10d

from weft.base.errors import OutOfBoundsError, UsageError
from weft.base.user_place import user_place
from weft.emulator.actors import address_of
from weft.emulator.codegen import LIBRARY, EmulatedKernel, Parameter
from weft.emulator.context import RankContext, context_of_rank, current
from weft.emulator.meetings import Meetings
from weft.emulator.torch_ops import fill_with_garbage
from weft.emulator.works import BarrierWork, KernelWork, WordWork

PAD_WORD = np.dtype(np.int32)
HEAP = "torch's symmetric memory"
PAGE_BYTES = 4096
# Dictionaries of torch's module that hold what belongs to one process.
PER_PROCESS = (
    "_backend_streams", "_group_name_to_workspace_tensor", "_group_name_to_store",
    "_symm_mem_pools",
)  # fmt: skip


class _OfRank(dict):
    """A dictionary of which each emulated rank sees its own."""

    def __init__(self, own: dict) -> None:
        self._own = own

    def _held(self) -> dict:
        context = current()
        if context is None:
            return self._own
        return context.belongings.setdefault((_OfRank, id(self)), {})

    def __getitem__(self, key: Any) -> Any:
        return self._held()[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._held()[key] = value

    def __contains__(self, key: object) -> bool:
        return key in self._held()

    def get(self, key: Any, default: Any = None) -> Any:
        return self._held().get(key, default)


class _Allocated:
    """One allocation of one rank: its bytes, and its signal pad."""

    def __init__(self, context: RankContext, nbytes: int, group_name: str | None) -> None:
        held = context.belongings.setdefault(_Allocated, [])
        self.number = len(held)
        held.append(self)
        self.nbytes = nbytes
        self.group_name = group_name
        self.buffer = torch.from_numpy(np.empty(-(-nbytes // 16) * 16 or 16, np.uint8))
        self.pad = torch.from_numpy(np.zeros(SymmetricMemory.signal_pad_size, np.uint8))
        self.handles: dict[str, SymmetricMemory] = {}

    @classmethod
    def of(cls, tensor: torch.Tensor, *, or_pad: bool = False) -> _Allocated | None:
        """The calling rank's whose buffer (or signal pad) holds `tensor`."""
        address = address_of(tensor)
        for one in context_of_rank("symmetric memory").belongings.get(cls, ()):
            for memory in (one.buffer, one.pad) if or_pad else (one.buffer,):
                if 0 <= address - address_of(memory) < memory.numel():
                    return one
        return None


class SymmetricMemory:
    """A handle: one allocation as all ranks of a group have it. Stands for torch's class."""

    signal_pad_size = torch_classes._SymmetricMemory.signal_pad_size
    meetings: Meetings  # the session's

    def __init__(self, own: _Allocated, group: Any, parts: list[_Allocated]) -> None:
        self._context = context_of_rank("symmetric memory")
        self._group = group
        self._parts = parts
        self._calls: dict[int, int] = {}
        self.rank, self.world_size = group.rank(), group.size()
        self.buffer_size = own.nbytes
        self.buffer_ptrs = [address_of(part.buffer) for part in parts]
        self.signal_pad_ptrs = [address_of(part.pad) for part in parts]
        self._tables = [torch.tensor(each) for each in (self.buffer_ptrs, self.signal_pad_ptrs)]
        for table, name in zip(self._tables, ("buffer_ptrs", "signal_pad_ptrs"), strict=True):
            self._context.track(table, name)
        self.buffer_ptrs_dev, self.signal_pad_ptrs_dev = map(address_of, self._tables)
        self.multicast_ptr, self.offset, self.device = 0, 0, torch.device("cpu")

    # ---- allocation

    @staticmethod
    def empty_strided_p2p(
        size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: Any = None,
        group_name: str | None = None, alloc_id: int | None = None,
    ) -> torch.Tensor:  # fmt: skip
        context = context_of_rank("symmetric memory")
        extent = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        nbytes = (extent if prod(size) else 0) * dtype.itemsize
        one = _Allocated(context, nbytes, group_name)
        tensor = one.buffer.view(dtype).as_strided(tuple(size), tuple(stride))
        fill_with_garbage(tensor)
        name = context.variable(("empty", "empty_strided_p2p")) or f"symmetric tensor {one.number}"
        offset = one.number * PAGE_BYTES  # the same on all ranks, and no other allocation's
        for memory, what, itemsize, fresh, shape in (
            (one.buffer, name, dtype.itemsize, True, tuple(size)),
            (one.pad, f"signal pad of {name}", PAD_WORD.itemsize, False, ()),
        ):
            context.memory.register(
                address_of(memory), memory.numel(), itemsize, context.rank, what,
                heap_offset=offset, heap=HEAP, initialised=not fresh, shape=shape,
            )  # fmt: skip
            offset += PAGE_BYTES // 2
        return tensor

    @staticmethod
    def rendezvous(
        tensor: torch.Tensor, group_name: str | None = None, *, or_pad: bool = False
    ) -> SymmetricMemory | None:
        """The handle of the allocation that holds `tensor`; all ranks of the group make it."""
        own = _Allocated.of(tensor, or_pad=or_pad)
        if own is None:
            return None
        name = group_name or own.group_name or c10d._get_default_group().group_name
        if name not in own.handles:
            group = c10d._resolve_process_group(name)
            parts = SymmetricMemory.meetings.exchange(
                (HEAP, group.members), group.members, group.rank(),
                "a rendezvous of symmetric memory", own,
            )  # fmt: skip
            sizes = [part.nbytes for part in parts]
            if len(set(sizes)) > 1:
                raise UsageError(
                    f"a rendezvous of tensors of {sizes} bytes, by rank; symmetric tensors have one"
                    " size on all ranks", place=user_place(),
                )  # fmt: skip
            own.handles[name] = SymmetricMemory(own, group, parts)
        return own.handles[name]

    @staticmethod
    def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
        return _Allocated.of(tensor) is not None

    @staticmethod
    def set_group_info(*about: Any) -> None:
        """A group's ranks know each other here."""

    @staticmethod
    def set_backend(name: str) -> None:
        """All of them are the same memory here; a script is told the one that it has chosen."""
        context_of_rank("symmetric memory").belongings["backend"] = name

    @staticmethod
    def get_backend(device: Any) -> str:
        return context_of_rank("symmetric memory").belongings.get("backend", "CUDA")

    @staticmethod
    def has_multicast_support(*where: Any) -> bool:
        return False

    # ---- memory of peers

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0
    ) -> torch.Tensor:
        return self._view(self._parts[rank].buffer, self.buffer_size, sizes, dtype, storage_offset)

    get_remote_tensor = get_buffer

    def peers(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        """A tensor of this allocation, in its buffer or on its signal pad, as `rank` has it."""
        own = self._parts[self.rank]
        for memory, there in ((own.buffer, "buffer"), (own.pad, "pad")):
            offset = address_of(tensor) - address_of(memory)
            if 0 <= offset < memory.numel():
                peers: torch.Tensor = getattr(self._parts[rank], there)
                start = peers[offset:]  # bytes; what is behind the last element may not divide
                whole = start[: start.numel() // tensor.itemsize * tensor.itemsize]
                return whole.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        raise UsageError("the tensor is not of this allocation", place=user_place())

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype | None = None,
        storage_offset: int = 0,
    ) -> torch.Tensor:  # fmt: skip
        dtype = dtype or torch.uint32
        words = self.signal_pad_size // dtype.itemsize - storage_offset
        pad = self._parts[rank].pad
        return self._view(pad, self.signal_pad_size, sizes or (words,), dtype, storage_offset)

    @staticmethod
    def _view(memory: torch.Tensor, nbytes: int, sizes, dtype, offset: int) -> torch.Tensor:
        count = prod(sizes)
        if (offset + count) * dtype.itemsize > nbytes:
            raise OutOfBoundsError(
                f"a view of {tuple(sizes)} {dtype} from element {offset} on does not fit into"
                f" {nbytes} bytes", place=user_place(),
            )  # fmt: skip
        return memory.view(dtype)[offset : offset + count].view(tuple(sizes))

    # ---- signals, in order on the current stream

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """All ranks' streams come here; what they did before is then known to all."""
        pad, place = self.signal_pad_ptrs[0], user_place()

        def make() -> BarrierWork:
            number = self._calls[channel] = self._calls.get(channel, 0) + 1
            key = f"{number} of channel {channel} on signal pad {pad:#x}"
            return BarrierWork(key, self.world_size, place=place)

        self._context.enqueue(make)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Set the own word on a peer's pad, once it is 0 there."""
        self._exchange(self.signal_pad_ptrs[dst_rank], self.rank, channel, "release", 0, 1)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for a peer's word on the own pad, and set it back to 0."""
        self._exchange(self.signal_pad_ptrs[self.rank], src_rank, channel, "acquire", 1, 0)

    def _exchange(self, pad: int, word: int, channel: int, order: str, old: int, new: int) -> None:
        address = pad + (channel * self.world_size + word) * PAD_WORD.itemsize
        name, place = "put_signal" if order == "release" else "wait_signal", user_place()
        source = (
            f"def {name}(rt, word):\n"
            f"    while rt.atomic_cas({order!r}, 'sys', word, {old}, {new}, i32, (), 0) != {old}:\n"
            "        pass\n"
        )
        names = dict(LIBRARY)
        exec(compile(source, f"<weft emulator: {name}>", "exec"), names)
        parameter = Parameter("word", "!tt.ptr<i32>")
        kernel = EmulatedKernel(name, names[name], (parameter,), [place], source, 32)
        args = (np.int64(address),)
        self._context.enqueue(lambda: KernelWork(kernel, (1, 1, 1), args, place=place))

    @staticmethod
    def stream_write_value32(tensor: torch.Tensor, offset: int, val: int) -> None:
        """Store a word behind all that the current stream has done."""
        context, place = context_of_rank("symmetric memory"), user_place()
        address = address_of(tensor) + offset * PAD_WORD.itemsize
        context.reach(tensor, address, "words")
        kept = context.keeping(tensor)
        context.enqueue(lambda: WordWork(address, val, PAD_WORD, place=place, keep=kept()))

    @staticmethod
    def memset32(tensor: torch.Tensor, offset: int = 0, val: int = 0, count: int = 1) -> None:
        for word in range(offset, offset + count):
            SymmetricMemory.stream_write_value32(tensor, word, val)


def intercept_symmetric_memory(meetings: Meetings) -> Callable[[], None]:
    """Let torch's symmetric memory be the emulated ranks'; returns the undo."""
    SymmetricMemory.meetings = meetings
    own = torch_classes._SymmetricMemory
    names = (*PER_PROCESS, "_should_use_implicit_mempool")
    before = {name: getattr(torch_module, name) for name in names if hasattr(torch_module, name)}
    torch_module._SymmetricMemory = torch_classes._SymmetricMemory = SymmetricMemory  # type: ignore
    for name, held in before.items():
        setattr(torch_module, name, _OfRank(held) if name in PER_PROCESS else lambda: False)

    def restore() -> None:
        del SymmetricMemory.meetings
        torch_module._SymmetricMemory = torch_classes._SymmetricMemory = own  # type: ignore
        for name, held in before.items():
            setattr(torch_module, name, held)

    return restore
