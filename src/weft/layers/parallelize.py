"""A model made parallel in place: its modules replaced by layers, as a plan says.

    plan    {pattern of a module's name: style}, "*" for any characters; the first that fits counts
    style   a layer's class, a function of (module, world, activations) that gives what comes in
            the module's place, or several of these, one after the other

Source  torch.distributed.tensor.parallel.parallelize_module, for plans by name
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from typing import Any

from torch import nn

from weft.base.errors import UnsupportedError, UsageError
from weft.layers import activations as rows
from weft.layers.activations import Activations
from weft.layers.mlp import ParallelMLP
from weft.layers.moe import COLUMNS, ParallelMoE
from weft.layers.transformers_plans import plan_of
from weft.runtime.start import world_over
from weft.runtime.world import World

Style = Any  # a layer's class, a function, or a sequence of them


def parallelize(
    model: nn.Module, world: Any, plan: Mapping[str, Style] | None = None, *,
    split_from: float | None = None, experts: str = COLUMNS,
) -> nn.Module:  # fmt: skip
    """Replace modules of `model`, in place, by layers that are spread over the ranks.

    Without a plan, that of transformers' Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE and Mixtral. What
    no pattern names stays as it is, alike on all ranks.

    world: or a device mesh of one axis, as torch's `parallelize_module` takes it, or a process
    group: then the world over its ranks, made where none is open

    experts: how they are spread, a strategy of ParallelMoE; a plan says it itself, by
    partial(ParallelMoE.from_module, strategy=..)

    Units   split_from: rows of a pass from which activations are split between its first layer and
            its last; by default what is predicted for the sizes of its MLPs
    Raises  UsageError: a pattern that fits no module, a model without a plan
            ShapeError: ranks that do not divide what they must
    """
    world = world_over(world, "parallelize")
    plan = plan_of(model, experts) if plan is None else plan
    chosen = _chosen(model, plan)
    ties = ties_of(model)
    activations = Activations(world)
    for name, style in chosen.items():
        made = model.get_submodule(name)
        for one in (style,) if isinstance(style, str) or not isinstance(style, Sequence) else style:
            made = _function(one)(made, world, activations)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made)
    _tie(model, ties)
    if not any(one.is_meta for one in chain(model.parameters(), model.buffers())):
        model.to(world.device)
    activations.split_from = _predicted(model, world) if split_from is None else split_from
    return model


def _chosen(model: nn.Module, plan: Mapping[str, Style]) -> dict[str, Style]:
    """The style of each module that has one.

    Raises  UsageError: a pattern that fits none
    """
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, Style] = {}
    for name in names:
        pattern = next((one for one in plan if fnmatchcase(name, one)), None)
        if pattern is not None:
            found[name] = plan[pattern]
    for pattern in plan:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UsageError(
                f"parallelize: {pattern!r} fits no module of {type(model).__name__}, which has "
                f"{', '.join(names[:8])}, ...; patterns are whole names, with * for any characters"
            )
    # The innermost first: what is around a module is replaced with it, or given a hook.
    return dict(sorted(found.items(), key=lambda one: -one[0].count(".")))


def _function(style: Style) -> Callable[[nn.Module, World, Activations], nn.Module]:
    found = getattr(style, "from_module", style)
    if not callable(found):
        raise UsageError(
            f"parallelize: {style!r} is no style; take a class of weft.layers, a function of "
            "(module, world, activations), or a sequence of these"
        )
    return found


def ties_of(model: nn.Module) -> list[list[str]]:
    """Names of parameters that are one."""
    found: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(one), []).append(name)
    return [names for names in found.values() if len(names) > 1]


def _tie(model: nn.Module, ties: list[list[str]]) -> None:
    """Make parameters one again.

    Raises  UnsupportedError: they are cut in different ways
    """
    there = dict(model.named_parameters(remove_duplicate=False))
    for names in ties:
        parts = [there.get(name) for name in names]
        first = parts[0]
        if first is None or any(one is None or one.shape != first.shape for one in parts):
            raise UnsupportedError(
                f"parallelize: {' and '.join(names)} are one parameter, but the plan cuts them in "
                "different ways; give their modules styles that cut them alike, or untie them"
            )
        for name in names:
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, first)


def _predicted(model: nn.Module, world: World) -> float:
    for one in model.modules():
        if isinstance(one, ParallelMLP | ParallelMoE):
            dtype = next(one.parameters()).dtype
            return rows.split_from(world, one.hidden, one.inner, dtype)
    return Activations(world).split_from
