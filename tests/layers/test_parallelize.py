"""Whole models, made parallel by a plan: the same logits, gradients and tokens."""

from __future__ import annotations

import copy
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from ordinary import MLP, Llama
from parallel import close, descend, same_state, seeded, step
from torch import nn

import weft
from weft.layers import ColumnParallelLinear, ParallelMLP, RowParallelLinear

INF = float("inf")


def tokens(*shape: int, vocabulary: int = 10) -> torch.Tensor:
    return torch.randint(0, vocabulary, shape, generator=torch.Generator().manual_seed(4))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "make", "shape", "split_from"),
    [(2, Llama, (2, 3), 0), (3, partial(Llama, experts=True), (1, 5), 0),
     (3, partial(Llama, experts=True), (1, 5), INF), (3, Llama, (1, 1), 0),
     (2, partial(Llama, tied=True), (1, 3), INF)],
)  # fmt: skip
def test_a_model_by_its_types_plan(ranks, num_ranks, make, shape, split_from):
    ids = tokens(*shape)

    def main():
        with weft.init() as world:
            ordinary = seeded(make)
            model = weft.parallelize(copy.deepcopy(ordinary), world, split_from=split_from)
            assert not any(type(one) is nn.Linear for one in model.modules())
            same_state(model, ordinary, world)
            got, want = model(ids), ordinary(ids)
            close(got, want)
            step(ordinary, want)
            step(model, got)
            same_state(model, ordinary, world)
            close(model(ids), ordinary(ids))

    ranks(main, num_ranks)


def test_rows_are_split_from_where_it_is_predicted(ranks):
    """One model, called with few rows and with many."""

    def main():
        with weft.init() as world, torch.no_grad():
            ordinary = seeded(Llama)
            model = weft.parallelize(copy.deepcopy(ordinary), world, split_from=4)
            found = []
            model.model.layers[1].register_forward_pre_hook(lambda _, args: found.append(args[0]))
            for shape in ((1, 3), (1, 4), (2, 5)):
                ids = tokens(*shape)
                close(model(ids), ordinary(ids))
            assert [tuple(one.shape[:2]) for one in found] == [(1, 3), (1, 2), (1, 5)]
            assert weft.parallelize(seeded(Llama), world) is not None

    ranks(main, 2)


def test_a_plan_of_ones_own(ranks):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = MLP(), nn.ModuleList([MLP()])

        def forward(self, x):
            return self.second[0](self.first(x))

    def main():
        with weft.init() as world:
            ordinary, x = seeded(Model), torch.ones(3, 8)
            plan = {
                "first": ParallelMLP,
                "second.*.gate_proj": ColumnParallelLinear,
                "second.*.up_proj": ColumnParallelLinear,
                "*.down_proj": RowParallelLinear,
            }
            with pytest.raises(weft.UsageError, match="not of RowParallelLinear"):
                weft.parallelize(copy.deepcopy(ordinary), world, plan)
            plan["second.*.down_proj"] = plan.pop("*.down_proj")
            model = weft.parallelize(copy.deepcopy(ordinary), world, plan)
            close(model(x), ordinary(x))
            same_state(model, ordinary, world)

    ranks(main, 2)


@pytest.mark.slow
def test_in_one_graph_of_torch_compile(ranks):
    ids = tokens(1, 5)

    def main():
        with weft.init() as world:
            ordinary = seeded(Llama)
            for split_from in (0, INF):
                model = weft.parallelize(copy.deepcopy(ordinary), world, split_from=split_from)
                compiled = torch.compile(
                    lambda x, model=model: model(x), backend="aot_eager", fullgraph=True
                )
                got = compiled(ids)
                close(got, ordinary(ids))
                got.sum().backward()
                assert all(one.grad is not None for one in model.parameters())

    ranks(main, 2)


def test_mistakes_say_values_place_and_remedy(ranks):
    def main():
        with weft.init() as world:
            with pytest.raises(weft.UsageError, match=r"'layers.\*.ffn' fits no module of Llama"):
                weft.parallelize(Llama(), world, {"layers.*.ffn": ParallelMLP})
            with pytest.raises(weft.UsageError, match="'nothing' is no style"):
                weft.parallelize(Llama(), world, {"lm_head": ["nothing"]})
            with pytest.raises(weft.UsageError, match="type None, and there are plans for llama"):
                weft.parallelize(nn.Linear(2, 2), world)
            with pytest.raises(weft.UnsupportedError, match=r"lm_head.weight are one parameter"):
                plan = {"lm_head": ColumnParallelLinear}
                weft.parallelize(Llama(tied=True), world, plan)
            model = Llama()
            model.model.layers[0].self_attn.attention_dropout = 0.1
            with pytest.raises(weft.UnsupportedError, match="attention_dropout=0.1"):
                weft.parallelize(model, world)
            model = Llama()
            config = SimpleNamespace(_attn_implementation="flash_attention_2")
            model.model.layers[0].self_attn.config = config
            with pytest.raises(weft.UnsupportedError, match="attn_implementation='flash_att"):
                weft.parallelize(model, world)

    ranks(main, 2)


def test_a_cache_is_taken_by_the_names_that_transformers_has_had(ranks):
    """A name that nobody knows must not be keys that nobody keeps."""

    class Kept:
        calls = 0

        def get_seq_length(self):
            raise AssertionError("for the model, not for its layers")

        def update(self, k, v, layer):
            self.calls += 1
            return k, v

    def main():
        with weft.init() as world:
            attention = weft.parallelize(seeded(Llama), world).model.layers[0].self_attn
            x, kept = torch.ones(1, 3, 16), Kept()
            for name in ("cache", "past_key_values"):
                attention(x, **{name: kept})
            assert kept.calls == 2
            with pytest.raises(weft.UnsupportedError, match="called with a cache as keys="):
                attention(x, keys=kept)

    ranks(main, 2)


SIZES = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 2, "head_dim": 4,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 11}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2,
           "moe_intermediate_size": 8}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    ["Qwen3Moe", *(pytest.param(k, marks=pytest.mark.slow) for k in ("Llama", "Qwen3", "Mixtral"))],
)
def test_transformers_models(ranks, kind):
    """The loss, its gradients, and tokens generated with its own cache, where it is installed."""
    transformers = pytest.importorskip("transformers")
    more = EXPERTS if kind in ("Qwen3Moe", "Mixtral") else {}
    config = getattr(transformers, f"{kind}Config")(**SIZES, **more, pad_token_id=0)
    ordinary = seeded(lambda: getattr(transformers, f"{kind}ForCausalLM")(config)).eval()
    ids = tokens(2, 5, vocabulary=11)
    generated = ordinary.generate(ids, max_new_tokens=3, do_sample=False)
    trained = copy.deepcopy(ordinary)
    loss = trained(ids, labels=ids, use_cache=False).loss
    loss.backward()
    descend(trained)

    def main():
        with weft.init() as world:
            for split_from in (0, INF):
                model = weft.parallelize(copy.deepcopy(ordinary), world, split_from=split_from)
                got = model.generate(ids, max_new_tokens=3, do_sample=False)
                assert torch.equal(got, generated)
                got = model(ids, labels=ids, use_cache=False).loss
                close(got, loss)
                got.backward()
                descend(model)
                same_state(model, trained, world)

    ranks(main, 2)
