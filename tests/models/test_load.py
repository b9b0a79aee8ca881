"""Checkpoints: read part by part on each rank, and every mistake in them said at once."""

from __future__ import annotations

import json
import math
import shutil
import sys
from functools import partial

import pytest
import torch

import weft
from weft import models
from weft.models import checkpoint

KINDS = ("llama", "qwen3", "qwen3_moe", "mixtral")


def ordinary(folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


def copied(folder, tmp_path, change=None, sizes=None):
    """The model in several files, its tensors changed, its configuration with other sizes."""
    safetensors = pytest.importorskip("safetensors.torch")
    shutil.copytree(folder, tmp_path / "m")
    tensors = safetensors.load_file(tmp_path / "m" / checkpoint.ONE)
    (tmp_path / "m" / checkpoint.ONE).unlink()
    if change is not None:
        change(tensors)
    names = sorted(tensors)
    files = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: tensors[name] for name in names if files[name] == file}
        safetensors.save_file(part, tmp_path / "m" / file)
    index = {"weight_map": files}
    (tmp_path / "m" / checkpoint.INDEX).write_text(json.dumps(index))
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | (sizes or {})))
    return tmp_path / "m"


slow = partial(pytest.param, marks=pytest.mark.slow)


def fails(ranks, folder, error, match):
    def main():
        with weft.init() as world, pytest.raises(error, match=match) as found:
            models.load(folder, world)
        return str(found.value)

    return ranks(main, 2)[0]


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [2, slow(1), slow(4)])
def test_as_transformers_loads_it(ranks, tiny, tmp_path, kind, num_ranks):
    """One file on two ranks, several on others: the same logits, and nothing is trained."""
    folder = tiny(kind) if num_ranks == 2 else copied(tiny(kind), tmp_path)
    ids = torch.arange(6)[None]
    wanted = ordinary(tiny(kind))(ids).logits

    def main():
        with weft.init() as world, torch.no_grad():
            model = models.load(folder, world)
            assert not model.training
            assert not any(one.requires_grad or one.is_meta for one in model.parameters())
            assert (model.lm_head.weight is model.model.embed_tokens.weight) == (kind == "qwen3")
            got = model(ids, use_cache=False).logits
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)

    ranks(main, num_ranks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy", "split_from"),
    [("qwen3_moe", "gather", 0), ("mixtral", "dispatch", float("inf"))],
)
def test_whole_experts(ranks, tiny, tmp_path, kind, strategy, split_from):
    """Of a checkpoint that has them one by one, a rank reads its own alone."""
    wanted = ordinary(tiny(kind))(ids := torch.arange(6)[None]).logits

    def main():
        with weft.init() as world, torch.no_grad():
            model = models.load(tiny(kind), world, experts=strategy, split_from=split_from)
            experts = model.model.layers[0].mlp.experts["down_proj"]
            assert len(experts) == model.config.num_local_experts // 2
            got = model(ids, use_cache=False).logits
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)

    ranks(main, 2)


@pytest.mark.parametrize("kind", ["Qwen2", "Mistral"])
def test_models_that_nobody_makes_tiny(ranks, tmp_path, kind):
    """Biases of queries, keys and values; a vocabulary that ranks do not divide."""
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=32, intermediate_size=12, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, vocab_size=33, initializer_range=0.3,
    )  # fmt: skip
    made = getattr(transformers, f"{kind}ForCausalLM")(config)
    for name, one in made.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(one)
    made.save_pretrained(tmp_path)
    ids = torch.arange(6)[None]
    wanted = made.eval()(ids).logits

    def main():
        with weft.init() as world, torch.no_grad():
            got = models.load(tmp_path, world)(ids, use_cache=False).logits
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)

    ranks(main, 2)


