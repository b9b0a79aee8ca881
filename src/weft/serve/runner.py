"""One ragged step of a model on one rank: tokens of many sequences in, the next token of each out.

All tokens of a step are one row, [1, tokens]; each sequence attends over its own pages. First come
those that bring one token, then chunks of prompts. Where all bring one, a step is a recording on
GPUs, a CUDA graph, one for each number of sequences in BUCKETS, replayed with other numbers in its
tensors. Sequences that fill a bucket up keep their keys in a page behind all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from weft.base.errors import CapacityError, UnsupportedError
from weft.layers.cache import Chunk, PagedCache, Ragged, alone
from weft.layers.transformers_plans import cache_keyword
from weft.runtime.world import World
from weft.serve.sampling import sampled
from weft.serve.step import Part, Step

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


class Runner:
    """Runs steps of `model`, one of `weft.models.load`. Collective, and so are its steps.

    record      decode steps are recorded and replayed; by default on GPUs
    by_kernel   they attend by flash_decode, else by torch's own attention; by default on GPUs
    Units       num_pages: of page_size tokens each; max_sequences, max_tokens: of one step
    Raises      UnsupportedError: a model that attends to a window of its keys
    """

    def __init__(
        self, model: Any, world: World, *, num_pages: int, page_size: int, max_sequences: int,
        max_tokens: int, record: bool | None = None, by_kernel: bool | None = None,
    ) -> None:  # fmt: skip
        config, on_gpus = model.config, world.target.backend != "emu"
        _check_window(config)
        self.model, self.world = model, world
        self.record = on_gpus if record is None else record
        self.page_size, self.num_pages = page_size, num_pages
        self.max_sequences, self.max_tokens = max_sequences, max_tokens
        # Pages of the longest sequence: as long as the model allows, or all that there are.
        self.width = min(num_pages, -(-config.max_position_embeddings // page_size))
        attention = model.model.layers[0].self_attn
        rows = _bucket(max_sequences)
        # Its lengths and its table are those of sequences that bring one token.
        self.cache = PagedCache(
            config.num_hidden_layers, rows, self.width * page_size, attention.kv_heads,
            attention.head_dim, page=page_size, pages=num_pages + 1, device=world.device,
            dtype=model.dtype,
            alone=alone(world) if (on_gpus if by_kernel is None else by_kernel) else None,
        )  # fmt: skip
        self.in_table: list[tuple[int, ...]] = [()] * rows
        # Of each token its id, its position and its place in the pages.
        self.numbers = torch.zeros(3, max(max_tokens, rows), dtype=torch.int64, device=world.device)
        # A model that is given a mask of four dimensions makes none; layers do not look at it.
        self.cache_keyword = cache_keyword(model)
        self.no_mask = torch.zeros(1, 1, 1, 1, device=world.device)
        self.recorded: dict[int, tuple[Any, Tensor]] = {}

    @torch.no_grad()
    def run(self, step: Step) -> list[int | None]:
        """A token for each part that wants one, the same on all ranks.

        Raises  CapacityError: a step that is too large, or a part without pages for its tokens
        """
        self._check(step)
        found: list[int | None] = [None] * len(step.parts)
        if not step.parts:
            return found
        order = sorted(range(len(step.parts)), key=lambda i: len(step.parts[i].tokens) > 1)
        parts = [step.parts[i] for i in order]
        wanting = [i for i, part in enumerate(parts) if part.wants_token]
        if self.record and len(parts[-1].tokens) == 1:
            logits = self._replayed(parts)[: len(parts)]
            logits = logits if len(wanting) == len(parts) else logits[wanting]
        else:
            ends = list(accumulate(len(part.tokens) for part in parts))
            logits = self._logits(parts, [ends[i] - 1 for i in wanting])
        if wanting:
            how = [(parts[i].sampling, _end(parts[i])) for i in wanting]
            for i, token in zip(wanting, sampled(logits, how), strict=True):
                found[order[i]] = token
        return found

    @torch.no_grad()
    def prepare(self) -> None:
        """Record decode steps of all buckets now, and not when one is needed first. Collective."""
        for rows in BUCKETS[: BUCKETS.index(_bucket(self.max_sequences)) + 1]:
            if self.record:
                self._replayed([self._filling] * rows)

    def close(self) -> None:
        """Collective."""
        if (own := self.cache.alone) is not None and own is not self.world:
            own.close()

    @property
    def _filling(self) -> Part:
        """A sequence that fills a bucket up."""
        return Part((0,), 0, (self.num_pages,))

    def _replayed(self, parts: Sequence[Part]) -> Tensor:
        """Logits of a decode step's bucket, [its rows, vocabulary]."""
        rows = _bucket(len(parts))
        filled = [*parts, *[self._filling] * (rows - len(parts))]
        if rows not in self.recorded:
            self._logits(filled, None)  # what is compiled or grows does so before a recording
            with self.world.record() as recording:
                logits = self._forward(rows, (), None)
            self.recorded[rows] = recording, logits
        recording, logits = self.recorded[rows]
        self._write(filled)
        recording.replay()
        return logits

    def _logits(self, parts: Sequence[Part], wanted: list[int] | None) -> Tensor:
        """Of the tokens `wanted`, of all for None; not defined where none is."""
        ones = self._write(parts)
        chunks, first = [], ones
        for part in parts[ones:]:
            rows, keys, pages = slice(first, first + len(part.tokens)), _end(part), None
            if part.first_position:
                there = part.pages[: -(-keys // self.page_size)]
                pages = torch.tensor(there, device=self.world.device)
            chunks.append(Chunk(rows, keys, pages))
            first = rows.stop
        return self._forward(ones, chunks, wanted)

    def _write(self, parts: Sequence[Part]) -> int:
        """Fill the tensors of a step; returns how many sequences bring one token."""
        size, ids, positions, places = self.page_size, [], [], []
        for part in parts:
            first, end = part.first_position, _end(part)
            pages = part.pages[first // size : -(-end // size)]
            rows = [row for page in pages for row in range(page * size, (page + 1) * size)]
            ids += part.tokens
            positions += range(first, end)
            places += rows[first % size :][: end - first]
        self.numbers[:, : len(ids)].copy_(torch.tensor([ids, positions, places]))
        ones = [part for part in parts if len(part.tokens) == 1]
        if ones:
            self.cache.lengths[: len(ones)].copy_(torch.tensor([_end(part) for part in ones]))
        # Most sequences stay in their rows, with their pages, for many steps.
        for row, part in enumerate(ones):
            if self.in_table[row] != part.pages:
                pages = torch.tensor(part.pages, dtype=torch.int32)
                self.cache.table[row, : len(pages)].copy_(pages)
                self.in_table[row] = part.pages
        return len(ones)

    def _forward(self, ones: int, chunks: Sequence[Chunk], wanted: list[int] | None) -> Tensor:
        tokens = chunks[-1].rows.stop if chunks else ones
        ids, positions, places = self.numbers[:, :tokens]
        seen = Ragged(
            self.cache, places, self.cache.lengths[:ones], self.cache.table[:ones], chunks
        )
        given = {
            "input_ids": ids[None], "position_ids": positions[None], self.cache_keyword: seen,
            "attention_mask": self.no_mask, "use_cache": False,
        }  # fmt: skip
        if wanted == []:  # the chunks of prompts that go on
            return self.model.model(**given).last_hidden_state
        kept = 0 if wanted is None else torch.tensor(wanted, device=self.world.device)
        return self.model(**given, logits_to_keep=kept).logits[0]

    def _check(self, step: Step) -> None:
        tokens = sum(len(part.tokens) for part in step.parts)
        if tokens > self.max_tokens or len(step.parts) > self.max_sequences:
            raise CapacityError(
                f"runner: a step of {len(step.parts)} sequences with {tokens} tokens, made for "
                f"max_sequences={self.max_sequences} and max_tokens={self.max_tokens}; split it, "
                "or make a runner for more"
            )
        for part in step.parts:
            room = len(part.pages) * self.page_size
            if not part.tokens or _end(part) > room or len(part.pages) > self.width:
                raise CapacityError(
                    f"runner: {len(part.tokens)} tokens from position {part.first_position} in "
                    f"{len(part.pages)} pages of {self.page_size}; a part has one token at least, "
                    f"pages for all its tokens, and {self.width} pages at most"
                )
            if not all(0 <= page < self.num_pages for page in part.pages):
                raise CapacityError(
                    f"runner: pages {part.pages}, of which there are 0 to {self.num_pages - 1}"
                )


def _end(part: Part) -> int:
    """The position behind a part's tokens."""
    return part.first_position + len(part.tokens)


def _bucket(rows: int) -> int:
    """The smallest bucket that holds so many sequences.

    Raises  CapacityError: none does
    """
    found = next((one for one in BUCKETS if one >= rows), None)
    if found is None:
        raise CapacityError(f"runner: {rows} sequences in a step; {BUCKETS[-1]} at most")
    return found


def _check_window(config: Any) -> None:
    window = getattr(config, "sliding_window", None)
    if window is not None and window < config.max_position_embeddings:
        raise UnsupportedError(
            f"runner: sliding_window={window} of {config.max_position_embeddings} positions; each "
            "token would see that many keys alone, but pages keep all: set sliding_window to null "
            "in config.json if the model was trained so"
        )
