"""Plans for models of Hugging Face's transformers, by the type of their configuration.

Embeddings and logits are spread by vocabulary; activations are all ranks' alike there, since such a
model looks at its embeddings' sizes. Between the first layer and the last norm their rows may be
split. Nothing of transformers is imported: modules are known by their names.
"""

from __future__ import annotations

import inspect
from functools import partial
from typing import Any

from torch import Tensor, nn

from weft.base.errors import UnsupportedError, UsageError
from weft.layers.activations import Activations
from weft.layers.attention import ParallelAttention, Rotary
from weft.layers.embedding import ParallelEmbedding
from weft.layers.lm_head import ParallelLMHead
from weft.layers.mlp import ParallelMLP
from weft.layers.moe import COLUMNS, ParallelMoE
from weft.layers.norm import ParallelNorm
from weft.runtime.world import World

KNOWN = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
ATTENTION = ("eager", "sdpa")
# What models call the keys that they keep: since transformers 5.24, and before.
CACHES = ("cache", "past_key_values")
OF_CACHES = ("get_seq_length", "attend")  # what theirs and ours have


def plan_of(model: nn.Module, strategy: str = COLUMNS) -> dict[str, Any]:
    """The plan of a model by its configuration's type; `strategy` as ParallelMoE takes it.

    Raises  UsageError: a model of another type, or without a configuration
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind not in KNOWN:
        raise UsageError(
            f"parallelize: {type(model).__name__} has a configuration of type {kind!r}, and there "
            f"are plans for {', '.join(KNOWN)}; pass plan={{pattern: style}}"
        )
    inner = "model." if hasattr(model, "model") else ""
    plan: dict[str, Any] = {
        f"{inner}embed_tokens": alike(ParallelEmbedding),
        f"{inner}layers.*.input_layernorm": ParallelNorm,
        f"{inner}layers.*.post_attention_layernorm": ParallelNorm,
        f"{inner}layers.*.self_attn": Attention,
        f"{inner}layers.*.mlp": partial(feed_forward, strategy=strategy),
        f"{inner}layers.0": enters,
        f"{inner}norm": (ParallelNorm, leaves),
    }
    return plan | ({"lm_head": alike(ParallelLMHead)} if hasattr(model, "lm_head") else {})


def cache_keyword(model: nn.Module) -> str:
    """By which keyword this model takes its cache."""
    names = inspect.signature(model.forward).parameters
    return next(one for one in CACHES if one in names)


def alike(style: Any) -> Any:
    """The same layer, with all rows on every rank."""
    return lambda module, world, _: style.from_module(module, world)


def feed_forward(
    module: nn.Module, world: World, activations: Activations, *, strategy: str = COLUMNS
) -> nn.Module:
    """Experts where a module has them."""
    if not hasattr(module, "experts"):
        return ParallelMLP.from_module(module, world, activations)
    return ParallelMoE.from_module(module, world, activations, strategy=strategy)


def enters(module: nn.Module, _: World, activations: Activations) -> nn.Module:
    """A pass begins with what this module is called with first."""
    module.register_forward_pre_hook(partial(_enter, activations), with_kwargs=True)
    return module


def leaves(module: nn.Module, _: World, activations: Activations) -> nn.Module:
    """All rows come out of this module."""
    module.register_forward_hook(lambda _, __, y: activations.leave(y))
    return module


def _enter(activations: Activations, _: nn.Module, args: tuple, named: dict[str, Any]) -> Any:
    if args:
        return (activations.enter(args[0]), *args[1:]), named
    return args, {**named, "hidden_states": activations.enter(named["hidden_states"])}


class Attention(ParallelAttention):
    """Called as transformers calls its own: the result, and no weights."""

    @classmethod
    def from_module(
        cls, module: nn.Module, world: World, activations: Activations | None = None, **given: Any
    ) -> ParallelAttention:
        how = getattr(getattr(module, "config", None), "_attn_implementation", None)
        if how is not None and how not in ATTENTION:
            raise UnsupportedError(
                f"parallelize: attn_implementation={how!r}, whose masks this layer does not know; "
                f"load the model with attn_implementation='sdpa'"
            )
        if dropout := getattr(module, "attention_dropout", 0):
            raise UnsupportedError(
                f"parallelize: attention_dropout={dropout}, of which ranks would draw differently; "
                "set it to 0 in the model's configuration"
            )
        return super().from_module(module, world, activations, **given)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, position_embeddings: Rotary | None = None,
        attention_mask: Tensor | None = None, **named: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        """Raises  UnsupportedError: keys are kept in an argument whose name is not known"""
        caches = {n for n, one in named.items() if any(hasattr(one, has) for has in OF_CACHES)}
        if unknown := caches - set(CACHES):
            raise UnsupportedError(
                f"parallelize: attention is called with a cache as {', '.join(sorted(unknown))}=, "
                f"and takes {' or '.join(CACHES)}; use a transformers that says one of these"
            )
        cache = next((named[one] for one in CACHES if named.get(one) is not None), None)
        y = super().forward(hidden_states, position_embeddings, cache=cache, mask=attention_mask)
        return y, None
