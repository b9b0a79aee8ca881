"""Calls found again: what an operator found out about tensors like these; checks of tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch._subclasses import FakeTensor

from weft.base.dtypes import FLOATS
from weft.base.errors import ConfigError, DtypeError, ShapeError, UsageError
from weft.compiler import layouts


def by_place(world: Any, tensors: Sequence[torch.Tensor | None], rest: tuple) -> tuple:
    """The key of a call whose tensors peers read where they lie.

    It has the tensors' type, since a DTensor has no memory of its own.
    """
    offset = world.offset
    for one in tensors:
        if one is None:
            rest += (None,)
        else:
            rest += (type(one), one.shape, one.dtype, one.stride(), one.get_device(), offset(one))
    return rest


def by_layout(world: Any, tensors: Sequence[torch.Tensor | None], rest: tuple) -> tuple:
    """The key of a call that takes tensors wherever they lie; transposed ones are others."""
    for one in tensors:
        if one is None:
            rest += (None,)
        else:
            rest += (type(one), one.shape, one.stride(), one.dtype, one.get_device())
    return rest


def find_call(
    world: Any,
    op: str,
    tensors: Sequence[torch.Tensor | None],
    rest: tuple,
    make: Callable,
    tell: Callable[[Any, Sequence[torch.Tensor | None], tuple], tuple] = by_place,
) -> Any:
    """What `make(world, *tensors, *rest)` returned when it was last asked for tensors like these;
    its `tensors` describe them by the names of make's parameters, for `world.operator_call`.

    Shapes  rest: what else a call depends on, the configuration last. tell(world, tensors, rest):
            the key of a call, as one tuple
    Raises  UsageError, ConfigError: the world, the configuration or a tensor is none
    """
    # Every microsecond here is one of a call's ten.
    try:
        key = (op, tell(world, tensors, rest))
        if world.choices and rest[-1] is None:  # a choice that was measured is not always taken
            key += (torch.are_deterministic_algorithms_enabled(),)
        call = world.calls.get(key)
    except (AttributeError, TypeError, RuntimeError):
        refuse(op, world, rest[-1])
        for name, one in zip(_names_of(make), tensors):
            if one is not None and not isinstance(one, torch.Tensor):
                raise other_kind(op, name, one, "a torch tensor") from None
            if one is not None and one.layout is not torch.strided:
                layout = f"{name} is of layout {one.layout}"
                raise UsageError(f"{op}: {layout}; pass {name}.to_dense()") from None
        raise
    if call is None:
        refuse(op, world, rest[-1])
        call = make(world, *tensors, *rest)
        call.tensors = described(_names_of(make), tensors, world if tell is by_place else None)
        if rest[-1] is None and (runner := getattr(call, "runner", None)) is not None:
            runner.fall_back()  # the configuration is weft's own
        world.calls[key] = call
    return call


def _names_of(make: Callable) -> tuple[str, ...]:
    """Of the tensors that `make` takes, behind the world."""
    function, bound = (make.func, len(make.args)) if isinstance(make, partial) else (make, 0)
    return _parameters_of(function)[1 + bound :]


@cache
def _parameters_of(function: Callable) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


def refuse(op: str, world: Any, config: Any) -> None:
    """Asked only where a call is new or has failed: a call's host time is microseconds.

    Raises  UsageError: `world` is none; ConfigError: `config` is no operator's Config
    """
    if not hasattr(world, "workspace"):
        raise UsageError(
            f"{op}: world={world!r} is of type {type(world).__name__}; pass what weft.init() "
            "returned"
        )
    if config is not None and not hasattr(config, "check"):
        raise ConfigError(
            f"{op}: config={config!r} is of type {type(config).__name__}; leave it out, or make "
            f"one: from weft.ops.{op} import Config"
        )


def described(names: Iterable[str], tensors: Iterable[torch.Tensor | None], world: Any) -> str:
    """What may differ between ranks in a call's tensors: shown where their calls differ. `world`
    says where they lie; None where the call does not depend on it."""
    return ", ".join([f"{name} {_described(one, world)}" for name, one in zip(names, tensors)])


def _described(tensor: torch.Tensor | None, world: Any) -> str:
    if tensor is None:
        return "not given"
    lies = "" if tensor.is_contiguous() else f" of strides {tensor.stride()}"
    dtype = str(tensor.dtype).removeprefix("torch.")
    place = "" if world is None else f" {place_at(world.offset(tensor))}"
    return f"{dtype}{tuple(tensor.shape)}{lies}{place}"


def place_at(offset: int | None) -> str:
    """Where on the heap something lies, in words."""
    return "on no heap" if offset is None else f"at {offset} of the heap"


# ---------------------------------------------------------------------------------------------
# Tensors


def is_on_heap(world: Any, x: torch.Tensor) -> bool:
    """May others read x where it lies? It must then lie there on all ranks, at one offset."""
    if isinstance(x, FakeTensor):
        return False
    return world.offset(x) is not None and len(set(world.backend.seats.nodes)) == 1


def check_out(op: str, out: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, world: Any):
    """Raises  ShapeError, DtypeError: `out` cannot hold the result"""
    layouts.check_tensor(op, "out", out, world)
    if tuple(out.shape) != tuple(shape):
        raise ShapeError(f"{op}: out has shape {tuple(out.shape)}; the result is {tuple(shape)}")
    if out.dtype != dtype:
        raise DtypeError(f"{op}: out is {out.dtype}, the result {dtype}; nothing is converted")


def check_apart(op: str, out: torch.Tensor, read: Mapping[str, Any], remedy: str = "") -> None:
    """Of a call with `out`, each time: how tensors lie to each other is in no call's key.

    Raises  UsageError: `out` shares memory with one that is read while results are stored
    """
    begin, end = out.data_ptr(), out.data_ptr() + out.nbytes
    for name, one in read.items():
        if not isinstance(one, torch.Tensor) or one.is_meta:  # which lies nowhere
            continue
        first, size = one.data_ptr(), one.nbytes
        if size and first < end and begin < first + size:
            raise UsageError(
                f"{op}: out shares memory with {name}, bytes {max(begin, first)} to "
                f"{min(end, first + size)}: {name} is read while out is written; "
                f"{remedy or 'pass another out'}"
            )


def other_kind(op: str, name: str, given: Any, wanted: str) -> UsageError:
    """The error of an argument that is something else than `wanted`."""
    return UsageError(f"{op}: {name} is of type {type(given).__name__}; pass {wanted}")


def out_dtype_of(op: str, out: torch.Tensor | None) -> str:
    """What the result is rounded to: "" where there is no `out`.

    Raises  DtypeError: no product is stored in it
    """
    if out is None:
        return ""
    dtype = str(out.dtype).removeprefix("torch.")
    if dtype not in FLOATS:
        raise DtypeError(f"{op}: out is {out.dtype}; it may be {', '.join(FLOATS)}")
    return dtype


def check_shard(
    op: str, name: str, rows: int, problem: Any, world: Any, out: torch.Tensor | None = None,
    remedy: str = "pass m= where shards differ",
) -> None:  # fmt: skip
    """Are `rows`, of tensor `name`, what this rank holds of m? `out` is given where m is its.

    Raises  ShapeError
    """
    first, end = problem.shard(world.rank)
    if rows == end - first:
        return
    passes = f"rank {world.rank} of {world.num_ranks} passes {name} with {rows} rows"
    way = "zigzag" if getattr(problem, "zigzag", False) else f"rows {first} to {end} of torch.chunk"
    holds = f"of m={problem.m} it holds {end - first} ({way})"
    if out is not None:
        shape = tuple(out.shape)
        raise ShapeError(
            f"{op}: out has shape {shape}, the rows of all ranks, but {passes}; {holds}"
        )
    raise ShapeError(f"{op}: {passes}, but {holds}; {remedy}")
