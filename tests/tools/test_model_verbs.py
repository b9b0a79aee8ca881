"""`weft make-tiny`, `weft generate`: a model made and asked, from the outside."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from weft.tools.main import main

pytest.importorskip("transformers")


def test_make_tiny_writes_what_both_load(tmp_path, capsys):
    folder = str(tmp_path / "m")
    assert main(["make-tiny", folder, "--kind", "qwen3_moe", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == {"ok": True, "folder": folder, "kind": "qwen3_moe"}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
        one.name for one in (tmp_path / "m").iterdir()
    }
    assert main(["make-tiny", folder]) == 2
    assert "has a model already" in capsys.readouterr().err
    assert main(["make-tiny", str(tmp_path / "n"), "--kind", "bert"]) == 2
    assert "kind 'bert'; there are llama" in capsys.readouterr().err


def transformers_text(folder, prompt, count):
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    found = model.generate(ids, max_new_tokens=count, do_sample=False)[0, ids.shape[1] :]
    return tokenizer.decode(found, skip_special_tokens=True), len(found)


def test_generate_prints_what_transformers_generates(tiny, capsys):
    folder, prompt = str(tiny("qwen3")), "The weft travels"
    words = ["generate", "--model", folder, "--prompt", prompt, "--ranks", "2", "--target", "emu"]
    wanted, count = transformers_text(folder, prompt, 6)
    capsys.readouterr()
    assert main([*words, "--max-tokens", "6"]) == 0
    said = capsys.readouterr()
    assert said.out == wanted + "\n"
    assert "2 ranks on the emulator" in said.err and f"{count} tokens in" in said.err
    for temperature in ("0", "1e-50"):  # the latter is 0 in float32
        more = ["--max-tokens", "2", "--ranks", "1", "--temperature", temperature]
        assert main([*words, *more]) == 0
        assert wanted.startswith(capsys.readouterr().out[:-1])


@pytest.mark.slow
def test_generate_draws_by_its_seed(tiny, capsys):
    words = ["generate", "--model", str(tiny("llama")), "--prompt", "hi"]
    words += "--chat --json --ranks 1 --target emu --max-tokens 8 --temperature 1.5".split()
    found = []
    for seed in (3, 3, 4):
        assert main([*words, "--seed", str(seed)]) == 0
        found.append(json.loads(capsys.readouterr().out))
    texts = [one["text"] for one in found]
    assert texts[0] == texts[1] != texts[2]
    assert found[0]["prompt_tokens"] > 10  # with the template
    assert (found[0]["ok"], found[0]["ranks"], found[0]["target"]) == (True, 1, "emu")
    assert found[0]["finish"] == ("length" if found[0]["tokens"] == 8 else "stop")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", "hi", "--max-tokens", "512"], "the model takes 512 in all"),
        (["--prompt", ""], "--prompt '' has no tokens: write what is continued"),
        (["--prompt", "hi", "--ranks", "3"], "heads=4 over 3 ranks"),
    ],
)
def test_generate_refuses(tiny, words, said, capsys):
    assert main(["generate", "--model", str(tiny("llama")), "--target", "emu", *words]) == 2
    assert said in capsys.readouterr().err


def test_generate_without_a_model(tmp_path, capsys):
    assert main(["generate", "--model", str(tmp_path), "--prompt", "hi"]) == 2
    assert "has no config.json" in capsys.readouterr().err


@pytest.mark.gpu(n=2)
def test_generate_on_gpus(tiny):
    """In a process of its own, which starts the other rank's."""
    words = "--prompt hello --target cuda --ranks 2 --max-tokens 6 --json".split()
    found = subprocess.run(
        [sys.executable, "-m", "weft", "generate", "--model", str(tiny("qwen3")), *words],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-3000:]
    said = json.loads(found.stdout)
    assert (said["ok"], said["target"], said["ranks"]) == (True, "cuda", 2)
    assert said["tokens"] == 6 or said["finish"] == "stop"
