"""Tiny models: what transformers loads, a tokenizer for any text, and kinds that are there."""

from __future__ import annotations

import pytest

import weft
from weft import models


def test_its_tokenizer_takes_any_text(tiny):
    tokenizer = models.load_tokenizer(tiny("llama"))
    for text in ("The weft travels.", "Größe: 5 µs, 天地", " \n\t"):
        ids = tokenizer(text).input_ids
        assert tokenizer.decode(ids) == text
        assert max(ids) < len(tokenizer)
    assert len(tokenizer("the threads of the weft").input_ids) < 12  # merges were learnt
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], add_generation_prompt=True, tokenize=False
    )
    assert said == "<|begin|>user\nhi<|end|>\n<|begin|>assistant\n"
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|begin|>", "<|end|>")


def test_the_same_model_each_time(tiny, tmp_path):
    models.make_tiny(tmp_path / "again", "qwen3")
    for file in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tiny("qwen3") / file).read_bytes()


def test_on_rank_0_alone(ranks, tmp_path):
    def main():
        with weft.init() as world:
            if world.rank == 0:
                return models.make_tiny(tmp_path / "m", "llama")
            with pytest.raises(weft.UsageError, match="rank 1, where transformers writes no files"):
                models.make_tiny(tmp_path / "other", "llama")

    ranks(main, 2)
    assert (tmp_path / "m" / "config.json").exists()
    assert not (tmp_path / "other").exists()


def test_mistakes(tiny):
    with pytest.raises(weft.UsageError, match="kind 'gpt'; there are llama, qwen3, qwen3_moe"):
        models.make_tiny("nowhere", "gpt")
    with pytest.raises(weft.UsageError, match="has a model already"):
        models.make_tiny(tiny("llama"), "llama")
    with pytest.raises(weft.UsageError, match="cannot be made: Not a directory"):
        models.make_tiny(f"{__file__}/tiny", "llama")