def test_a_rank_reads_its_part_alone(ranks, tiny, monkeypatch):
    read, folder = checkpoint.Stored.read, tiny("qwen3_moe")

    def main():
        with weft.init() as world:
            seen = []

            def noting(self, index):
                part = read(self, index)
                seen.append((self.name, math.prod(self.shape), part.numel()))
                return part

            with monkeypatch.context() as patch:
                patch.setattr(checkpoint.Stored, "read", noting)
                models.load(folder, world)
            alike = [name for name, whole, part in seen if part == whole]
            assert all("norm" in one or one.endswith("gate.weight") for one in alike), alike
            assert {whole // part for name, whole, part in seen if name not in alike} == {2}

    ranks(main, 2)


def test_experts_that_are_stacked_in_a_checkpoint(ranks, tiny, tmp_path):
    """As the model has them, instead of one by one."""
    stacked = ordinary(tiny("mixtral")).state_dict()
    ids = torch.arange(6)[None]

    def change(tensors):
        tensors.clear()
        tensors |= {name: one.clone() for name, one in stacked.items()}

    folder = copied(tiny("mixtral"), tmp_path, change)

    def main(folder):
        with weft.init() as world, torch.no_grad():
            return models.load(folder, world)(ids, use_cache=False).logits

    wanted = ranks(lambda: main(tiny("mixtral")), 2)[0]
    assert torch.equal(ranks(lambda: main(folder), 2)[0], wanted)


def test_another_dtype(ranks, tiny):
    folder = tiny("llama")

    def main():
        with weft.init() as world:
            model = models.load(folder, world, dtype=torch.bfloat16)
            assert {one.dtype for one in model.parameters()} == {torch.bfloat16}
            assert model.model.rotary_emb.inv_freq.dtype == torch.float32

    ranks(main, 2)


@pytest.mark.slow
def test_random_weights_are_alike_on_any_number_of_ranks(ranks, tiny, tmp_path):
    """Of experts too."""
    shutil.copy(tiny("mixtral") / "config.json", tmp_path)
    ids = torch.arange(5)[None]

    def main():
        with weft.init() as world, torch.no_grad():
            model = models.load(tmp_path, world, random=True)
            return model(ids, use_cache=False).logits

    alone, several = ranks(main, 1)[0], ranks(main, 4)[0]
    torch.testing.assert_close(several, alone, rtol=1e-4, atol=1e-4)
    assert alone.std() > 0.1


def test_all_that_is_wrong_with_tensors_is_said_at_once(ranks, tiny, tmp_path):
    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(96, 32)
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(96, 64)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    folder = copied(tiny("llama"), tmp_path, change)
    said = fails(ranks, folder, weft.UsageError, "its tensors are not those of the model")
    for line in (
        "1 missing:\n  model.layers.1.mlp.up_proj.weight [96, 64]\n",
        "1 not expected:\n  model.layers.7.mlp.up_proj.weight [96, 64] in part-",
        "1 of other sizes:\n  model.layers.0.mlp.up_proj.weight [96, 32] in part-",
        "safetensors, not [96, 64]",
    ):
        assert line in said, said
    assert "inv_freq" not in said


def test_long_lists_are_cut(ranks, tiny, tmp_path):
    folder = copied(tiny("qwen3_moe"), tmp_path, lambda tensors: tensors.clear() or tensors.update(
        {"lm_head.weight": torch.zeros(384, 64)}
    ))  # fmt: skip
    said = fails(ranks, folder, weft.UsageError, "missing")
    assert "model.layers.0.self_attn.q_proj.weight" in said
    assert " more" in said and len(said.splitlines()) < 30, said


def test_folders_that_are_no_model(ranks, tiny, tmp_path):
    fails(ranks, tmp_path, weft.UsageError, r"has no config.json; .* weft make-tiny DIR")
    config = json.loads((tiny("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    fails(ranks, tmp_path, weft.UsageError, "has neither model.safetensors.index.json nor model.")
    (tmp_path / checkpoint.ONE).write_text("version https://git-lfs.github.com/spec/v1")
    fails(ranks, tmp_path, weft.UsageError, r"model.safetensors: cannot be read \(.*copy it again")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    fails(ranks, tmp_path, weft.UsageError, "type 'gpt2'; there are plans for llama, mistral, mix")
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    fails(ranks, tmp_path, weft.UnsupportedError, "its weights are quantised")
    with pytest.raises(weft.UsageError, match="has neither tokenizer.json"):
        models.load_tokenizer(tmp_path)


def test_a_package_that_is_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "transformers", None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(weft.UsageError, match=r"need transformers.*pip install 'weft\[serve\]'"):
        models.load(tmp_path, None)  # pyright: ignore


@pytest.mark.slow
def test_a_head_of_keys_that_several_ranks_have(ranks, tmp_path):
    """Two of them on four ranks."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=12, num_hidden_layers=2, head_dim=4, vocab_size=11,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path)
    ids = torch.arange(6)[None]
    wanted = ordinary(tmp_path)(ids).logits

    def main():
        with weft.init() as world, torch.no_grad():
            model = models.load(tmp_path, world)
            assert model.model.layers[0].self_attn.kv_heads == 1
            got = model(ids, use_cache=False).logits
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)

    ranks(main, 4)
