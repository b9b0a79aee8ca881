"""Attention of tokens that are split over the ranks: each attends with some heads to all of them.

    own tokens, all heads  ->  all tokens, own heads    one all-to-all of q, k and v
    softmax(q k^T * scale) v                            each rank by itself
    all tokens, own heads  ->  own tokens, all heads    one all-to-all

What a rank sends and gets is its tokens' q, k, v and results, however many ranks there are; by
gathered keys (weft.ops.ag_attention) it gets those of all other ranks.

`UlyssesAttention` has the projections too. Each is one program with the all-to-all beside it, which
overlaps where that is predicted to be faster: tiles of q, k and v go to the ranks that own their
heads while others are multiplied, and the output projection multiplies one rank's heads after the
other as they arrive.

Source  DeepSpeed Ulysses (Jacobs et al. 2023, 2309.14509)
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.base.errors import DtypeError, ShapeError
from weft.compiler import Replicate, Shard, frontend
from weft.compiler import Tensor as Declared
from weft.layers.activations import shared
from weft.layers.attention import OUT, PROJECTIONS, Rotary, rotated
from weft.layers.norm import ParallelNorm
from weft.layers.shards import like, name_parts, one_of, shard_of
from weft.ops import all_to_all
from weft.runtime.world import World


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, *, world: World, causal: bool = False,
    scale: float | None = None,
) -> Tensor:  # fmt: skip
    """softmax(q k^T * scale) v of all ranks' tokens, of which this rank gets those of its own.
    Collective; differentiable.

    A token's position is its place among those of all ranks, in their order. With fewer kv_heads
    than ranks, ranks whose heads share one are sent it each.

    Shapes  q: [.., own tokens, heads, d]; k, v: [.., own tokens, kv_heads, d], with equally many
            tokens on every rank; the result as q
    Dtypes  all alike, what torch's scaled_dot_product_attention takes; on NVIDIA's GPUs by cuDNN
            where it can, of the kernels that torch may use: torch.nn.attention.sdpa_kernel says so
    Sync    stream-ordered on the current stream; can be recorded
    Raises  ShapeError: heads that ranks do not divide, kv_heads that heads or ranks do not go with;
            DtypeError
    """
    ranks = world.num_ranks
    _check(q, k, v, ranks)
    (*batch, tokens, heads, d), kv_heads = q.shape, k.shape[-2]
    each_q, each_kv = heads // ranks, max(1, kv_heads // ranks)
    parts = [one.reshape(-1, tokens, one.shape[-2], d) for one in (q, k, v)]
    if kv_heads < ranks:
        parts[1:] = [one.repeat_interleave(ranks // kv_heads, 2) for one in parts[1:]]
    parts = [one.unflatten(2, (ranks, -1)) for one in parts]
    # [ranks, batch * own tokens, heads of q, k and v there]
    sent = torch.cat([one.flatten(-2).permute(2, 0, 1, 3) for one in parts], -1)
    got = all_to_all(sent.flatten(0, 2).contiguous(), world=world)
    own_q, own_k, own_v = _heads(got, ranks, tokens, d).split([each_q, each_kv, each_kv], 1)
    back = all_to_all(_attended(own_q, own_k, own_v, ranks, causal, scale), world=world)
    mine = back.view(ranks, -1, tokens, each_q, d).permute(1, 2, 0, 3, 4)
    return mine.reshape(*batch, tokens, heads, d)


class UlyssesAttention(nn.Module):
    """Self-attention of all ranks' tokens with its projections, grouped (GQA) or not. Collective.

        own heads = all_to_all(x @ (q, k, v)_proj^T)
        y         = all_to_all(softmax(q k^T * scale) v) @ o_proj^T

    Every rank has all parameters; gradients are summed over ranks, alike on all of them. With fewer
    kv_heads than ranks, ranks whose heads share one multiply it each.

    q_norm, k_norm: modules that norm each head.

    Shapes  x, the result: [.., own tokens, hidden], with equally many tokens on every rank
    Raises  ShapeError: heads that ranks do not divide, kv_heads that heads or ranks do not go with
    """

    def __init__(
        self, hidden: int, heads: int, kv_heads: int, head_dim: int, world: World, *,
        bias: bool = False, out_bias: bool = False, q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None, scale: float | None = None, causal: bool = True,
        out: str = OUT[0], **options: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        ranks = world.num_ranks
        _check_heads(f"{type(self).__name__} on {ranks} ranks", heads, kv_heads, ranks)
        self.world, self.scale, self.causal = world, scale, causal
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        widths = [one * head_dim for one in (heads, kv_heads, kv_heads)]
        self.qkv = nn.Linear(hidden, sum(widths), bias=bias, **options)
        self.out = nn.Linear(heads * head_dim, hidden, bias=out_bias, **options)
        self.q_norm, self.k_norm = (
            None if one is None else ParallelNorm(one, world) for one in (q_norm, k_norm)
        )
        name_parts(self, "qkv", dict(zip(PROJECTIONS, widths, strict=True)))
        name_parts(self, "out", {out: hidden})
        # Where no gradient is asked for: the weight by ranks, and of which version it is.
        self._kept: tuple[Any, Tensor | None] = (None, None)

    @classmethod
    def from_module(cls, module: nn.Module, world: World, **given: Any) -> UlyssesAttention:
        """Of a module with q_proj, k_proj, v_proj, o_proj and head_dim, and q_norm, k_norm and
        scaling if it has them; `given` are arguments of the constructor."""
        name = cls.__name__
        parts = [one_of(name, module, one) for one in PROJECTIONS]
        last = one_of(name, module, *OUT)
        head_dim = given.pop("head_dim", None) or one_of(name, module, "head_dim")
        norms = {one: getattr(module, one, None) for one in ("q_norm", "k_norm")}
        heads, kv_heads = (one.weight.shape[0] // head_dim for one in parts[:2])
        made = cls(
            parts[0].weight.shape[1], heads, kv_heads, head_dim, world, device="meta",
            out=next(one for one in OUT if hasattr(module, one)),
            **{**norms, "scale": getattr(module, "scaling", None), **given},
        )  # fmt: skip
        for kind in ("weight", "bias"):
            for child, ones in ((made.qkv, parts), (made.out, [last])):
                if found := [one for each in ones if (one := getattr(each, kind)) is not None]:
                    joined = torch.cat([shard_of(one, None, world) for one in found])
                    setattr(child, kind, like(joined, *found))
                else:
                    setattr(child, kind, None)
        return made

    def forward(self, x: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Attend; each rank gives its own tokens, and gets theirs.

        rotary: cos and sin of all ranks' tokens, [batch or 1, tokens, head_dim]

        Sync    stream-ordered on the current stream; can be recorded
        """
        ranks, (*batch, tokens, hidden) = self.world.num_ranks, x.shape
        each_q, each_kv = self.heads // ranks, max(1, self.kv_heads // ranks)
        rows = x.reshape(-1, hidden).contiguous()
        sizes, dtype = {"m": rows.shape[0] * ranks}, str(x.dtype).removeprefix("torch.")
        weight, bias = self._by_rank()
        given = [] if bias is None else [bias]
        to_heads = _program(_to_heads, dtype, hidden, weight.shape[0], bias is not None)
        got = to_heads(rows, weight.t(), *given, world=self.world, **sizes)
        q, k, v = _heads(got, ranks, tokens, self.head_dim).split([each_q, each_kv, each_kv], 1)
        q = q if self.q_norm is None else self.q_norm(q)
        k = k if self.k_norm is None else self.k_norm(k)
        if rotary is not None:
            cos, sin = (one.unsqueeze(-3).to(q.dtype) for one in rotary)
            q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        back = _attended(q, k, v, ranks, self.causal, self.scale)
        given = [] if self.out.bias is None else [self.out.bias[None]]
        out = self.out.weight
        from_heads = _program(_from_heads, dtype, out.shape[1], out.shape[0], bool(given))
        made = from_heads(back, out.t(), *given, world=self.world, **sizes)
        return made.view(*batch, tokens, out.shape[0])

    def _by_rank(self) -> tuple[Tensor, Tensor | None]:
        """The rows of the weight of q, k and v by the ranks that own their heads, and what this one
        owns of the bias."""
        weight, bias = self.qkv.weight, self.qkv.bias
        if bias is not None:
            bias = self._order(shared(bias, self.world))
            own = bias.shape[0] // self.world.num_ranks
            bias = bias[own * self.world.rank :][:own][None]
        if torch.is_grad_enabled() and weight.requires_grad:
            return self._order(weight), bias
        of = (weight.data_ptr(), weight._version, weight.dtype)
        if self._kept[0] != of:
            self._kept = of, self._order(weight)
        kept = self._kept[1]
        assert kept is not None
        return kept, bias

    def _order(self, one: Tensor) -> Tensor:
        """A parameter's rows, each rank's of q, k and v together."""
        ranks, d = self.world.num_ranks, self.head_dim
        parts = one.split([n * d for n in (self.heads, self.kv_heads, self.kv_heads)])
        if self.kv_heads < ranks:
            q, *shared_heads = parts
            times = ranks // self.kv_heads
            repeated = [part.unflatten(0, (-1, d)).repeat_interleave(times, 0).flatten(0, 1)
                        for part in shared_heads]  # fmt: skip
            parts = (q, *repeated)
        return torch.cat([part.unflatten(0, (ranks, -1)) for part in parts], 1).flatten(0, 1)


