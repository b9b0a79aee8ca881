"""`weft generate --model DIR --prompt TEXT`: a text continued, on emulated ranks or on GPUs."""

from __future__ import annotations

import queue
import sys
import time
from functools import partial
from typing import Annotated

from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.tools import console, options
from weft.tools.run import PLACES, choose_target
from weft.tools.serve import CLOSE_S, close
from weft.tools.words import parse_topology

PAGE_SIZE = 16


def generate(
    model: options.ModelFolder,
    prompt: Annotated[str, options.option("TEXT", "what is continued")],
    chat: Annotated[
        bool, options.flag("the prompt is a user's message, in the model's template", "--chat")
    ] = False,
    max_tokens: Annotated[int, options.option("N", "tokens at most", min=1)] = 64,
    temperature: Annotated[
        float, options.option("T", "0: the most probable token each time", min=0)
    ] = 0.0,
    top_k: Annotated[int, options.option("K", "of the k most probable; 0: of all", min=0)] = 0,
    top_p: Annotated[
        float,
        options.option("P", "of the most probable that make up p; 0: of one", min=0, max=1),
    ] = 1.0,
    seed: Annotated[int, options.option("N", "of what is drawn", min=0)] = 0,
    ranks: options.RanksAnywhere = None,
    nodes: options.Nodes = "1",
    target: options.Where = "auto",
    json: options.AsJson = False,
) -> int:
    """Continue a text by a model spread over the ranks; it is printed as it comes."""
    from weft.models import load_config, load_tokenizer, stop_tokens
    from weft.serve.engine import Delta, Engine
    from weft.serve.ranks import Ranks, Sizes, model_runner
    from weft.serve.scheduler import Request
    from weft.serve.step import Sampling

    room, tokenizer = load_config(model).max_position_embeddings, load_tokenizer(model)
    tokens = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=False
    ) if chat else tokenizer(prompt).input_ids  # fmt: skip
    if not tokens:
        raise UsageError(f"--prompt {prompt!r} has no tokens: write what is continued")
    if len(tokens) + max_tokens > room:
        raise UsageError(
            f"--prompt of {counted(len(tokens), 'token')} and --max-tokens {max_tokens}: the model "
            f"takes {room} in all"
        )
    ranks, where, why = choose_target(target, ranks, nodes)
    topology, notes = parse_topology(ranks, nodes), console.notes()
    there = f"{counted(topology.num_ranks, 'rank')} on the {PLACES[where]}"
    notes.print(f"loading {model}, {there}: {why}", markup=False)
    pages = -(-(len(tokens) + max_tokens) // PAGE_SIZE)
    sizes = Sizes(PAGE_SIZE, pages, max_sequences=1)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    started = Ranks(
        partial(model_runner, model, sizes), partial(Engine, decode=decode), topology, where
    )
    engine = started.engine.result()
    deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
    sampling = Sampling(temperature, top_k, top_p, seed)
    request = Request("one", tuple(tokens), max_tokens, sampling, stop_tokens(model, tokenizer))
    began, text, delta = time.monotonic(), "", Delta()
    try:
        engine.submit(request, deltas.put)
        while not delta.is_last:
            delta = deltas.get()
            text += delta.text
            if not json:
                sys.stdout.write(delta.text)
                sys.stdout.flush()
    finally:  # no rank stays behind, also after Ctrl-C
        started.close(CLOSE_S)
    seconds = time.monotonic() - began
    values = {
        "ok": delta.error is None, "model": model, "target": where, "ranks": topology.num_ranks,
        "prompt_tokens": len(tokens), "tokens": delta.num_tokens, "text": text,
        "finish": delta.finish, "seconds": round(seconds, 3),
    }  # fmt: skip
    if json:
        console.print_json(values if delta.error is None else values | {"error": delta.error})
    elif delta.error is None:
        sys.stdout.write("\n")
        notes.print(f"{counted(delta.num_tokens, 'token')} in {seconds:.1f} s ({delta.finish})")
    return close(started, where)
