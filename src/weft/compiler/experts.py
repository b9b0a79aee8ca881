"""What libraries do by a router's tables: rows by index, a product for each expert, weighted sums.

    gather_rows(x, routing)[slot] = x[token of slot]
    grouped_matmul(rows, b, routing)[slot] = rows[slot] @ b[expert of slot]
    scatter_rows(y, routing)[token] = sum over its choices of  weight * y[slot of the choice]

Slots are all (token, choice) sorted by expert, as weft.ops.moe_route sorts them. Of rows by expert
a rank has the slots of its own experts: they begin at its first one, in room for all. The host does
not learn how many they are, but where the library has no grouped product for the tensors.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch

# Rows of operands of the library's grouped product begin at so many bytes.
ALIGNMENT = 16


class Tables(Protocol):
    """The part of weft.ops.moe_route.Tables that is asked here."""

    token_of: Any
    weight_of: Any
    slot_of: Any
    counts: Any


class Routing(Protocol):
    """As weft.ops.moe_route gives it."""

    @property
    def tables(self) -> Tables: ...


class Sorted(NamedTuple):
    """The tables of `route`, as `Tables` names them."""

    token_of: Any
    weight_of: Any
    slot_of: Any
    counts: Any

    @property
    def tables(self) -> Sorted:
        return self


def route(logits: torch.Tensor, top_k: int) -> Sorted:
    """What weft.ops.moe_route means, of all ranks' tokens: the top_k experts by softmax, weights
    over their sum; all (token, choice) sorted by expert, stable. counts: [1, experts]."""
    chosen = logits.sort(dim=1, descending=True, stable=True).indices[:, :top_k]
    share = logits.softmax(1).gather(1, chosen)
    order = chosen.flatten().sort(stable=True).indices
    weights = (share / share.sum(1, keepdim=True)).flatten()[order]
    counts = chosen.flatten().bincount(minlength=logits.shape[1])[None]
    return Sorted(order // top_k, weights, order.argsort().view(chosen.shape), counts)


def gather_rows(x: torch.Tensor, routing: Routing) -> torch.Tensor:
    """A row for each slot: its token's."""
    return x.index_select(0, routing.tables.token_of)


def scatter_rows(y: torch.Tensor, routing: Routing) -> torch.Tensor:
    """A row for each token: its choices times their weights, added up in fp32, in their order."""
    slots, sums = routing.tables.slot_of, None
    for j in range(slots.shape[1]):
        weight = routing.tables.weight_of.index_select(0, slots[:, j])
        share = y.index_select(0, slots[:, j]).float() * weight[:, None]
        sums = share if sums is None else sums + share
    assert sums is not None
    return sums.to(y.dtype)


def grouped_matmul(
    rows: torch.Tensor, b: torch.Tensor, routing: Routing, *, first: int = 0
) -> torch.Tensor:
    """Each row times the matrix of its expert; b has experts from `first` on, whose slots rows has.

    Rows behind the last of these are undefined.
    """
    experts = b.shape[0]
    counts = routing.tables.counts.sum(0)[first : first + experts]
    if not rows.numel() or not b.numel():
        return rows.new_zeros(rows.shape[0], b.shape[2])
    if (product := _product_of_groups(rows, b)) is not None:
        return product(rows, b, offs=counts.cumsum(0, dtype=torch.int32))
    out = rows.new_zeros(rows.shape[0], b.shape[2])
    begin = 0
    for expert, size in enumerate(counts.tolist()):
        out[begin : begin + size] = rows[begin : begin + size] @ b[expert]
        begin += size
    return out


def _product_of_groups(rows: torch.Tensor, b: torch.Tensor) -> Any:
    """The library's product by offsets on the device, where it takes these tensors."""
    strides = [one.stride(i) * one.element_size() for one in (rows, b) for i in range(one.dim())
               if one.stride(i) != 1]  # fmt: skip
    # On GPUs it has kernels for bfloat16 alone.
    is_taken = not rows.is_cuda or rows.dtype == torch.bfloat16
    is_taken = is_taken and not any(stride % ALIGNMENT for stride in strides)
    return getattr(torch.nn.functional, "grouped_mm", None) if is_taken else None
