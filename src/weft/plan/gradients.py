"""Gradients of a program: its plan of library calls is differentiated, call by call.

A gradient lies as its value does: of a part it is the part, of what all ranks have alike it is
alike on all, an input's too. A call whose result is split gives each rank a share of the gradient
of an operand that all have; these are summed where they leave the call:

    h @ Shard(1) = matmul(x @ Replicate(), w @ Shard(1))        dx = all_reduce(dh w^T)

What was gathered is spared that: its shares are summed on their way back, by reduce_scatter. So the
gradients of what was gathered, and of what is made of it, stay shares of each rank; where all ranks
have the same (a result of the program, say), one of them keeps it.

The other lowerings go forward as they do. Backward the unfused plan is run once more, with
gradients: nothing between is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from weft.base.errors import UnsupportedError
from weft.base.providers import provider
from weft.ir.device import Call, Plan
from weft.ir.task import Program
from weft.ir.tensor import Replicate
from weft.plan.calls import run_calls

# What makes a tensor that all ranks have of one that is split, and sums gradients on the way back.
GATHERS = ("all_gather", "moe_route", "ep_route")
# What writes into its operand.
IN_PLACE = ("kv_append",)


def run_differentiated(
    program: Program, plan: Plan, tensors: Mapping[str, Any], sizes: Mapping[str, int], *,
    world: Any, otherwise: Callable[[], tuple] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """One rank's results, which have gradients. `otherwise` runs another lowering forward.

    Raises  UnsupportedError: a program that writes into its inputs
    """
    for task in program.tasks:
        if task.kind in IN_PLACE:
            text = f"{program.name}: {task.kind} writes its operand in place, so it has no gradient"
            raise UnsupportedError(f"{text}; call under torch.no_grad()", place=task.place)

    def unfused(given: Mapping[str, Any]) -> tuple[Any, ...]:
        shares = _Shares(program, world)
        results = run_calls(plan, given, sizes, world=world, adapted=shares.operands)
        named = zip(plan.results, results, strict=True)
        return tuple(shares.whole(one) if name in shares.names else one for name, one in named)

    if otherwise is None:
        return unfused(tensors)
    names = list(tensors)

    def again(given: Sequence[Any]) -> tuple[Any, ...]:
        return unfused(dict(zip(names, given, strict=True)))

    results = _Again.apply(otherwise, again, *tensors.values())
    return results if isinstance(results, tuple) else (results,)


class _Shares:
    """Of which values gradients are shares, and what that asks of a call's operands."""

    def __init__(self, program: Program, world: Any) -> None:
        self.world = world
        self.everywhere: set[str] = set()
        self.names: set[str] = set()
        for task in program.tasks:
            if task.type is None or not (task.type.placement == Replicate()):
                continue
            self.everywhere.add(task.name)
            made_of = self.names.intersection(task.operands)
            if task.kind in GATHERS or (made_of and task.kind != "all_reduce"):
                self.names.add(task.name)

    def operands(self, step: Call, operands: list[Any]) -> list[Any]:
        """Those of a call, with what their gradients must pass."""
        if self.world.num_ranks == 1 or step.function in ("reduce_scatter", "all_reduce"):
            return operands
        (result,) = step.writes
        splits = result not in self.everywhere or result in self.names
        found = []
        for name, operand in zip(step.reads, operands, strict=True):
            if name in self.everywhere and (name in self.names) != splits:
                operand = self.whole(operand) if name in self.names else self.summed(operand)
            found.append(operand)
        return found

    def whole(self, operand: Any) -> Any:
        """Gradients that all ranks have alike: the first keeps them as its share."""
        if not isinstance(operand, torch.Tensor):  # a router's tables, of which weights have one
            tables = operand.tables._replace(weight_of=self.whole(operand.tables.weight_of))
            return operand._replace(tables=tables)
        is_kept = self.world.rank == 0
        return _Passed.apply(operand, lambda one: one if is_kept else torch.zeros_like(one))

    def summed(self, operand: torch.Tensor) -> Any:
        """The gradient is the sum of all ranks'."""
        world, summed = self.world, provider("collectives").all_reduce
        return _Passed.apply(operand, lambda one: summed(one.contiguous(), world=world))


class _Passed(torch.autograd.Function):
    """The operand; its gradient is what `back` makes of it."""

    @staticmethod
    def forward(ctx: Any, operand: torch.Tensor, back: Callable[..., Any]) -> torch.Tensor:
        ctx.back = back
        return operand.view_as(operand)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:  # type: ignore[override]
        return ctx.back(gradient), None


class _Again(torch.autograd.Function):
    """Results of one lowering, gradients of another."""

    @staticmethod
    def forward(ctx: Any, otherwise: Any, again: Any, *tensors: torch.Tensor) -> Any:
        ctx.again = again
        ctx.save_for_backward(*tensors)
        results = tuple(otherwise())
        return results if len(results) != 1 else results[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple:  # type: ignore[override]
        asked = ctx.needs_input_grad[2:]
        tensors = [
            one.detach().requires_grad_(is_asked)
            for one, is_asked in zip(ctx.saved_tensors, asked, strict=True)
        ]
        with torch.enable_grad():
            results = ctx.again(tensors)
        leaves = [one for one in tensors if one.requires_grad]
        found = iter(torch.autograd.grad(results, leaves, gradients, allow_unused=True))
        return None, None, *(next(found) if is_asked else None for is_asked in asked)
