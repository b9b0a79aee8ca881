"""What a program's tasks do by libraries, on one rank's tensors, and what they mean on global ones.

`weft.plan.calls` runs plans of such calls; collectives are operators, which it finds above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from weft.compiler import attending, decoding, experts
from weft.ir.device import Call
from weft.ir.task import ATTRIBUTES, Program, Task


def silu_mul(h: torch.Tensor) -> torch.Tensor:
    """Gate and value from neighbouring columns."""
    return torch.nn.functional.silu(h[:, 0::2]) * h[:, 1::2]


def silu_mul_halves(h: torch.Tensor) -> torch.Tensor:
    """Gate and value side by side."""
    gate, value = h.tensor_split(2, dim=1)
    return torch.nn.functional.silu(gate) * value


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Each row by its root mean square, times a weight per column."""
    return torch.nn.functional.rms_norm(x, x.shape[1:], weight[0], eps)


LOCAL = {
    "matmul": torch.matmul,
    "silu": torch.nn.functional.silu,
    "silu_mul": silu_mul,
    "silu_mul_halves": silu_mul_halves,
    "mul": torch.mul,
    "add": torch.add,
    "rms_norm": rms_norm,
    "gather_rows": experts.gather_rows,
    "scatter_rows": experts.scatter_rows,
    "grouped_matmul": experts.grouped_matmul,
    "rope": decoding.rope,
    "kv_append": decoding.kv_append,
    "decode_attention": decoding.decode_attention,
    "attention": attending.attention,
}


def attributes(step: Call | Task) -> dict[str, Any]:
    """What a local function is given behind its operands."""
    given = {name: getattr(step, name) for name in ATTRIBUTES}
    return {name: value for name, value in given.items() if value is not None}


# Of all ranks' tensors together a collective does this; others do nothing.
MEANINGS: Mapping[str, Callable[..., Any]] = {
    **LOCAL,
    "kv_append": decoding.appended,
    "moe_route": experts.route,
    "ag_attention": attending.attention,
    "ep_dispatch": experts.gather_rows,
    "ep_combine": experts.scatter_rows,
}


def reference(program: Program, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """What a program means: global tensors in fp32, on which collectives do nothing.

    Where a tensor lies changes nothing of what it is; an input that is Partial() comes as its sum.
    """
    values = {name: tensor.float() for name, tensor in tensors.items()}
    for task in program.tasks:
        if task.kind != "input":
            operands = [values[name] for name in task.operands]
            meant = MEANINGS.get(task.kind)
            values[task.name] = meant(*operands, **attributes(task)) if meant else operands[0]
    return tuple(values[name] for name in program.results)
