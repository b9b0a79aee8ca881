"""How a step comes from rank 0 to all ranks: as numbers, in one small broadcast."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from weft.base.errors import CallOrderError
from weft.runtime.world import World
from weft.serve.step import Part, Sampling, Step

# Numbers that every broadcast has; only what does not fit comes in a second one.
HEAD = 2048
# After so many steps ranks ask each other whether they have drawn the same tokens. An emulated rank
# also learns by it that the others' work has ended, without which checks take longer step by step.
AGREE_STEPS = 16
# Rank 0 sends a step without parts when it has had nothing to do for so long, and the others give
# up when they have heard nothing for so long.
BEAT_S, SILENCE_S = 5.0, 120.0

END = -1


# Pages of the last step's sequences, by the first of them, which no two have at a time.
Known = dict[int, tuple[int, ...]]


def numbers_of(step: Step | None, known: Known) -> list[float]:
    """Doubles, which hold every whole number up to 2 ** 53; None ends the server.

    Of pages only those that are new: both ends remember the others in `known`.
    """
    if step is None:
        return [END]
    numbers: list[float] = [len(step.parts)]
    now: Known = {}
    for part in step.parts:
        pages, how = part.pages, part.sampling
        old = known.get(pages[0], ())
        kept = len(old) if pages[: len(old)] == old else 0
        now[pages[0]] = pages
        numbers += (pages[0], kept, len(pages) - kept, len(part.tokens), part.first_position)
        numbers += (part.wants_token, how.temperature, how.top_k, how.top_p, how.seed)
        numbers += (*pages[kept:], *part.tokens)
    _remember(known, now)
    return numbers


def step_of(numbers: Sequence[float], known: Known) -> Step | None:
    if numbers[0] == END:
        return None
    parts, at = [], 1
    now: Known = {}
    for _ in range(int(numbers[0])):
        page, kept, num_new, num_tokens, first, wants_token = map(int, numbers[at : at + 6])
        begin = at + 10
        temperature, top_k, top_p, seed = numbers[at + 6 : begin]
        at = begin + num_new + num_tokens
        whole = tuple(map(int, numbers[begin:at]))
        now[page] = pages = known.get(page, ())[:kept] + whole[:num_new]
        sampling = Sampling(temperature, int(top_k), top_p, int(seed))
        parts.append(Part(whole[num_new:], first, pages, bool(wants_token), sampling))
    _remember(known, now)
    return Step(tuple(parts))


def _remember(known: Known, now: Known) -> None:
    known.clear()
    known.update(now)


class Link:
    """One rank's end. Collective, as `send` on rank 0 and `receive` on the others are.

    Raises  RuntimeError: torch's, where a rank's process has ended, or was silent for too long
    """

    def __init__(self, world: World) -> None:
        self.rank, self.num_ranks = world.rank, world.num_ranks
        ranks = list(world.backend.seats.global_ranks)
        self.root = ranks[0]
        self.known: Known = {}
        self.steps = self.drawn = 0
        timeout = timedelta(seconds=SILENCE_S)
        self.group = dist.new_group(
            ranks, backend="gloo", timeout=timeout, use_local_synchronization=True
        )

    def send(self, step: Step | None) -> None:
        if self.num_ranks == 1:
            return
        numbers = numbers_of(step, self.known)
        head = [len(numbers), *numbers[: HEAD - 1]]
        self._broadcast(torch.tensor(head + [0] * (HEAD - len(head)), dtype=torch.float64))
        if rest := numbers[HEAD - 1 :]:
            self._broadcast(torch.tensor(rest, dtype=torch.float64))

    def receive(self) -> Step | None:
        count, *numbers = self._broadcast(torch.zeros(HEAD, dtype=torch.float64)).tolist()
        if (rest := int(count) - len(numbers)) > 0:
            numbers += self._broadcast(torch.zeros(rest, dtype=torch.float64)).tolist()
        return step_of(numbers, self.known)

    def agree(self, tokens: Sequence[int | None]) -> None:
        """Of each step what it gave. Raises  CallOrderError: ranks have drawn different tokens"""
        self.steps += 1
        self.drawn = zlib.crc32(repr(tokens).encode(), self.drawn)
        if self.steps % AGREE_STEPS:
            return
        least, most = self.fewest(self.drawn), -self.fewest(-self.drawn)
        if least != most:
            raise CallOrderError(
                f"rank {self.rank}: ranks have drawn different tokens in steps "
                f"{self.steps - AGREE_STEPS + 1} to {self.steps}; each must run the same steps, "
                "with the same weights"
            )

    def fewest(self, count: int) -> int:
        """The smallest of all ranks' counts: pages, say, that each has memory for."""
        found = torch.tensor([count])
        dist.all_reduce(found, dist.ReduceOp.MIN, self.group)
        return int(found.item())

    def _broadcast(self, numbers: torch.Tensor) -> torch.Tensor:
        dist.broadcast(numbers, self.root, group=self.group)
        return numbers
