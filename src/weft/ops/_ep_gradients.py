"""Gradients of ep_dispatch and ep_combine: each is carried back by the other.

    x' = ep_dispatch(x)      dx = ep_combine(dx') without weights
    out = ep_combine(y)      dy = ep_dispatch(dout) times the slots' weights
                             of a slot's weight: y's row times that of ep_dispatch(dout)

Weights travel to the experts' ranks with the tokens, so their gradients come back as rows do: a
slot's at its choice's column. Rows behind the last slot are zeros here, forward and backward: they
are in the sums of whoever multiplies all of them.

Not an operator. The handle is no tensor: torch.compile runs these calls between its graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.base.errors import DtypeError
from weft.plan import operations


@operations.runs_between_graphs("ep_dispatch")
def dispatch(call: Callable[[], Any], rows: Any, scales: Any, weights: Any, world: Any) -> Any:
    """What `call()` gives, an ep_dispatch of rows with zeros behind the last slot, with
    gradients."""
    if not _are_asked(rows, weights):
        with operations.without_autocast():
            return call()
    if scales is not None or rows.dtype.itemsize == 1:
        raise DtypeError(
            f"ep_dispatch: {rows.dtype} rows with scales have no gradient; call under "
            "torch.no_grad(), or send rows in bfloat16 where they are trained"
        )
    kept: list[Any] = []
    x, weight_of, own = _Dispatch.apply(rows, weights, call, world, kept)
    (made,) = kept
    tables = made.handle.tables._replace(weight_of=weight_of, weights=own)
    return type(made)(x, made.handle._replace(tables=tables))


@operations.runs_between_graphs("ep_combine")
def combine(
    call: Callable[..., Any], y: Any, handle: Any, weighted: bool, world: Any, out: Any = None
) -> Any:
    """What `call()` gives, an ep_combine of `y`, with gradients.

    Raises  UsageError: out= with a gradient
    """
    if not _are_asked(y, handle.tables.weight_of):
        with operations.without_autocast():
            return call(out=out)
    if out is not None:
        raise operations.no_gradient_of_out("ep_combine")
    return _Combine.apply(y, handle.tables.weight_of, call, handle, weighted, world)


def _are_asked(*tensors: Any) -> bool:
    given = [one for one in tensors if one is not None]
    return torch.is_grad_enabled() and any(one.requires_grad for one in given)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Any, weights: Any, call: Any, world: Any, kept: list) -> tuple:
        with operations.without_autocast():
            made = call()
        kept.append(made)
        ctx.handle, ctx.world, ctx.is_weighted = made.handle, world, weights is not None
        # Other tensors than the handle's, which has no gradient.
        tables = made.handle.tables
        return made.x, tables.weight_of.clone(), tables.weights.clone()

    @staticmethod
    def backward(ctx: Any, dx: Any, d_weight_of: Any, d_own: Any) -> tuple:  # type: ignore[override]
        from weft.ops import ep_combine

        d_rows = d_weights = None
        if ctx.needs_input_grad[0]:
            d_rows = ep_combine(dx.contiguous(), ctx.handle, world=ctx.world, weighted=False)
        if ctx.is_weighted and ctx.needs_input_grad[1]:
            slots = _by_choice(ctx.handle.tables.slot_of, d_weight_of)
            d_weights = ep_combine(slots, ctx.handle, world=ctx.world, weighted=False) + d_own
        return d_rows, d_weights, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Any, weight_of: Any, call: Any, handle: Any, weighted: bool, world: Any
    ) -> torch.Tensor:
        tables = handle.tables._replace(weight_of=weight_of.detach())
        ctx.handle, ctx.weighted, ctx.world = handle._replace(tables=tables), weighted, world
        ctx.save_for_backward(y, weight_of)
        with operations.without_autocast():
            return call()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple:  # type: ignore[override]
        from weft.ops import ep_dispatch

        y, weight_of = ctx.saved_tensors
        gradient = gradient.contiguous()
        back = ep_dispatch(gradient, handle=ctx.handle, world=ctx.world, clear=True).x
        if not ctx.weighted:
            return back, None, None, None, None, None
        back = back.float()
        dy = (back * weight_of[:, None]).to(y.dtype)
        return dy, (back * y.float()).sum(1), None, None, None, None


def _by_choice(slot_of: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """[slots, top_k]: a slot's value in the column of the choice that it is, zeros elsewhere."""
    top_k, slots = slot_of.shape[1], values.shape[0]
    choice = torch.arange(top_k, device=values.device).expand_as(slot_of)
    # Choices of other ranks' experts go behind the last, as do those that there was no room for.
    place = torch.where(slot_of < 0, slots, slot_of).clamp(max=slots).long()
    column = torch.zeros(slots + 1, dtype=torch.int64, device=values.device)
    column = column.scatter(0, place.flatten(), choice.flatten())[:slots]
    return torch.nn.functional.one_hot(column, top_k).to(values.dtype) * values[:, None]
