"""Ordinary attention and a small Llama, in the names of transformers', for layers to be made of."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional

from weft.layers import rotary

# A model's sizes: heads of queries and of keys, inner columns of an MLP and of an expert.
HIDDEN, HEAD = 16, 4
HEADS, INNER, OF_EXPERT = (12, 6), 18, 6


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    other = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos[:, None].to(x.dtype) + other * sin[:, None].to(x.dtype)


class Attention(nn.Module):
    """Keys of all past calls are in `past`, if it is given."""

    def __init__(
        self, heads: int = 6, kv_heads: int = 6, bias: bool = False, norms: bool = False,
        layer_idx: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.head_dim, self.layer_idx = HEAD, layer_idx
        self.q_proj = nn.Linear(HIDDEN, heads * HEAD, bias=bias)
        self.k_proj = nn.Linear(HIDDEN, kv_heads * HEAD, bias=bias)
        self.v_proj = nn.Linear(HIDDEN, kv_heads * HEAD, bias=bias)
        self.o_proj = nn.Linear(heads * HEAD, HIDDEN, bias=bias)
        if norms:
            self.q_norm, self.k_norm = nn.RMSNorm(HEAD, eps=1e-6), nn.RMSNorm(HEAD, eps=1e-6)

    def forward(self, hidden_states, position_embeddings=None, past=None):
        tokens = hidden_states.shape[1]
        q, k, v = (
            one(hidden_states).unflatten(-1, (-1, HEAD))
            for one in (self.q_proj, self.k_proj, self.v_proj)
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (one.transpose(1, 2) for one in (q, k, v))
        if position_embeddings is not None:
            q, k = turned(q, *position_embeddings), turned(k, *position_embeddings)
        if past is not None:
            past.append((k, v))
            k, v = (torch.cat(one, 2) for one in zip(*past, strict=True))
        seen = q.new_ones(tokens, k.shape[2], dtype=torch.bool).tril(k.shape[2] - tokens)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """As Llama and Qwen3 have it."""

    def __init__(self, bias: bool = False, inner: int = 12, hidden: int = 8) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(hidden, inner, bias=bias) for _ in range(2))
        self.down_proj, self.act_fn = nn.Linear(inner, hidden, bias=bias), nn.SiLU()

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Router(nn.Module):
    def __init__(self, experts: int, top_k: int, norm_topk_prob: bool) -> None:
        super().__init__()
        self.top_k, self.norm_topk_prob = top_k, norm_topk_prob
        self.weight = nn.Parameter(torch.empty(experts, HIDDEN))

    def forward(self, x):
        weights, ids = functional.linear(x, self.weight).softmax(-1).topk(self.top_k, -1)
        return weights / weights.sum(-1, keepdim=True) if self.norm_topk_prob else weights, ids


class Experts(nn.Module):
    """Stacked."""

    def __init__(self, experts: int, inner: int) -> None:
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * inner, HIDDEN))
        self.down_proj = nn.Parameter(torch.empty(experts, HIDDEN, inner))
        self.act_fn = nn.SiLU()

    def one(self, e: int, x):
        gate, up = functional.linear(x, self.gate_up_proj[e]).chunk(2, -1)
        return functional.linear(self.act_fn(gate) * up, self.down_proj[e])


class Listed(nn.ModuleList):
    """One module each."""

    def __init__(self, experts: int, inner: int) -> None:
        super().__init__(MLP(inner=inner, hidden=HIDDEN) for _ in range(experts))

    def one(self, e: int, x):
        return self[e](x)


class MoE(nn.Module):
    """As Mixtral and Qwen3-MoE have it; every expert sees every token."""

    def __init__(self, kind: type = Experts, norm: bool = True, experts: int = 4) -> None:
        super().__init__()
        self.gate, self.experts = Router(experts, 2, norm), kind(experts, OF_EXPERT)
        self.count = experts

    def forward(self, x):
        weights, ids = self.gate(x)
        chosen = functional.one_hot(ids, self.count).to(x.dtype)  # [.., top_k, experts]
        of_each = (chosen * weights[..., None]).sum(-2)
        return sum(of_each[..., e, None] * self.experts.one(e, x) for e in range(self.count))


class Decoder(nn.Module):
    def __init__(self, mlp: nn.Module, layer_idx: int) -> None:
        super().__init__()
        self.self_attn = Attention(*HEADS, norms=True, layer_idx=layer_idx)
        self.mlp = mlp
        self.input_layernorm = nn.RMSNorm(HIDDEN, eps=1e-6)
        self.post_attention_layernorm = nn.RMSNorm(HIDDEN, eps=1e-6)

    def forward(self, hidden_states, **rest):
        x = hidden_states
        found = self.self_attn(hidden_states=self.input_layernorm(x), **rest)
        x = x + (found[0] if isinstance(found, tuple) else found)
        return x + self.mlp(self.post_attention_layernorm(x))


class Inner(nn.Module):
    def __init__(self, experts: bool, vocabulary: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, HIDDEN)
        mlps = [
            MLP(inner=INNER, hidden=HIDDEN),
            MoE() if experts else MLP(inner=INNER, hidden=HIDDEN),
        ]
        self.layers = nn.ModuleList(Decoder(one, i) for i, one in enumerate(mlps))
        self.norm = nn.RMSNorm(HIDDEN, eps=1e-6)

    def forward(self, ids):
        x = self.embed_tokens(ids)
        turns = rotary(torch.arange(x.shape[1], device=x.device)[None], HEAD)
        for layer in self.layers:
            x = layer(x, position_embeddings=turns)
        return self.norm(x)


class Llama(nn.Module):
    """A causal model with the names, and the ways of calling, of transformers'."""

    def __init__(self, experts: bool = False, tied: bool = False, vocabulary: int = 10) -> None:
        super().__init__()
        self.config = SimpleNamespace(model_type="qwen3_moe" if experts else "llama")
        self.model = Inner(experts, vocabulary)
        self.lm_head = nn.Linear(HIDDEN, vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids):
        return self.lm_head(self.model(ids))
