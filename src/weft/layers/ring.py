"""Ring attention: keys and values pass from rank to rank while queries attend to those that came.

    step t     rank r attends to the keys of rank r - t; meanwhile they go on to rank r + 1
    backward   the same, and their gradients, in fp32, go on behind them; after n steps, home

A rank holds the keys it works on and those that come, whatever the number of ranks; by gathered
keys (weft.ops.ag_attention) it holds all. What has been attended is a mean and the log of its
weights, in fp32; each step merges its keys into it (weft.tiles.attention_blocks). The order of
blocks, and of sums, is fixed by the rank: results are the same bits in every run.

Each hand-over is one all-to-all in which every rank sends to its neighbour alone, on a stream of
its own, by a few SMs. Not a program of the compiler: docs/decisions/037-ring-attention.md.

Source  Ring attention (Liu et al. 2023, 2310.01889); merged as flash-decode's splits are
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from weft.base.errors import UsageError
from weft.base.parts import full_part
from weft.compiler import layouts
from weft.layers.zigzag import check_rows
from weft.ops import all_to_all
from weft.ops.ag_attention import FORMS
from weft.ops.all_to_all import candidates, problem_of
from weft.plan import operations
from weft.plan.attention_blocks import BlockAttention
from weft.plan.attention_by_library import LibraryAttention
from weft.plan.sequence_shards import Shards, shards_in
from weft.runtime.world import World
from weft.tiles import attention_blocking

NAME = "ring_attention"
# Programs that hand over: attention has the other SMs.
CHANNELS = 16
# Who attends to a block.
LOCAL = {"template": BlockAttention, "library": LibraryAttention}


@torch.compiler.disable
def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, *, world: World, causal: bool = True, zigzag: bool = False,
    cu_seqlens: Tensor | None = None, scale: float | None = None, m: int | None = None,
    local: Literal["template", "library"] = "template",
) -> Tensor:  # fmt: skip
    """Attend own queries over the keys and values of all ranks, which pass. Collective;
    differentiable.

        out[t] = softmax over j of (scale * q[t] . k[j]) @ v,  j: of t's sequence; causal: j <= t

    Shapes  q: [own tokens, q_heads, d]; k, v: [own tokens, kv_heads, d]; out as q; q_heads a
            multiple of kv_heads, d from 1 to 256. m: tokens of all ranks, by default num_ranks *
            own ones: pass it where shards differ. Tokens are split in order, as torch.chunk does,
            or (`zigzag`) as zigzag_split does. cu_seqlens: int32 [sequences + 1], the first token
            of each sequence and the end of the last, alike on all ranks; by default one sequence
            of all tokens. Tokens of none have out = 0. local: who attends to a block, weft's
            template, or torch's library (cuDNN, FlashAttention-2), which takes no cu_seqlens
    Dtypes  all alike, float16, bfloat16 or float32; scores, sums, and gradients that pass, in fp32
    Units   scale is 1 / sqrt(d) by default
    Sync    stream-ordered on the current stream; the host waits for nothing; can be recorded, and a
            replay goes by the cu_seqlens that are there then
    Raises  ShapeError, DtypeError: with the values; UsageError: cu_seqlens for the library
    """
    if local not in LOCAL or (cu_seqlens is not None and local == "library"):
        raise UsageError(
            f"{NAME}: local={local!r}; it is one of {', '.join(LOCAL)}, and 'library' takes one "
            "sequence of all tokens, no cu_seqlens"
        )
    if operations.is_autocast():
        q, k, v = operations.cast((q, k, v))
    tensors = {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens}
    q, k, v = (tensors[name].contiguous() for name in "qkv")  # pyright: ignore
    tensors |= {"q": q, "k": k, "v": v}
    sizes = layouts.bind_sizes(NAME, world, tensors, FORMS, {"cu_seqlens": torch.int32})
    attention_blocking.check_heads(NAME, sizes["q_heads"], sizes["kv_heads"], sizes["d"])
    m = q.shape[0] * world.num_ranks if m is None else m
    check_rows(NAME, "q", q, m, world, zigzag=zigzag)
    shards = shards_in(world, m, zigzag, cu_seqlens)
    with operations.without_autocast():
        return _RingAttention.apply(q, k, v, world, shards, local, causal, scale)


class _Ring:
    """Hand-overs to rank + 1 and from rank - 1, on a stream of their own.

    Buffers are of [2, most tokens of a rank, kv_heads, d]: keys and values, or their gradients.
    """

    def __init__(self, world: World, shards: Shards, like: Tensor) -> None:
        self.world, self.shards = world, shards
        self.most = full_part(shards.m, world.num_ranks)
        self.shape = (2, self.most, *like.shape[1:])
        self.main, self.stream = world.current_stream(), world.stream("ring")
        after = (world.rank + 1) % world.num_ranks
        self.splits = 2 * (torch.arange(world.num_ranks, device=like.device) == after).long()
        self.configs: dict[torch.dtype, Any] = {}

    def buffer(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Without values; behind shards that are shorter than others, zeros."""
        made = torch.empty if self.shards.m % self.world.num_ranks == 0 else torch.zeros
        return made(self.shape, dtype=dtype, device=like.device)

    def packed(self, k: Tensor, v: Tensor) -> Tensor:
        both = self.buffer(k, k.dtype)
        both[0, : k.shape[0]] = k
        both[1, : v.shape[0]] = v
        return both

    def begin(self) -> None:
        """What is passed from here on is there, and where it comes is free."""
        self.stream.wait(self.main)

    def hand_on(self, x: Tensor, into: Tensor) -> None:
        with self.stream:
            if x.dtype not in self.configs:
                self.configs[x.dtype] = self._config(x)
            config = self.configs[x.dtype]
            all_to_all(x, world=self.world, splits=self.splits, config=config, out=into)

    def end(self) -> None:
        """What has been passed has come."""
        self.main.wait(self.stream)

    def _config(self, x: Tensor) -> Any:
        """By pulling, where ranks are near: by pushing a slot has room for rows of every rank."""
        problem = problem_of(self.world, x, self.splits, len(x))
        every = [*candidates(problem, self.world.target)]
        one = next((one for one in every if one.transport == "sm_pull"), every[0])
        return replace(one, channels=min(one.channels, CHANNELS))


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, world: World, shards: Shards, *way: Any
    ) -> Tensor:
        ctx.world, ctx.shards, ctx.way = world, shards, way
        out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
        if shards.m:
            _forward(world, _blocks(q, k, world, shards, *way), k, v, out, lse)
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple:  # pyright: ignore
        q, k, v, out, lse = ctx.saved_tensors
        found = q, k, v
        if ctx.shards.m:
            blocks = _blocks(q, k, ctx.world, ctx.shards, *ctx.way)
            found = _backward(ctx.world, blocks, k, v, out, lse, dout.contiguous())
        return *found, *[None] * 5


