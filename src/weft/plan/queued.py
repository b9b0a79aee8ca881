"""What a call queues, written down: launches, copies, waits of streams, by named memory.

The call is made in a world whose memory is addresses alone. Each address in it is found again as
a place (an input, a slot's part, the world's table ..) of some rank, and a distance from there: so
what is written serves any call of these sizes, wherever its tensors lie.
"""

from __future__ import annotations

import ctypes
import mmap
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.base.errors import UnsupportedError, UsageError
from weft.base.target import Target
from weft.language import triton_api
from weft.language.triton_api import LeftOut
from weft.language.world_arg import SlotArg, WorldArg
from weft.plan.described import DescribedWorld

# How far apart ranks' heaps are; a rank's own memory has as much. All begins at multiples of ALIGN.
SPAN, ALIGN = 1 << 37, 512
# torch's functions that make memory; that look at some, or hand over what the host has filled.
_aten = torch.ops.aten
MAKERS = (_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty,
          _aten.new_empty_strided)  # fmt: skip
LOOKS = (_aten.detach, _aten.alias, _aten.lift_fresh)

# A place, the rank whose part of it is meant (-1: one's own), bytes behind its begin.
Address = tuple[str, int, int]
NULL: Address = ("null", -1, 0)
# What is reserved for other calls.
UNUSED = "unused"


class LibraryCallError(UnsupportedError):
    """A call of a library, which no artefact holds."""


@dataclass
class Kernels:
    """Kernels that launches ask for, each once, in the order in which they came."""

    launches: list[LeftOut] = field(default_factory=list)
    _numbers: dict[Any, int] = field(default_factory=dict)
    _known: dict[Any, int] = field(default_factory=dict)
    _kept: list[Any] = field(default_factory=list)

    def number_of(self, launch: LeftOut, key_of: Callable[[LeftOut], Any]) -> int:
        kinds = triton_api.kinds_of(launch.fn, launch.arguments, self._kept)
        seen = (id(launch.fn), kinds, *sorted(launch.options.items()))
        number = self._known.get(seen)
        if number is None:
            self._kept.append(launch.fn)
            number = self._numbers.setdefault(key_of(launch), len(self.launches))
            if number == len(self.launches):
                self.launches.append(launch)
            self._known[seen] = number
        return number


@lru_cache(maxsize=8)
def _addresses(nbytes: int) -> tuple[mmap.mmap, int]:
    """So many of them, where they begin, and what holds them. No memory is behind them, and nobody
    is to write there; who reads, as what prints a tensor does, reads zeros."""
    held = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    return held, np.frombuffer(held, dtype=np.uint8, count=1).ctypes.data


class _Backend(SimpleNamespace):
    @property
    def group(self) -> Any:
        """What calls of torch.distributed are made with."""
        raise LibraryCallError(
            "the call runs collectives of torch.distributed, and an artefact holds weft's kernels "
            "alone; name a configuration that is fused"
        )


class _Stream(AbstractContextManager[Any]):
    def __init__(self, world: WrittenWorld, name: str) -> None:
        self.world, self.name = world, name

    def wait(self, other: _Stream) -> None:
        self.world.steps.append(["wait", self.name, other.name])

    def __enter__(self) -> _Stream:
        self.world.entered.append(self)
        return self

    def __exit__(self, *failure: Any) -> None:
        self.world.entered.pop()


