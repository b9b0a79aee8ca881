"""What a call may be given in a plain tensor's place: DTensors, and whatever torch.autocast is on.

Not an operator. Of a DTensor that lies as the operator needs it, the call takes the rank's part;
gradients go back to it as DTensors. Under torch.autocast products and attention cast as torch's do,
and norms take the widest dtype. Neither is looked at where a call's tensors are plain.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weft.compiler import dtensors
from weft.ir.tensor import Partial, Placement, Replicate, Shard

PLAIN = (torch.Tensor, torch.nn.Parameter)

# torch.autocast's two policies that calls have.
NARROWED, WIDENED = "narrowed to autocast's dtype", "widened to the widest"


ROWS, COLUMNS, SUM, ALIKE = Shard(0), Shard(1), Partial(), Replicate()


@dataclass(frozen=True)
class _Takes:
    """How each of a call's tensors lies over the ranks, what autocast does with them, and which of
    the call's further arguments is the number of all ranks' rows."""

    placements: Mapping[str, Placement]
    policy: str | None = None
    m_at: int | None = None


_TAKES = {
    "all_gather": _Takes({"x": ROWS}, m_at=0),
    "reduce_scatter": _Takes({"x": SUM}),
    "all_reduce": _Takes({"x": SUM}),
    "all_to_all": _Takes({"x": ROWS}),
    "all_to_all_splits": _Takes({"x": ROWS, "splits": ROWS}),
    "ag_gemm": _Takes({"a": ROWS, "b": COLUMNS}, NARROWED, m_at=0),
    "gemm_rs": _Takes({"a": COLUMNS, "b": ROWS}, NARROWED),
    "gemm_ar": _Takes({"a": COLUMNS, "b": ROWS}, NARROWED),
    "ag_wgrad": _Takes({"x": ROWS, "y": COLUMNS}, NARROWED),
    "ag_attention": _Takes({"q": ROWS, "k": ROWS, "v": ROWS}, NARROWED, m_at=3),
    "all_reduce_rms_norm": _Takes({"x": SUM, "residual": ALIKE, "weight": ALIKE}, WIDENED),
    "moe_route": _Takes({"logits": ROWS}, m_at=1),
    "ag_moe": _Takes({"x": ROWS, "b": Shard(2)}, NARROWED),
    "moe_rs": _Takes({"x": COLUMNS, "b": COLUMNS}, NARROWED),
    "ep_dispatch": _Takes({"x": ROWS, "ids": ROWS, "weights": ROWS}),
}  # fmt: skip

# As torch: neither doubles nor what is quantised.
_CAST = (torch.float32, torch.bfloat16, torch.float16)

# Is torch.autocast on, for any device?
is_autocast = torch._C._is_any_autocast_enabled
# Within an operator nothing is cast behind its back.
without_autocast = torch._C._DisableAutocast


def plain(
    op: str, world: Any, tensors: Sequence[Any], rest: tuple = (), *, has_out: bool = False
) -> tuple[tuple, tuple]:
    """A call's tensors as its operator takes them, and its further arguments.

    Raises  PlacementError: a DTensor that lies otherwise than the operator needs it
    """
    takes = _TAKES.get(op)
    if takes is None:
        return tuple(tensors), rest
    placements = takes.placements
    if op == "ag_wgrad" and rest[0] == "y":  # which is gathered
        placements = {"x": COLUMNS, "y": ROWS}
    if takes.m_at is not None and rest[takes.m_at] is None and dtensors.is_dtensor(tensors[0]):
        rest = (*rest[: takes.m_at], tensors[0].shape[0], *rest[takes.m_at + 1 :])
    named = list(zip(placements, tensors))
    others = tensors[len(named) :]
    local = [
        dtensors.local_part(op, world, name, one, placements[name])
        if dtensors.is_dtensor(one) else one
        for name, one in named
    ]  # fmt: skip
    # As torch: who gives room for a result says its dtype.
    if takes.policy is not None and not has_out:
        local = cast(local, takes.policy)
    return (*local, *others), rest


def cast(tensors: Sequence[torch.Tensor], policy: str = NARROWED) -> list[torch.Tensor]:
    """Tensors as torch.autocast wants them; as they are where it is off for their device."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or any(one.dtype not in _CAST for one in tensors):
        return list(tensors)
    if policy == NARROWED:
        dtype = torch.get_autocast_dtype(device)
    else:
        dtype = functools.reduce(torch.promote_types, (one.dtype for one in tensors))
    return [one.to(dtype) for one in tensors]


def without_class(value: Any) -> Any:
    """A tensor of a class of the user's own as torch's own; all else as it is."""
    if not isinstance(value, torch.Tensor) or type(value) in PLAIN:
        return value
    return value.as_subclass(torch.Tensor)
