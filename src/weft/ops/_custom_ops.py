"""Operators as operations of torch's: torch.ops.weft.NAME, which torch.compile keeps whole.

Not an operator. An operation takes the world by its name, and a configuration by what `name_of`
calls it; the rest is the operator's. What it gives without values is said by the operator's card
(`fake`), how gradients travel back by `_autograd.py`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch

from weft.compiler import layouts
from weft.ops import _autograd, _operations
from weft.plan import problems, summed
from weft.plan.experts_wgrad import experts_wgrad as _experts_wgrad
from weft.runtime.start import world as world_called


def _module(name: str) -> Any:
    return importlib.import_module(f"weft.ops.{name}")


def _operator(name: str) -> Callable[..., Any]:
    """An operator as a function of its tensors, the world's name and a configuration's."""

    def call(*given: Any) -> Any:
        *tensors, world, config = given
        there, chosen = world_called(world), _operations.config_called(config)
        return getattr(_module(name), name)(*tensors, world=there, config=chosen)

    return call


def _empty(x: torch.Tensor, fake: torch.Tensor, *shape: int) -> torch.Tensor:
    """As a card's fake, on x's device; of another shape if it says so."""
    return x.new_empty(shape or fake.shape, dtype=fake.dtype)


# ---------------------------------------------------------------------------------------------
# Rows that move, and sums


def _rows(name: str, x: torch.Tensor, world: str, *fields: Any) -> tuple[Any, Any]:
    """The card's fake of an operator on x's rows, and the world."""
    module, there = _module(name), world_called(world)
    layouts.check_tensor(name, "x", x, there)
    n = math.prod(x.shape[1:])
    problem = module.Problem(
        x.shape[0], n, there.num_ranks, str(x.dtype), problems.nodes_of(there), *fields
    )
    return module.fake(problem, {"x": x}, there.rank), there


def _gathered(x: torch.Tensor, world: str, m: int | None, config: str) -> torch.Tensor:
    module, there = _module("all_gather"), world_called(world)
    fake = module.fake(module.problem_of(there, x, m), {"x": x}, there.rank)
    return _empty(x, fake, fake.shape[0], *x.shape[1:])


@_operations.defined(
    "(Tensor x, str world, SymInt? m, str config) -> Tensor",
    _gathered, _autograd.save_rows, _autograd.all_gather,
)  # fmt: skip
def all_gather(x: torch.Tensor, world: str, m: int | None, config: str) -> torch.Tensor:
    there, chosen = world_called(world), _operations.config_called(config)
    return _module("all_gather").all_gather(x, world=there, m=m, config=chosen)


def _of_rows(name: str) -> Callable[..., torch.Tensor]:
    def gives(x: torch.Tensor, world: str, config: str) -> torch.Tensor:
        fake, _ = _rows(name, x, world)
        return _empty(x, fake, fake.shape[0], *x.shape[1:])

    return gives


for _name, _gradient in (
    ("reduce_scatter", _autograd.reduce_scatter),
    ("all_reduce", _autograd.all_reduce),
    ("all_to_all", _autograd.all_to_all),
):
    _operations.define(
        _name, "(Tensor x, str world, str config) -> Tensor", _operator(_name), _of_rows(_name),
        _autograd.save_rows, _gradient,
    )  # fmt: skip


def _exchanged_by_splits(
    x: torch.Tensor, splits: torch.Tensor, world: str, capacity: int | None, config: str
) -> tuple[torch.Tensor, torch.Tensor]:
    room = -1 if capacity is None else capacity
    (out, received), _ = _rows("all_to_all", x, world, True, room)
    return _empty(x, out, out.shape[0], *x.shape[1:]), _empty(x, received)


@_operations.defined(
    "(Tensor x, Tensor splits, str world, SymInt? capacity, str config) -> (Tensor, Tensor)",
    _exchanged_by_splits, _autograd.save_splits, _autograd.all_to_all_splits,
)  # fmt: skip
def all_to_all_splits(
    x: torch.Tensor, splits: torch.Tensor, world: str, capacity: int | None, config: str
) -> tuple[torch.Tensor, torch.Tensor]:
    there, chosen = world_called(world), _operations.config_called(config)
    return _module("all_to_all").all_to_all(
        x, world=there, splits=splits, capacity=capacity, config=chosen
    )


# ---------------------------------------------------------------------------------------------
# Products


def _gathered_product(
    a: torch.Tensor, b: torch.Tensor, world: str, m: int | None, out_dtype: Any, scale_a: Any,
    scale_b: Any, config: str,
) -> torch.Tensor:  # fmt: skip
    module, there = _module("ag_gemm"), world_called(world)
    problem = module.problem_of(there, a, b, m, None, scale_a, scale_b)
    fake = module.fake(problem, {"a": a, "b": b}, there.rank)
    return a.new_empty(fake.shape, dtype=out_dtype or fake.dtype)


@_operations.defined(
    "(Tensor a, Tensor b, str world, SymInt? m, ScalarType? out_dtype, Tensor? scale_a, "
    "Tensor? scale_b, str config) -> Tensor",
    _gathered_product, _autograd.save_ag_gemm, _autograd.ag_gemm,
)  # fmt: skip
def ag_gemm(
    a: torch.Tensor, b: torch.Tensor, world: str, m: int | None, out_dtype: Any, scale_a: Any,
    scale_b: Any, config: str,
) -> torch.Tensor:  # fmt: skip
    there, chosen, out = world_called(world), _operations.config_called(config), None
    if out_dtype is not None:
        rows = a.shape[0] * there.num_ranks if m is None else m
        out = torch.empty((rows, b.shape[1]), dtype=out_dtype, device=a.device)
    return _module("ag_gemm").ag_gemm(
        a, b, world=there, m=m, config=chosen, out=out, scale_a=scale_a, scale_b=scale_b
    )


def _summed_product(name: str) -> Callable[..., torch.Tensor]:
    def gives(a: torch.Tensor, b: torch.Tensor, world: str, config: str) -> torch.Tensor:
        module, there = _module(name), world_called(world)
        problem = summed.problem_of(module.Problem, there, a, b)
        return _empty(a, module.op.fake(problem, {"a": a, "b": b}, there.rank))

    return gives


for _name, _gradient in (("gemm_rs", _autograd.gemm_rs), ("gemm_ar", _autograd.gemm_ar)):
    _operations.define(
        _name, "(Tensor a, Tensor b, str world, str config) -> Tensor", _operator(_name),
        _summed_product(_name), _autograd.save_product, _gradient,
    )  # fmt: skip


def _weights_gradient(
    x: torch.Tensor, y: torch.Tensor, world: str, gathered: str, out_dtype: Any, config: str
) -> torch.Tensor:
    module, there = _module("ag_wgrad"), world_called(world)
    fake = module.fake(module.problem_of(there, x, y, gathered), {"x": x, "y": y}, there.rank)
    return x.new_empty(fake.shape, dtype=out_dtype or fake.dtype)


@_operations.defined(
    "(Tensor x, Tensor y, str world, str gathered, ScalarType? out_dtype, str config) -> Tensor",
    _weights_gradient, _autograd.save_wgrad, _autograd.ag_wgrad,
)  # fmt: skip
def ag_wgrad(
    x: torch.Tensor, y: torch.Tensor, world: str, gathered: str, out_dtype: Any, config: str
) -> torch.Tensor:
    there, chosen, out = world_called(world), _operations.config_called(config), None
    if out_dtype is not None:
        out = torch.empty((x.shape[1], y.shape[1]), dtype=out_dtype, device=x.device)
    return _module("ag_wgrad").ag_wgrad(
        x, y, world=there, gathered=gathered, config=chosen, out=out
    )


def _normed(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, world: str, eps: float,
    config: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    (normed, total), _ = _rows("all_reduce_rms_norm", x, world)
    return _empty(x, normed), _empty(x, total)


@_operations.defined(
    "(Tensor x, Tensor residual, Tensor weight, str world, float eps, str config) -> "
    "(Tensor, Tensor)",
    _normed, _autograd.save_norm, _autograd.all_reduce_rms_norm,
)  # fmt: skip
def all_reduce_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, world: str, eps: float,
    config: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    return _module("all_reduce_rms_norm").all_reduce_rms_norm(
        x,
        residual,
        weight,
        world=world_called(world),
        eps=eps,
        config=_operations.config_called(config),
    )


# ---------------------------------------------------------------------------------------------
# Attention


def _attended(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, world: str, cu_seqlens: Any, causal: bool,
    scale: float | None, m: int | None, config: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    module, there = _module("ag_attention"), world_called(world)
    problem = module.problem_of(there, q, k, v, cu_seqlens, causal, m)
    out, lse = module.fake(problem, {"q": q}, there.rank)
    return _empty(q, out), _empty(q, lse)


@_operations.defined(
    "(Tensor q, Tensor k, Tensor v, str world, Tensor? cu_seqlens, bool causal, float? scale, "
    "SymInt? m, str config) -> (Tensor, Tensor)",
    _attended, _autograd.save_attention, _autograd.ag_attention,
)  # fmt: skip
def ag_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, world: str, cu_seqlens: Any, causal: bool,
    scale: float | None, m: int | None, config: str,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    there, chosen = world_called(world), _operations.config_called(config)
    return _module("ag_attention").ag_attention(
        q, k, v, world=there, cu_seqlens=cu_seqlens, causal=causal, scale=scale, m=m,
        config=chosen, with_lse=True,
    )  # fmt: skip


def _attention_gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> tuple:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


@_operations.defined(
    "(Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor d_out, Tensor? d_lse, "
    "str world, Tensor? cu_seqlens, bool causal, float? scale, SymInt? m, str config) -> "
    "(Tensor, Tensor, Tensor)",
    _attention_gradients, _autograd.save_nothing, _autograd.refuse,
)  # fmt: skip
def ag_attention_backward(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    *tensors, world, cu_seqlens, causal, scale, m, _ = arguments
    return _autograd.ag_attention_backward(
        *tensors, world=world_called(world), cu_seqlens=cu_seqlens, causal=causal, scale=scale, m=m
    )


# ---------------------------------------------------------------------------------------------
# Experts


def _routed(
    logits: torch.Tensor, world: str, top_k: int, m: int | None, renormalise: bool, tile_m: int,
    config: str,
) -> tuple:  # fmt: skip
    module, there = _module("moe_route"), world_called(world)
    problem = module.problem_of(there, logits, top_k, m, renormalise, tile_m)
    return tuple(_empty(logits, one) for one in module.fake(problem, {}, there.rank))


@_operations.defined(
    "(Tensor logits, str world, int top_k, SymInt? m, bool renormalise, int tile_m, str config) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _routed, _autograd.save_route, _autograd.moe_route,
)  # fmt: skip
def moe_route(
    logits: torch.Tensor, world: str, top_k: int, m: int | None, renormalise: bool, tile_m: int,
    config: str,
) -> tuple:  # fmt: skip
    there, chosen = world_called(world), _operations.config_called(config)
    made = _module("moe_route").moe_route(
        logits, top_k, world=there, m=m, renormalise=renormalise, tile_m=tile_m, config=chosen
    )
    return tuple(made.tables)


EXPERTS = (
    "(Tensor x, Tensor b, Tensor weight_of, Tensor[] tables, str world, int tile_m, str config) -> "
    "Tensor"
)


def _by_experts(name: str) -> Callable[..., torch.Tensor]:
    def gives(
        x: torch.Tensor, b: torch.Tensor, weight_of: torch.Tensor, tables: list, world: str,
        tile_m: int, config: str,
    ) -> torch.Tensor:  # fmt: skip
        module, there = _module(name), world_called(world)
        problem = module.problem_of(there, x, b, _autograd.routing_of(tables, weight_of, tile_m))
        return _empty(x, module.fake(problem, {}, there.rank))

    return gives


def _by_tables(name: str) -> Callable[..., torch.Tensor]:
    def call(
        x: torch.Tensor, b: torch.Tensor, weight_of: torch.Tensor, tables: list, world: str,
        tile_m: int, config: str,
    ) -> torch.Tensor:  # fmt: skip
        return _operator(name)(x, b, _autograd.routing_of(tables, weight_of, tile_m), world, config)

    return call


for _name, _gradient in (("ag_moe", _autograd.ag_moe), ("moe_rs", _autograd.moe_rs)):
    _operations.define(
        _name, EXPERTS, _by_tables(_name), _by_experts(_name), _autograd.save_experts, _gradient
    )


def _summed_by_expert(
    x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor, world: str, is_nk: bool
) -> torch.Tensor:
    experts, p, q = counts.shape[1], x.shape[1], y.shape[1]
    return x.new_empty(experts, q, p).transpose(1, 2) if is_nk else x.new_empty(experts, p, q)


@_operations.defined(
    "(Tensor x, Tensor y, Tensor counts, str world, bool is_nk) -> Tensor",
    _summed_by_expert,
)  # fmt: skip
def experts_wgrad(
    x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor, world: str, is_nk: bool
) -> torch.Tensor:
    """What ag_moe's and moe_rs's gradients end with: no operator, and without a gradient."""
    target = world_called(world).target
    return _experts_wgrad(x, y, counts, target=target, is_nk=is_nk)
