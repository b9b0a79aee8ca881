"""Operators as operations of torch's: torch.ops.weft.NAME, which torch differentiates and traces.

A call whose tensors require no gradient, and that nobody traces, runs the operator's launches.
Every other one becomes an operation of its name, made when the operator is imported:

    schema    the operator's own signature, with the world and the configuration by their names
    fake      the card's, of the problem that the operator's `problem_of` makes of the arguments
    gradient  a formula of weft.plan.operator_gradients, made of operators again

DTensors stand for the rank's part of them where they lie as the operator needs it. Under
torch.autocast products and attention cast as torch's do, and norms take the widest dtype.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import is_grad_enabled
from torch.compiler import is_dynamo_compiling
from torch.utils._pytree import tree_flatten, tree_unflatten

from weft.base.errors import UsageError
from weft.base.providers import provider
from weft.compiler import dtensors
from weft.compiler.experts import Routing, Tables
from weft.ir.tensor import Placement
from weft.plan.call_cache import refuse
from weft.runtime.start import world as world_called

PLAIN = (torch.Tensor, torch.nn.Parameter)

# torch.autocast's two policies that calls have.
NARROWED, WIDENED = "narrowed to autocast's dtype", "widened to the widest"
# As torch: neither doubles nor what is quantised.
_CAST = (torch.float32, torch.bfloat16, torch.float16)
# Is torch.autocast on, for any device?
is_autocast = torch._C._is_any_autocast_enabled
# Within an operator nothing is cast behind its back.
without_autocast = torch._C._DisableAutocast

# A parameter's annotation, and what the schema says. Sizes may stay open.
_FORMS = {
    "torch.Tensor": "Tensor", "torch.Tensor | None": "Tensor?", "int": "int",
    "int | None": "SymInt?", "bool": "bool", "float": "float", "float | None": "float?",
    "str": "str",
}  # fmt: skip
# Parameters that the schema has under other names, or several; () for one that it leaves out.
_NAMED_APART = {
    "world": (("world", "str"),), "config": (),
    "routing": (("weight_of", "Tensor"), ("tables", "Tensor[]"), ("tile_m", "int"),
                ("split_experts", "bool")),
}  # fmt: skip

_configs: dict[str, Any] = {}


@dataclass
class Operation:
    """What an operation needs to know beside its function's signature.

    `placements` say how its first tensors lie over the ranks, `policy` what autocast does with
    them. `gradient(of, *gradients)` gives a function by input; `of` has the inputs and results
    (result_0, ..) that `keeps` names, every argument that is no tensor, and the first tensor's
    `rows`. `fake(**arguments)` stands in for the card's, `with_out` says that out's dtype counts,
    `always` is what the function is called with beside, `checked` refuses calls to differentiate.
    Without results it is no operation: its handle is no tensor.
    """

    placements: Mapping[str, Placement]
    gradient: Callable[..., Mapping[str, Callable[[], Any]]] | None = None
    keeps: tuple[str, ...] = ()
    policy: str | None = None
    num_results: int = 1
    results_of: Callable[[Any], Any] = lambda made: made
    fake: Callable[..., Any] | None = None
    with_out: bool = False
    always: Mapping[str, Any] | None = None
    checked: Callable[[Any], None] | None = None

    # Its arguments, and torch's own of it, once it is defined.
    names: tuple[str, ...] = ()
    made: Any = None


OPERATIONS: dict[str, Operation] = {}


# ---------------------------------------------------------------------------------------------
# Calls


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
        message = f"operators take torch tensors, not {type(one).__name__}"
        raise UsageError(f"{message}; world= and options are passed by name") from None
    return False


def is_differentiated(*tensors: torch.Tensor | None) -> bool:
    """Does torch differentiate a call with these tensors?"""
    return is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def as_operation(
    op: str, world: Any, tensors: tuple, *, config: Any = None, out: Any = None, **rest: Any
) -> Any:
    """The call as an operation of torch's. `tensors` come first in its schema, `rest` by name.

    Raises  UsageError, ConfigError: no world, no configuration, out= with a gradient, a config=
            while compiling; PlacementError: a DTensor that lies otherwise than `op` needs it
    """
    if not torch.compiler.is_dynamo_compiling():
        refuse(op, world, config)
    dtensors.refuse(op, "out", out)
    if "m" in rest and rest["m"] is None and dtensors.is_dtensor(tensors[0]):
        rest["m"] = tensors[0].shape[0]
    gathered = rest.get("gathered", "x")
    tensors = plain(op, world, tensors, gathered=gathered, has_out=out is not None)
    given = [out, *tensors] if out is not None and torch.is_grad_enabled() else []
    if any(isinstance(one, torch.Tensor) and one.requires_grad for one in given):
        raise no_gradient_of_out(op)
    # Read from its row: torch.compile does not see what joins a table while it traces.
    names = OPERATIONS[op].names
    if "out_dtype" in names:
        rest["out_dtype"] = None if out is None else out.dtype
    rest["world"], rest["config"] = world.name, name_of(op, config)
    result = OPERATIONS[op].made(*tensors, *[rest[name] for name in names[len(tensors) :]])
    if out is None:
        return result
    if isinstance(result, torch.Tensor):
        return out.copy_(result)
    first, *others = result
    return out.copy_(first), *others


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


def plain(
    op: str, world: Any, tensors: Sequence[Any], *, gathered: str = "x", has_out: bool = False
) -> tuple:
    """A call's tensors as its operator takes them. `gathered`: which of ag_wgrad's two is.

    Raises  PlacementError: a DTensor that lies otherwise than the operator needs it
    """
    chosen = OPERATIONS[op]
    places = list(chosen.placements.items())
    if gathered == "y":
        (x, of_x), (y, of_y) = places
        places = [(x, of_y), (y, of_x)]
    local = [
        dtensors.local_part(op, world, name, one, where) if dtensors.is_dtensor(one) else one
        for (name, where), one in zip(places, tensors)
    ]
    others = tensors[len(local) :]
    # As torch: who gives room for a result says its dtype.
    if chosen.policy is not None and not has_out:
        local = cast(local, chosen.policy)
    return (*local, *others)


def cast(tensors: Sequence[torch.Tensor], policy: str = NARROWED) -> list[torch.Tensor]:
    """Tensors as torch.autocast wants them; as they are where it is off for their device."""
    device = tensors[0].device.type
    # Of tensors without memory torch cannot be asked.
    if not (is_autocast() and torch.is_autocast_enabled(device)) or any(
        one.dtype not in _CAST for one in tensors
    ):
        return list(tensors)
    if policy == NARROWED:
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = functools.reduce(torch.promote_types, (one.dtype for one in tensors))
    return [one.to(dtype) for one in tensors]


def without_class(value: Any) -> Any:
    """A tensor of a class of the user's own as torch's own; all else as it is."""
    if not isinstance(value, torch.Tensor) or type(value) in PLAIN:
        return value
    return value.as_subclass(torch.Tensor)


# ---------------------------------------------------------------------------------------------
# Definitions


def operation(name: str) -> Any:
    """torch.ops.weft.NAME."""
    return OPERATIONS[name].made


def names() -> Sequence[str]:
    """The operations that have been defined."""
    return tuple(name for name, one in OPERATIONS.items() if one.made is not None)


def schema_of(function: Callable[..., Any], operation: Operation) -> tuple[tuple[str, str], ...]:
    """The names of an operation's arguments and their types, as the function's signature says:
    tensors that lie somewhere come first."""
    found: list[tuple[str, str]] = []
    parameters = inspect.signature(function).parameters
    for name, one in parameters.items():
        if name in _NAMED_APART:
            found += _NAMED_APART[name]
        elif name == "out" and one.kind == one.KEYWORD_ONLY:
            found += [("out_dtype", "ScalarType?")] if operation.with_out else []
        elif name not in (operation.always or {}):
            found.append((name, _FORMS[one.annotation]))
    found.sort(key=lambda one: one[0] not in operation.placements)
    return (*found, *([("config", "str")] if "config" in parameters else []))


def define(name: str, function: Callable[..., Any]) -> None:
    """Make the operator torch.ops.weft.NAME, if it has a row of OPERATIONS."""
    chosen = OPERATIONS.get(name)
    if chosen is None or chosen.made is not None or not chosen.num_results:
        return
    schema = schema_of(function, chosen)
    chosen.names = names = tuple(one for one, _ in schema)
    forms = ", ".join(f"{form} {one}" for one, form in schema)
    results = ", ".join(["Tensor"] * chosen.num_results)

    def run(*given: Any) -> Any:
        # Below the gradient: the call is the operator's own.
        with torch.no_grad(), without_autocast():
            named = _bound(names, map(without_class, given))
            if (dtype := named.pop("out_dtype", None)) is not None:
                named["out"] = _fakes(name, chosen, named, dtype)
            return chosen.results_of(function(**named, **(chosen.always or {})))

    def fake(*given: Any) -> Any:
        named = _bound(names, given)
        return _fakes(name, chosen, named, named.pop("out_dtype", None))

    made = torch.library.custom_op(
        f"weft::{name}", run, mutates_args=(), schema=f"({forms}) -> ({results})"
    )
    made.register_fake(fake)
    if chosen.gradient is not None:
        save = functools.partial(_save, chosen, names)
        made.register_autograd(functools.partial(_back, chosen, names), setup_context=save)
    chosen.made = getattr(torch.ops.weft, name).default


def _bound(names: Sequence[str], given: Any) -> dict[str, Any]:
    """An operation's arguments as its operator takes them."""
    named = dict(zip(names, given))
    named["world"] = world_called(named["world"])
    if "config" in named:
        named["config"] = _configs.get(named["config"])
    if "tables" in named:
        parts = (named.pop(name) for name in ("tables", "weight_of", "tile_m", "split_experts"))
        named["routing"] = routing_of(*parts)
    return named


