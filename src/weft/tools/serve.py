"""`weft serve --model DIR`: an OpenAI-compatible server of a model, on emulated ranks or GPUs."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.tools import console, options
from weft.tools.run import PLACES, choose_target
from weft.tools.words import parse_topology

CLOSE_S = 30.0


def serve(
    model: options.ModelFolder,
    host: Annotated[str, options.option("ADDRESS", "where to listen")] = "127.0.0.1",
    port: Annotated[int, options.option("N", "0: any that is free", min=0, max=65535)] = 8000,
    ranks: options.RanksAnywhere = None,
    nodes: options.Nodes = "1",
    target: options.Where = "auto",
    page_size: Annotated[int, options.option("N", "tokens in a page of the cache", min=1)] = 16,
    pages: Annotated[
        int | None, options.option("N", "pages of the cache (default: as --memory says)", min=1)
    ] = None,
    memory: Annotated[
        float,
        options.option("SHARE", "of each GPU, for the model and the cache", min=0.01, max=1.0),
    ] = 0.8,
    max_tokens_per_step: Annotated[
        int, options.option("N", "tokens of all sequences in one step", min=1)
    ] = 2048,
    max_sequences: Annotated[
        int, options.option("N", "sequences in one step, up to 256", min=1)
    ] = 64,
    name: Annotated[
        str, options.option("TEXT", "the model's name, for clients (default: DIR's)")
    ] = "",
) -> int:
    """Serve a model by the API of OpenAI: /v1/completions, /v1/chat/completions, /v1/models.

    /metrics is for Prometheus, /health for who starts it. Ctrl-C ends it; so does a rank that
    fails, whose error it then shows, with who waits for whom.
    """
    from weft.models import load_config, load_tokenizer, needed, stop_tokens

    for package in ("fastapi", "uvicorn", "prometheus_client"):
        needed(package)
    from weft.serve.api import Served
    from weft.serve.engine import Engine
    from weft.serve.ranks import Ranks, Sizes, model_runner
    from weft.serve.runner import BUCKETS
    from weft.serve.server import Server, bind

    if max_sequences > BUCKETS[-1]:
        raise UsageError(f"--max-sequences {max_sequences}: {BUCKETS[-1]} at most in one step")
    config, tokenizer = load_config(model), load_tokenizer(model)
    ranks, where, why = choose_target(target, ranks, nodes)
    topology = parse_topology(ranks, nodes)
    sizes = Sizes(page_size, pages, memory, max_tokens_per_step, max_sequences)
    decode = partial(tokenizer.decode, skip_special_tokens=True)
    notes = console.notes()
    with bind(host, port) as own:
        there = f"{counted(topology.num_ranks, 'rank')} on the {PLACES[where]}"
        notes.print(f"loading {model}, {there}: {why}", markup=False)
        started = Ranks(
            partial(model_runner, model, sizes), partial(Engine, decode=decode), topology, where
        )
        engine = started.engine.result()
        scheduler = engine.scheduler
        context = min(config.max_position_embeddings, scheduler.capacity)
        stops = stop_tokens(model, tokenizer)
        served = Served(name or Path(model).resolve().name, tokenizer, stops, context)
        room = f"{counted(scheduler.num_pages, 'page')} of {counted(page_size, 'token')}"
        address = "http://{}:{}".format(*own.getsockname()[:2])
        notes.print(f"serving {served.name} at {address}/v1 by {there}, {room}", markup=False)
        Server(engine, served).run(sockets=[own])
    return close(started, where)


def close(started: Any, where: str) -> int:
    """End `started`, a serve.ranks.Ranks; the exit code, with what ended it where a rank failed."""
    started.close(CLOSE_S)
    if started.error is not None:
        console.notes().print("[bold red]weft:[/] a rank failed:")
        console.notes().print(started.report, markup=False)
    code = console.FINE if started.error is None else console.PROBLEM
    if where == "cuda":  # a library's destructor may wait for a rank that is gone
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code
