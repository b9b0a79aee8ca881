"""Copy-engine transfers of rows: every row goes once, behind it the word that tiles wait for."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from hypothesis import given
from hypothesis import strategies as st

from weft.language import mapping
from weft.language.mapping import StaticMapping
from weft.plan.transfers import pushes, queue

channel_of_row = mapping.as_python(mapping.channel_of_row)
SIZES = {"m": st.integers(1, 300), "num_ranks": st.integers(1, 6), "chunks": st.integers(1, 9)}


def split_of(m: int, num_ranks: int, chunks: int) -> StaticMapping:
    return StaticMapping.of(m, num_ranks, chunks=chunks)


class Copied:
    """A world that takes down what is copied, in order. `peers` are the arrays of each rank."""

    def __init__(self, rank: int, num_ranks: int, peers: list[SimpleNamespace]) -> None:
        self.rank, self.num_ranks, self.arrays = rank, num_ranks, peers
        self.names = {id(one): name for name, one in vars(peers[rank]).items()}
        self.copies: list[tuple[bool, torch.Tensor, torch.Tensor]] = []

    def peers(self, array, ranks):
        return [getattr(self.arrays[rank], self.names[id(array)]) for rank in ranks]

    def copy(self, dst, src):
        self.copies.append((False, dst, src))

    def copy_word(self, dst, src):
        self.copies.append((True, dst, src))


@given(**SIZES)
def test_each_rank_pushes_its_rows_and_words_to_every_other(m, num_ranks, chunks):
    split = split_of(m, num_ranks, chunks)
    told: dict[tuple[int, int], list[int]] = {}
    for rank in range(num_ranks):
        peers = [
            SimpleNamespace(
                gathered=torch.arange(m)[:, None] + peer * m,
                rows_ready=torch.arange(num_ranks * chunks) + peer * num_ranks * chunks,
            )
            for peer in range(num_ranks)
        ]
        world, here = Copied(rank, num_ranks, peers), peers[rank]
        first, end = mapping.as_python(mapping.rows_of_rank)(rank, split)
        others = [peer for peer in range(num_ranks) if peer != rank]
        arrays = [(torch.arange(first, end)[:, None], here.gathered)]
        queue(world, pushes(world, others, arrays, here.rows_ready, split))
        rows: list[int] = []
        for is_word, dst, src in world.copies:
            if is_word:
                assert int(src) - rank * num_ranks * chunks == int(dst) % (num_ranks * chunks)
                told[divmod(int(dst), num_ranks * chunks)] = rows
                rows = []
            else:
                assert torch.equal(dst % m, src)
                rows += src.flatten().tolist()
    words = [channel_of_row(row, split) for row in range(m)]
    for peer in range(num_ranks):
        for word in range(num_ranks * chunks):
            if word // chunks != peer:
                assert told.pop((peer, word)) == [row for row in range(m) if words[row] == word]
    assert not told
