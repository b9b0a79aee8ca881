"""Cards draw inputs and make references on whatever device they are told, and mix it with no other.

There is no second device here, so one is pretended: tensors that say they are on `meta`, over
memory of the CPU, and a mode that refuses operations on both.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from weft.ops import card, names
from weft.tune import case
from weft.tune.answers import rel_err

ELSEWHERE = torch.device("meta")


class There(torch.Tensor):
    """`inner`, as a tensor of the other device."""

    inner: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def of(inner: torch.Tensor) -> There:
        made = torch.Tensor._make_wrapper_subclass(
            There, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(),
            dtype=inner.dtype, device=ELSEWHERE,
        )  # fmt: skip
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of the mode")


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, There) else value


class TwoDevices(TorchDispatchMode):
    """Runs everything on the CPU; what has a tensor from there, or is told to, gives one there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        are_there = any(isinstance(x, There) for x in tensors)
        name, told = func.name(), kwargs.get("device")
        if are_there and "copy" not in name:  # a scalar may come from the host
            strangers = [x for x in tensors if x.dim() and not isinstance(x, There)]
            assert not strangers, f"{name} of tensors on two devices"
        if told is not None:
            are_there, kwargs["device"] = torch.device(told) == ELSEWHERE, torch.device("cpu")
        given, more = tree_map(_inner, (args, kwargs))
        out = func(*given, **more)
        if func._schema.is_mutable and isinstance(out, torch.Tensor):
            return next(x for x in tensors if _inner(x) is out)
        if not are_there:
            return out
        return tree_map(lambda x: There.of(x) if isinstance(x, torch.Tensor) else x, out)


class ByHand(TorchFunctionMode):
    """What torch does for its own devices before it dispatches."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.tolist and isinstance(args[0], There):
            return args[0].inner.tolist()
        if func is torch.tensor:
            kwargs = dict(kwargs or {})
            told = kwargs.pop("device", None)
            made = func(*args, **kwargs)
            return There.of(made) if told is not None and told == ELSEWHERE else made
        return func(*args, **(kwargs or {}))


def _alike_here(drawn: Any, generator: torch.Generator) -> torch.Generator:
    for known, made in drawn.made:
        if known is generator:
            return made
    drawn.made.append((generator, torch.Generator().manual_seed(generator.initial_seed())))
    return drawn.made[-1][1]


@pytest.mark.parametrize("name", names())
def test_inputs_and_references_stay_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(case._DrawnOn, "_alike", _alike_here)
    op = card(name)
    problem = op.make_problem(2, op.default_shape, "bfloat16")
    with ByHand(), TwoDevices():
        inputs = [case.drawn_on(ELSEWHERE, op.make_inputs, problem, rank, 0) for rank in range(2)]
        expected = case.drawn_on(ELSEWHERE, op.reference, problem, inputs)
    made = [x for x in tree_leaves((inputs, expected)) if isinstance(x, torch.Tensor)]
    assert made and all(isinstance(x, There) for x in made)
    here = [op.make_inputs(problem, rank, 0) for rank in range(2)]
    assert rel_err(tree_map(_inner, expected), op.reference(problem, here)) == 0.0
