"""Models that are made on the spot: small, with random weights and a real tokenizer.

    weft.models.make_tiny("tiny", "qwen3")

The files are transformers' own: it loads them too, and so can be compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weft.base.errors import UsageError
from weft.models.needed import needed

# By kind: the name of transformers' classes, and what its configuration has beside SIZES.
EXPERTS = {"num_experts_per_tok": 2}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "initializer_range": 0.5}),
    "qwen3_moe": ("Qwen3Moe", {"num_experts": 4, "moe_intermediate_size": 32, **EXPERTS}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, **EXPERTS}),
}
# Up to four ranks have heads and inner columns of their own. Weights are so large that each token
# depends on all before it.
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 512,
    "initializer_range": 0.25,
}  # fmt: skip
VOCABULARY = 384
BEGIN, END, PAD = "<|begin|>", "<|end|>", "<|pad|>"
CHAT = (
    "{% for one in messages %}<|begin|>{{ one['role'] }}\n{{ one['content'] }}<|end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant\n{% endif %}"
)
# What the tokenizer's merges are learnt from.
TEXT = """\
A loom holds one set of threads still and carries another across them. The threads that are held
are the warp; the thread that travels is the weft. Each pass of the shuttle binds what lies beside
it, and a cloth is the sum of many such passes, made in order, none before the one it rests on.
Programs on many processors are woven likewise. Each has its own part of the work, and from time to
time it sends what it has to the others and waits for what they have. A pattern that is right on one
loom is right on all of them, if every thread is where the next pass expects it.
What does a model say when nobody has taught it anything? It says what its numbers say: words
without a meaning, the same ones each time. That is enough to see whether two machines agree.
"""


def make_tiny(folder: str | Path, kind: str = "llama") -> None:
    """Write a model of `kind` (llama, qwen3, qwen3_moe, mixtral), with two layers, into `folder`.

    In a process group, call it on rank 0: transformers writes on no other one.

    Raises  UsageError: another kind, a folder that has a model already or cannot be made, or
            another rank
    """
    if dist.is_initialized() and dist.get_rank():
        raise UsageError(
            f"make_tiny: called on rank {dist.get_rank()}, where transformers writes no files; "
            "call it on rank 0, or before the process group is made"
        )
    if kind not in KINDS:
        raise UsageError(f"make_tiny: kind {kind!r}; there are {', '.join(KINDS)}")
    folder = Path(folder)
    if (folder / "config.json").exists():
        raise UsageError(f"make_tiny: {folder} has a model already; pass another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"make_tiny: {folder} cannot be made: {error.strerror}") from None
    transformers = needed("transformers")
    tokenizer = _tokenizer(transformers)
    name, more = KINDS[kind]
    ids = {
        f"{one}_token_id": getattr(tokenizer, f"{one}_token_id") for one in ("bos", "eos", "pad")
    }
    sizes = {**SIZES, "vocab_size": len(tokenizer), "tie_word_embeddings": False, **more, **ids}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**sizes)
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(transformers: Any) -> Any:
    """Byte-level BPE, so that any text has tokens."""
    tokenizers = needed("tokenizers")
    found = tokenizers.Tokenizer(tokenizers.models.BPE())
    found.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[BEGIN, END, PAD], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    found.train_from_iterator([TEXT], trainer)
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=found, bos_token=BEGIN, eos_token=END, pad_token=PAD, chat_template=CHAT
    )