def _blocks(
    q: Tensor, k: Tensor, world: World, shards: Shards, local: str, causal: bool,
    scale: float | None,
) -> Any:  # fmt: skip
    return LOCAL[local](
        q, k.shape[1], shards, rank=world.rank, causal=causal, scale=scale, target=world.target
    )


def _forward(world: World, blocks: Any, k: Tensor, v: Tensor, out: Tensor, lse: Tensor) -> None:
    steps = world.num_ranks
    if steps == 1:
        blocks.see(0)
        blocks.attend(k, v, None, lse, out, is_first=True, is_last=True)
        return
    ring = _Ring(world, blocks.shards, k)
    mean = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    held = ring.packed(k, v)
    coming = torch.empty_like(held)
    for step in range(steps):
        is_last = step == steps - 1
        if not is_last:
            ring.begin()
            ring.hand_on(held, coming)
        blocks.see((world.rank - step) % steps)
        blocks.attend(*held, mean, lse, out, is_first=step == 0, is_last=is_last)
        ring.end()
        held, coming = coming, held


def _backward(
    world: World, blocks: Any, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    dout: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv)"""
    steps, own = world.num_ranks, k.shape[0]
    ring = _Ring(world, blocks.shards, k)
    dq = torch.empty(out.shape, dtype=torch.float32, device=out.device)
    held, found = ring.packed(k, v), ring.buffer(k, torch.float32)
    coming, found_before = torch.empty_like(held), torch.empty_like(found)
    for step in range(steps):
        ring.begin()
        if step:
            # What rank - 1 has found for the keys that are here now.
            ring.hand_on(found, found_before)
            found, found_before = found_before, found
        blocks.see((world.rank - step) % steps)
        given = blocks.given(*held, out, dout, lse)
        blocks.queries(given, dq, adds=step > 0)
        ring.end()
        if step < steps - 1:
            ring.hand_on(held, coming)
        blocks.keys(given, *found, adds=step > 0)
        ring.end()
        held, coming = coming, held
    if steps > 1:
        ring.begin()
        ring.hand_on(found, found_before)
        ring.end()
        found = found_before
    dk, dv = (one[:own].to(k.dtype) for one in found)
    return dq.to(k.dtype), dk, dv
