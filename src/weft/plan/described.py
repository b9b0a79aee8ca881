"""The kernels of an operator's call as records, for `compile`: found by calling it.

The call is made in a world where nothing is launched, with tensors that have no memory, twice: with
m rows and with another number. A record says what both launches have in common. So one binary
serves calls of all m, and knows that rows begin at 16 bytes where their length makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses import FakeTensorMode

from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.language import triton_api
from weft.language.world_arg import SlotArg, WorldArg, language_version

META = torch.device("meta")
# The transport of calls that only libraries run.
LIBRARY = "nccl"

Kernels = Iterator[tuple[Any, KernelRecord]]


class DescribedWorld:
    """Rank 0 of a world without memory: what it queues is nothing, but for launches. `is_on_heap`:
    do tensors lie where peers read them?"""

    rank, device, name = 0, META, "described"

    def __init__(
        self, num_ranks: int, target: Target, nodes: tuple[int, ...] = (), is_on_heap: bool = False
    ) -> None:
        self.num_ranks, self.target, self.is_on_heap = num_ranks, target, is_on_heap
        version, ranks = map(triton_api.constexpr, (language_version(), num_ranks))
        self.arg = WorldArg(_meta(torch.int64), ranks, version)
        seats = [node for node, ranks in enumerate(nodes or (num_ranks,)) for _ in range(ranks)]
        self.backend = SimpleNamespace(seats=SimpleNamespace(nodes=seats))
        self.calls = _Calls()

    def workspace(
        self, key: str, buffers: Mapping[str, tuple] | None = None,
        signals: Mapping[str, tuple] | None = None, *, num_slots: int | None = None,
    ) -> Any:  # fmt: skip
        arg = SlotArg(_meta(torch.int64), _meta(torch.int32), _meta(torch.int64))
        wanted = {**(buffers or {}), **(signals or {})}
        arrays = {
            name: torch.empty(shape, dtype=dtype, device=META)
            for name, (shape, dtype) in wanted.items()
        }
        return SimpleNamespace(**arrays, arg=arg, number=0)

    reserve = workspace

    def scratch(self, key: str, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=META)

    def is_recording(self) -> bool:
        return False

    def operator_call(self, name: str, tensors: str = "") -> int:
        return 0

    def error_word(self, explain: Any) -> torch.Tensor:
        return _meta(torch.int64)

    def offset(self, tensor: torch.Tensor) -> int | None:
        return 0 if self.is_on_heap else None

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor

    def replays(self) -> Any:
        return SimpleNamespace(run=lambda key, launch, behind=None: launch())

    def stream(self, name: str = "main") -> Any:
        return _Stream()

    current_stream = stream

    def _queue_nothing(self, *_: Any, **__: Any) -> None:
        pass

    load = copy = copy_word = take_token = _queue_nothing


class _Calls(dict):
    num_recorded = 0

    def is_first(self, key: Any, kept: Any) -> bool:
        return False


class _Stream(nullcontext):
    def wait(self, other: Any) -> None:
        pass


def _meta(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(1, dtype=dtype, device=META)


def one_row_more(problem: Any) -> list[Any]:
    return [replace(problem, m=problem.m + 1)]


def kernels_of(
    run: Callable[..., Any], make_inputs: Callable[..., Mapping[str, Any]],
    candidates: Callable[..., Iterator[Any]],
    neighbours: Callable[[Any], Iterable[Any]] = one_row_more,
) -> Callable[[Any, Any, Target], Kernels]:  # fmt: skip
    """A card's `kernels`, of its other functions. `neighbours`: the problem with other rows; the
    first that launches the same kernels is taken."""

    def kernels(problem: Any, config: Any, target: Target) -> Kernels:
        config = config or next(iter(candidates(problem, target)))

        def launched(one: Any) -> list[tuple[Any, KernelRecord]]:
            is_on_heap = getattr(one, "in_place", False)
            world = DescribedWorld(one.num_ranks, target, one.nodes, is_on_heap)
            with FakeTensorMode():
                drawn = make_inputs(one, 0)
            inputs = {name: _without_memory(value) for name, value in drawn.items()}
            return launched_by(lambda: run(world, one, inputs, config))

        if config.transport == LIBRARY:
            return
        own = launched(problem)
        for other in neighbours(problem):
            beside = launched(other)
            if [fn for fn, _ in own] == [fn for fn, _ in beside]:
                own = [(fn, common(x, y)) for (fn, x), (_, y) in zip(own, beside, strict=True)]
                break
        yield from own

    return kernels


def launched_by(call: Callable[[], Any]) -> list[tuple[Any, KernelRecord]]:
    """What a call launches, as it is."""
    with triton_api.described_launches() as found:
        call()
    return found


def _without_memory(value: Any) -> Any:
    """A drawn value as a tensor of its shape and strides alone."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)


def common(one: KernelRecord, other: KernelRecord) -> KernelRecord:
    """What two launches of a kernel have in common: an argument that is 1 in one of them, or
    divisible by 16, is any number."""
    signature: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    for name, kind in one.signature.items():
        value = one.constants.get(name)
        signature[name], kept = _common(kind, other.signature[name], value)
        if kept is not None or signature[name] == "constexpr":
            constants[name] = kept
    aligned = tuple(path for path in one.divisible_by_16 if path in other.divisible_by_16)
    return replace(one, signature=signature, constants=constants, divisible_by_16=aligned)


def _common(kind: Any, other: Any, value: Any) -> tuple[Any, Any]:
    """The type that serves both, and what of the value is compiled in."""
    if isinstance(kind, tuple):
        pairs = [_common(*three) for three in zip(kind, other, value, strict=True)]
        kinds, values = zip(*pairs, strict=True)
        return kinds, type(value)(*values) if hasattr(value, "_fields") else values
    if kind == "constexpr" and other != "constexpr":
        return other, None
    return kind, value
