"""A model's tokenizer: transformers' own, which `tokenizers` runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft.base.errors import UsageError
from weft.models.needed import needed

FILES = ("tokenizer.json", "tokenizer_config.json")


def load_tokenizer(folder: str | Path) -> Any:
    """The tokenizer in `folder`: text to tokens and back, and its chat template.

    Raises  UsageError: there is none
    """
    if not any((Path(folder) / file).is_file() for file in FILES):
        raise UsageError(
            f"{folder}: has neither {' nor '.join(FILES)}; pass a folder with a model and its "
            "tokenizer, as transformers writes them"
        )
    return needed("transformers").AutoTokenizer.from_pretrained(str(folder))


def stop_tokens(folder: str | Path, tokenizer: Any) -> frozenset[int]:
    """Tokens that end a text: those of the model's generation_config.json, or the tokenizer's."""
    found = tokenizer.eos_token_id
    if (Path(folder) / "generation_config.json").is_file():
        config = needed("transformers").GenerationConfig.from_pretrained(str(folder))
        found = found if config.eos_token_id is None else config.eos_token_id
    return frozenset(found if isinstance(found, list) else [] if found is None else [found])
