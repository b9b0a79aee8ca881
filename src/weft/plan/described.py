"""The kernels of an operator's call as records, for `compile`: found by calling it.

The call is made in a world where nothing is launched, with tensors that have no memory, twice: with
m rows and with another number. A record says what both launches have in common. So one binary
serves calls of all m, and knows that rows begin at 16 bytes where their length makes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.base.card import UNFUSED
from weft.base.records import KernelRecord
from weft.base.settings import Settings
from weft.base.target import Target
from weft.language import triton_api
from weft.language.triton_api import LeftOut
from weft.language.world_arg import SlotArg, WorldArg, language_version
from weft.runtime.start import called

META = torch.device("meta")
# The transports of calls that launch nothing of the operator's own.
BY_OTHERS = ("nccl", UNFUSED)

Kernels = Iterator[tuple[Any, KernelRecord]]


class DescribedWorld:
    """Rank 0 of a world without memory: what it queues is nothing, but for launches. `is_on_heap`:
    do tensors lie where peers read them? `is_recorded`: are its calls recorded?"""

    rank, device, name = 0, META, "described"
    orders = ()
    settings = Settings()

    def __init__(
        self, num_ranks: int, target: Target, nodes: tuple[int, ...] = (), is_on_heap: bool = False,
        is_recorded: bool = False, version: int | None = None,
        choices: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.choices = choices
        self.num_ranks, self.target, self.is_on_heap = num_ranks, target, is_on_heap
        self.is_recorded = is_recorded
        version, ranks = map(triton_api.constexpr, (version or language_version(), num_ranks))
        self.arg = WorldArg(_meta(torch.int64), ranks, version)
        seats = [node for node, ranks in enumerate(nodes or (num_ranks,)) for _ in range(ranks)]
        self.backend = SimpleNamespace(
            seats=SimpleNamespace(nodes=seats), by_address=None, exchange=self._queue_nothing
        )
        self.calls = _Calls()
        self.mailboxes: dict[str, Any] = {}
        # What a library multiplies in calls: operands' shapes, strides and dtype.
        self.products: set[tuple] = set()

    def workspace(
        self, key: str, buffers: Mapping[str, tuple] | None = None,
        signals: Mapping[str, tuple] | None = None, *, num_slots: int | None = None,
        shared: Mapping[str, tuple] | None = None, axes: Any = None,
    ) -> Any:  # fmt: skip
        arg = SlotArg(_meta(torch.int64), _meta(torch.int32), _meta(torch.int64))
        wanted = {**(buffers or {}), **(signals or {}), **(shared or {})}
        arrays = {
            name: torch.empty(shape, dtype=dtype, device=META)
            for name, (shape, dtype) in wanted.items()
        }
        return SimpleNamespace(**arrays, arg=arg, number=0, is_outgrown=False)

    def asked(self, *args: Any, **named: Any) -> Any:
        slot = self.workspace(*args, **named)
        return SimpleNamespace(take=lambda is_recording: slot, reserve=lambda: slot)

    def scratch(self, key: str, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=META)

    def is_recording(self) -> bool:
        return self.is_recorded

    def operator_call(self, name: str, tensors: str = "") -> int:
        return 0

    def error_word(self, explain: Any) -> torch.Tensor:
        return _meta(torch.int64)

    def offset(self, tensor: torch.Tensor) -> int | None:
        return 0 if self.is_on_heap else None

    def peer(self, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        return tensor

    def peers(self, tensor: torch.Tensor, ranks: Sequence[int]) -> list[torch.Tensor]:
        return [tensor] * len(ranks)

    def replays(self) -> Any:
        run = lambda key, launch, *_, **__: launch()  # noqa: E731
        return SimpleNamespace(run=run, replay=lambda key: False)

    def stream(self, name: str = "main") -> Any:
        return _Stream()

    current_stream = stream

    def _queue_nothing(self, *_: Any, **__: Any) -> None:
        pass

    load = copy = copy_word = take_token = check = begin_call = _queue_nothing

    def stream_order(self) -> Any:
        return SimpleNamespace(take=self._queue_nothing)


class _Calls(dict):
    num_recorded = 0

    def is_first(self, key: Any, kept: Any) -> bool:
        return False

    def is_covered(self, key: Any, sizes: Mapping[str, int]) -> bool:
        return key[0] == "prepared"  # what is recorded is described by itself

    def cover(self, key: Any, sizes: Mapping[str, int], kept: Any = None) -> None:
        pass


class _Stream(nullcontext):
    def wait(self, other: Any) -> None:
        pass


def _meta(dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(1, dtype=dtype, device=META)


class _WithoutGenerators(TorchFunctionMode):
    """Numbers without memory are drawn by no generator."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        named = {name: one for name, one in (kwargs or {}).items() if name != "generator"}
        return func(*args, **named)


