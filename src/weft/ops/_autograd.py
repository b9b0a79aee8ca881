"""How gradients travel back: the formulas of the operations in `_custom_ops.py`.

Not an operator. Formulas are made of operators again, so most can be differentiated too.

What a gradient is (docs/training.md): that of a tensor of which each rank has its own part is each
rank's part of the gradient; that of what all ranks have alike is the same on all ranks. A gathered
tensor, and a weight that ranks use on their own rows, has a share of its gradient on each rank;
those of a gathered tensor are summed by what carries them back.

    all_gather      reduce_scatter            ag_gemm    da = gemm_rs(dc, b^T), db = ag_wgrad
    reduce_scatter  all_gather                gemm_rs    da = ag_gemm(dout, b^T), db = ag_wgrad
    all_reduce      the gradient itself       gemm_ar    da = dout b^T, db = a^T dout
    all_to_all      all_to_all                ag_wgrad   gemm_rs of what is gathered, ag_gemm
    ep_dispatch     ep_combine, and the other way round (_ep_gradients.py)
    ag_attention    all_gather of k and v again, reduce_scatter of shares of their gradients
    ag_moe          moe_rs with weights of 1  moe_rs     ag_moe, times the weights

Source  Megatron-LM's tensor and sequence parallelism for what is summed where
"""

from __future__ import annotations

from typing import Any

import torch

from weft.base.errors import DtypeError, UsageError
from weft.base.parts import full_part, part_of
from weft.compiler import layouts
from weft.ops import _operations
from weft.plan import attention_launches
from weft.plan.experts_wgrad import experts_wgrad

# ---------------------------------------------------------------------------------------------
# What formulas have in common


def _world(ctx: Any) -> Any:
    from weft.runtime.start import world

    return world(ctx.world)


