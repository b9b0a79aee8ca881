"""weft serve with a tiny Qwen3 on two emulated ranks, by openai's client; a load for minutes."""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import openai
import pytest
from engines import listening, until
from torchrun import environment

from weft import models
from weft.base.topology import Topology
from weft.serve.api import Served
from weft.serve.engine import Engine
from weft.serve.ranks import Ranks, Sizes, model_runner
from weft.tools.main import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
CONTEXT, COUNT = 512, 30


@contextmanager
def served(folder, sizes: Sizes) -> Iterator[tuple[Engine, str]]:
    tokenizer = models.load_tokenizer(folder)
    engine_of = partial(Engine, decode=partial(tokenizer.decode, skip_special_tokens=True))
    ranks = Ranks(partial(model_runner, str(folder), sizes), engine_of, Topology.of(2))
    engine = ranks.engine.result(120)
    model = Served("tiny", tokenizer, frozenset({tokenizer.eos_token_id}), CONTEXT)
    try:
        with listening(engine, model) as url:
            yield engine, url
    finally:
        ranks.close(120)
    assert ranks.error is None, ranks.report
    assert not engine.scheduler.has_work
    assert sorted(engine.scheduler.free) == list(range(sizes.pages))


def ask(client, prompt: str, seed: int, tokens: int, stream: bool = True) -> str:
    given = {"model": "tiny", "prompt": prompt, "seed": seed, "max_tokens": tokens,
             "temperature": 1.0, "top_k": 50, "ignore_eos": True}  # fmt: skip
    more = {name: given.pop(name) for name in ("top_k", "ignore_eos")}
    answer = client.completions.create(**given, stream=stream, extra_body=more)
    if not stream:
        return answer.choices[0].text
    return "".join(one.choices[0].text for one in answer)


@pytest.mark.slow
def test_requests_at_once_are_answered_as_each_alone(tiny):
    sizes = Sizes(page_size=4, pages=12, max_tokens=16, max_sequences=3)
    prompts = ["The weft", "A loom holds one set of threads", "Cloth"]
    with served(tiny("qwen3"), sizes) as (engine, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            alone = [ask(client, one, i, 6, stream=False) for i, one in enumerate(prompts)]
            with ThreadPoolExecutor(len(prompts)) as pool:
                asked = [pool.submit(ask, client, one, i, 6) for i, one in enumerate(prompts)]
                assert [one.result() for one in asked] == alone
            assert len({*alone}) == len(prompts) and all(alone)
            messages = [{"role": "user", "content": "hi"}]
            chat = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=3, temperature=0
            )
            assert chat.usage.prompt_tokens > 3 and chat.choices[0].finish_reason


@contextmanager
def verb(folder, target: str) -> Iterator[tuple[subprocess.Popen, str]]:
    """`weft serve` as a process of its own, and its address."""
    words = f"-m weft serve --model {folder} --name tiny --ranks 2 --target {target} --port 0"
    command = [sys.executable, *words.split(), "--pages", "64", "--page-size", "16"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment()) as server:
        try:
            before = []
            for line in server.stderr:
                if line.startswith("serving tiny"):
                    break
                before.append(line)
            else:
                pytest.fail(f"the server did not start:\n{''.join(before)}")
            yield server, line.split()[3]
        finally:
            server.kill()


TARGETS = ["emu", pytest.param("cuda", marks=pytest.mark.gpu(n=2))]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_the_verb_serves_until_it_is_interrupted(tiny, target):
    with verb(tiny("qwen3"), target) as (server, address):
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            alone = [ask(client, "The weft", seed, 3) for seed in range(3)]
            with ThreadPoolExecutor(3) as pool:
                assert list(pool.map(partial(ask, client, "The weft", tokens=3), range(3))) == alone
        server.send_signal(signal.SIGINT)
        rest = server.stderr.read()
        assert server.wait(60) == 0, rest
    assert "Traceback" not in rest


