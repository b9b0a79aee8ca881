"""An engine without a model: what the next token is follows from what the pages hold."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import uvicorn

from weft.serve.api import Served, make_app
from weft.serve.engine import Engine
from weft.serve.scheduler import Scheduler
from weft.serve.step import Part, Step

VOCABULARY, SPACE = 97, 32
WAIT_S = 60.0


def next_token(tokens: list[int], seed: int = 0) -> int:
    """Of all that came before it, so that one wrong key shows."""
    found = seed
    for token in tokens:
        found = (found * 31 + token + 7) % 1_000_003
    return found % VOCABULARY


def continued(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """The tokens that a request alone gets."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


class PageRunner:
    """Keeps tokens where a model keeps keys; `on_step` is called first in each step."""

    def __init__(
        self, num_pages: int, page_size: int, on_step: Callable[[int], None] = lambda number: None
    ) -> None:
        self.page_size, self.on_step, self.steps = page_size, on_step, 0
        self.pages: list[list[int | None]] = [[None] * page_size for _ in range(num_pages)]

    def run(self, step: Step) -> list[int | None]:
        self.steps += 1
        self.on_step(self.steps)
        for part in step.parts:
            for at, token in enumerate(part.tokens, part.first_position):
                self.pages[part.pages[at // self.page_size]][at % self.page_size] = token
        return [self._token(part) if part.wants_token else None for part in step.parts]

    def _token(self, part: Part) -> int:
        length = part.first_position + len(part.tokens)
        kept = [self.pages[part.pages[at // self.page_size]][at % self.page_size]
                for at in range(length)]  # fmt: skip
        return next_token([token for token in kept if token is not None], part.sampling.seed)


class Letters:
    """A tokenizer: one letter a token."""

    def __len__(self) -> int:
        return VOCABULARY

    def get_vocab(self) -> dict[str, int]:
        return {chr(SPACE + token): token for token in range(VOCABULARY)}

    def encode(self, text: str) -> list[int]:
        return [ord(one) - SPACE for one in text]

    def decode(self, tokens: Sequence[int]) -> str:
        return "".join(chr(SPACE + token) for token in tokens)

    def apply_chat_template(self, messages: list[dict], **_: object) -> list[int]:
        if messages[0]["role"] not in ("system", "user"):
            raise ValueError("a conversation begins with system or user")
        return self.encode("".join(f"{one['role']}:{one['content']}|" for one in messages))


LETTERS = Letters()


@contextmanager
def running(scheduler: Scheduler, runner: PageRunner) -> Iterator[Engine]:
    """An engine on a thread of its own; what its runner raises ends it."""
    engine = Engine(scheduler, LETTERS.decode)

    def run() -> None:
        try:
            engine.run(runner.run, lambda step: None)
        except RuntimeError as error:
            engine.end(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield engine
    finally:
        engine.close()
        thread.join(WAIT_S)
        assert not thread.is_alive()


@contextmanager
def listening(engine: Engine, served: Served) -> Iterator[str]:
    """The address of a server of `engine` on a thread."""
    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(make_app(engine, served), log_level="warning"))
        thread = threading.Thread(target=server.run, args=([own],))
        thread.start()
        until(lambda: server.started)
        try:
            yield f"http://127.0.0.1:{own.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(WAIT_S)
            assert not thread.is_alive()


def until(condition: Callable[[], bool]) -> None:
    """Waits for what another thread does."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.002)
