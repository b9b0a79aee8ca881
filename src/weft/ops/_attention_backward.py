"""Gradients of ag_attention: keys are gathered again, their gradients summed over ranks.

Not an operator: what autograd calls for one; see ag_attention.py.

    all_gather      own k -> those of all ranks; v likewise
    gradients       two launches (weft.tiles.attention_backward): dq of own queries; then this
                    rank's share of dk and dv of all keys
    reduce_scatter  shares -> own dk; dv likewise

Sums within a rank are in fp32 and in a fixed order; a share is rounded once before it travels, as
any summand of reduce_scatter is. So gradients are the same bits in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from weft.base.dtypes import DTYPES
from weft.base.parts import part_of
from weft.base.records import KernelRecord
from weft.base.target import Target
from weft.ops import _operations
from weft.ops.all_gather import all_gather
from weft.ops.reduce_scatter import reduce_scatter
from weft.tiles import attention, attention_backward
from weft.tiles.attention_backward import Given


class Where(NamedTuple):
    """Own queries begin at position `first` of `positions`; `sequences`, whose number + 1 has
    `steps` binary digits; the number of own queries has `halves`."""

    first: Any
    positions: Any
    sequences: Any
    steps: Any
    halves: Any


class Cut(NamedTuple):
    """Tiles of queries by tiles of keys, and how they are compiled."""

    m: int
    n: int
    num_warps: int
    num_stages: int

    def tile(self, d: int) -> attention.Tile:
        return attention.Tile.of(self.m, self.n, d=d)

    @property
    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages}


@triton.jit
def attention_gradients(given, dlse, dq, dk, dv, cu_seqlens, shape, where, tile,
                        of_keys: tl.constexpr, causal: tl.constexpr):  # fmt: skip
    """A tile to a program: of dq, or (`of_keys`) of dk and dv, in a launch behind the other."""
    i = tl.program_id(0)
    first = tl.cast(where.first, tl.int32)
    positions = tl.cast(where.positions, tl.int32)
    if cu_seqlens is None:
        visible: tl.constexpr = attention.visible_before if causal else attention.visible_all
        args = attention.One(first, positions)
    else:
        visible: tl.constexpr = (
            attention.visible_before_in_sequences if causal else attention.visible_in_sequences
        )
        sequences, steps = tl.cast(where.sequences, tl.int32), tl.cast(where.steps, tl.int32)
        args = attention.Lengths(cu_seqlens, sequences, steps, first, positions)
    if of_keys:
        attention_backward.keys_tile(
            i // shape.kv_heads, i % shape.kv_heads, given, dk, dv, positions, where.halves,
            shape, tile,
        )  # fmt: skip
    else:
        num_m = tl.num_programs(0) // shape.q_heads
        at = attention.last_first(i, num_m, shape.q_heads, None)
        attention_backward.queries_tile(
            at.i_m, at.i_n, given, dlse, dq, shape, tile, visible, args
        )  # fmt: skip


def ag_attention_backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    dout: torch.Tensor, dlse: torch.Tensor | None = None, *, world: Any, causal: bool = True,
    cu_seqlens: torch.Tensor | None = None, scale: float | None = None, m: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """(dq, dk, dv) of own tokens, of what ag_attention(q, k, v, ..) gave. Collective.

    Shapes  as there; dout as out; dlse, if lse has a gradient too, as lse
    Dtypes  gradients have that of q, k and v
    Sync    stream-ordered on the current stream
    """
    tensors = (q, k, v, out, lse, dout, dlse)
    if _operations.is_asked(*(one for one in tensors if one is not None)):
        rest = (cu_seqlens, causal, scale, m)
        return _operations.as_operation("ag_attention_backward", world, tensors, *rest)
    m = k.shape[0] * world.num_ranks if m is None else m
    keys, values = (all_gather(one, world=world, m=m) for one in (k, v))
    first, _ = part_of(m, world.rank, world.num_ranks)
    dq, *shares = gradients(
        q, keys, values, out, lse, dout, dlse, first=first, causal=causal, cu_seqlens=cu_seqlens,
        scale=scale, target=world.target,
    )  # fmt: skip
    return dq, *(reduce_scatter(one, world=world) for one in shares)


def gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor,
    dout: torch.Tensor, dlse: torch.Tensor | None, *, first: int, causal: bool,
    cu_seqlens: torch.Tensor | None, scale: float | None, target: Target,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, and dk and dv of all positions, as q and k are, of queries from position `first` on."""
    tokens, q_heads, d = q.shape
    positions, kv_heads, _ = k.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    shape = attention.Shape.of(tokens, q_heads, kv_heads, d, scale)
    sequences = 0 if cu_seqlens is None else len(cu_seqlens) - 1
    where = Where(
        first, positions, sequences, (sequences + 1).bit_length(), tokens.bit_length()
    )  # fmt: skip
    lo, hi = (torch.empty(tokens, dtype=torch.int32, device=q.device) for _ in range(2))
    given = Given(q, k, v, out, dout.contiguous(), lse, torch.empty_like(lse), lo, hi)
    dlse = None if dlse is None else dlse.contiguous()
    for of_keys in (False, True):
        cut = cut_of(d, q.dtype.itemsize, target, of_keys=of_keys)
        units = ceil(positions / cut.n) * kv_heads if of_keys else ceil(tokens / cut.m) * q_heads
        if units:
            attention_gradients[(units,)](
                given, dlse, dq, dk, dv, cu_seqlens, shape, where,
                cut.tile(d).as_constexpr(), of_keys, causal, **cut.options,
            )  # fmt: skip
    return dq, dk, dv