@pytest.mark.gpu(n=2)
def test_a_process_that_dies_ends_the_server(tiny):
    """A decode that goes on and on, and a rank that is killed in the middle of it."""
    with verb(tiny("qwen3"), "cuda") as (server, address):
        with openai.OpenAI(base_url=address, api_key="none", max_retries=0) as client:
            given = {"model": "tiny", "prompt": "The weft", "max_tokens": 480, "stream": True}
            with pytest.raises(openai.APIError) as heard:
                for number, _ in enumerate(client.completions.create(**given)):
                    if number == 3:
                        children = ["pgrep", "-P", str(server.pid), "-f", "spawn_main"]
                        found = subprocess.run(children, capture_output=True, text=True)
                        os.kill(int(found.stdout), signal.SIGKILL)
        rest = server.stderr.read()
        assert server.wait(120) == 1, rest
    # Whichever is first: the table of who waits, or the process that is no more.
    assert rest.startswith("weft: ") and "rank" in rest and "Traceback" not in rest, rest
    assert str(heard.value)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_verb_with_the_table(tiny, monkeypatch, capsys):
    from weft.serve.runner import Runner

    run, steps = Runner.run, {0: 0, 1: 0}

    def failing(self, step):
        steps[self.world.rank] += 1
        if self.world.rank == 1 and steps[1] == 3:
            raise RuntimeError("rank 1 has had enough")
        return run(self, step)

    monkeypatch.setattr(Runner, "run", failing)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    heard = []

    def client() -> None:
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none") as one:
            until(lambda: "serving" in capsys.readouterr().err)
            try:
                ask(one.with_options(max_retries=0), "The weft", 0, 9)
            except openai.APIError as error:
                heard.append(str(error))

    asking = threading.Thread(target=client)
    asking.start()
    words = f"serve --model {tiny('qwen3')} --name tiny --ranks 2 --target emu --pages 64"
    code = main([*words.split(), "--port", str(port)])
    asking.join(60)
    told = capsys.readouterr().err
    assert code == 1
    for text in (told, *heard):
        assert "rank 1 has had enough" in text and "(raised on emulated rank 1)" in text
        assert "meanwhile" in text and "rank 0" in text and "waits for" in text
    assert len(heard) == 1


def test_what_the_verb_refuses_before_it_loads_anything(tiny, tmp_path, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ["serve", "--model", str(tiny("qwen3")), "--target", "emu"]
        assert main([*words, "--port", port]) == 2
    assert "--port, 0 for any that is free" in capsys.readouterr().err
    assert main([*words, "--max-sequences", "5000"]) == 2
    said = capsys.readouterr().err
    assert "--max-sequences 5000: 256 at most" in said and "loading" not in said
    assert main(["serve", "--model", str(tmp_path), "--target", "emu"]) == 2
    assert "has no config.json" in capsys.readouterr().err


@pytest.mark.slow
def test_a_load_for_minutes_loses_and_leaks_nothing(tiny, monkeypatch, capsys):
    """20 at once and more, some leave; few pages, so that some give way; then each again alone."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    script = importlib.import_module("serve_load")
    sizes = Sizes(page_size=4, pages=24, max_tokens=32, max_sequences=8)
    words = f"--count {COUNT} --rate 2 --prompt 2..10 --tokens 4..16 --leave 0.2 --warm 0 --again"
    with served(tiny("qwen3"), sizes) as (engine, url):
        code = script.main(f"--url {url} {words}".split())
        found = json.loads(capsys.readouterr().out)
        assert code == 0, found
        assert found["ended"] + found["left"] == COUNT
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            with ThreadPoolExecutor(20) as pool:
                asked = [pool.submit(ask, client, f"story {i}", i, 16) for i in range(20)]
                texts = [one.result() for one in asked]
            assert engine.scheduler.num_preempted > 0
            assert texts == [ask(client, f"story {i}", i, 16) for i in range(20)]
        until(lambda: not engine.scheduler.has_work)
        ended = engine.metrics.registry.get_sample_value
        assert ended("weft_requests_total", {"finish": "error"}) is None
        assert ended("weft_requests_total", {"finish": "abort"}) >= found["left"]
