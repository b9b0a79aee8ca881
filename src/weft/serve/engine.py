"""The engine's loop on rank 0: requests in, a step for all ranks, text out.

One thread has the scheduler and runs steps. Other threads put what they ask of it into `inbox`,
where it finds it between two steps; what a request gets is given to the function that it came with.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from weft.base.errors import WeftError
from weft.serve.link import BEAT_S
from weft.serve.metrics import Metrics
from weft.serve.scheduler import Output, Request, Scheduler
from weft.serve.step import Step
from weft.serve.text import Text


@dataclass(frozen=True)
class Delta:
    """What one token adds to a request's answer; the last has a `finish`, or an `error`."""

    text: str = ""
    num_tokens: int = 0
    finish: str | None = None
    error: str | None = None

    @property
    def is_last(self) -> bool:
        return self.finish is not None or self.error is not None


@dataclass
class Open:
    """A request under way. Units  last: of the clock, when it came or its last token did"""

    request: Request
    text: Text
    emit: Callable[[Delta], None]
    last: float
    num_tokens: int = 0


class Engine:
    """Requests in, text out. `submit`, `abort` and `close` are for any thread.

    decode: text of tokens. `ended` is why it takes no more requests, once it does not.
    """

    def __init__(self, scheduler: Scheduler, decode: Callable[[Sequence[int]], str]) -> None:
        self.scheduler, self.decode = scheduler, decode
        self.metrics = Metrics(scheduler)
        self.open: dict[str, Open] = {}
        self.ended: str | None = None
        # Safe in a signal's handler, which may come while its own thread puts something there.
        self.inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_closing = False
        self._ending = threading.Lock()

    def submit(
        self, request: Request, emit: Callable[[Delta], None], stops: Sequence[str] = ()
    ) -> None:
        """Answer `request` by calls of `emit`, on the engine's thread, up to its last delta."""
        one = Open(request, Text(self.decode, stops), emit, time.monotonic())
        with self._ending:
            if self.ended is None:
                self.inbox.put(partial(self._open, one))
                return
        emit(Delta(error=self.ended))

    def abort(self, id: str) -> None:
        """Nobody wants the answer any more: its pages are free before the next step."""
        self.inbox.put(partial(self._abort, id))

    def close(self) -> None:
        """End after the step that is being run."""
        self._is_closing = True
        self.inbox.put(lambda: None)

    def run(
        self, run_step: Callable[[Step], list[int | None]], send: Callable[[Step | None], None]
    ) -> None:
        """Until `close`: every step is sent to the other ranks, then run here."""
        while self._receive():
            step = self.scheduler.next_step()
            send(step)  # also one without parts: rank 0 is alive
            if step.parts:
                for output in self.scheduler.take(run_step(step)):
                    self._give(output)
        send(None)
        self.end("the server was stopped")

    def end(self, why: str) -> None:
        """All that are open end with an error, and so do those that still come."""
        with self._ending:
            if self.ended is not None:
                return
            self.ended = why
        with suppress(queue.Empty):
            while True:
                self.inbox.get_nowait()()
        for id in list(self.open):
            self._finish(self.open[id], "error", Delta(error=why))

    def _receive(self) -> bool:
        """Do what was asked; wait for it where there is nothing else to do. False: it closes."""
        wait_s = 0.0 if self.scheduler.has_work else BEAT_S
        with suppress(queue.Empty):
            while True:
                self.inbox.get(timeout=wait_s)()
                wait_s = 0.0
        return not self._is_closing

    def _open(self, one: Open) -> None:
        try:
            self.scheduler.add(one.request)
        except WeftError as error:
            self.metrics.ended.labels("error").inc()
            one.emit(Delta(error=str(error)))
            return
        self.open[one.request.id] = one
        self.metrics.prompt_tokens.inc(len(one.request.prompt))

    def _abort(self, id: str) -> None:
        if id in self.open:
            self._finish(self.open[id], "abort")

    def _give(self, output: Output) -> None:
        one, now = self.open[output.id], time.monotonic()
        is_first, finish = one.num_tokens == 0, output.finish
        one.num_tokens += 1
        times = self.metrics.time_to_first_token if is_first else self.metrics.time_between_tokens
        times.observe(now - one.last)
        one.last = now
        self.metrics.generated_tokens.inc()
        text = "" if finish == "stop" else one.text.add(output.token)
        if finish and not one.text.has_stopped:
            text += one.text.end()
        if one.text.has_stopped:
            finish = "stop"
        delta = Delta(text, one.num_tokens, finish)
        if finish:
            self._finish(one, finish, delta)
        else:
            one.emit(delta)

    def _finish(self, one: Open, how: str, last: Delta | None = None) -> None:
        self.scheduler.end(one.request.id)
        del self.open[one.request.id]
        self.metrics.ended.labels(how).inc()
        if last is not None:
            one.emit(last)
