"""A fixed trace of arrivals against a server that speaks OpenAI's API: weft's, or any other.

    python benchmarks/serve_load.py --url http://127.0.0.1:8000 [--rate 4] [--count 200]

Of a seed: when each request comes (exponential gaps of --rate a second), how long its prompt is, in
words, and how many tokens it asks for; --leave is the share of clients that leave half way. Told
are tokens/s, and p50, p99 and the worst of times to the first token and between tokens, in ms. A
request that does not end as it must is an error; so are pages that weft still holds afterwards.
With --again each request is repeated alone, and must have the same text. Needs Python alone. --save
writes results/serve_load_NAME.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

RESULTS = Path(__file__).parent / "results"
WORDS = "the loom holds one set of threads and carries another across them each pass binds".split()
# So long a server may take to free what clients who left had.
SETTLE_S = 20.0


@dataclass
class Asked:
    """A request of the trace, and what became of it. Units  at: seconds after the first"""

    number: int
    at: float
    prompt: str
    tokens: int
    leaves_after: int | None
    text: str = ""
    finish: str | None = None
    usage: dict[str, int] = field(default_factory=dict)
    times: list[float] = field(default_factory=list)  # since it came, of each piece of text
    problem: str = ""


def trace(options: argparse.Namespace) -> list[Asked]:
    draw, at, asked = random.Random(options.seed), 0.0, []
    for number in range(options.count):
        words = draw.randint(*options.prompt)
        prompt = " ".join(draw.choice(WORDS) for _ in range(words))
        tokens = draw.randint(*options.tokens)
        leaves = max(1, tokens // 2) if draw.random() < options.leave else None
        asked.append(Asked(number, at, prompt, tokens, leaves))
        at += draw.expovariate(options.rate)
    return asked


async def exchange(url: str, method: str, path: str, body: bytes = b"") -> AsyncIterator[bytes]:
    """The status as three bytes, then the answer's lines. The connection ends with the iterator."""
    place = urlsplit(url)
    reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
    try:
        head = (
            f"{method} {place.path.rstrip('/')}{path} HTTP/1.1\r\nhost: {place.netloc}\r\n"
            "content-type: application/json\r\nconnection: close\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        writer.write(head.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        yield answer.split(b" ", 2)[1]
        if b"transfer-encoding: chunked" not in answer:
            for line in (await reader.read()).splitlines():
                yield line
            return
        rest = b""
        while size := int(await reader.readline(), 16):
            *lines, rest = (rest + await reader.readexactly(size)).split(b"\n")
            await reader.readline()
            for line in lines:
                yield line
        yield rest
    finally:
        writer.close()


async def ask(url: str, model: str, asked: Asked) -> None:
    """Sends one request and reads its stream, or half of it."""
    body = {
        "model": model, "prompt": asked.prompt, "max_tokens": asked.tokens, "temperature": 0,
        "seed": asked.number, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    begin, is_done, said = time.perf_counter(), False, []
    lines = exchange(url, "POST", "/v1/completions", json.dumps(body).encode())
    try:
        if (status := await anext(lines)) != b"200":
            said = [line.decode() async for line in lines]
            asked.problem = f"status {status.decode()}: {' '.join(said)}"
            return
        async for line in lines:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                is_done = True
                break
            event = json.loads(line[6:])
            if "error" in event:
                asked.problem = event["error"]["message"]
                return
            asked.usage = event.get("usage") or asked.usage
            for choice in event["choices"]:
                asked.times.append(time.perf_counter() - begin)
                asked.text += choice["text"]
                asked.finish = choice["finish_reason"] or asked.finish
            if asked.leaves_after is not None and len(asked.times) >= asked.leaves_after:
                return
    except (OSError, EOFError, ValueError) as error:
        asked.problem = f"{type(error).__name__}: {error}"
        return
    finally:
        await lines.aclose()
    given = asked.usage.get("completion_tokens")
    if not is_done or asked.finish != "length" or given != asked.tokens:
        asked.problem = f"ended by {asked.finish} with {given} of {asked.tokens} tokens"


async def come(url: str, model: str, all_asked: list[Asked]) -> float:
    """All requests, each when its time has come; how long they took together."""
    begin = time.perf_counter()

    async def one(asked: Asked) -> None:
        await asyncio.sleep(max(0.0, begin + asked.at - time.perf_counter()))
        await ask(url, model, asked)

    await asyncio.gather(*map(one, all_asked))
    return time.perf_counter() - begin


async def get(url: str, path: str) -> tuple[bytes, list[str]]:
    lines = exchange(url, "GET", path)
    status = await anext(lines)
    return status, [line.decode() async for line in lines]


async def left_over(url: str) -> dict[str, float]:
    """What weft still has of requests when all have ended; {} of other servers too."""
    deadline, kept = time.monotonic() + SETTLE_S, {}
    names = ("weft_requests_running", "weft_requests_waiting", "weft_pages_used")
    while time.monotonic() < deadline:
        status, lines = await get(url, "/metrics")
        if status != b"200":
            return {}
        values = dict(line.rsplit(" ", 1) for line in lines if line.startswith("weft_"))
        kept = {name: float(values[name]) for name in names if float(values.get(name, 0))}
        if not kept:
            return {}
        await asyncio.sleep(0.2)
    return kept


async def differing(url: str, model: str, all_asked: list[Asked]) -> list[int]:
    """Requests whose text is another one when nobody else is there."""
    found = []
    for asked in all_asked:
        alone = Asked(asked.number, 0.0, asked.prompt, asked.tokens, asked.leaves_after)
        await ask(url, model, alone)
        length = min(len(alone.text), len(asked.text)) if asked.leaves_after else None
        if alone.text[:length] != asked.text[:length]:
            found.append(asked.number)
    return found


def quantiles(some: list[float]) -> dict[str, float]:
    """Units  ms"""
    some = sorted(some) or [0.0]
    at = {f"p{p}": some[min(len(some) - 1, len(some) * p // 100)] for p in (50, 99)}
    return {name: round(1e3 * value, 3) for name, value in {**at, "worst": some[-1]}.items()}


async def load(options: argparse.Namespace) -> dict[str, Any]:
    _, lines = await get(options.url, "/v1/models")
    model = options.model or json.loads("".join(lines))["data"][0]["id"]
    all_asked = trace(options)
    for asked in all_asked[: options.warm]:
        await ask(options.url, model, Asked(asked.number, 0.0, asked.prompt, asked.tokens, None))
    took_s = await come(options.url, model, all_asked)
    stayed = [one for one in all_asked if one.leaves_after is None and not one.problem]
    gaps = [b - a for one in stayed for a, b in zip(one.times, one.times[1:])]
    new = sum(one.usage["completion_tokens"] for one in stayed)
    asked = {name: getattr(options, name) for name in
             ("seed", "rate", "count", "prompt", "tokens", "leave")}  # fmt: skip
    return {
        "model": model, "trace": asked, "seconds": round(took_s, 3), "ended": len(stayed),
        "left": sum(one.leaves_after is not None for one in all_asked),
        "prompt_tokens": sum(one.usage["prompt_tokens"] for one in stayed),
        "generated_tokens": new, "tokens_per_s": round(new / took_s, 2),
        "first_token_ms": quantiles([one.times[0] for one in stayed]),
        "between_tokens_ms": quantiles(gaps),
        "wrong": [{"request": one.number, "why": one.problem} for one in all_asked if one.problem],
        "left_over": await left_over(options.url),
        "differing": await differing(options.url, model, all_asked) if options.again else [],
    }  # fmt: skip


def is_fine(found: dict[str, Any]) -> bool:
    return not found["wrong"] and not found["left_over"] and not found["differing"]


def spread(text: str) -> tuple[int, int]:
    """`16..64`, or one number."""
    least, _, most = text.partition("..")
    return int(least), int(most or least)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", default="", help="by default the server's first")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--prompt", type=spread, default=(32, 512), help="words, e.g. 32..512")
    parser.add_argument("--tokens", type=spread, default=(16, 256))
    parser.add_argument("--leave", type=float, default=0.0)
    parser.add_argument("--warm", type=int, default=2, help="requests before the trace begins")
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--save", default="", metavar="NAME")
    options = parser.parse_args(words)
    found = asyncio.run(load(options))
    print(json.dumps(found, indent=1))
    if options.save:
        from weft.tune.provenance import provenance, write_json

        path = RESULTS / f"serve_load_{options.save}.json"
        write_json(path, {"provenance": provenance(), **found})
    return not is_fine(found)


if __name__ == "__main__":
    raise SystemExit(main())
