"""Copy-engine transfers of a plan: own rows to peers, tiles to their owners, rows from peers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from weft.base.errors import UnsupportedError
from weft.compiler.lower import kernels
from weft.ir.device import Copy, Step
from weft.language import mapping
from weft.language.mapping import StaticMapping
from weft.plan.memory import Memory
from weft.plan.sizes import SizedPlan

rows_of_rank = mapping.as_python(mapping.rows_of_rank)


def push(
    world: Any, rows: torch.Tensor, target: torch.Tensor, words: torch.Tensor, split: StaticMapping
) -> None:
    """Queue on the current stream: own rows to rank - 1, - 2, ... by a copy engine; behind each
    chunk its word, which this rank has set to e."""
    rank, num_ranks = world.rank, world.num_ranks
    begin, end = rows_of_rank(rank, split)
    for hop in range(1, num_ranks):
        peer = (rank - hop) % num_ranks
        theirs, their_words = world.peer(target, peer), world.peer(words, peer)
        for chunk in range(split.chunks):
            first = min(begin + chunk * split.chunk_rows, end)
            last = min(first + split.chunk_rows, end)
            if last > first:
                world.copy(theirs[first:last], rows[first - begin : last - begin])
            word = slice(rank * split.chunks + chunk, rank * split.chunks + chunk + 1)
            world.copy_word(their_words[word], words[word])


def pull(
    world: Any, rows: torch.Tensor, target: torch.Tensor, words: torch.Tensor,
    announced: torch.Tensor, split: StaticMapping, *, is_part: bool,
) -> None:  # fmt: skip
    """Queue on the current stream: rows of rank + 1, + 2, ... by a copy engine; behind each chunk
    its word. `rows` are what peers' engines read: all, or with `is_part` own ones alone.

    The word is the source's own announcement, which holds e until this rank's credit lets the
    source go on. Never a word of this device: such a copy is a kernel, for which a running grid
    need not make room, and each change between kernel and copy engine costs time.
    """
    for hop in range(1, world.num_ranks):
        peer = (world.rank + hop) % world.num_ranks
        theirs = world.peer(rows, peer)
        their_word = world.peer(announced, peer)[peer : peer + 1]
        begin, end = rows_of_rank(peer, split)
        for chunk in range(split.chunks):
            first = min(begin + chunk * split.chunk_rows, end)
            last = min(first + split.chunk_rows, end)
            if last > first:
                there = slice(first - begin, last - begin) if is_part else slice(first, last)
                world.copy(target[first:last], theirs[there])
            word = peer * split.chunks + chunk
            world.copy_word(words[word : word + 1], their_word)


class Transfers:
    """The copies of a plan, queued on the current stream."""

    def __init__(self, sized: SizedPlan, memory: Memory) -> None:
        self.sized, self.memory, self.world = sized, memory, sized.world

    def turns(self, steps: Iterable[Step]) -> int:
        """Streams of copy engines that take turns with what these steps carry."""
        channels = [
            self.sized.channels[one.awaits] for one in steps if isinstance(one, Copy) and one.awaits
        ]
        most = [
            min(launch.schedule.engines, (self.world.num_ranks - 1) * self.sized.chunks_of(one))
            for one in channels
            for launch in self.memory.launches.values()
            if one.name in launch.launch.announces and launch.schedule
        ]
        return max(1, *most) if len(channels) == 1 else 1

    def queue(
        self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any, met: str | None,
        turn: int = 0, turns: int = 1,
    ) -> None:  # fmt: skip
        """`met`: the channel on which the stream met the others last. Of what is carried, that of
        the turn-th of `turns` streams."""
        if step.side == "push":
            self._push(step, bound, slot)
        elif step.side == "owner":
            self._to_owners(step, bound, slot, turn, turns)
        else:
            assert met is not None
            self._pull(step, bound, slot, met)

    def _push(self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any) -> None:
        split = self.sized.split(self.sized.channels[step.announces])
        words = self.memory.words_of(slot, step.announces)
        push(self.world, bound[step.source], bound[step.target], words, split)

    def _to_owners(
        self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any, turn: int, turns: int
    ) -> None:
        """Of what tiles leave here each rank's part to that rank, in the order in which tiles are
        multiplied: each chunk behind its token, its rows, then the word that says so.

        Shapes  kept: by owner and chunk, rows of whole tiles; partials: by source and chunk; words
                by rank and chunk, of `arrived` the owner's, by source, the others own ones
        """
        if not step.awaits:
            title = self.sized.plan.name
            told = f"{title}: a copy of {step.source} to owners takes no tokens"
            raise UnsupportedError(told, place=step.place)
        channels = self.sized.channels
        tokens, split = channels[step.awaits], self.sized.split(channels[step.announces])
        ranks, chunks = self.world.num_ranks, self.sized.chunks_of(tokens)
        kept, partials = bound[step.source], bound[step.target]
        _, rows, columns = partials.shape
        _, told = kernels.beside_tokens(tokens)
        words = (self.memory.words_of(slot, name) for name in (step.announces, told, step.awaits))
        arrived, told, tokens = words
        kept = kept.view(ranks * chunks, kept.shape[1], columns // chunks)
        partials = partials.view(ranks, chunks, rows, columns // chunks)
        rank, world = self.world.rank, self.world
        for hop in range(1, ranks):
            owner = (rank + hop) % ranks
            first, end = rows_of_rank(owner, split)
            theirs, there = world.peer(partials, owner), world.peer(arrived, owner)
            for chunk in range(chunks):
                if ((hop - 1) * chunks + chunk) % turns != turn:
                    continue
                mine, word = owner * chunks + chunk, rank * chunks + chunk
                world.take_token(tokens[mine : mine + 1])
                if end > first:
                    world.copy(theirs[rank, chunk, : end - first], kept[mine, : end - first])
                world.copy_word(there[word : word + 1], told[mine : mine + 1])

    def _pull(
        self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any, met: str
    ) -> None:  # fmt: skip
        split = self.sized.split(self.sized.channels[step.announces])
        words = self.memory.words_of(slot, step.announces)
        pull(
            self.world, bound[step.source], bound[step.target], words,
            self.memory.words_of(slot, met), split,
            is_part=self.sized.buffers[step.source].role == "shared",
        )  # fmt: skip