def _like(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A gradient as operators take it: contiguous, of the operand's dtype."""
    return gradient.to(x.dtype).contiguous()


def _weights_gradient(ctx: Any, a: Any, gradient: Any, b: Any, *, gathers_a: bool) -> Any:
    """a^T gradient, of which one is gathered, laid out as b is."""
    from weft.ops import ag_wgrad

    if b.is_contiguous():
        gathered = "x" if gathers_a else "y"
        return ag_wgrad(a, gradient, world=_world(ctx), gathered=gathered)
    gathered = "y" if gathers_a else "x"
    return ag_wgrad(gradient, a, world=_world(ctx), gathered=gathered).t()


def local_product(left: torch.Tensor, right: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """left^T right, laid out as b is."""
    if b.is_contiguous():
        return left.t() @ right
    return (right.t() @ left).t()


# ---------------------------------------------------------------------------------------------
# Rows that move, and sums


def save_world(ctx: Any, inputs: tuple, output: Any) -> None:
    """For operators of one tensor, whose gradient needs no values."""
    ctx.world, ctx.dtype = inputs[1], inputs[0].dtype


def all_gather(ctx: Any, gradient: torch.Tensor) -> tuple:
    from weft.ops import reduce_scatter

    return reduce_scatter(gradient.contiguous(), world=_world(ctx)), None, None, None


def save_rows(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.world, ctx.rows = inputs[1], inputs[0].shape[0]


def reduce_scatter(ctx: Any, gradient: torch.Tensor) -> tuple:
    from weft.ops import all_gather

    return all_gather(gradient.contiguous(), world=_world(ctx), m=ctx.rows), None, None


def all_reduce(ctx: Any, gradient: torch.Tensor) -> tuple:
    return gradient, None, None


def all_to_all(ctx: Any, gradient: torch.Tensor) -> tuple:
    """The same exchange; where shards differ, by splits: rows of this rank's shard, from each."""
    from weft.ops import all_to_all

    world, m = _world(ctx), ctx.rows
    gradient = gradient.contiguous()
    if m % world.num_ranks == 0:
        return all_to_all(gradient, world=world), None, None
    own = gradient.shape[0] // world.num_ranks
    most = full_part(m, world.num_ranks) * world.num_ranks
    padded = gradient.new_zeros((most, *gradient.shape[1:]))
    padded[: gradient.shape[0]] = gradient
    splits = torch.full((world.num_ranks,), own, dtype=torch.int64, device=gradient.device)
    return all_to_all(padded, world=world, splits=splits, capacity=m)[0], None, None


def save_splits(ctx: Any, inputs: tuple, output: Any) -> None:
    x, splits, ctx.world, *_ = inputs
    ctx.rows = x.shape[0]
    ctx.save_for_backward(splits, output[1])


def all_to_all_splits(ctx: Any, gradient: torch.Tensor, _: Any) -> tuple:
    """Rows go back to whom they came from. Of rows that found no room nothing comes back: what
    comes of a rank goes to where the rows for it began."""
    from weft.ops import all_to_all

    splits, received = ctx.saved_tensors
    room = (gradient.shape[0] - (received.cumsum(0) - received)).clamp(min=0)
    back, kept = all_to_all(
        gradient.contiguous(), world=_world(ctx), splits=received.minimum(room), capacity=ctx.rows
    )
    row = torch.arange(ctx.rows, device=gradient.device)
    ends = splits.cumsum(0)
    to = torch.searchsorted(ends, row, right=True).clamp(max=len(splits) - 1)
    place = row - (ends - splits)[to]
    there = (row < ends[-1]) & (place < kept[to])
    source = torch.where(there, (kept.cumsum(0) - kept)[to] + place, 0)
    shape = (-1, *[1] * (gradient.dim() - 1))
    return back[source] * there.view(shape).to(back.dtype), None, None, None, None


# ---------------------------------------------------------------------------------------------
# Products


def save_product(ctx: Any, inputs: tuple, output: Any) -> None:
    a, b, ctx.world, *_ = inputs
    ctx.save_for_backward(a, b)


def save_ag_gemm(ctx: Any, inputs: tuple, output: Any) -> None:
    a, scales = inputs[0], inputs[5:7]
    if a.dtype.itemsize == 1 or scales != (None, None):
        raise DtypeError(
            f"ag_gemm: {a.dtype} operands with scales have no gradient; call under torch.no_grad()"
            ", or keep weights in bfloat16 where they are trained"
        )
    save_product(ctx, inputs, output)


def ag_gemm(ctx: Any, gradient: torch.Tensor) -> tuple:
    from weft.ops import gemm_rs

    a, b = ctx.saved_tensors
    gradient, da, db = _like(gradient, a), None, None
    if ctx.needs_input_grad[0]:
        da = gemm_rs(gradient, b.t(), world=_world(ctx))
    if ctx.needs_input_grad[1]:
        db = _weights_gradient(ctx, a, gradient, b, gathers_a=True)
    return da, db, None, None, None, None, None, None


def gemm_rs(ctx: Any, gradient: torch.Tensor) -> tuple:
    from weft.ops import ag_gemm

    a, b = ctx.saved_tensors
    gradient, da, db = gradient.contiguous(), None, None
    if ctx.needs_input_grad[0]:
        da = ag_gemm(gradient, b.t(), world=_world(ctx), m=a.shape[0])
    if ctx.needs_input_grad[1]:
        db = _weights_gradient(ctx, a, gradient, b, gathers_a=False)
    return da, db, None, None


def gemm_ar(ctx: Any, gradient: torch.Tensor) -> tuple:
    a, b = ctx.saved_tensors
    da = gradient @ b.t() if ctx.needs_input_grad[0] else None
    db = local_product(a, gradient, b) if ctx.needs_input_grad[1] else None
    return da, db, None, None


def save_wgrad(ctx: Any, inputs: tuple, output: Any) -> None:
    x, y, ctx.world, ctx.gathered, *_ = inputs
    ctx.save_for_backward(x, y)


def ag_wgrad(ctx: Any, gradient: torch.Tensor) -> tuple:
    """Of what is gathered gemm_rs, of the other ag_gemm."""
    from weft.ops import ag_gemm, gemm_rs

    x, y = ctx.saved_tensors
    gradient, world, found = _like(gradient, x), _world(ctx), [None, None]
    rows, whole, place, b = (x, y, 0, gradient.t()) if ctx.gathered == "x" else (y, x, 1, gradient)
    if ctx.needs_input_grad[place]:
        found[place] = gemm_rs(whole, b, world=world)
    if ctx.needs_input_grad[1 - place]:
        found[1 - place] = ag_gemm(rows, b.t(), world=world, m=whole.shape[0])
    return *found, None, None, None, None


def save_norm(ctx: Any, inputs: tuple, output: Any) -> None:
    ctx.eps = inputs[4]
    ctx.save_for_backward(output[1], inputs[2])


def all_reduce_rms_norm(ctx: Any, d_normed: torch.Tensor, d_total: torch.Tensor) -> tuple:
    """Nothing travels: both results, and so their gradients, are alike on all ranks."""
    total, weight = ctx.saved_tensors
    value, given = total.float(), d_normed.float()
    scale = torch.rsqrt(value.square().mean(1, keepdim=True) + ctx.eps)
    unit = value * scale
    weighted = given * weight.float()
    dx = scale * (weighted - unit * (weighted * unit).mean(1, keepdim=True)) + d_total.float()
    dx = dx.to(total.dtype)
    d_weight = (given * unit).sum(0).to(weight.dtype)
    return dx, dx, d_weight, None, None, None


# ---------------------------------------------------------------------------------------------
# Attention


def save_attention(ctx: Any, inputs: tuple, output: Any) -> None:
    q, k, v, ctx.world, cu_seqlens, *ctx.way, _ = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)


def ag_attention(ctx: Any, d_out: torch.Tensor, d_lse: torch.Tensor) -> tuple:
    *tensors, cu_seqlens = ctx.saved_tensors
    causal, scale, m = ctx.way
    found = ag_attention_backward(
        *tensors, d_out.to(tensors[0].dtype), d_lse, world=_world(ctx), causal=causal,
        cu_seqlens=cu_seqlens, scale=scale, m=m,
    )  # fmt: skip
    return *found, None, None, None, None, None, None


def ag_attention_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    dout: torch.Tensor, dlse: torch.Tensor | None = None, *, world: Any, causal: bool = True,
    cu_seqlens: torch.Tensor | None = None, scale: float | None = None, m: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) of own tokens, of the results of ag_attention(q, k, v, ..). Collective.

    Keys are gathered again; each rank makes its share of all keys' gradients, which reduce_scatter
    sums. A share is rounded once; every order of sums is fixed, so results are the same bits.

    Shapes  as there; dout as out; dlse, if lse has a gradient too, as lse
    Dtypes  gradients have that of q, k and v
    Sync    stream-ordered on the current stream
    """
    from weft.ops import all_gather, reduce_scatter

    tensors = (q, k, v, out, lse, dout, dlse)
    if _operations.is_asked(*(one for one in tensors if one is not None)):
        rest = (cu_seqlens, causal, scale, m)
        return _operations.as_operation("ag_attention_backward", world, tensors, *rest)
    m = k.shape[0] * world.num_ranks if m is None else m
    keys, values = (all_gather(one, world=world, m=m) for one in (k, v))
    first, _ = part_of(m, world.rank, world.num_ranks)
    dq, *shares = attention_launches.gradients(
        q, keys, values, out, lse, dout, dlse, first=first, causal=causal, cu_seqlens=cu_seqlens,
        scale=scale, target=world.target,
    )  # fmt: skip
    return dq, *(reduce_scatter(one, world=world) for one in shares)


def save_nothing(ctx: Any, inputs: tuple, output: Any) -> None:
    pass


def refuse(ctx: Any, *_: Any) -> None:
    raise UsageError("ag_attention: its gradients have none; call without create_graph=True")


# ---------------------------------------------------------------------------------------------
# Experts


def save_route(ctx: Any, inputs: tuple, output: Any) -> None:
    logits, ctx.world, _, _, ctx.renormalises, *_ = inputs
    ids, weights, _, _, slot_of, *_ = output
    ctx.save_for_backward(logits, ids, weights, slot_of)


def moe_route(ctx: Any, d_ids: Any, d_weights: Any, d_token_of: Any, d_weight_of: Any, *_) -> tuple:
    """What each rank says of a token's weights in all tables is summed on its own rank."""
    from weft.ops import reduce_scatter

    logits, ids, weights, slot_of = ctx.saved_tensors
    d_chosen = reduce_scatter(d_weight_of[slot_of.long()], world=_world(ctx)) + d_weights
    chosen = ids.long()
    if ctx.renormalises:  # a softmax of the chosen logits alone
        d_chosen = weights * (d_chosen - (d_chosen * weights).sum(1, keepdim=True))
        d_logits = torch.zeros_like(logits, dtype=torch.float32).scatter(1, chosen, d_chosen)
    else:
        share = logits.float().softmax(1)
        d_share = torch.zeros_like(share).scatter(1, chosen, d_chosen)
        d_logits = share * (d_share - (d_share * share).sum(1, keepdim=True))
    return d_logits.to(logits.dtype), None, None, None, None, None, None


def routing_of(tables: Any, weight_of: torch.Tensor, tile_m: int) -> Any:
    from weft.ops.moe_route import Routing, Tables

    return Routing(Tables(*tables)._replace(weight_of=weight_of), tile_m)


def save_experts(ctx: Any, inputs: tuple, output: Any) -> None:
    x, b, weight_of, tables, ctx.world, ctx.tile_m, _ = inputs
    ctx.save_for_backward(x, b, weight_of, *tables)


def _products_of(ctx: Any, x: Any, y: Any, b: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """x^T y of each expert's slots, as b lies."""
    x, y, is_nk = x.contiguous(), y.contiguous(), layouts.is_nk(b)
    if _operations.is_asked(x, y):
        return _operations.operation("experts_wgrad")(x, y, counts, ctx.world, is_nk)
    target = _world(ctx).target
    return experts_wgrad(x, y, counts, target=target, is_nk=is_nk)


def ag_moe(ctx: Any, gradient: torch.Tensor) -> tuple:
    from weft.ops import all_gather, moe_rs

    x, b, weight_of, *tables = ctx.saved_tensors
    routing = routing_of(tables, torch.ones_like(weight_of), ctx.tile_m)
    gradient, world, dx, db = _like(gradient, x), _world(ctx), None, None
    if ctx.needs_input_grad[0]:
        dx = moe_rs(gradient, b.transpose(1, 2), routing, world=world)
    if ctx.needs_input_grad[1]:
        made = routing.tables
        rows = all_gather(x, world=world, m=made.slot_of.shape[0])[made.token_of.long()]
        db = _products_of(ctx, rows, gradient, b, made.counts)
    return dx, db, None, [None] * len(tables), None, None, None


def moe_rs(ctx: Any, gradient: torch.Tensor) -> tuple:
    """Of a weight the product of what it weighs and the gradient: this rank's part of k's."""
    from weft.ops import ag_moe, all_gather

    x, b, weight_of, *tables = ctx.saved_tensors
    routing = routing_of(tables, weight_of, ctx.tile_m)
    gradient, world, made, db = gradient.contiguous(), _world(ctx), routing.tables, None
    dx = d_weight_of = None
    if ctx.needs_input_grad[0] or ctx.needs_input_grad[2]:
        unweighted = ag_moe(gradient, b.transpose(1, 2), routing, world=world).float()
        dx = (unweighted * weight_of[:, None]).to(x.dtype)
        d_weight_of = (unweighted * x.float()).sum(1)
    if ctx.needs_input_grad[1]:
        rows = all_gather(gradient, world=world, m=made.slot_of.shape[0])[made.token_of.long()]
        weighted = (rows.float() * weight_of[:, None]).to(x.dtype)
        db = _products_of(ctx, x, weighted, b, made.counts)
    return dx, db, d_weight_of, [None] * len(tables), None, None, None
