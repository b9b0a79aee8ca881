"""Requests that a runner advances step by step."""

from __future__ import annotations

from weft.serve.step import Part, Sampling, Step

PROMPTS = ((5, 9, 2, 11, 4), (54, 260, 264, 320, 86, 259, 326, 291, 375), (7, 8, 9), (301,))
PAGE, PAGES = 4, 24
SIZES = {"num_pages": PAGES, "page_size": PAGE, "max_sequences": 4, "max_tokens": 32}


class Sequence:
    """One request, the `number`-th of four, whose pages lie apart from each other."""

    def __init__(self, prompt: tuple[int, ...], number: int = 0, sampling: Sampling = Sampling()):
        self.tokens, self.prompt, self.done = list(prompt), len(prompt), 0
        self.pages, self.sampling = tuple(range(PAGES - 1 - number, -1, -4)), sampling

    def part(self, most: int) -> Part:
        new = tuple(self.tokens[self.done : self.done + most])
        is_last = self.done + len(new) == len(self.tokens)
        return Part(new, self.done, self.pages, is_last, self.sampling)

    def take(self, part: Part, token: int | None) -> None:
        assert (token is None) == (not part.wants_token)
        self.done += len(part.tokens)
        self.tokens += [] if token is None else [token]

    @property
    def found(self) -> list[int]:
        return self.tokens[self.prompt :]


def advance(runner, *sequences: Sequence, most: int = 32) -> None:
    """One step of all of them, each with so many tokens at most."""
    parts = [one.part(most) for one in sequences]
    for one, part, token in zip(sequences, parts, runner.run(Step(tuple(parts))), strict=True):
        one.take(part, token)