def _to_heads(x: Any, w: Any, *bias: Any) -> Any:
    """Own tokens -> all tokens' own heads."""
    got = frontend.all_to_all(x @ w, dim=1)
    return got + bias[0] if bias else got


def _from_heads(y: Any, w: Any, *bias: Any) -> Any:
    """All tokens' own heads -> own tokens."""
    made = frontend.all_to_all(y, dim=0) @ w
    return made + bias[0] if bias else made


@cache
def _program(
    function: Callable[..., Any], dtype: str, k: int, n: int, has_bias: bool
) -> Callable[..., Tensor]:
    """One of the two, of rows of k columns by a weight [k, n]."""
    is_first = function is _to_heads
    x = Declared(dtype, ("m", k), Shard(0 if is_first else 1))
    w = Declared(dtype, (k, n), Replicate())
    if not has_bias:

        def projected(x: Any, w: Any) -> Any:
            return function(x, w)

        return frontend.program(mesh="sp", x=x, w=w)(projected)

    def shifted(x: Any, w: Any, bias: Any) -> Any:
        return function(x, w, bias)

    row = Declared(dtype, (1, n), Shard(1) if is_first else Replicate())
    return frontend.program(mesh="sp", x=x, w=w, bias=row)(shifted)


def _heads(rows: Tensor, ranks: int, tokens: int, d: int) -> Tensor:
    """All ranks' rows of own heads as [batch, heads, all tokens, d]."""
    whole = rows.view(ranks, -1, tokens, rows.shape[-1]).transpose(0, 1).flatten(1, 2)
    return whole.unflatten(-1, (-1, d)).transpose(1, 2)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, ranks: int, causal: bool, scale: float | None
) -> Tensor:
    """Attention of own heads, as rows by the ranks that own their tokens."""
    with _cudnn_first(q):
        made = functional.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=True
        )
    back = made.transpose(1, 2).unflatten(1, (ranks, -1)).transpose(0, 1)
    return back.flatten(3).flatten(0, 2).contiguous()