class _Multiplied(TorchDispatchMode):
    """Takes down torch's products of two matrices."""

    def __init__(self, found: set[tuple]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket is torch.ops.aten.mm:
            a, b = args[:2]
            self._found.add((*a.shape, a.stride(), *b.shape, b.stride(), a.dtype))
        return func(*args, **(kwargs or {}))


def is_by_others(config: Any) -> bool:
    """Do libraries or other operators run such a call?"""
    return config.transport in BY_OTHERS or not getattr(config, "is_fused", True)


def one_row_more(problem: Any) -> list[Any]:
    return [replace(problem, m=problem.m + 1)]


@dataclass(frozen=True)
class KernelsOf:
    """A card's `kernels`, of its other functions. `neighbours`: the problem with other rows; the
    first that launches the same kernels is taken."""

    run: Callable[..., Any]
    make_inputs: Callable[..., Mapping[str, Any]]
    candidates: Callable[..., Iterator[Any]]
    neighbours: Callable[[Any], Iterable[Any]] = one_row_more

    def __call__(self, problem: Any, config: Any, target: Target) -> Kernels:
        config = config or next(iter(self.candidates(problem, target)))
        if is_by_others(config):
            return

        def launched(one: Any) -> list[tuple[Any, KernelRecord]]:
            is_on_heap = getattr(one, "in_place", False)
            world = DescribedWorld(one.num_ranks, target, one.nodes, is_on_heap)
            found = self.launches(one, world, self.inputs(one), config)
            return [(left.fn, left.record()) for left in found]

        own = launched(problem)
        for other in self.neighbours(problem):
            beside = launched(other)
            if [fn for fn, _ in own] == [fn for fn, _ in beside]:
                own = [(fn, common(x, y)) for (fn, x), (_, y) in zip(own, beside, strict=True)]
                break
        yield from own

    def inputs(self, problem: Any, rank: int = 0) -> dict[str, Any]:
        """A call's arguments, of tensors without memory."""
        with META, _WithoutGenerators():
            return dict(self.make_inputs(problem, rank))

    def launches(
        self, problem: Any, world: DescribedWorld, inputs: Mapping[str, Any], config: Any = None
    ) -> list[LeftOut]:
        """What a call launches in this world; without a configuration, as it is chosen there. The
        library's products are added to the world's."""
        with triton_api.described_launches() as found, _Multiplied(world.products):
            self.run(world, problem, inputs, config)
        return found

    def gradients_launches(
        self, problem: Any, world: DescribedWorld, inputs: Mapping[str, Any], config: Any = None
    ) -> list[LeftOut]:
        """The same of a call that torch differentiates, and of its gradients."""
        leaves = {name: _with_gradient(value) for name, value in inputs.items()}
        with triton_api.described_launches() as found, called(world):
            made = tree_leaves(self.run(world, problem, leaves, config))
            results = [one for one in made if isinstance(one, torch.Tensor) and one.requires_grad]
            if results:
                torch.autograd.backward(results, [*map(torch.empty_like, results)])
        return found


def stages_called(
    kernels: KernelsOf, problem: Any, target: Target, is_recorded: bool = False,
    choices: Mapping[str, Any] = MappingProxyType({}),
) -> Any:  # fmt: skip
    """The stages of the plan that a call without a configuration runs; None where it runs none."""
    is_on_heap, nodes = getattr(problem, "in_place", False), getattr(problem, "nodes", ())
    world = DescribedWorld(
        problem.num_ranks, target, nodes, is_on_heap, is_recorded, choices=choices
    )
    kernels.launches(problem, world, kernels.inputs(problem))
    calls = (one[1] if isinstance(one, tuple) else getattr(one, "runner", None)
             for one in world.calls.values())  # fmt: skip
    runner = next((one for one in calls if one is not None), None)
    if runner is not None and is_recorded:
        runner = runner.alongside or runner
    return None if runner is None else runner.stages


def _with_gradient(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.detach().requires_grad_() if is_number else value


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
    if isinstance(kind, tuple) and kind:
        pairs = [_common(*three) for three in zip(kind, other, value, strict=True)]
        kinds, values = zip(*pairs, strict=True)
        return kinds, type(value)(*values) if hasattr(value, "_fields") else values
    if kind == "constexpr" and other != "constexpr":
        return other, None
    return kind, value
