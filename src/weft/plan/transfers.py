"""Copy-engine transfers of a plan: own rows to peers, tiles to their owners."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from weft.base.errors import UnsupportedError
from weft.compiler.lower import kernels
from weft.ir.device import Copy
from weft.language import mapping
from weft.language.mapping import StaticMapping
from weft.plan.memory import Memory
from weft.plan.sizes import SizedPlan

rows_of_rank = mapping.as_python(mapping.rows_of_rank)


class Move(NamedTuple):
    """What a stream does next: copy `src` to `dst`; with `is_word` the signal word of what it
    copied before; without `src` it takes the token `dst`."""

    dst: torch.Tensor
    src: torch.Tensor | None = None
    is_word: bool = False


def queue(world: Any, moves: Iterable[Move]) -> None:
    """On the current stream, in this order."""
    for dst, src, is_word in moves:
        if src is None:
            world.take_token(dst)
        elif is_word:
            world.copy_word(dst, src)
        else:
            world.copy(dst, src)


def pushes(
    world: Any, peers: Iterable[int], arrays: Sequence[tuple[torch.Tensor, torch.Tensor]],
    words: torch.Tensor, split: StaticMapping,
) -> Iterator[Move]:  # fmt: skip
    """Own rows to `peers`, in this order, by a copy engine; behind each chunk its word, which this
    rank has set to e. arrays: own rows, and where all ranks' go"""
    rank, (begin, end) = world.rank, rows_of_rank(world.rank, split)
    end = min(end, begin + arrays[0][0].shape[0])  # fewer than have room there
    peers = [*peers]
    targets = zip(*[world.peers(to, peers) for _, to in arrays], strict=True)
    for theirs, their_words in zip(targets, world.peers(words, peers), strict=True):
        for chunk in range(split.chunks):
            first = min(begin + chunk * split.chunk_rows, end)
            last = min(first + split.chunk_rows, end)
            if last > first:
                for (rows, _), there in zip(arrays, theirs, strict=True):
                    yield Move(there[first:last], rows[first - begin : last - begin])
            word = slice(rank * split.chunks + chunk, rank * split.chunks + chunk + 1)
            yield Move(their_words[word], words[word], is_word=True)


class Transfers:
    """The copies of a plan."""

    def __init__(self, sized: SizedPlan, memory: Memory) -> None:
        self.sized, self.memory, self.world = sized, memory, sized.world

    def queue(self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any) -> None:
        """On the current stream."""
        queue(self.world, self.moves(step, bound, slot))

    def moves(self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any) -> Iterator[Move]:
        if step.side == "push":
            return self._pushes(step, bound, slot)
        if step.side == "parts":
            return self._parts(step, bound, slot)
        return self._to_owners(step, bound, slot)

    def _pushes(self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any) -> Iterator[Move]:
        split = self.sized.split(self.sized.channels[step.announces])
        words = self.memory.signals_of(slot, step.announces)
        rank, ranks = self.world.rank, self.world.num_ranks
        behind = [(rank - hop) % ranks for hop in range(1, ranks)]
        return pushes(self.world, behind, [(bound[step.source], bound[step.target])], words, split)

    def _parts(self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any) -> Iterator[Move]:
        """Each peer's rows of own columns to it, the first chunk to all before the second; behind
        each its word, which this rank has set to e.

        Shapes  source: all ranks' rows; target: rows of a rank, columns by source; signals by
                source and chunk
        """
        split = self.sized.split(self.sized.channels[step.announces])
        words = self.memory.signals_of(slot, step.announces)
        source, target = bound[step.source], bound[step.target]
        rank, ranks, world = self.world.rank, self.world.num_ranks, self.world
        columns = slice(rank * source.shape[1], (rank + 1) * source.shape[1])
        for chunk in range(split.chunks):
            for hop in range(1, ranks):
                peer = (rank - hop) % ranks
                begin, end = rows_of_rank(peer, split)
                first = min(begin + chunk * split.chunk_rows, end)
                last = min(first + split.chunk_rows, end)
                if last > first:
                    there = world.peer(target, peer)[first - begin : last - begin, columns]
                    yield Move(there, source[first:last])
                word = slice(rank * split.chunks + chunk, rank * split.chunks + chunk + 1)
                yield Move(world.peer(words, peer)[word], words[word], is_word=True)

    def _to_owners(
        self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any
    ) -> Iterator[Move]:
        """Of what tiles leave here each rank's part to that rank, in the order in which tiles are
        multiplied: each chunk behind its token, its rows, then the word that says so. Of a piece
        one chunk of each part, all there.

        Shapes  staged: by owner and chunk, of pieces by chunk and owner, rows of whole tiles;
                partials: by source and chunk; signals by rank and chunk, of `arrived` the owner's,
                by source, the others own ones
        """
        if step.piece:
            yield from self._piece_to_owners(step, bound, slot)
            return
        if not step.awaits:
            title = self.sized.plan.name
            message = f"{title}: a copy of {step.source} to owners takes no tokens"
            raise UnsupportedError(message, place=step.place)
        channels = self.sized.channels
        tokens, split = channels[step.awaits], self.sized.split(channels[step.announces])
        ranks, chunks = self.world.num_ranks, self.sized.chunks_of(tokens)
        staged, partials = bound[step.source], bound[step.target]
        _, rows, columns = partials.shape
        names = step.announces, kernels.beside_tokens(tokens)[1], step.awaits
        arrived, flags, tokens = [self.memory.signals_of(slot, name) for name in names]
        staged = staged.view(ranks * chunks, staged.shape[1], columns // chunks)
        partials = partials.view(ranks, chunks, rows, columns // chunks)
        rank, world = self.world.rank, self.world
        owners = [(rank + hop) % ranks for hop in range(1, ranks)]
        targets = zip(owners, world.peers(partials, owners), world.peers(arrived, owners))
        for owner, theirs, there in targets:
            first, end = rows_of_rank(owner, split)
            for chunk in range(chunks):
                mine, word = owner * chunks + chunk, rank * chunks + chunk
                yield Move(tokens[mine : mine + 1])
                if end > first:
                    yield Move(theirs[rank, chunk, : end - first], staged[mine, : end - first])
                yield Move(there[word : word + 1], flags[mine : mine + 1], is_word=True)

    def _piece_to_owners(
        self, step: Copy, bound: Mapping[str, torch.Tensor], slot: Any
    ) -> Iterator[Move]:
        """The word that is copied behind the rows is the one that this rank has set to e."""
        (chunk, chunks), (ranks, rank) = step.piece, (self.world.num_ranks, self.world.rank)
        split = self.sized.split(self.sized.channels[step.announces])
        words = self.memory.signals_of(slot, step.announces)
        staged, partials = bound[step.source], bound[step.target]
        _, rows, columns = partials.shape
        staged = staged.view(chunks, ranks, staged.shape[1], columns // chunks)[chunk]
        partials = partials.view(ranks, chunks, rows, columns // chunks)
        owners = [(rank + hop) % ranks for hop in range(1, ranks)]
        word = slice(rank * chunks + chunk, rank * chunks + chunk + 1)
        targets = zip(owners, self.world.peers(partials, owners), self.world.peers(words, owners))
        for owner, theirs, there in targets:
            first, end = rows_of_rank(owner, split)
            if end > first:
                yield Move(theirs[rank, chunk, : end - first], staged[owner, : end - first])
            yield Move(there[word], words[word], is_word=True)