def _fakes(name: str, operation: Operation, named: Mapping[str, Any], dtype: Any = None) -> Any:
    """An operation's results without their values, on the device of its first tensor."""
    if operation.fake is not None:
        return operation.fake(**named)
    module = importlib.import_module(f"{provider('collectives').__name__}.{name}")
    asked = inspect.signature(module.problem_of).parameters
    problem = module.problem_of(**{key: one for key, one in named.items() if key in asked})
    fakes = operation.results_of(module.op.fake(problem, named, named["world"].rank))
    first = next(one for one in named.values() if isinstance(one, torch.Tensor))
    if isinstance(fakes, torch.Tensor):
        return first.new_empty(fakes.shape, dtype=dtype or fakes.dtype)
    return tuple(first.new_empty(one.shape, dtype=one.dtype) for one in fakes)


def routing_of(tables: Any, weight_of: torch.Tensor, tile_m: int, split_experts: bool) -> Any:
    """A router's tables as operators take them, with other weights."""
    return Routing(Tables(*tables)._replace(weight_of=weight_of), tile_m, split_experts)


def _save(
    operation: Operation, names: tuple[str, ...], ctx: Any, inputs: tuple, output: Any
) -> None:
    """Of inputs and results what the formula keeps, and every argument that is no tensor."""
    named = dict(zip(names, inputs))
    if operation.checked is not None:
        operation.checked(SimpleNamespace(**named))
    ctx.rest = {x: one for x, one in named.items() if not isinstance(one, torch.Tensor | list)}
    ctx.rest["rows"] = inputs[0].shape[0]
    results = output if isinstance(output, tuple) else (output,)
    named |= {f"result_{i}": one for i, one in enumerate(results)}
    tensors, ctx.spec = tree_flatten([named[name] for name in operation.keeps])
    ctx.save_for_backward(*tensors)


def _back(operation: Operation, names: tuple[str, ...], ctx: Any, *gradients: Any) -> tuple:
    """The inputs' gradients, in order: of those that need one, what the formula says."""
    kept = zip(operation.keeps, tree_unflatten(ctx.saved_tensors, ctx.spec))
    of = SimpleNamespace(**{**ctx.rest, **dict(kept), "world": world_called(ctx.rest["world"])})
    assert operation.gradient is not None
    # Saved tensors have the dtype that the call was made with.
    with without_autocast():
        made = operation.gradient(of, *gradients)
        return tuple(
            [None] * len(of.tables) if name == "tables"
            else made[name]() if name in made and is_needed else None
            for name, is_needed in zip(names, ctx.needs_input_grad)
        )  # fmt: skip
