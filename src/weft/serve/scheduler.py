"""Which sequences a step runs, and which pages of the cache each of them has: host code alone.

    waiting   in order of arrival; the first is admitted once there are pages for all its tokens
    running   older than all that wait; each has pages, and brings its next token to a step, or,
              the youngest alone, a chunk of what the cache does not hold of it yet

Where a running sequence finds no page for its next token, the youngest that runs is preempted: its
pages go back to the pool, and it waits as the first, to compute its tokens again. So the oldest
sequence always goes on, and nothing starves.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from weft.base.errors import CapacityError, ConfigError
from weft.serve.step import Part, Sampling, Step


@dataclass(frozen=True)
class Request:
    """A prompt to be continued by up to `max_tokens`, or to one of `stop_tokens`, which counts."""

    id: str
    prompt: tuple[int, ...]
    max_tokens: int
    sampling: Sampling = Sampling()
    stop_tokens: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Output:
    """A token of a request; `finish` is why it is the last: "stop" or "length"."""

    id: str
    token: int
    finish: str | None


@dataclass(eq=False)
class Sequence:
    """A request under way. The cache holds the first `computed` of its `tokens`, in `pages`."""

    request: Request
    tokens: list[int]
    pages: list[int] = field(default_factory=list)
    computed: int = 0

    @property
    def left(self) -> int:
        return len(self.tokens) - self.computed


class Scheduler:
    """Continuous batching with chunked prompts over `num_pages` pages of `page_size` tokens.

    A step has `max_tokens` tokens of `max_sequences` sequences at most. Call `next_step` and `take`
    in turns; `add` and `end` at any time.

    Raises  ConfigError: more sequences than tokens in a step, which each needs one
    """

    def __init__(self, num_pages: int, page_size: int, max_sequences: int, max_tokens: int) -> None:
        if not 0 < max_sequences <= max_tokens or num_pages < 1 or page_size < 1:
            raise ConfigError(
                f"{max_sequences} sequences and {max_tokens} tokens in a step, {num_pages} pages "
                f"of {page_size} tokens: a step needs a token at least for each sequence, and all "
                "of these must be positive; lower --max-sequences or raise --max-tokens-per-step"
            )
        self.num_pages, self.page_size = num_pages, page_size
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        self.free = list(range(num_pages))
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preempted = 0
        self._by_id: dict[str, Sequence] = {}
        self._planned: list[tuple[Sequence, Part]] = []

    @property
    def capacity(self) -> int:
        """Tokens that one sequence can have: all pages may be its own."""
        return self.num_pages * self.page_size

    @property
    def has_work(self) -> bool:
        return bool(self._by_id)

    def add(self, request: Request) -> None:
        """Raises  CapacityError: not even all pages hold the prompt and `max_tokens`"""
        most = len(request.prompt) + request.max_tokens
        if not request.prompt or request.max_tokens < 1 or most > self.capacity:
            raise CapacityError(
                f"a prompt of {len(request.prompt)} tokens and {request.max_tokens} more: both "
                f"must be positive, and the cache holds {self.capacity} tokens"
            )
        if request.id in self._by_id:
            raise ConfigError(f"a request {request.id!r} is under way already; name it otherwise")
        self._by_id[request.id] = one = Sequence(request, list(request.prompt))
        self.waiting.append(one)

    def end(self, id: str) -> bool:
        """Take a request out and its pages back, also in the middle of a step; was it there?"""
        one = self._by_id.pop(id, None)
        if one is not None:
            self._free_pages(one)
            (self.running if one in self.running else self.waiting).remove(one)
        return one is not None

    def next_step(self) -> Step:
        """What is run next; without parts where there is nothing to do."""
        self._planned = []
        preempted, budget = self.num_preempted, self.max_tokens
        for one in list(self.running):  # the oldest first
            count = min(one.left, budget)
            if one in self.running and self._find_pages(one, one.computed + count):
                self._plan(one, count)
                budget -= count
        while self.num_preempted == preempted and budget and self._can_admit():
            one = self.waiting.popleft()
            self.running.append(one)
            self._find_pages(one, len(one.tokens) + 1)
            count = min(one.left, budget)
            self._plan(one, count)
            budget -= count
        return Step(tuple(part for _, part in self._planned))

    def take(self, tokens: list[int | None]) -> list[Output]:
        """What the last step gave, a token for each part that wanted one."""
        outputs = []
        for (one, part), token in zip(self._planned, tokens, strict=True):
            request = one.request
            if self._by_id.get(request.id) is not one:  # ended meanwhile
                continue
            one.computed += len(part.tokens)
            if token is None:
                continue
            one.tokens.append(token)
            finish = None
            if token in request.stop_tokens:
                finish = "stop"
            elif len(one.tokens) == len(request.prompt) + request.max_tokens:
                finish = "length"
            if finish:
                self.end(request.id)
            outputs.append(Output(request.id, token, finish))
        self._planned = []
        return outputs

    def _plan(self, one: Sequence, count: int) -> None:
        first, end = one.computed, one.computed + count
        part = Part(
            tuple(one.tokens[first:end]), first, tuple(one.pages), end == len(one.tokens),
            one.request.sampling,
        )  # fmt: skip
        self._planned.append((one, part))

    def _pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def _can_admit(self) -> bool:
        """Has the first that waits a seat, and pages for its tokens and the one that follows?"""
        if not self.waiting or len(self.running) == self.max_sequences:
            return False
        return self._pages_of(len(self.waiting[0].tokens) + 1) <= len(self.free)

    def _find_pages(self, one: Sequence, tokens: int) -> bool:
        """Give `one` pages for its first `tokens`; False where it was preempted itself."""
        while len(one.pages) < self._pages_of(tokens):
            if self.free:
                one.pages.append(self.free.pop())
                continue
            youngest = self.running.pop()
            self._free_pages(youngest)
            self.waiting.appendleft(youngest)
            self.num_preempted += 1
            if youngest is one:
                return False
        return True

    def _free_pages(self, one: Sequence) -> None:
        self.free += one.pages
        one.pages, one.computed = [], 0
