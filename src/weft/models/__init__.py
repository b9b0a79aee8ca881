"""Models: transformers' own classes, spread over the ranks, with a checkpoint's weights.

model = weft.models.load("Qwen3-32B", world)
tokenizer = weft.models.load_tokenizer("Qwen3-32B")
weft.models.make_tiny("tiny", "qwen3")
"""

from __future__ import annotations

from weft.models.load import load, load_config
from weft.models.needed import needed
from weft.models.tiny import make_tiny
from weft.models.tokenizer import load_tokenizer, stop_tokens

__all__ = ["load", "load_config", "load_tokenizer", "make_tiny", "needed", "stop_tokens"]
