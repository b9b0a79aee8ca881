"""The OpenAI-compatible API of one engine and one model: what is asked, answered, and refused."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Literal

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel, ConfigDict, Field
from starlette.exceptions import HTTPException

from weft.serve.engine import Delta, Engine
from weft.serve.scheduler import Request as Wanted
from weft.serve.step import Sampling

COMPLETION_TOKENS = 16  # where a completion's max_tokens is left out, as OpenAI has it
STOPS = 4
BAD_REQUEST, NOT_FOUND, CLIENT_LEFT, FAILED, ENGINE_ENDED = 400, 404, 499, 500, 503
JSON_TYPE = "application/json"
# What can have several forms, in words.
FORMS = {
    "prompt": "a text, or a list of one, or of tokens, which are integers",
    "stop": f"a text, or a list of up to {STOPS}",
}


@dataclass(frozen=True)
class Served:
    """A model by the name that clients use. `tokenizer` is one of transformers'.

    context: tokens that a prompt and what follows it may have together
    """

    name: str
    tokenizer: Any
    stop_tokens: frozenset[int]
    context: int

    @cached_property
    def longest_token(self) -> int:
        """In characters."""
        return max(map(len, self.tokenizer.get_vocab()))


class ApiError(Exception):
    """What the API answers in an answer's place."""

    def __init__(
        self, message: str, param: str | None = None, code: str | None = None,
        status: int = BAD_REQUEST,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.body = _error(message, param, code, status)


def _error(message: str, param: str | None, code: str | None, status: int) -> dict[str, Any]:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool = False


class Asked(BaseModel):
    """What both kinds of requests have. What can only be left out is listed, so that nobody who
    asks for it gets an answer without it. Strict: "8" is no number, and true is none."""

    model_config = ConfigDict(extra="forbid", strict=True)

    model: str
    max_tokens: int | None = Field(None, ge=1)
    temperature: float = Field(1.0, ge=0, le=2)
    top_p: float = Field(1.0, ge=0, le=1)
    top_k: int = Field(0, ge=-1)  # 0 and -1: all, as other servers have it
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False

    n: Literal[1] | None = None
    logprobs: Literal[False] | None = None
    presence_penalty: Literal[0] | None = None
    frequency_penalty: Literal[0] | None = None
    logit_bias: dict[str, Literal[0]] | None = None

    # These change no answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    def stops(self) -> list[str]:
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        if len(stops) > STOPS or not all(stops):
            raise ApiError(f"stop: up to {STOPS} strings, none of them empty", "stop")
        return stops

    def sampling(self) -> Sampling:
        seed = secrets.randbits(32) if self.seed is None else self.seed % 2**32
        return Sampling(self.temperature, max(self.top_k, 0), self.top_p, seed)


class CompletionAsked(Asked):
    kind: ClassVar[str] = "text_completion"
    prompt: str | list[str] | list[int] | list[list[int]]
    best_of: Literal[1] | None = None
    echo: Literal[False] | None = None
    logprobs: None = None  # 0 asks for the token's own
    suffix: Literal[""] | None = None

    def most(self) -> int | None:
        return COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens

    def tokens(self, served: Served) -> list[int]:
        prompt: Any = self.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise ApiError(f"prompt: one a request, not {len(prompt)}", "prompt")
            prompt = prompt[0]
        if isinstance(prompt, str):
            _check_length(len(prompt), served, "prompt")
            return served.tokenizer.encode(prompt)
        size = len(served.tokenizer)
        if bad := [token for token in prompt if not 0 <= token < size]:
            raise ApiError(f"prompt: token {bad[0]}, of a vocabulary of {size}", "prompt")
        return prompt


class Message(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    role: str
    content: str | list[dict[str, str]] | None = None
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """Its text: parts of it are joined. Raises  ApiError: a part that is no text"""
        parts = self.content or ""
        if isinstance(parts, list):
            if other := [part for part in parts if part.get("type") != "text"]:
                raise ApiError(f"messages: text only, no part {other[0]}", "messages")
            parts = "".join(part.get("text", "") for part in parts)
        return {"role": self.role, "content": parts}


class ChatAsked(Asked):
    kind: ClassVar[str] = "chat.completion"
    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    top_logprobs: Literal[0] | None = None
    tools: None = None
    tool_choice: Literal["none"] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None

    def most(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def tokens(self, served: Served) -> list[int]:
        messages = [one.plain() for one in self.messages]
        # Templates may leave out what a model has thought, and the space around a message.
        kept = [one["content"].strip() for one in messages if one["role"] != "assistant"]
        _check_length(sum(map(len, kept)), served, "messages")
        try:
            return served.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # a template says in its own way what it does not take
            raise ApiError(f"messages: the model's chat template: {error}", "messages") from error


class Answer:
    """One request, as its answer or as the events of its stream."""

    def __init__(self, asked: CompletionAsked | ChatAsked, wanted: Wanted) -> None:
        self.asked, self.wanted = asked, wanted
        self.is_chat = isinstance(asked, ChatAsked)
        self.created = int(time.time())

    def whole(self, deltas: list[Delta]) -> dict[str, Any]:
        text, last = "".join(delta.text for delta in deltas), deltas[-1]
        said = {"message": {"role": "assistant", "content": text, "refusal": None}}
        choice = self._choice(said if self.is_chat else {"text": text}, last.finish)
        return {**self._head(self.asked.kind), "choices": [choice], "usage": self._usage(last)}

    async def events(self, deltas: AsyncIterator[Delta]) -> AsyncIterator[str]:
        """Server-sent events: one a token; before them a chat's role, behind them the usage."""
        kind = "chat.completion.chunk" if self.is_chat else self.asked.kind
        options = self.asked.stream_options
        wants_usage = options is not None and options.include_usage
        head = {**self._head(kind), **({"usage": None} if wants_usage else {})}
        if self.is_chat:
            yield _event({**head, "choices": [self._piece({"role": "assistant", "content": ""})]})
        async for delta in deltas:
            if delta.error:
                yield _event(_error(delta.error, None, "engine_ended", ENGINE_ENDED))
                return
            said = {"content": delta.text} if self.is_chat else {"text": delta.text}
            yield _event({**head, "choices": [self._piece(said, delta.finish)]})
        if wants_usage:
            yield _event({**head, "choices": [], "usage": self._usage(delta)})
        yield "data: [DONE]\n\n"

    def _piece(self, said: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return self._choice({"delta": said} if self.is_chat else said, finish)

    def _choice(self, said: dict[str, Any], finish: str | None) -> dict[str, Any]:
        return {"index": 0, **said, "logprobs": None, "finish_reason": finish}

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.wanted.id, "object": kind, "created": self.created,
            "model": self.asked.model,
        }  # fmt: skip

    def _usage(self, last: Delta) -> dict[str, int]:
        prompt, new = len(self.wanted.prompt), last.num_tokens
        return {
            "prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new
        }  # fmt: skip


def _event(values: dict[str, Any]) -> str:
    return f"data: {json.dumps(values)}\n\n"


class Events(StreamingResponse):
    """A stream that says when it is over, be it that the client has left."""

    def __init__(self, events: AsyncIterator[str], at_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream")
        self.at_end = at_end

    async def __call__(self, *args: Any) -> None:
        try:
            await super().__call__(*args)
        finally:
            self.at_end()


def make_app(engine: Engine, served: Served) -> FastAPI:
    app = FastAPI(title="weft serve", openapi_url=None)
    begun = int(time.time())
    card = {"id": served.name, "object": "model", "created": begun, "owned_by": "weft",
            "max_model_len": served.context}  # fmt: skip

    @app.exception_handler(ApiError)
    async def refused(_: Request, error: ApiError) -> Response:
        return JSONResponse(error.body, error.status)

    @app.exception_handler(RequestValidationError)
    async def misread(request: Request, error: RequestValidationError) -> Response:
        kind = request.headers.get("content-type", "")
        return JSONResponse(_misread(error, kind).body, BAD_REQUEST)

    @app.exception_handler(HTTPException)
    async def no_such_page(_: Request, error: HTTPException) -> Response:
        status = error.status_code
        return JSONResponse(_error(str(error.detail), None, None, status), status)

    @app.exception_handler(Exception)
    async def failed(_: Request, error: Exception) -> Response:
        message = f"this server failed: {type(error).__name__}; its log has the traceback"
        return JSONResponse(_error(message, None, "internal_error", FAILED), FAILED)

    @app.get("/health")
    async def health() -> dict[str, str]:
        if engine.ended is not None:
            raise ApiError(engine.ended, code="engine_ended", status=ENGINE_ENDED)
        return {"status": "ok"}

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(served, name)
        return card

    @app.post("/v1/completions")
    async def completions(asked: CompletionAsked, request: Request) -> Response:
        return await answer(asked, request)

    @app.post("/v1/chat/completions")
    async def chat_completions(asked: ChatAsked, request: Request) -> Response:
        return await answer(asked, request)

    async def answer(asked: CompletionAsked | ChatAsked, request: Request) -> Response:
        # On a thread: to find a long text's tokens takes seconds, in which others are answered.
        wanted, stops = await asyncio.to_thread(_wanted, asked, served), asked.stops()
        if asked.stream_options is not None and not asked.stream:
            raise ApiError("stream_options: only where stream is true", "stream_options")
        deltas: asyncio.Queue[Delta] = asyncio.Queue()
        engine.submit(wanted, partial(_hand_over, asyncio.get_running_loop(), deltas), stops)
        answer, abort = Answer(asked, wanted), partial(engine.abort, wanted.id)
        if asked.stream:
            return Events(answer.events(_until_last(deltas)), abort)
        try:
            got = await _unless_left(request, deltas)
        finally:
            abort()
        if got is None:
            return Response(status_code=CLIENT_LEFT)
        if got[-1].error:
            raise ApiError(got[-1].error, code="engine_ended", status=ENGINE_ENDED)
        return JSONResponse(answer.whole(got))

    return app


def _wanted(asked: CompletionAsked | ChatAsked, served: Served) -> Wanted:
    """What the engine is asked for.

    Raises  ApiError: another model, more than the context, or what is no text
    """
    _check_model(served, asked.model)
    _check_texts(asked)
    prompt, source = asked.tokens(served), "messages" if isinstance(asked, ChatAsked) else "prompt"
    if not prompt:
        raise ApiError(f"{source}: at least one token", source)
    room = served.context - len(prompt)
    most = room if (most := asked.most()) is None else most
    if room < 1 or most > room:
        raise ApiError(
            f"this model's context is {served.context} tokens, but {source} has {len(prompt)} and "
            f"{max(most, 1)} are asked for behind them; shorten one of the two",
            source, "context_length_exceeded",
        )  # fmt: skip
    name = "chatcmpl" if isinstance(asked, ChatAsked) else "cmpl"
    stop_tokens = frozenset() if asked.ignore_eos else served.stop_tokens
    return Wanted(f"{name}-{uuid.uuid4().hex}", tuple(prompt), most, asked.sampling(), stop_tokens)


def _check_length(characters: int, served: Served, source: str) -> None:
    """Refuse a text that has more tokens than the context, however it is cut into them."""
    if characters > served.context * served.longest_token:
        raise ApiError(
            f"this model's context is {served.context} tokens, but {source} has {characters} "
            f"characters, of which a token has {served.longest_token} at most; shorten it",
            source, "context_length_exceeded",
        )  # fmt: skip


def _check_texts(asked: Asked) -> None:
    """Half of a surrogate pair, as JSON can have it, is no text: nothing encodes it."""
    for name, value in asked.model_dump(exclude_unset=True).items():
        for text in _texts(value):
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise ApiError(
                    f"{name}: character {error.start} of a text is half of a surrogate pair, "
                    f"{text[error.start]!r}; send both halves, or the character itself", name
                ) from None  # fmt: skip


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _texts([*value, *value.values()])
    elif isinstance(value, list):
        for one in value:
            yield from _texts(one)


def _check_model(served: Served, name: str) -> None:
    if name != served.name:
        message = f"the model {name!r} does not exist; this server has {served.name!r}"
        raise ApiError(message, "model", "model_not_found", NOT_FOUND)


def _misread(error: RequestValidationError, content_type: str) -> ApiError:
    """The first thing that a request says wrong, or asks for and cannot have."""
    first = error.errors()[0]
    if first["loc"] == ("body",) and not _is_json(content_type):
        was = f"of content-type {content_type}" if content_type else "without a content-type"
        return ApiError(f"the request came {was}: send it with content-type: {JSON_TYPE}")
    if first["type"] == "json_invalid":
        return ApiError(f"the request's body is not JSON: {first['ctx']['error']}")
    where = [str(one) for one in first["loc"][1:]]
    param = where[0] if where else None
    if first["type"] == "extra_forbidden":
        return ApiError(f"{'.'.join(where)}: this server knows no such parameter", param,
                        "unknown_parameter")  # fmt: skip
    if first["type"] in ("literal_error", "none_required"):
        only = first.get("ctx", {}).get("expected", "none")
        return ApiError(f"{param}: this server can only have {only}; leave it out", param,
                        "unsupported_value")  # fmt: skip
    if param in FORMS and len(where) > 1:
        return ApiError(f"{param}: {FORMS[param]}", param)
    return ApiError(f"{'.'.join(where) or 'body'}: {first['msg']}", param)


def _is_json(content_type: str) -> bool:
    kind = content_type.partition(";")[0].strip().lower()
    return kind == JSON_TYPE or (kind.startswith("application/") and kind.endswith("+json"))


def _hand_over(loop: asyncio.AbstractEventLoop, deltas: asyncio.Queue, delta: Delta) -> None:
    """From the engine's thread to the server's."""
    with suppress(RuntimeError):  # the server's loop has ended: nobody is there to read it
        loop.call_soon_threadsafe(deltas.put_nowait, delta)


async def _until_last(deltas: asyncio.Queue[Delta]) -> AsyncIterator[Delta]:
    while True:
        delta = await deltas.get()
        yield delta
        if delta.is_last:
            return


async def _unless_left(request: Request, deltas: asyncio.Queue[Delta]) -> list[Delta] | None:
    """All deltas of an answer; None where the client leaves before the last."""

    async def leaving() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    async def all_of_them() -> list[Delta]:
        return [delta async for delta in _until_last(deltas)]

    left, got = asyncio.ensure_future(leaving()), asyncio.ensure_future(all_of_them())
    try:
        await asyncio.wait({left, got}, return_when=asyncio.FIRST_COMPLETED)
        return got.result() if got.done() else None
    finally:
        left.cancel()
        got.cancel()
