"""torch operations of an emulated rank, as the checker sees them.

An operation belongs to the rank's current stream: where its tensors are tracked memory (symmetric,
or seen by a kernel), that stream's earlier work finishes first while other ranks go on, and its
reads and writes are accesses like a kernel's. Fresh memory is a pattern that nobody mistakes for
a value, and unwritten until somebody writes it. All other operations pay one look at addresses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.base.errors import UnsupportedError
from weft.base.user_place import user_place
from weft.emulator.actors import Actor, address_of, span_of, spans_of, tensors_in
from weft.emulator.context import FRESH, RankContext, current
from weft.emulator.recording import frozen_operation

aten = torch.ops.aten

# Fresh memory: as a float of any width the first is NaN, as an integer the second stands out.
NAN_BYTE, GARBAGE_BYTE = 0xFF, 0xA5

_FRESH = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}

# What gives integers a start, as words for signals have one. It is the stream's that is current: to
# a kernel or a wait on another stream these words hold what the memory's last owner left there.
_FILLING = {
    "zeros", "ones", "full", "zeros_like", "ones_like", "full_like", "new_zeros", "new_ones",
    "new_full", "zero_", "fill_",
}  # fmt: skip

# In-place operations that do not look at what they overwrite.
_OVERWRITING = (
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_",
    "log_normal_", "cauchy_", "geometric_", "trunc_normal_",
)  # fmt: skip

# In-place operations that overwrite the elements that other arguments choose, and by which names
# they are given what they write. What `reduce=` makes of them is not followed.
_CHOOSING = (
    "index_put_", "index_copy_", "index_fill_", "scatter_", "masked_fill_", "masked_scatter_",
    "put_",
)  # fmt: skip
_WRITTEN_VALUES = ("values", "value", "source", "src")

# What reads a tensor's values on the host, where a GPU would have to wait as well.
_HOST_READS = {aten._local_scalar_dense.default, aten.equal.default}

# torch's own operations, each done at once. All others are made of these, of kernels, and of calls
# of a process group, whose ranks meet.
_OWN = {"aten", "prim", "prims", "profiler", "quantized"}
# Those of which all is seen: they are made of operations of torch's, kernels and meetings.
_SEEN = {"weft", "c10d", "_c10d_functional", "_dtensor", "fsdp", "symm_mem"}
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

# Copies move unwritten memory without looking at it.
_COPIES = {
    aten.clone.default, aten._to_copy.default, aten.copy_.default, aten.cat.default,
    aten._foreach_copy_.default,
}  # fmt: skip


@dataclass(frozen=True)
class _Manner:
    """How one torch operation treats its arguments, found once per operation."""

    func: Any  # kept: an operation that goes would leave its id to another one
    is_made_of_others: bool
    is_view: bool
    is_fresh: bool
    fills: bool
    writes: frozenset[str]
    reads_written: bool
    chooses: bool
    names: tuple[str, ...]


# By id: hashing an operation costs more than all the rest here.
_manners: dict[int, _Manner] = {}


def _manner(func: Any) -> _Manner:
    manner = _manners.get(id(func))
    if manner is None:
        schema = func._schema
        written = frozenset(
            a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write
        )
        outs = {a.name for a in schema.arguments if a.is_out}
        base = schema.name.split("::")[-1]
        manner = _manners[id(func)] = _Manner(
            func=func,
            is_made_of_others=func.namespace not in _OWN,
            is_view=bool(getattr(func, "is_view", False)) or base in _METADATA,
            is_fresh=func in _FRESH,
            fills=base in _FILLING,
            writes=written,
            reads_written=not (outs or base.removeprefix("_foreach_") in _OVERWRITING),
            chooses=base in _CHOOSING and "reduce" not in schema.overload_name,
            names=tuple(a.name for a in schema.arguments),
        )
    return manner


# What torch.compile and the like put in a tensor's place while they follow what is done with it.
_TRACED = (FakeTensor, FunctionalTensor)

_METADATA = {
    "_unsafe_view", "resize_", "set_", "sym_size", "sym_stride", "sym_numel", "size", "stride",
    "numel", "dim", "is_pinned", "is_same_size", "is_contiguous", "requires_grad_", "detach_",
    "unsqueeze_", "squeeze_", "transpose_", "t_", "as_strided_", "_has_same_storage_numel",
}  # fmt: skip


class TorchOperations(TorchDispatchMode):
    """Active on every rank's thread."""

    def __init__(self, context: RankContext) -> None:
        super().__init__()
        self.context = context
        self.memory = context.memory

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """torch.compile may trace: what it makes runs under this mode again."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if types and any(issubclass(one, _TRACED) for one in types):
            return func(*args, **kwargs)
        manner = _manners.get(id(func)) or _manner(func)
        if manner.is_made_of_others:
            # What it does is seen as if its caller did it: nothing is while this mode handles.
            if func.namespace not in _SEEN:
                self._wait_for_tracked(args, kwargs)
            with self:
                return func.redispatch(_CPU, *args, **kwargs)
        if manner.is_view:
            return func(*args, **kwargs)
        if manner.is_fresh:
            result = func(*args, **kwargs)
            self._unwritten(result)
            return result
        if self.context.recording is not None:
            return self._record(func, manner, args, kwargs)
        if self._is_tracked(args, kwargs):
            return self._tracked(func, manner, args, kwargs)
        result = func(*args, **kwargs)
        if manner.fills and not (result.is_floating_point() or result.is_complex()):
            if result.numel() and result.device.type == "cpu" and not _is_traced(result):
                self.context.filled(result)
        return result

    def _is_tracked(self, args: tuple, kwargs: dict) -> bool:
        find = self.memory.find
        tensors = tensors_in((*args, *kwargs.values()) if kwargs else args)
        return any(find(address_of(tensor)) is not None for tensor in tensors)

    def _wait_for_tracked(self, args: tuple, kwargs: dict) -> None:
        """Code that is compiled (a C++ extension's) reads its tensors by itself, unseen: now."""
        if self.context.recording is None and self._is_tracked(args, kwargs):
            self.context.settle(may_go_on=True)

    def _tracked(self, func, manner: _Manner, args, kwargs):
        if func in _HOST_READS:
            for tensor in tensors_in(args):
                self.context.host_read(tensor)
            return func(*args, **kwargs)
        self._let_others_run(manner, args)
        if not self.context.settle(may_go_on=not _decides_on_values(func)):
            # As on a GPU: queued behind what cannot move yet, with values once it has run.
            result, make = frozen_operation(
                self.context, self.report_accesses, func, manner, args, kwargs
            )
            self.context.stream.enqueue(make())
            return result
        with self.context.operation() as actor:
            self.report_accesses(func, manner, args, kwargs, actor)
            result = func(*args, **kwargs)
        self._forget_overwritten(manner, args, kwargs)
        return result

    def _let_others_run(self, manner: _Manner, args: tuple) -> None:
        """Reading symmetric memory again and again is waiting for somebody."""
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and not manner.writes:
            known = self.memory.find(address_of(first))
            if known is not None and known.heap_offset is not None:
                self.context.polls(known.address, user_place())

    def report_accesses(self, func, manner: _Manner, args, kwargs, actor: Actor) -> None:
        """Tell the checker what `func` is about to read and write."""
        find = self.memory.find
        named = [*zip(manner.names, args, strict=False), *kwargs.items()]
        looks = func not in _COPIES
        for name, value in named:
            written = name in manner.writes
            for tensor in tensors_in((value,)):
                if not tensor.numel() or find(address_of(tensor)) is None:
                    continue
                if written and manner.chooses:
                    self._report_chosen(func, tensor, dict(named), actor)
                    continue
                span = [span_of(tensor)]
                if not written or manner.reads_written:
                    actor.access(span, False, looks=looks)
                if written:
                    actor.access(span, True)

    def _report_chosen(self, func, tensor: torch.Tensor, named: dict, actor: Actor) -> None:
        """The elements that `func` writes: those that become 1 where it writes ones into zeros."""
        zeros = torch.zeros(tensor.shape, dtype=tensor.dtype)
        ones = {
            name: torch.ones_like(value) if isinstance(value, torch.Tensor) else 1
            for name, value in named.items()
            if name in _WRITTEN_VALUES
        }
        func(**{**named, **ones, "self": zeros})
        looked_at = zeros.view(torch.uint8) if zeros.element_size() == 1 else zeros  # fp8, too
        spans = spans_of(tensor, looked_at != 0)
        if named.get("accumulate"):
            actor.access(spans, False)
        actor.access(spans, True)

    def _unwritten(self, tensor: torch.Tensor) -> None:
        """Fresh memory: a pattern that stands out, tracked until all of it is written."""
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu":
            return
        if _is_traced(tensor):  # it has no memory
            return
        if tensor.numel():
            fill_with_garbage(tensor)
            self.context.track(tensor, FRESH, initialised=False)

    def _forget_overwritten(self, manner: _Manner, args, kwargs) -> None:
        """What torch has filled and no kernel has seen is of no more interest."""
        if manner.chooses:
            return
        for name, value in [*zip(manner.names, args, strict=False), *kwargs.items()]:
            if name in manner.writes and isinstance(value, torch.Tensor):
                self.context.forget_if_filled(value)

    def _record(self, func, manner: _Manner, args, kwargs):
        """While a recording is made: run nothing, and remember what to run at each replay."""
        if func in _HOST_READS:
            self.context.refuse_reads_of_recordings()
        if not any(True for _ in tensors_in((*args, *kwargs.values()))):
            return func(*args, **kwargs)  # a constant: made once, as while capturing a graph
        if _decides_on_values(func):
            raise UnsupportedError(
                f"{func} cannot be recorded: the shape of its result depends on values",
                place=user_place(),
            )
        context = self.context
        result, make = frozen_operation(context, self.report_accesses, func, manner, args, kwargs)
        context.recording.add(context.stream, make)
        return result


def _decides_on_values(func: Any) -> bool:
    """Does the result's shape depend on values, so that a GPU's host waits as well?"""
    tags = func.tags
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


def fill_with_garbage(tensor: torch.Tensor) -> None:
    """NaN, or for integers a byte pattern, over all of the tensor's storage."""
    if tensor.dtype is torch.bool:
        return
    number = tensor.is_floating_point() or tensor.is_complex()
    storage = tensor.untyped_storage()
    ctypes.memset(storage.data_ptr(), NAN_BYTE if number else GARBAGE_BYTE, storage.nbytes())


def _is_traced(tensor: torch.Tensor) -> bool:
    """Has it no values, because torch.compile or the like follows what is done with it?"""
    return isinstance(tensor, _TRACED) or torch._is_functional_tensor(tensor)


# ---------------------------------------------------------------------------------------------
# What reads tensors without an operation


def intercept_host_reads() -> Callable[[], None]:
    """Make the methods that bypass torch's dispatcher wait as operations do; returns the undo."""
    plain = {
        name: (getattr(torch.Tensor, name), name in vars(torch.Tensor))
        for name in ("tolist", "numpy", "__repr__", "data_ptr", "__reduce_ex__")
    }

    def reading(base: Callable) -> Callable:
        def method(self, *args, **kwargs):
            context = current()
            if context is not None and self.device.type == "cpu" and not _is_traced(self):
                context.host_read(self)
            return base(self, *args, **kwargs)

        return method

    def addressing(base: Callable) -> Callable:
        def data_ptr(self):
            context = current()
            if context is not None:
                context.address_taken(self, base(self))
            return base(self)

        return data_ptr

    for name, (base, _) in plain.items():
        wrapper = addressing(base) if name == "data_ptr" else reading(base)
        setattr(torch.Tensor, name, wrapper)

    def restore() -> None:
        for name, (base, own) in plain.items():
            if own:
                setattr(torch.Tensor, name, base)
            else:
                delattr(torch.Tensor, name)

    return restore
