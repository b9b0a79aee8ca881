"""Which tokens of packed sequences each rank has: in order, or zigzag.

    in order    the m tokens as torch.chunk splits them
    zigzag      each sequence in 2n parts; rank r has its parts r and 2n - 1 - r, in this order

A causal query meets the keys up to its own, so ranks in order have unequal work; zigzag ones have
within two queries' the same of each sequence. Of m tokens zigzag rank r has (m + n - 1 - r) // n,
whatever the lengths: parts differ by a token, and sequences take turns at who has one more. Tokens
of no sequence, in front and at the end, are spread as if they were one.

Everything is computed on the lengths' device; the host reads nothing. Of one sequence of all tokens
it is known on the host.

Source  zigzag: Zhu, ring-flash-attention (2024); striped attention (Brandon et al. 2023,
        2311.09431), which balances by single tokens
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.base.parts import full_part, part_of
from weft.tiles.attention_blocks import lay_out

# Rows of a rank's table.
ROW, FRONT, COUNT, BACK = range(4)
# That a program lays out at once.
SEQUENCES = 128


class Shards(NamedTuple):
    """How m tokens lie. A rank has of sequence i rows table[rank, ROW, i] up to those of i + 1:
    the first COUNT of them are positions FRONT, FRONT + 1, .., the others BACK, BACK + 1, ..

    Shapes  ends: int32 [sequences + 3], where sequences begin, with the tokens of none before and
            after them, and m; table: int32 [num_ranks, 4, sequences + 3]
    """

    m: int
    num_ranks: int
    zigzag: bool
    ends: Tensor
    table: Tensor

    def rows(self, rank: int) -> int:
        """How many tokens a rank has."""
        return rows_of(self.m, rank, self.num_ranks, self.zigzag)

    def positions(self, rank: int) -> tuple[Tensor, Tensor]:
        """Of a rank's tokens the place among all, and among those of their sequence. int64"""
        own = self.table[rank].long()
        row = torch.arange(self.rows(rank), device=own.device)
        i = (torch.searchsorted(own[ROW], row, right=True) - 1).clamp(min=0)
        # Not own[:, i], whose shape the emulator takes to depend on values: it could not record it.
        before, front, count, back = own.index_select(1, i)
        row = row - before
        place = torch.where(row < count, front + row, back + row - count)
        # Lengths that are wrong, or not there yet as in a recording, reach nothing outside.
        place = place.clamp(0, max(0, self.m - 1))
        return place, place - self.ends.index_select(0, i)

    def places(self) -> Tensor:
        """Where each of the m tokens is found in what ranks have, each padded to the most that one
        has, one behind the other. int64"""
        most = most_rows(self.m, self.num_ranks)
        found = torch.zeros(self.m, dtype=torch.int64, device=self.table.device)
        for rank in range(self.num_ranks):
            row = torch.arange(self.rows(rank), device=found.device)
            found.index_copy_(0, self.positions(rank)[0], rank * most + row)
        return found


def most_rows(m: int, num_ranks: int) -> int:
    """The tokens of the rank that has most."""
    return full_part(m, num_ranks)


def rows_of(m: int, rank: int, num_ranks: int, zigzag: bool) -> int:
    """The tokens of a rank."""
    if zigzag:
        return (m + num_ranks - 1 - rank) // num_ranks
    first, end = part_of(m, rank, num_ranks)
    return end - first


def shards_in(world: Any, m: int, zigzag: bool, cu_seqlens: Tensor | None) -> Shards:
    """How m tokens lie over a world's ranks: as `shards_of` says, by one launch."""
    if cu_seqlens is None and not world.is_recording():
        return one_sequence(m, world.num_ranks, zigzag, world.device)
    ranks, columns = world.num_ranks, 4 if cu_seqlens is None else len(cu_seqlens) + 2
    ends, table = (
        torch.empty(*lead, columns, dtype=torch.int32, device=world.device)
        for lead in ((), (ranks, 4))
    )
    lay_out[(ranks,)](cu_seqlens, ends, table, m, columns, ranks, zigzag, SEQUENCES, num_warps=4)
    return Shards(m, ranks, zigzag, ends, table)


def one_sequence(m: int, num_ranks: int, zigzag: bool, device: torch.device) -> Shards:
    """One of all tokens: by one copy, which a recording cannot hold."""
    lists, begin, behind = [], 0, m
    for rank in range(num_ranks):
        some = rows_of(m, rank, num_ranks, zigzag)
        front = (some + 1) // 2 if zigzag else some
        behind -= some - front
        lists += [[0, 0, some, some], [0, begin, m, 0], [0, front, 0, 0], [0, behind, m, 0]]
        begin += front
    lists.append([0, 0, m, m])
    found = torch.tensor(lists, dtype=torch.int32).to(device, non_blocking=True)
    return Shards(m, num_ranks, zigzag, found[-1], found[:-1].view(num_ranks, 4, 4))


def shards_of(
    m: int, num_ranks: int, zigzag: bool, cu_seqlens: Tensor | None, device: torch.device
) -> Shards:
    """In plain torch, on any device. cu_seqlens: int32 [sequences + 1]; by default one sequence of
    all tokens"""
    if cu_seqlens is None:
        cu_seqlens = torch.arange(0, 2, device=device) * m
    # Lengths that fall, or lie beyond m, give wrong numbers, but none outside.
    starts = cu_seqlens.long().clamp(0, m).cummax(0).values
    ends = torch.cat([starts.new_zeros(1), starts, starts.new_full((1,), m)])
    rank = torch.arange(num_ranks, device=device)[:, None]
    if zigzag:
        row = (ends + num_ranks - 1 - rank) // num_ranks
        some = row.diff(dim=1)
        front = (some + 1) // 2
        back = (some - front).flip(0)
        begin = ends[:-1] + front.cumsum(0) - front
        behind = ends[:-1] + front.sum(0) + (back.cumsum(0) - back).flip(0)
    else:
        each = most_rows(m, num_ranks)
        first = (rank * each).clamp(max=m)
        row = torch.minimum((ends - first).clamp(min=0), (m - first).clamp(max=each))
        front = row.diff(dim=1)
        begin = torch.maximum(ends[:-1], first)
        behind = begin
    columns = [torch.nn.functional.pad(one, (0, 1)) for one in (begin, front, behind)]
    table = torch.stack([row, *columns], 1).int()
    return Shards(m, num_ranks, zigzag, ends.int(), table)


def padded(x: Tensor, m: int, num_ranks: int) -> Tensor:
    """A zigzag rank's tokens, and zeros up to the most that one has: shards of one size."""
    missing = most_rows(m, num_ranks) - x.shape[0]
    return torch.cat([x, x.new_zeros(missing, *x.shape[1:])]) if missing else x
