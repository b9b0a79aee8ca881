"""Calls that torch differentiates or traces, and the operations that they become, by name.

Not an operator. A call whose tensors require no gradient, and that nobody traces, runs the
operator's launches; every other one becomes an operation of its name. Operators know of these names
alone: what an operation does is defined in `_custom_ops.py` and `_ep_gradients.py`, which know all
operators, and which `weft.ops` imports with the first of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling

from weft.base.errors import UsageError
from weft.compiler import dtensors
from weft.ops import _given
from weft.ops._given import PLAIN, is_autocast
from weft.plan.call_cache import refuse

_configs: dict[str, Any] = {}
_operations: dict[str, Any] = {}
_between_graphs: dict[str, Callable[..., Any]] = {}


def is_asked(*tensors: torch.Tensor) -> bool:
    """Does torch differentiate, trace or cast a call with these tensors?

    Cost    0.3 us: a look at autocast and at each tensor
    Raises  UsageError: one of them is no tensor
    """
    if is_dynamo_compiling() or is_autocast():
        return True
    one = None
    try:
        for one in tensors:
            # Other types are traced values, torch's fake tensors say, or DTensors.
            if (one.requires_grad and is_grad_enabled()) or type(one) not in PLAIN:
                return True
    except AttributeError:
        told = f"operators take torch tensors, not {type(one).__name__}"
        raise UsageError(f"{told}; world= and options are passed by name") from None
    return False


def no_gradient_of_out(op: str) -> UsageError:
    return UsageError(
        f"{op}: out= has no gradient, and an input or out requires one; leave out= away, or call "
        "under torch.no_grad()"
    )


def name_of(op: str, config: Any) -> str:
    """What an operation calls a configuration; "" is None."""
    if config is None:
        return ""
    if torch.compiler.is_dynamo_compiling():
        # An error of weft's cannot be made there: it looks for the user's line.
        torch._dynamo.graph_break(
            f"{op}: config= cannot be traced; leave it away in what is compiled: it is chosen"
        )
    name = f"{op} {config}"
    _configs[name] = config
    return name


def as_operation(
    op: str, world: Any, tensors: tuple, *rest: Any, config: Any = None, out: Any = None
) -> Any:
    """The call as an operation of torch's: `tensors`, or lists of them, the world's name, `rest`.

    Raises  UsageError, ConfigError: no world, no configuration, out= with a gradient, a config=
            while compiling; PlacementError: a DTensor that lies otherwise than `op` needs it
    """
    if not torch.compiler.is_dynamo_compiling():
        refuse(op, world, config)
    dtensors.refuse(op, "out", out)
    tensors, rest = _given.plain(op, world, tensors, rest, has_out=out is not None)
    given = [out, *tensors] if out is not None and torch.is_grad_enabled() else []
    if any(isinstance(one, torch.Tensor) and one.requires_grad for one in given):
        raise no_gradient_of_out(op)
    result = operation(op)(*tensors, world.name, *rest, name_of(op, config))
    if out is None:
        return result
    if isinstance(result, torch.Tensor):
        return out.copy_(result)
    first, *others = result
    return out.copy_(first), *others


def operation(name: str) -> Any:
    """torch.ops.weft.NAME."""
    return _operations[name]


def config_called(name: str) -> Any:
    """The configuration that `name_of` called so; None of ""."""
    return _configs.get(name)


def between_graphs(name: str) -> Callable[..., Any]:
    """The call of an operator whose handle is no tensor: torch.compile runs it between graphs."""
    return _between_graphs[name]


def runs_between_graphs(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function as that call."""

    def enter(call: Callable[..., Any]) -> Callable[..., Any]:
        _between_graphs[name] = torch.compiler.disable(call)
        return _between_graphs[name]

    return enter


def define(
    name: str, schema: str, call: Callable[..., Any], gives: Callable[..., Any],
    save: Any = None, gradient: Any = None,
) -> None:  # fmt: skip
    """Make `call`, a function of tensors, the world's name and the rest, torch.ops.weft.NAME.

    `gives(...)`, with the same arguments, are its results' shapes and dtypes; `save` and `gradient`
    as torch.library.register_autograd takes them.
    """

    def run(*arguments: Any) -> Any:
        # Below the gradient: the call is the operator's own.
        with torch.no_grad(), _given.without_autocast():
            return call(*map(_given.without_class, arguments))

    def back(*arguments: Any) -> Any:
        # Saved tensors have the dtype that the call was made with.
        with _given.without_autocast():
            return gradient(*arguments)

    made = torch.library.custom_op(f"weft::{name}", run, mutates_args=(), schema=schema)
    made.register_fake(gives)
    if gradient is not None:
        made.register_autograd(back, setup_context=save)
    _operations[name] = getattr(torch.ops.weft, name).default


def defined(
    schema: str, gives: Callable[..., Any], save: Any = None, gradient: Any = None
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """As `define`, of the function's own name."""

    def of_its_name(call: Callable[..., Any]) -> Callable[..., Any]:
        define(call.__name__, schema, call, gives, save, gradient)
        return call

    return of_its_name


def names() -> Sequence[str]:
    """The operations there are."""
    return tuple(_operations)
