"""Operators that torch differentiates: how their tensors lie, and how gradients travel back.

What a gradient is (docs/training.md): that of a tensor of which each rank has its own part is each
rank's part of the gradient; that of what all ranks have alike is the same on all ranks. A gathered
tensor, and a weight that ranks use on their own rows, has a share of its gradient on each rank;
those of a gathered tensor are summed by what carries them back.

    all_gather      reduce_scatter            ag_gemm    da = gemm_rs(dc, b^T), db = ag_wgrad
    reduce_scatter  all_gather                gemm_rs    da = ag_gemm(dout, b^T), db = ag_wgrad
    all_reduce      the gradient itself       gemm_ar    da = dout b^T, db = a^T dout
    all_to_all      all_to_all                ag_wgrad   gemm_rs of what is gathered, ag_gemm
    ep_dispatch     ep_combine, and the other way round (in their files)
    ag_attention    all_gather of k and v again, reduce_scatter of shares of their gradients
    ag_moe          moe_rs with weights of 1  moe_rs     ag_moe, times the weights
    moe_ar          as moe_rs, of what is there

Formulas are made of operators again, so most can be differentiated too.

Source  Megatron-LM's tensor and sequence parallelism for what is summed where
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch

from weft.base.errors import DtypeError, UsageError
from weft.base.parts import full_part, part_of
from weft.base.providers import provider
from weft.compiler import experts, layouts
from weft.ir.tensor import Partial, Placement, Replicate, Shard
from weft.plan import attention_blocks, attention_launches, operations
from weft.plan import experts_wgrad as by_experts
from weft.plan.attention_blocks import BlockAttention
from weft.plan.operations import NARROWED, OPERATIONS, WIDENED, Operation, routing_of
from weft.plan.sequence_shards import padded, shards_in

ROWS, COLUMNS, SUM, ALIKE = Shard(0), Shard(1), Partial(), Replicate()
Formula = Callable[..., dict[str, Callable[[], Any]]]


def _differentiates(
    *keeps: str, policy: str | None = None, lies: dict[str, Placement], **rest: Any
) -> Callable[[Formula], Formula]:
    """Enter a formula as the gradient of the operator of its name."""

    def enter(formula: Formula) -> Formula:
        row = Operation(lies, formula, keeps, policy, **rest)
        OPERATIONS[formula.__name__] = row
        return formula

    return enter


def _ops() -> Any:
    return provider("collectives")


def _like(gradient: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A gradient as operators take it: contiguous, of the operand's dtype."""
    return gradient.to(x.dtype).contiguous()


# ---------------------------------------------------------------------------------------------
# Rows that move, and sums


@_differentiates(lies={"x": ROWS})
def all_gather(of: Any, gradient: torch.Tensor) -> dict:
    return {"x": lambda: _ops().reduce_scatter(gradient.contiguous(), world=of.world)}


@_differentiates(lies={"x": SUM})
def reduce_scatter(of: Any, gradient: torch.Tensor) -> dict:
    return {"x": lambda: _ops().all_gather(gradient.contiguous(), world=of.world, m=of.rows)}


@_differentiates(lies={"x": SUM})
def all_reduce(of: Any, gradient: torch.Tensor) -> dict:
    return {"x": lambda: gradient}


def _exchanged(made: Any) -> tuple[Any, Any]:
    """Without splits how many rows have come is known, and not said."""
    return made if isinstance(made, tuple) else (made, made.new_empty(0, dtype=torch.int64))


@_differentiates(
    "splits", "result_1", lies={"x": ROWS, "splits": ROWS}, num_results=2, results_of=_exchanged
)
def all_to_all(of: Any, gradient: torch.Tensor, _: Any) -> dict:
    gradient = gradient.contiguous()
    back = _exchanged_back if of.splits is None else _exchanged_back_by_splits
    return {"x": lambda: back(of, gradient)}


