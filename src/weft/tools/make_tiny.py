"""`weft make-tiny DIR`: a small model with random weights and a real tokenizer."""

from __future__ import annotations

from typing import Annotated

import typer

from weft.tools import console, options


def make_tiny(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="where it is written")],
    kind: Annotated[
        str, options.option("KIND", "llama, qwen3, qwen3_moe or mixtral", "--kind")
    ] = "llama",
    json: options.AsJson = False,
) -> int:
    """Write a model of two layers, which weft and transformers load: nothing is downloaded."""
    from weft import models

    models.make_tiny(folder, kind)
    if json:
        console.print_json({"ok": True, "folder": folder, "kind": kind})
    else:
        what = f"a tiny {kind} and its tokenizer; weights are random, so what it says is noise"
        console.results().print(f"{folder}: {what}", markup=False)
    return console.FINE
