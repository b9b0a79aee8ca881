"""ag_attention as an operation of torch's, and its gradients as another, so that both are traced.

Not an operator: see _custom_ops.py, which has those of all others, and _autograd.py.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from weft.base.errors import UsageError
from weft.ops import _operations
from weft.runtime.start import world as world_called


def _gives(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, world: str, cu_seqlens: Any, causal: bool,
    scale: float | None, m: int | None, config: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    module, there = import_module("weft.ops.ag_attention"), world_called(world)
    problem = module.problem_of(there, q, k, v, cu_seqlens, causal, m)
    out, lse = module.fake(problem, {"q": q}, there.rank)
    return q.new_empty(out.shape), q.new_empty(lse.shape, dtype=lse.dtype)


def _save(ctx: Any, inputs: tuple, output: Any) -> None:
    q, k, v, ctx.world, cu_seqlens, *ctx.way, _ = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def _gradient(ctx: Any, d_out: torch.Tensor, d_lse: torch.Tensor) -> tuple:
    from weft.ops._attention_backward import ag_attention_backward

    *tensors, cu_seqlens = ctx.saved_tensors
    causal, scale, m = ctx.way
    found = ag_attention_backward(
        *tensors, d_out.to(tensors[0].dtype), d_lse, world=world_called(ctx.world), causal=causal,
        cu_seqlens=cu_seqlens, scale=scale, m=m,
    )  # fmt: skip
    return *found, None, None, None, None, None, None


@_operations.defined(
    "(Tensor q, Tensor k, Tensor v, str world, Tensor? cu_seqlens, bool causal, float? scale, "
    "SymInt? m, str config) -> (Tensor, Tensor)",
    _gives, _save, _gradient,
)  # fmt: skip
def ag_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, world: str, cu_seqlens: Any, causal: bool,
    scale: float | None, m: int | None, config: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    from weft.ops import ag_attention as call

    return call(
        q, k, v, world=world_called(world), causal=causal, cu_seqlens=cu_seqlens, scale=scale,
        m=m, config=_operations.config_called(config), with_lse=True,
    )  # fmt: skip


def _gives_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _save_nothing(ctx: Any, inputs: tuple, output: Any) -> None:
    pass


def _refuse(ctx: Any, *_: Any) -> None:
    raise UsageError("ag_attention: its gradients have none; call without create_graph=True")


@_operations.defined(
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, "
    "str world, Tensor? cu_seqlens, bool causal, float? scale, SymInt? m, str config) -> "
    "(Tensor, Tensor, Tensor)",
    _gives_gradients, _save_nothing, _refuse,
)  # fmt: skip
def ag_attention_backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from weft.ops._attention_backward import ag_attention_backward as call

    *tensors, world, cu_seqlens, causal, scale, m, _ = arguments
    return call(
        *tensors, world=world_called(world), causal=causal, cu_seqlens=cu_seqlens, scale=scale, m=m
    )