def cut_of(d: int, itemsize: int, target: Target, *, of_keys: bool) -> Cut:
    """Tiles that spill no registers there, as compiled kernels say."""
    if target.backend == "emu":
        return Cut(16, 32, 4, 1)
    if itemsize == 4:
        return Cut(16, 16, 8, 1)
    if target.backend == "hip":
        return Cut(32, 32, 4, 1)
    if attention.padded_head(d) > 128:
        return Cut(32 if of_keys else 16, 32, 8, 1)
    # Triton 3.7 does not compile the pipelined loop over queries.
    return Cut(64, 32, 8, 1) if of_keys else Cut(64, 64, 8, 2)


def kernels(
    dtype: str, d: int, target: Target, *, causal: bool = True, sequences: int = 1
) -> Iterator[tuple[Any, KernelRecord]]:
    """Both launches as records, of rows that begin at 16 bytes."""
    element = f"*{DTYPES[dtype].triton}"
    for of_keys in (False, True):
        cut = cut_of(d, DTYPES[dtype].itemsize, target, of_keys=of_keys)
        constants = {
            "given": Given(*[None] * len(Given._fields)),
            "dlse": None,
            "shape": attention.Shape(*[None] * len(attention.Shape._fields)),
            "where": Where(*[None] * len(Where._fields)),
            "tile": cut.tile(d),
            "of_keys": of_keys,
            "causal": causal,
            **({} if sequences else {"cu_seqlens": None}),
        }
        types = {
            "given": [*[element] * 5, "*fp32", "*fp32", "*i32", "*i32"],
            **dict.fromkeys(("dq", "dk", "dv"), element),
            "cu_seqlens": "*i32" if sequences else "constexpr",
            "shape": ["i32"] * (len(attention.Shape._fields) - 1) + ["fp32"],
            "where": ["i32"] * len(Where._fields),
            "tile": ["constexpr"] * len(attention.Tile._fields),
        }
        names = attention_gradients.arg_names
        yield (
            attention_gradients,
            KernelRecord(
                name=f"ag_attention.d{'kv' if of_keys else 'q'}",
                signature={name: types.get(name, "constexpr") for name in names},
                constants=constants,
                options=cut.options,
                divisible_by_16=(
                    "dq", "dk", "dv",
                    *(f"given.{name}" for name in Given._fields),
                    *(f"shape.{name}" for name in ("d", "q_stride", "kv_stride") if d % 16 == 0),
                ),
            ),
        )  # fmt: skip