def _cudnn_first(q: Tensor) -> Any:
    """cuDNN's kernel is the first of those that the user lets torch choose from."""
    if not q.is_cuda or torch.version.hip is not None or torch.compiler.is_compiling():
        return nullcontext()
    return sdpa_kernel(kernels(), set_priority=True)


def kernels() -> list[SDPBackend]:
    """Of torch's attention, those that may be used now, in the order in which they are tried."""
    may = {
        SDPBackend.CUDNN_ATTENTION: cuda.cudnn_sdp_enabled(),
        SDPBackend.FLASH_ATTENTION: cuda.flash_sdp_enabled(),
        SDPBackend.EFFICIENT_ATTENTION: cuda.mem_efficient_sdp_enabled(),
        SDPBackend.MATH: cuda.math_sdp_enabled(),
    }
    return [one for one, is_on in may.items() if is_on]


def _check(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> None:
    alike = q.dim() >= 3 and k.shape == v.shape
    if not alike or (*q.shape[:-2], q.shape[-1]) != (*k.shape[:-2], k.shape[-1]):
        wrong = "they must be [.., tokens, heads, d], alike but for the heads of k and v"
        raise ShapeError(f"{_said(q, k, v, ranks)}; {wrong}")
    if not (q.dtype == k.dtype == v.dtype):
        wrong = f"have {q.dtype}, {k.dtype}, {v.dtype}; they must be alike"
        raise DtypeError(f"{_said(q, k, v, ranks)} {wrong}")
    _check_heads(_said(q, k, v, ranks), q.shape[-2], k.shape[-2], ranks)


def _check_heads(what: str, heads: int, kv_heads: int, ranks: int) -> None:
    if heads % ranks:
        raise ShapeError(f"{what}: {heads} heads do not divide by the ranks")
    if kv_heads == 0 or heads % kv_heads or (kv_heads % ranks and ranks % kv_heads):
        wrong = f"{kv_heads} kv_heads must divide {heads} heads, and the ranks, or be divided by"
        raise ShapeError(f"{what}: {wrong} them")


def _said(q: Tensor, k: Tensor, v: Tensor, ranks: int) -> str:
    """A call in an error's words."""
    shapes = ", ".join(f"{name} {tuple(one.shape)}" for name, one in (("q", q), ("k", k), ("v", v)))
    return f"ulysses_attention: {shapes} on {ranks} ranks"
