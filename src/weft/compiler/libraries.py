"""What a program's tasks do by libraries, on one rank's tensors, and what they mean on global ones.

`weft.plan.calls` runs plans of such calls; collectives are operators, which it finds above it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from weft.compiler import attending, decoding, experts
from weft.ir.device import Call
from weft.ir.kinds import ATTRIBUTES
from weft.ir.task import Program, Task

ACTIVATED: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": partial(torch.nn.functional.gelu, approximate="tanh"),
}


def gate_in_pairs(activation: Callable[..., Any], h: torch.Tensor) -> torch.Tensor:
    """Gate and value from neighbouring columns."""
    return activation(h[:, 0::2]) * h[:, 1::2]


def gated_product(activation: Callable[..., Any], x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Of the product's columns."""
    return gate_in_pairs(activation, x @ w)


def gate_in_halves(activation: Callable[..., Any], h: torch.Tensor) -> torch.Tensor:
    """Gate and value side by side."""
    gate, value = h.tensor_split(2, dim=1)
    return activation(gate) * value


def columns(x: torch.Tensor, between: tuple[int, int]) -> torch.Tensor:
    """Some of them, where they lie."""
    return x[:, slice(*between)]


def matmul_tn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """The sum over the rows of both."""
    return x.t() @ y


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Each row by its root mean square, times a weight per column."""
    return torch.nn.functional.rms_norm(x, x.shape[1:], weight[0], eps)


def embedding(table: torch.Tensor, ids: torch.Tensor, first: int | None = None) -> torch.Tensor:
    """Rows of the table by id; of one that has the rows from `first` on alone, zeros for others."""
    rows = ids[0].long()
    if first is None:
        return torch.nn.functional.embedding(rows, table)
    is_here = (rows >= first) & (rows < first + len(table))
    if not len(table):
        return table.new_zeros(len(rows), table.shape[1])
    found = torch.nn.functional.embedding((rows - first).where(is_here, 0), table)
    return found.masked_fill(~is_here[:, None], 0)


def head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, head: int) -> torch.Tensor:
    """Each head by its root mean square, times a weight per column of a head."""
    heads = x.unflatten(1, (x.shape[1] // head, head))
    return torch.nn.functional.rms_norm(heads, (head,), weight[0], eps).flatten(1)


LOCAL = {
    "matmul": torch.matmul,
    "matmul_tn": matmul_tn,
    **ACTIVATED,
    **{f"{kind}_mul": partial(gate_in_pairs, of) for kind, of in ACTIVATED.items()},
    **{f"matmul_{kind}_mul": partial(gated_product, of) for kind, of in ACTIVATED.items()},
    **{f"{kind}_mul_halves": partial(gate_in_halves, of) for kind, of in ACTIVATED.items()},
    **dict.fromkeys(("mul", "mul_row"), torch.mul),
    **dict.fromkeys(("add", "add_row"), torch.add),
    "columns": columns,
    "rms_norm": rms_norm,
    "gather_rows": experts.gather_rows,
    "scatter_rows": experts.scatter_rows,
    "grouped_matmul": experts.grouped_matmul,
    "embedding": embedding,
    "head_norm": head_norm,
    "rope": decoding.rope,
    "rope_by_table": decoding.rope_by_table,
    "kv_append": decoding.kv_append,
    "decode_attention": decoding.decode_attention,
    "attention_parts": decoding.attention_parts,
    "merge_parts": decoding.merge_parts,
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
    "ep_route": experts.route,
    "all_reduce_add": torch.add,
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
