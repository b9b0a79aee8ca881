"""Run a plan of library calls on one rank: torch for what is local, given collectives for the rest.

The compiler stands below the operators and knows none of them: `collectives` is whatever has
all_gather, reduce_scatter and all_reduce with the signatures of weft.ops, so weft.ops itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from weft.base.errors import UnsupportedError
from weft.compiler.passes.tile import number
from weft.ir.device import Buffer, Call, Plan
from weft.ir.task import Program, Task


class Collectives(Protocol):
    """Over rows, among the ranks of a world; as in weft.ops. `run_plan` runs what overlaps."""

    def all_gather(self, x: Any, *, world: Any, m: int | None = None) -> Any: ...

    def reduce_scatter(self, x: Any, *, world: Any) -> Any: ...

    def all_reduce(self, x: Any, *, world: Any) -> Any: ...

    def run_plan(
        self, stages: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int], *, world: Any,
        orders: Mapping[str, Any],
    ) -> tuple[Any, ...]: ...  # fmt: skip


def silu_mul(h: torch.Tensor) -> torch.Tensor:
    """Gate and value from neighbouring columns."""
    return torch.nn.functional.silu(h[:, 0::2]) * h[:, 1::2]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Each row by its root mean square, times a weight per column."""
    return torch.nn.functional.rms_norm(x, x.shape[1:], weight[0], eps)


LOCAL = {
    "matmul": torch.matmul,
    "silu": torch.nn.functional.silu,
    "silu_mul": silu_mul,
    "mul": torch.mul,
    "add": torch.add,
    "rms_norm": rms_norm,
}


def run(
    plan: Plan, tensors: Mapping[str, Any], sizes: Mapping[str, int], *, world: Any,
    collectives: Collectives,
) -> tuple[Any, ...]:  # fmt: skip
    """One rank's results. A value is let go after its last reader.

    Raises  UnsupportedError: a plan with other steps than calls
    """
    values = dict(tensors)
    buffers = {buffer.name: buffer for buffer in plan.of(Buffer)}
    left = Counter(name for step in plan.steps if isinstance(step, Call) for name in step.reads)
    left.update(plan.results)
    for step in plan.steps:
        if not isinstance(step, Call):
            told = f"{plan.name}: {type(step).__name__} is not a call of a library"
            raise UnsupportedError(told, place=step.place)
        operands = [values[name] for name in step.reads]
        (result,) = step.writes
        if step.function in LOCAL:
            values[result] = LOCAL[step.function](*operands, *_attributes(step))
        else:
            size = _whole(buffers[result], step.dim, sizes)
            values[result] = _collective(step, operands[0], size, world, collectives)
        for name in step.reads:
            left[name] -= 1
            if not left[name] and name in values:
                del values[name]
    return tuple(values[name] for name in plan.results)


def _attributes(step: Call | Task) -> tuple[float, ...]:
    """What a local function is given behind its operands."""
    return () if step.eps is None else (step.eps,)


def _collective(step: Call, x: Any, size: int, world: Any, collectives: Collectives) -> Any:
    if step.function == "all_reduce":
        return collectives.all_reduce(x.contiguous(), world=world)
    # Collectives move rows; columns are rows of the transposed.
    rows = x.t().contiguous() if step.dim == 1 else x.contiguous()
    if step.function == "all_gather":
        out = collectives.all_gather(rows, world=world, m=size)
    else:
        out = collectives.reduce_scatter(rows, world=world)
    return out.t().contiguous() if step.dim == 1 else out


def _whole(buffer: Buffer, dim: int | None, sizes: Mapping[str, int]) -> int:
    """The global size of the dimension that a collective works along."""
    size = buffer.sizes[dim or 0]
    return number(getattr(size, "size", size), sizes)  # type: ignore[arg-type]


def reference(program: Program, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a program means: global tensors in fp32, on which collectives do nothing.

    Where a tensor lies changes nothing of what it is; an input that is Partial() comes as its sum.
    """
    values = {name: tensor.float() for name, tensor in tensors.items()}
    for task in program.tasks:
        if task.kind != "input":
            operands = [values[name] for name in task.operands]
            local = LOCAL.get(task.kind)
            values[task.name] = local(*operands, *_attributes(task)) if local else operands[0]
    return tuple(values[name] for name in program.results)
