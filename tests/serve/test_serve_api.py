"""The API by openai's own client, against a server on a thread: answers, streams, refusals."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
import torch
from engines import LETTERS, VOCABULARY, PageRunner, continued, listening, running, until

from weft.serve.api import Served
from weft.serve.sampling import sampled
from weft.serve.scheduler import Scheduler
from weft.serve.step import Part

NUM_PAGES, PAGE, CONTEXT = 32, 4, 100
SERVED = Served("letters", LETTERS, frozenset({LETTERS.encode("~")[0]}), CONTEXT)


class Site:
    """A server under test; `pace_s` is what a step takes."""

    def __init__(self) -> None:
        self.scheduler, self.pace_s, self.fails = Scheduler(NUM_PAGES, PAGE, 6, 16), 0.0, False

    def on_step(self, number: int) -> None:
        time.sleep(self.pace_s)
        if self.fails:
            raise RuntimeError("rank 1 waits for rank 0")

    def is_empty(self) -> bool:
        return not self.scheduler.has_work and len(self.scheduler.free) == NUM_PAGES


@pytest.fixture
def site():
    one = Site()
    runner = PageRunner(NUM_PAGES, PAGE, one.on_step)
    with running(one.scheduler, runner) as one.engine, listening(one.engine, SERVED) as one.url:
        one.client = openai.OpenAI(base_url=f"{one.url}/v1", api_key="none", max_retries=0)
        with one.client:
            yield one


class DrawingRunner(PageRunner):
    """Draws the token as a model's runner does; the same as PageRunner's has the largest logit."""

    def _token(self, part: Part) -> int:
        logits = torch.zeros(1, VOCABULARY)
        logits[0, super()._token(part)] = 1.0
        return sampled(logits, [(part.sampling, part.first_position)])[0]


def expected(prompt: str, count: int, seed: int = 0) -> str:
    return LETTERS.decode(continued(LETTERS.encode(prompt), count, seed))


def complete(site: Site, prompt: object = "once", **more):
    given = {"model": "letters", "max_tokens": 8, "seed": 0, "extra_body": {"ignore_eos": True}}
    return site.client.completions.create(prompt=prompt, **{**given, **more})


def fetch(
    url: str, body: bytes | None = None, content_type: str = "application/json"
) -> tuple[int, str]:
    """(status, text) by no client in particular."""
    asked = urllib.request.Request(url, body, {"content-type": content_type})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_completion(site):
    answer = complete(site)
    assert answer.choices[0].text == expected("once", 8)
    assert answer.choices[0].finish_reason == "length" and answer.model == "letters"
    used = answer.usage
    assert (used.prompt_tokens, used.completion_tokens, used.total_tokens) == (4, 8, 12)
    as_tokens = complete(site, LETTERS.encode("once"))
    in_a_list = complete(site, ["once"])
    assert as_tokens.choices[0].text == in_a_list.choices[0].text == expected("once", 8)
    assert len(complete(site, max_tokens=None).choices[0].text) == 16


@pytest.mark.parametrize("temperature", [1e-46, 1e-300])
def test_a_temperature_that_rounds_to_0_is_0(temperature):
    scheduler, runner = Scheduler(NUM_PAGES, PAGE, 6, 16), DrawingRunner(NUM_PAGES, PAGE)
    given = {"model": "letters", "prompt": "once", "max_tokens": 8, "seed": 0, "ignore_eos": True,
             "temperature": temperature}  # fmt: skip
    with running(scheduler, runner) as engine, listening(engine, SERVED) as url:
        status, said = fetch(f"{url}/v1/completions", json.dumps(given).encode())
        assert status == 200, said
        assert json.loads(said)["choices"][0]["text"] == expected("once", 8)


def test_a_stream_of_a_completion(site):
    chunks = list(complete(site, stream=True, stream_options={"include_usage": True}))
    assert "".join(one.choices[0].text for one in chunks[:-1]) == expected("once", 8)
    assert [one.choices[0].finish_reason for one in chunks[:-1]] == [None] * 7 + ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    assert all(one.usage is None for one in chunks[:-1])
    assert len({one.id for one in chunks}) == 1


def test_a_chat_and_its_stream(site):
    parts = [{"type": "text", "text": text} for text in ("what", "?")]
    messages = [{"role": "system", "content": "be short"}, {"role": "user", "content": parts}]
    text = expected("system:be short|user:what?|", 9, 3)
    asked = {"model": "letters", "messages": messages, "seed": 3, "max_completion_tokens": 9,
             "extra_body": {"ignore_eos": True}}  # fmt: skip
    answer = site.client.chat.completions.create(**asked)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.role == "assistant"
    chunks = list(site.client.chat.completions.create(**asked, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == text
    assert chunks[-1].choices[0].finish_reason == "length"
    until(site.is_empty)


def test_stop_strings_and_the_end_of_a_text(site):
    text = expected("once", 20)
    answer = complete(site, max_tokens=20, stop=[text[6:9], "never"])
    assert answer.choices[0].text == text[: text.index(text[6:9])]
    assert answer.choices[0].finish_reason == "stop"
    prompt = next(p for p in map(chr, range(40, 120)) if "~" in expected(p, 60))
    answer = complete(site, prompt, max_tokens=60, extra_body={})
    assert answer.choices[0].text == expected(prompt, 60).partition("~")[0]
    assert answer.choices[0].finish_reason == "stop"


def test_twenty_clients_at_once_get_what_each_gets_alone(site):
    """With pages for a few of them, so that some are preempted."""

    def ask(i: int) -> str:
        chunks = complete(site, f"story {i}", max_tokens=30 + i, seed=i, stream=True)
        return "".join(one.choices[0].text for one in chunks)

    with ThreadPoolExecutor(20) as pool:
        answers = list(pool.map(ask, range(20)))
    assert answers == [expected(f"story {i}", 30 + i, i) for i in range(20)]
    assert site.scheduler.num_preempted > 0
    until(site.is_empty)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(site, stream):
    site.pace_s = 0.02
    if stream:
        with complete(site, max_tokens=90, stream=True) as chunks:
            next(iter(chunks))
    else:
        with pytest.raises(openai.APITimeoutError):
            complete(site, max_tokens=90, timeout=0.2)
    until(site.is_empty)
    count = site.engine.metrics.registry.get_sample_value
    assert count("weft_requests_total", {"finish": "abort"}) == 1
    assert count("weft_generated_tokens_total") < 90


REFUSED = {
    "logprobs": ({"logprobs": 1}, "logprobs"),
    "logprobs of the token": ({"logprobs": 0}, "logprobs"),
    "several": ({"n": 2}, "n"),
    "penalties": ({"presence_penalty": 0.5}, "presence_penalty"),
    "echo": ({"echo": True}, "echo"),
    "temperature": ({"temperature": -1}, "temperature"),
    "top_p": ({"top_p": 1.5}, "top_p"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "unknown": ({"extra_body": {"best": 1}}, "best"),
    "stops": ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    "empty stop": ({"stop": ""}, "stop"),
    "empty prompt": ({"prompt": ""}, "prompt"),
    "usage of no stream": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "two prompts": ({"prompt": ["a", "b"]}, "prompt"),
    "strange tokens": ({"prompt": [1, 97]}, "prompt"),
    "a number as a text": ({"max_tokens": "8"}, "max_tokens"),
    "true as a number": ({"max_tokens": True}, "max_tokens"),
    "a temperature as a text": ({"temperature": "1"}, "temperature"),
    "a switch as a text": ({"extra_body": {"ignore_eos": "true"}}, "ignore_eos"),
    "true as a token": ({"prompt": [True]}, "prompt"),
}


@pytest.mark.few(8)
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(site, name):
    changes, param = REFUSED[name]
    with pytest.raises(openai.BadRequestError) as refused:
        complete(site, **changes)
    body = refused.value.body
    assert body.keys() == {"message", "type", "param", "code"}
    assert body["param"] == param and body["type"] == "invalid_request_error"
    assert param in body["message"]
    assert site.is_empty()


def refusal(site: Site, body: bytes, page: str = "completions", **more: str) -> dict:
    status, said = fetch(f"{site.url}/v1/{page}", body, **more)
    assert status == 400, said
    error = json.loads(said)["error"]
    assert error["type"] == "invalid_request_error"
    return error


@pytest.mark.parametrize("field", ["prompt", "stop", "user", "messages"])
def test_half_of_a_surrogate_pair_is_no_text(site, field):
    text = '"on\\ud800ce"'
    value = f'[{{"role": "user", "content": {text}}}]' if field == "messages" else text
    rest = '"prompt": "once", ' if field in ("stop", "user") else ""
    page = "chat/completions" if field == "messages" else "completions"
    body = f'{{"model": "letters", {rest}"{field}": {value}}}'
    error = refusal(site, body.encode(), page)
    assert error["param"] == field
    assert f"{field}: character 2 of a text is half of a surrogate pair" in error["message"]
    # So is a name that is none.
    for more in ('"\\ud800": 1', '"model": "\\ud800"'):
        status, said = fetch(f"{site.url}/v1/{page}", f"{body[:-1]}, {more}}}".encode())
        assert status in (400, 404) and json.loads(said)["error"]["message"]


def test_a_body_that_is_not_said_to_be_json(site):
    body = b'{"model": "letters", "prompt": "once"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded"):
        error = refusal(site, body, content_type=kind)
        assert "send it with content-type: application/json" in error["message"]
    assert "content-type" not in refusal(site, b"[]")["message"]
    status, _ = fetch(f"{site.url}/v1/completions", body, "application/json; charset=utf-8")
    assert status == 200


def test_a_prompt_of_another_form_is_told_which_there_are(site):
    error = refusal(site, b'{"model": "letters", "prompt": [1, "a"]}')
    assert error["message"] == "prompt: a text, or a list of one, or of tokens, which are integers"


def test_integers_are_taken_where_numbers_are(site):
    assert len(complete(site, temperature=1, top_p=1).choices[0].text) == 8
    assert len(complete(site, top_p=0).choices[0].text) == 8


def test_what_nobody_expects_is_an_error_in_openais_form(site, monkeypatch):
    def broken(*_: object) -> None:
        raise ValueError("a secret")

    monkeypatch.setattr(site.engine, "submit", broken)
    with pytest.raises(openai.InternalServerError) as failed:
        complete(site)
    assert failed.value.body["type"] == "server_error"
    assert failed.value.body["message"].startswith("this server failed: ValueError")
    assert "secret" not in failed.value.body["message"]


class SlowLetters(type(LETTERS)):
    """Takes as long as a tokenizer does of a long text."""

    def __init__(self) -> None:
        self.asked, self.goes_on = threading.Event(), threading.Event()

    def encode(self, text: str) -> list[int]:
        self.asked.set()
        assert self.goes_on.wait(60)
        return super().encode(text)


def test_others_are_answered_while_a_prompts_tokens_are_found():
    scheduler, letters = Scheduler(NUM_PAGES, PAGE, 6, 16), SlowLetters()
    slow = Served("letters", letters, frozenset(), CONTEXT)
    body = b'{"model": "letters", "prompt": "once", "max_tokens": 1}'
    with (
        running(scheduler, PageRunner(NUM_PAGES, PAGE)) as engine,
        listening(engine, slow) as url,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(fetch, f"{url}/v1/completions", body)
        try:
            assert letters.asked.wait(60)
            assert fetch(f"{url}/health")[0] == 200
        finally:
            letters.goes_on.set()
        assert asked.result()[0] == 200


def test_a_text_that_is_plainly_too_long_is_not_cut_into_tokens(site, monkeypatch):
    monkeypatch.setattr(type(LETTERS), "encode", None)
    many = "a" * 200
    for page, given in (
        ("completions", {"prompt": many}),
        ("chat/completions", {"messages": [{"role": "user", "content": many}]}),
    ):
        error = refusal(site, json.dumps({"model": "letters", **given}).encode(), page)
        assert error["code"] == "context_length_exceeded"
        assert "context is 100 tokens, but" in error["message"]
        assert "200 characters, of which a token has 1 at most" in error["message"]


def test_more_than_the_context_is_refused(site):
    for prompt, most in (("a" * 90, 11), ("a" * 100, 1), ("a" * 200, 1)):
        with pytest.raises(openai.BadRequestError, match="context is 100 tokens") as refused:
            complete(site, prompt, max_tokens=most)
        assert refused.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="context is 100 tokens"):
        site.client.chat.completions.create(
            model="letters", messages=[{"role": "user", "content": "a" * 100}]
        )
    assert len(complete(site, "a" * 90, max_tokens=10).choices[0].text) == 10


def test_chats_that_are_refused(site):
    chat = site.client.chat.completions.create
    picture = {"type": "image_url", "image_url": "x"}
    for messages in (
        [],
        [{"role": "robot", "content": "x"}],
        [{"role": "user", "content": [picture]}],
    ):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(model="letters", messages=messages)
        assert refused.value.param == "messages"
    with pytest.raises(openai.BadRequestError, match="logprobs"):
        chat(model="letters", messages=[{"role": "user", "content": "x"}], logprobs=True)


def test_models_and_pages_that_there_are_and_are_not(site):
    assert [one.id for one in site.client.models.list()] == ["letters"]
    assert site.client.models.retrieve("letters").id == "letters"
    with pytest.raises(openai.NotFoundError) as unknown:
        complete(site, model="numbers")
    assert unknown.value.code == "model_not_found" and "'letters'" in unknown.value.body["message"]
    with pytest.raises(openai.NotFoundError):
        site.client.models.retrieve("numbers")
    with pytest.raises(openai.NotFoundError):
        site.client.embeddings.create(model="letters", input="x")
    status, said = fetch(f"{site.url}/v1/completions", b"{")
    assert status == 400 and "not JSON" in json.loads(said)["error"]["message"]
    status, said = fetch(f"{site.url}/health")
    assert status == 200 and json.loads(said) == {"status": "ok"}


def test_metrics(site):
    complete(site, max_tokens=5)
    lines = fetch(f"{site.url}/metrics")[1].splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    for name, value in {
        "weft_requests_running": 0, "weft_requests_waiting": 0, "weft_pages_used": 0,
        "weft_pages_free": NUM_PAGES, "weft_prompt_tokens_total": 4,
        "weft_generated_tokens_total": 5, 'weft_requests_total{finish="length"}': 1,
        "weft_time_to_first_token_seconds_count": 1, "weft_time_between_tokens_seconds_count": 4,
    }.items():  # fmt: skip
        assert float(values[name]) == value, name


def test_an_engine_that_fails_ends_all_answers_with_its_error(site):
    site.pace_s = 0.01

    def ask(stream: bool):
        answer = complete(site, max_tokens=80, stream=stream)
        return list(answer) if stream else answer

    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(ask, stream) for stream in (True, False) * 3]
        until(lambda: len(site.scheduler.running) == 6)
        site.fails = True
        for one in asked:
            with pytest.raises(openai.APIError, match="rank 1 waits for rank 0"):
                one.result()
    with pytest.raises(openai.InternalServerError, match="rank 1 waits for rank 0"):
        complete(site)
    assert fetch(f"{site.url}/health")[0] == 503