def _exchanged_back(of: Any, gradient: torch.Tensor) -> torch.Tensor:
    """The same exchange; where shards differ, by splits: rows of this rank's shard, from each."""
    world, m = of.world, of.rows
    if m % world.num_ranks == 0:
        return _ops().all_to_all(gradient, world=world)
    own = gradient.shape[0] // world.num_ranks
    most = full_part(m, world.num_ranks) * world.num_ranks
    padded = gradient.new_zeros((most, *gradient.shape[1:]))
    padded[: gradient.shape[0]] = gradient
    splits = torch.full((world.num_ranks,), own, dtype=torch.int64, device=gradient.device)
    return _ops().all_to_all(padded, world=world, splits=splits, capacity=m)[0]


def _exchanged_back_by_splits(of: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Rows go back to whom they came from. Of rows that found no room nothing comes back: what
    comes of a rank goes to where the rows for it began."""
    splits, received = of.splits, of.result_1
    room = (gradient.shape[0] - (received.cumsum(0) - received)).clamp(min=0)
    back, kept = _ops().all_to_all(
        gradient, world=of.world, splits=received.minimum(room), capacity=of.rows
    )
    row = torch.arange(of.rows, device=gradient.device)
    ends = splits.cumsum(0)
    to = torch.searchsorted(ends, row, right=True).clamp(max=len(splits) - 1)
    place = row - (ends - splits)[to]
    there = (row < ends[-1]) & (place < kept[to])
    source = torch.where(there, (kept.cumsum(0) - kept)[to] + place, 0)
    shape = (-1, *[1] * (gradient.dim() - 1))
    return back[source] * there.view(shape).to(back.dtype)


def _no_values(x: torch.Tensor, residual: torch.Tensor, **_: Any) -> tuple:
    return torch.empty_like(x), torch.empty_like(x)


@_differentiates(
    "result_1", "weight", lies={"x": SUM, "residual": ALIKE, "weight": ALIKE}, policy=WIDENED,
    num_results=2, fake=_no_values,
)  # fmt: skip
def all_reduce_rms_norm(of: Any, d_normed: torch.Tensor, d_total: torch.Tensor) -> dict:
    """Nothing travels: both results, and so their gradients, are alike on all ranks."""
    value, given, weight = of.result_1.float(), d_normed.float(), of.weight
    scale = torch.rsqrt(value.square().mean(1, keepdim=True) + of.eps)
    unit = value * scale

    @cache
    def dx() -> torch.Tensor:
        weighted = given * weight.float()
        back = scale * (weighted - unit * (weighted * unit).mean(1, keepdim=True))
        return (back + d_total.float()).to(of.result_1.dtype)

    return {"x": dx, "residual": dx, "weight": lambda: (given * unit).sum(0).to(weight.dtype)}


# ---------------------------------------------------------------------------------------------
# Products


def _weights_gradient(of: Any, gradient: Any, *, gathers_a: bool) -> Any:
    """a^T gradient, of which one is gathered, laid out as b is."""
    if of.b.is_contiguous():
        gathered = "x" if gathers_a else "y"
        return _ops().ag_wgrad(of.a, gradient, world=of.world, gathered=gathered)
    gathered = "y" if gathers_a else "x"
    return _ops().ag_wgrad(gradient, of.a, world=of.world, gathered=gathered).t()


def _refuse_scales(op: str, given: Any) -> None:
    if given.a.dtype.itemsize == 1 or (given.scale_a, given.scale_b) != (None, None):
        raise DtypeError(
            f"{op}: {given.a.dtype} operands with scales have no gradient; call under "
            "torch.no_grad(), or keep weights in bfloat16 where they are trained"
        )


@_differentiates(
    "a", "b", policy=NARROWED, lies={"a": ROWS, "b": COLUMNS}, with_out=True,
    checked=partial(_refuse_scales, "ag_gemm"),
)  # fmt: skip
def ag_gemm(of: Any, gradient: torch.Tensor) -> dict:
    gradient = _like(gradient, of.a)
    return {
        "a": lambda: _ops().gemm_rs(gradient, of.b.t(), world=of.world),
        "b": lambda: _weights_gradient(of, gradient, gathers_a=True),
    }


@_differentiates(
    "a", "b", policy=NARROWED, lies={"a": COLUMNS, "b": ROWS}, with_out=True,
    checked=partial(_refuse_scales, "gemm_rs"),
)  # fmt: skip
def gemm_rs(of: Any, gradient: torch.Tensor) -> dict:
    gradient, m = _like(gradient, of.a), of.rows
    return {
        "a": lambda: _ops().ag_gemm(gradient, of.b.t(), world=of.world, m=m),
        "b": lambda: _weights_gradient(of, gradient, gathers_a=False),
    }


@_differentiates(
    "a", "b", policy=NARROWED, lies={"a": COLUMNS, "b": ROWS}, with_out=True,
    checked=partial(_refuse_scales, "gemm_ar"),
)  # fmt: skip
def gemm_ar(of: Any, gradient: torch.Tensor) -> dict:
    a, b, gradient = of.a, of.b, _like(gradient, of.a)
    return {
        "a": lambda: gradient @ b.t(),
        # As b lies.
        "b": lambda: a.t() @ gradient if b.is_contiguous() else (gradient.t() @ a).t(),
    }


@_differentiates("x", "y", policy=NARROWED, lies={"x": ROWS, "y": COLUMNS}, with_out=True)
def ag_wgrad(of: Any, gradient: torch.Tensor) -> dict:
    """Of what is gathered gemm_rs, of the other ag_gemm."""
    gradient = _like(gradient, of.x)
    whole, b = (of.y, gradient.t()) if of.gathered == "x" else (of.x, gradient)
    rows, other = (of.x, "y") if of.gathered == "x" else (of.y, "x")
    return {
        of.gathered: lambda: _ops().gemm_rs(whole, b, world=of.world),
        other: lambda: _ops().ag_gemm(rows, b.t(), world=of.world, m=whole.shape[0]),
    }


# ---------------------------------------------------------------------------------------------
# Attention


@_differentiates(
    "q", "k", "v", "result_0", "result_1", "cu_seqlens", policy=NARROWED, num_results=2,
    lies={"q": ROWS, "k": ROWS, "v": ROWS}, always={"with_lse": True},
)  # fmt: skip
def ag_attention(of: Any, d_out: torch.Tensor, d_lse: torch.Tensor) -> dict:
    @cache
    def found() -> tuple:
        return ag_attention_backward(
            of.q, of.k, of.v, of.result_0, of.result_1, d_out.to(of.q.dtype), d_lse,
            world=of.world, causal=of.causal, zigzag=of.zigzag, cu_seqlens=of.cu_seqlens,
            scale=of.scale, m=of.m,
        )  # fmt: skip

    return {name: lambda i=i: found()[i] for i, name in enumerate("qkv")}


def ag_attention_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    dout: torch.Tensor, dlse: torch.Tensor | None = None, *, world: Any, causal: bool = True,
    zigzag: bool = False, cu_seqlens: torch.Tensor | None = None, scale: float | None = None,
    m: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) of own tokens, of the results of ag_attention(q, k, v, ..). Collective.

    Keys are gathered again; each rank makes its share of all keys' gradients, which reduce_scatter
    sums. A share is rounded once; every order of sums is fixed, so results are the same bits.

    Shapes  as there; dout as out; dlse, if lse has a gradient too, as lse
    Dtypes  gradients have that of q, k and v
    Sync    stream-ordered on the current stream
    """
    tensors = (q, k, v, out, lse, dout, dlse)
    if operations.is_asked(*(one for one in tensors if one is not None)):
        rest = {"causal": causal, "zigzag": zigzag, "cu_seqlens": cu_seqlens, "scale": scale,
                "m": m}  # fmt: skip
        return operations.as_operation("ag_attention_backward", world, tensors, **rest)
    m, own = k.shape[0] * world.num_ranks if m is None else m, k.shape[0]
    if zigzag:
        lie = shards_in(world, m, True, cu_seqlens)
        keys, values = (
            _ops().all_gather(padded(one, m, world.num_ranks), world=world) for one in (k, v)
        )
        blocks = BlockAttention(
            q, k.shape[1], lie, rank=world.rank, causal=causal, scale=scale, target=world.target
        )
        dq, *shares = attention_blocks.gradients(blocks, keys, values, out, lse, dout, dlse)
    else:
        keys, values = (_ops().all_gather(one, world=world, m=m) for one in (k, v))
        first, _ = part_of(m, world.rank, world.num_ranks)
        dq, *shares = attention_launches.gradients(
            q, keys, values, out, lse, dout, dlse, first=first, causal=causal,
            cu_seqlens=cu_seqlens, scale=scale, target=world.target,
        )  # fmt: skip
    return dq, *(_ops().reduce_scatter(one, world=world)[:own] for one in shares)


def _like_operands(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_: Any) -> tuple:
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _refuse(of: Any, *_: Any) -> dict:
    raise UsageError("ag_attention: its gradients have none; call without create_graph=True")


OPERATIONS["ag_attention_backward"] = Operation({}, _refuse, num_results=3, fake=_like_operands)


def _refuse_decode(of: Any, *_: Any) -> dict:
    raise UsageError(
        "flash_decode: it has no gradient; call it under torch.no_grad(), and train with "
        "ag_attention, or torch's attention of own heads"
    )


# Each rank has keys of every sequence.
OPERATIONS["flash_decode"] = Operation(
    {"q": ALIKE, "k_cache": COLUMNS, "v_cache": COLUMNS}, _refuse_decode, policy=NARROWED
)

# ---------------------------------------------------------------------------------------------
# Experts


@_differentiates(
    "logits",
    "result_0",
    "result_1",
    "result_4",
    lies={"logits": ROWS},
    num_results=9,
    results_of=lambda made: tuple(getattr(made, "tables", made)),
)
def moe_route(of: Any, d_ids: Any, d_weights: Any, d_token_of: Any, d_weight_of: Any, *_) -> dict:
    """What each rank says of a token's weights in all tables is summed on its own rank."""
    logits, chosen, weights, slot_of = of.logits, of.result_0.long(), of.result_1, of.result_4

    def d_logits() -> torch.Tensor:
        d_slots = d_weight_of[slot_of.clamp(min=0).long()]
        d_slots = torch.where(slot_of >= 0, d_slots, 0.0)  # other ranks' experts say it there
        d_chosen = _ops().reduce_scatter(d_slots, world=of.world) + d_weights
        is_softmax = of.score == "softmax"
        if is_softmax and of.renormalise:  # a softmax of the chosen logits alone
            share = weights / of.scale
            d_chosen = weights * (d_chosen - (d_chosen * share).sum(1, keepdim=True))
            back = torch.zeros_like(logits, dtype=torch.float32).scatter(1, chosen, d_chosen)
            return back.to(logits.dtype)
        scores = logits.float().softmax(1) if is_softmax else logits.float().sigmoid()
        d_chosen = d_chosen * of.scale
        if of.renormalise:
            total, share = scores.gather(1, chosen).sum(1, keepdim=True), weights / of.scale
            d_chosen = (d_chosen - (d_chosen * share).sum(1, keepdim=True)) / total
        d_score = torch.zeros_like(scores).scatter(1, chosen, d_chosen)
        rest = (d_score * scores).sum(1, keepdim=True) if is_softmax else d_score * scores
        return (scores * (d_score - rest)).to(logits.dtype)

    return {"logits": d_logits}


def _of_each_expert(of: Any, x: Any, y: Any) -> torch.Tensor:
    """x^T y of each expert's slots, as b lies."""
    x, y, is_nk = x.contiguous(), y.contiguous(), layouts.is_nk(of.b)
    return experts_wgrad(x, y, of.counts, world=of.world, is_nk=is_nk)


def experts_wgrad(
    x: torch.Tensor, y: torch.Tensor, counts: torch.Tensor, *, world: Any, is_nk: bool
) -> torch.Tensor:
    """What ag_moe's and moe_rs's gradients end with: no operator, and without a gradient."""
    if operations.is_asked(x, y):
        return operations.as_operation("experts_wgrad", world, (x, y, counts), is_nk=is_nk)
    return by_experts.experts_wgrad(x, y, counts, target=world.target, is_nk=is_nk)


def _by_expert(x: Any, y: Any, counts: Any, is_nk: bool, **_: Any) -> torch.Tensor:
    experts, p, q = counts.shape[1], x.shape[1], y.shape[1]
    return x.new_empty(experts, q, p).transpose(1, 2) if is_nk else x.new_empty(experts, p, q)


OPERATIONS["experts_wgrad"] = Operation({}, fake=_by_expert)


@_differentiates("x", "b", "weight_of", "tables", policy=NARROWED, lies={"x": ROWS, "b": Shard(2)})
def ag_moe(of: Any, gradient: torch.Tensor) -> dict:
    ones, world = torch.ones_like(of.weight_of), of.world
    routing = routing_of(of.tables, ones, of.tile_m, of.split_experts)
    made, gradient = routing.tables, _like(gradient, of.x)
    of.counts = made.counts

    def db() -> torch.Tensor:
        rows = _ops().all_gather(of.x, world=world, m=made.slot_of.shape[0])
        return _of_each_expert(of, experts.gather_rows(rows, routing), gradient)

    return {"x": lambda: _ops().moe_rs(gradient, of.b.transpose(1, 2), routing, world=world),
            "b": db}  # fmt: skip


@_differentiates(
    "x", "b", "weight_of", "tables", policy=NARROWED, lies={"x": COLUMNS, "b": COLUMNS}
)
def moe_rs(of: Any, gradient: torch.Tensor) -> dict:
    routing = routing_of(of.tables, of.weight_of, of.tile_m, of.split_experts)
    world = of.world
    gradient, m = gradient.contiguous(), routing.tables.slot_of.shape[0]
    return _of_weighted_rows(
        of, routing,
        lambda: _ops().ag_moe(gradient, of.b.transpose(1, 2), routing, world=world),
        lambda: _ops().all_gather(gradient, world=world, m=m),
    )  # fmt: skip


@_differentiates(
    "x", "b", "weight_of", "tables", policy=NARROWED, lies={"x": COLUMNS, "b": COLUMNS}
)
def moe_ar(of: Any, gradient: torch.Tensor) -> dict:
    routing = routing_of(of.tables, of.weight_of, of.tile_m, of.split_experts)
    gradient = gradient.contiguous()

    def unweighted() -> torch.Tensor:
        rows = experts.gather_rows(gradient, routing)
        return experts.grouped_matmul(rows, of.b.transpose(1, 2), routing)

    return _of_weighted_rows(of, routing, unweighted, lambda: gradient)


def _of_weighted_rows(of: Any, routing: Any, product: Callable, rows: Callable) -> dict:
    """`product`: all tokens' gradients times b^T, by slot; `rows`: all tokens' gradients. Of a
    weight the product of what it weighs and the gradient: this rank's part of k's."""
    made, weight_of, x = routing.tables, of.weight_of, of.x
    of.counts = made.counts

    @cache
    def unweighted() -> torch.Tensor:
        return product().float()

    def db() -> torch.Tensor:
        weighted = (experts.gather_rows(rows(), routing).float() * weight_of[:, None]).to(x.dtype)
        return _of_each_expert(of, x, weighted)

    return {
        "x": lambda: (unweighted() * weight_of[:, None]).to(x.dtype),
        "b": db,
        "weight_of": lambda: (unweighted() * x.float()).sum(1),
    }


# Differentiated in its own file.
OPERATIONS["ep_dispatch"] = Operation({"x": ROWS, "ids": ROWS, "weights": ROWS}, num_results=0)

for _function in (ag_attention_backward, experts_wgrad):
    operations.define(_function.__name__, _function)