class WrittenWorld(DescribedWorld):
    """One rank of a world whose calls are written down."""

    device = torch.device("cpu")

    def __init__(
        self, rank: int, num_ranks: int, target: Target, is_recorded: bool,
        take: Callable[[LeftOut], int],
    ) -> None:  # fmt: skip
        super().__init__(num_ranks, target, is_recorded=is_recorded)
        self.backend = _Backend(**vars(self.backend))
        self.rank, self._take = rank, take
        self.steps: list[list[Any]] = []
        self.entered = [_Stream(self, "main")]
        self.slots: list[dict[str, Any]] = []
        self.scratches: dict[str, int] = {}
        # By address: where a place begins, its bytes, and its name; and by name those of `made`.
        self._begins: list[int] = []
        self._places: list[tuple[int, int, str]] = []
        # All ranks' heaps, then this rank's own memory; where it goes on, there and on its heap.
        _, self._heaps = _addresses((num_ranks + 1) * SPAN)
        self._ends = {False: self._heaps + num_ranks * SPAN, True: self._heaps + rank * SPAN}
        self._num_made = 0
        self.made: dict[str, int] = {}
        self._scratch: dict[str, torch.Tensor] = {}
        # Tables of the call's own, whose memory is the host's as long as it is written down.
        self.constants: dict[str, torch.Tensor] = {}
        self.used: list[str] = []
        self.arg = WorldArg(self.memory("table", (1,), torch.int64), *self.arg[1:])

    # ---- memory

    def memory(
        self, name: str, shape: Sequence[int], dtype: torch.dtype,
        strides: Sequence[int] | None = None, is_symmetric: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """A tensor at addresses of its own."""
        count = prod(shape)
        if strides is not None and count:
            count = 1 + sum((extent - 1) * step for extent, step in zip(shape, strides))
        nbytes = max(1, count * dtype.itemsize)
        begin = self._ends[is_symmetric]
        self._ends[is_symmetric] = begin + -(-nbytes // ALIGN) * ALIGN + ALIGN
        self._add(begin, nbytes, name)
        return _tensor_at(begin, shape, dtype, strides)

    def _add(self, begin: int, nbytes: int, name: str) -> None:
        number = bisect_right(self._begins, begin)
        self._begins.insert(number, begin)
        self._places.insert(number, (begin, nbytes, name))

    def _place_of(self, tensor: torch.Tensor) -> Address:
        """What a kernel is handed; where it lies in the host's memory, a constant: values that the
        call has computed there for the device to read."""
        begin = tensor.data_ptr()
        is_here = self._heaps <= begin < self._heaps + (self.num_ranks + 1) * SPAN
        if begin and not is_here and begin not in self._begins:
            if not tensor.is_contiguous():
                raise UnsupportedError(
                    f"a table of strides {tensor.stride()} is in no artefact yet"
                )
            name = f"constant:{len(self.constants)}"
            self.constants[name] = tensor
            self._add(begin, tensor.nbytes, name)
        return self.find(begin, 0)

    def new(self, like: torch.Tensor) -> torch.Tensor:
        """What torch makes in the call; as long as one of all places is what it is of."""
        name, self._num_made = f"made:{self._num_made}", self._num_made + 1
        return self.memory(name, like.shape, like.dtype, like.stride())

    def find(self, address: int, nbytes: int = 1) -> Address:
        """Raises  UnsupportedError: memory that is none of the call's"""
        if not (address or nbytes):  # of an empty tensor
            return NULL
        peer = -1
        owner = (address - self._heaps) // SPAN
        if 0 <= owner < self.num_ranks:
            if owner != self.rank:
                address, peer = address + (self.rank - owner) * SPAN, owner
        number = bisect_right(self._begins, address) - 1
        begin, size, name = self._places[number] if number >= 0 else (0, 0, UNUSED)
        if name.startswith(UNUSED) or address + nbytes > begin + size:
            raise UnsupportedError(
                f"a call uses memory at {address:#x} that is neither its tensors' nor the world's: "
                "it cannot be written to an artefact"
            )
        if name.startswith("made:"):
            self.made.setdefault(name, size)
        elif name.startswith("constant:") and name not in self.used:
            self.used.append(name)
        return name, peer, address - begin

    def workspace(
        self, key: str, buffers: Any = None, signals: Any = None, *, num_slots: int | None = None,
        shared: Any = None, axes: Any = None,
    ) -> Any:  # fmt: skip
        asked = {"buffers": buffers or {}, "signals": signals or {}, "shared": shared}
        index = len(self.slots)
        plain = {name: parts and {part: [_extent(size), str(dtype).removeprefix("torch.")]
                                  for part, (size, dtype) in parts.items()}
                 for name, parts in asked.items()}  # fmt: skip
        self.slots.append({"key": key, "num_slots": num_slots, **plain})
        return self._slot(f"slot:{index}", {**(buffers or {}), **(signals or {}), **(shared or {})})

    def _slot(self, name: str, parts: Mapping[str, tuple]) -> Any:
        def part(what: str, shape: Any, dtype: torch.dtype) -> torch.Tensor:
            shape = (shape,) if isinstance(shape, int) else shape
            return self.memory(f"{name}:{what}", shape, dtype, is_symmetric=True)

        words = zip(SlotArg._fields, _own_words(self.num_ranks), strict=True)
        arg = SlotArg(*(part(f"arg.{field}", *one) for field, one in words))
        arrays = {what: part(what, *one) for what, one in parts.items()}
        return SimpleNamespace(**arrays, arg=arg, number=len(self.slots), is_outgrown=False)

    def asked(self, *args: Any, **named: Any) -> Any:
        take = lambda is_recording: self.workspace(*args, **named)  # noqa: E731
        return SimpleNamespace(take=take, reserve=lambda: self._unused(*args, **named))

    def _unused(self, key: str, buffers: Any, signals: Any, **named: Any) -> Any:
        parts = {**(buffers or {}), **(signals or {}), **(named.get("shared") or {})}
        return self._slot(UNUSED, parts)

    def scratch(self, key: str, nbytes: int) -> torch.Tensor:
        found = self._scratch.get(key)
        if found is None or found.numel() < nbytes:
            name = f"scratch:{key}"
            found = self._scratch[key] = self.memory(name, (nbytes,), torch.uint8)
            self.scratches[key] = nbytes
        return found

    def error_word(self, explain: Any) -> torch.Tensor:
        raise UnsupportedError("a call that reports errors of its own is in no artefact yet")

    def offset(self, tensor: torch.Tensor) -> int | None:
        return None

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        address = tensor.data_ptr() + (rank - self.rank) * SPAN
        return _tensor_at(address, tensor.shape, tensor.dtype, tensor.stride())

    def peers(self, tensor: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor]:
        return [self.peer(tensor, rank) for rank in ranks]

    # ---- what is queued

    def begin_again(self, is_recorded: bool) -> None:
        """Forget what was queued so far, and not what calls have found out."""
        self.is_recorded = is_recorded
        self.steps.clear()
        self.slots.clear()
        self.made.clear()
        self.used.clear()

    def replays(self) -> Any:
        def run(key: Any, launch: Any, behind: Any = lambda: None, *, at_once: bool = False):
            launch()
            behind()

        return SimpleNamespace(run=run, replay=lambda key: False)

    def stream(self, name: str = "main") -> Any:
        return self.entered[0] if name == "main" else _Stream(self, name)

    def current_stream(self) -> Any:
        return self.entered[-1]

    def launched(self, launch: LeftOut) -> None:
        words = [self._word(kind, value) for kind, value in launch.words()]
        x, y, z = (*launch.grid, 1, 1)[:3]
        number, stream = self._take(launch), self.current_stream().name
        self.steps.append(["launch", stream, f"#{number}", [x, y, z], words])

    def _word(self, kind: str, value: Any) -> list[Any]:
        if kind.startswith("tensordesc"):
            base = value.base
            where = self.find(base.data_ptr(), 0)
            return ["descriptor", where, [*value.shape], [*value.strides], value.padding == "nan",
                    str(base.dtype).removeprefix("torch.")]  # fmt: skip
        if kind.startswith("*"):
            if not hasattr(value, "data_ptr"):
                raise UnsupportedError(f"an argument of type {kind} is {value!r}: no tensor")
            return [kind, self._place_of(value)]
        value = triton_api.unwrap(value)
        return [kind, int(value) if kind[0] in "iu" else float(value)]

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        if not dst.numel():
            return
        to, source = self.find(dst.data_ptr()), self.find(src.data_ptr())
        stream, size = self.current_stream().name, dst.element_size()
        if dst.is_contiguous() and src.is_contiguous():
            self.steps.append(["copy", stream, to, source, dst.nbytes])
        else:
            rows, columns = dst.shape
            pitches = [dst.stride(0) * size, src.stride(0) * size]
            self.steps.append(["copy_2d", stream, to, source, [rows, columns * size], pitches])

    copy_word = copy

    def take_token(self, word: torch.Tensor) -> None:
        self.steps.append(["token", self.current_stream().name, self.find(word.data_ptr())])


def _own_words(num_ranks: int) -> tuple[tuple[int, torch.dtype], ...]:
    return (1, torch.int64), (1, torch.int32), (num_ranks, torch.int64)


def _extent(size: Any) -> Any:
    return size if isinstance(size, int) else [*size]


def _tensor_at(
    address: int, shape: Sequence[int], dtype: torch.dtype, strides: Sequence[int] | None
) -> torch.Tensor:
    count = prod(shape)
    if count and strides is not None:
        count = 1 + sum((extent - 1) * step for extent, step in zip(shape, strides))
    memory = (ctypes.c_char * max(1, count * dtype.itemsize)).from_address(address)
    flat = torch.frombuffer(memory, dtype=torch.uint8)
    if not count:  # no dtype is of a byte
        flat = flat[:0]
    flat = flat.view(dtype)
    return flat.view(shape) if strides is None else flat.as_strided(shape, strides)


class _Makes(TorchDispatchMode):
    """torch makes memory where the world says, and computes nothing.

    Raises  LibraryCallError: what it would compute
    """

    def __init__(self, world: WrittenWorld) -> None:
        super().__init__()
        self.world = world

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named, maker = kwargs or {}, func.overloadpacket
        if maker in MAKERS:
            on_meta = [one.to("meta") if isinstance(one, torch.Tensor) else one for one in args]
            return self.world.new(func(*on_meta, **{**named, "device": torch.device("meta"),
                                                    "pin_memory": False}))  # fmt: skip
        if func.is_view or maker in LOOKS:
            return func(*args, **named)
        raise LibraryCallError(
            f"the call runs torch's {func}, and an artefact holds weft's kernels alone; name a "
            "configuration that is fused"
        )


# What makes the call: of a world, a problem, and tensors by name.
Run = Callable[[Any, Any, Mapping[str, Any]], Any]


def write_down(
    run: Run, problem: Any, likes: Mapping[str, Any], rank: int, target: Target, is_recorded: bool,
    take: Callable[[LeftOut], int], keep: Callable[[bytes], str],
) -> dict[str, Any]:  # fmt: skip
    """What a call of this problem queues on a rank, as plain values. `take` numbers its kernels,
    `keep` gives a table's values a name.

    Shapes  likes: its tensors without memory, by name
    Raises  UnsupportedError: it does what no artefact can hold; as the call
    """
    world = WrittenWorld(rank, problem.num_ranks, target, is_recorded, take)
    inputs, told = {}, []
    for name, like in likes.items():
        if not isinstance(like, torch.Tensor):
            raise UnsupportedError(f"{name} is a {type(like).__name__}: artefacts take tensors")
        inputs[name] = world.memory(f"input:{name}", like.shape, like.dtype, like.stride())
        told.append({"name": name, **_told(inputs[name])})
    with triton_api.described_launches(world.launched), _Makes(world), torch.no_grad():
        try:
            made = run(world, problem, inputs)
        except UsageError:
            if not is_recorded:
                raise
            # It asks to be called before it is recorded: what that call queued is not kept.
            world.is_recorded = False
            run(world, problem, inputs)
            world.begin_again(is_recorded=True)
            made = run(world, problem, inputs)
    results = [{"at": world.find(one.data_ptr(), 0), **_told(one)} for one in tree_leaves(made)]
    scratches = [{"key": key, "bytes": size} for key, size in world.scratches.items()]
    names = {f"scratch:{one['key']}": f"scratch:{i}" for i, one in enumerate(scratches)}
    names |= {name: f"made:{i}" for i, name in enumerate(world.made)}
    names |= {name: f"constant:{i}" for i, name in enumerate(world.used)}
    constants = [keep(world.constants[name].numpy().tobytes()) for name in world.used]
    return {
        "inputs": told, "results": _renamed(results, names), "slots": world.slots,
        "scratch": scratches, "made": [*world.made.values()], "constants": constants,
        "steps": _renamed(world.steps, names),
    }  # fmt: skip


def _told(tensor: torch.Tensor) -> dict[str, Any]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"dtype": dtype, "shape": [*tensor.shape], "strides": [*tensor.stride()]}


def _renamed(tree: Any, names: Mapping[str, str]) -> Any:
    if isinstance(tree, (list, tuple)):
        return [_renamed(one, names) for one in tree]
    if isinstance(tree, dict):
        return {key: _renamed(one, names) for key, one in tree.items()}
    return names.get(tree, tree) if isinstance(tree, str) else tree
