"""A launch, and how products are cut and described to kernels whose tiles travel to other ranks.

Those of plans (product_launches.py) and those of operators alike. A `sized` one says m, n and k,
the operands' itemsize, and whether B is [n, k].
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any, NamedTuple

import torch

from weft.base.elements import Axes
from weft.base.parts import part_of
from weft.base.target import Target
from weft.ir.device import Launch
from weft.ir.schedule import Schedule
from weft.tiles import blocking, descriptors_sm90, gemm, gemm_sm90
from weft.tiles.hooks import order, partition, scatter, table
from weft.tiles.relay import Groups

# Of the order's end, own tiles alone, in turns of all programs (order.order_of).
LAST = 3
# Threads of several programs on one SM: with 128 registers each, they have all of an SM's.
THREADS_OF_SM, REGISTERS_OF_THREAD = 512, 128


# Of a program that moves rows.
MOVING_WARPS = 8


class Start(NamedTuple):
    """A launch, ready to be loaded or queued."""

    function: Any
    grid: tuple[int, int, int]
    arguments: tuple
    options: dict[str, int]

    def run(self) -> Any:
        """Queue it on the current stream; the kernel, for `triton_api.relaunch`."""
        return self.function[self.grid](*self.arguments, **self.options)


class KernelLaunch:
    """A launch of a plan's kernel at given sizes: what it asks of a slot, and how it starts."""

    launch: Launch
    # Of a product's; whether operands must begin at 16 bytes, or the ranks' tiles would differ.
    schedule: Schedule | None = None
    needs_aligned: bool = False
    # Of the signals of a channel that its tiles announce one by one; columns of its result.
    axes: Axes
    n: int = 1
    # How tiles are cut that travel; where a relay of other nodes' ones finds the shares of this
    # node, and how it is launched.
    parts: partition.Parts
    groups: Groups | None = None
    of_relay: Mapping[str, int] = {"num_warps": MOVING_WARPS}
    # Of the slot, by name, beside the plan's own; and by the buffer that packets are of its array.
    buffers: Mapping[str, tuple] = {}
    signals: Mapping[str, tuple] = {}
    packets: Mapping[str, str] = {}

    @property
    def packed(self) -> Sequence[str]:
        """What it reads by rows that lie one behind the other."""
        return self.launch.reads

    def of(self, step: Launch) -> KernelLaunch:
        """That of a step of the plan which has a piece: there are several, of one kernel."""
        raise NotImplementedError

    def at(self, sized: Any) -> KernelLaunch | None:
        """The same launch of the plan at other sizes, of rows alone, by what this one knows of it;
        None where that is nothing."""
        return None

    def start(
        self, bound: Mapping[str, Any], words: Mapping[str, Any], slot: Any, split: Any
    ) -> Start:
        """The launch with these tensors; `words` are its channels'."""
        raise NotImplementedError


def tables_in(bound: Mapping[str, Any], name: str, world: Any) -> table.Tables:
    """Of the call; before the router has run, for loading, some of their dtypes."""
    if name in bound:
        return table.Tables.of(bound[name])
    return table.Tables(*[
        torch.zeros(4, dtype=torch.float32 if field == "weight_of" else torch.int32,
                    device=world.device)
        for field in table.Tables._fields
    ])  # fmt: skip


def parts_of(
    sized: Any, rows: int, num_ranks: int, tile: tuple[int, int], is_sm90: bool, programs: int,
    last: int, group_m: int, chunks: int = 1,
) -> partition.Parts:  # fmt: skip
    """How a product is cut of which each rank has `rows` rows, for so many programs; columns in
    `chunks` for engines."""
    tile_m, tile_n = tile
    tiles_m, num_n = ceil(rows / tile_m), ceil(sized.n / tile_n)
    # Each half of a tile that consumers share has a word of its own.
    is_shared = gemm_sm90.chunk_rows(tile_m, tile_n, sized.itemsize) < tile_m
    words = 2 if is_sm90 and is_shared else 1
    lead, tail = order.order_of(num_ranks, tiles_m * num_n, programs, last, group_m * num_n)
    return partition.Parts(
        sized.m, sized.n, rows, tile_m, tile_n, tiles_m, num_n, words, lead, tail, group_m,
        chunks, ceil(num_n / chunks),
    )  # fmt: skip


def shape_of(sized: Any) -> gemm.Shape:
    stride_b = sized.k if sized.b_is_nk else sized.n
    return gemm.Shape(sized.m, sized.n, sized.k, sized.k, stride_b, sized.n)


def can_use_tma(sized: Any, itemsize: int, target: Target, out_itemsize: int = 0) -> bool:
    """Do the rows of A, B and C begin where TMA can read them?"""
    rows = [sized.k * itemsize, (sized.k if sized.b_is_nk else sized.n) * itemsize]
    return blocking.can_use_tma(target, [*rows, sized.n * (out_itemsize or itemsize)])


def is_for_hopper(
    itemsize: int, nodes: tuple[int, ...], target: Target, b_is_nk: bool = False
) -> bool:
    """May the template for Hopper take it? Kernels in Gluon put nothing to other nodes' ranks; of
    fp8 operands B lies as [n, k]."""
    is_taken = itemsize == 2 or (itemsize == 1 and b_is_nk)
    return target.arch == 90 and is_taken and len(nodes) <= 1


def chunk_of(tile_m: int, tile_n: int, itemsize: int = 2) -> tuple[int, int]:
    """Rows and columns of the result that the template for Hopper stores at once."""
    return gemm_sm90.chunk_of(tile_m, tile_n, itemsize)


def block_of_b(tile_n: int, tile_k: int, b_is_nk: bool, is_sm90: bool) -> tuple[int, int]:
    """What TMA reads of B at once, in the order in which it lies."""
    columns = gemm_sm90.block_columns(tile_n) if is_sm90 else tile_n
    return (columns, tile_k) if b_is_nk else (tile_k, columns)


def describe_b(b: Any, tile_n: int, tile_k: int, b_is_nk: bool, is_sm90: bool) -> Any:
    """B as TMA reads it."""
    describe = descriptors_sm90.descriptor if is_sm90 else blocking.descriptor
    return describe(b.t() if b_is_nk else b, block_of_b(tile_n, tile_k, b_is_nk, is_sm90))


def describe_peers(
    world: Any, array: Any, parts: partition.Parts, chunk: tuple[int, int]
) -> list[Any]:
    """What tiles leave by: this rank's part of `array` on every peer, by hop.

    As many descriptors as the kernel takes, the last ones unused.
    """
    rank, num_ranks = world.rank, world.num_ranks
    hops = range(1, num_ranks) if 1 < num_ranks <= scatter.MOST_PEERS + 1 else (0,)
    there = world.peers(array, [(rank + hop) % num_ranks for hop in hops])
    if array.dim() == 3:  # a part of its own for each source
        mine = [one[rank] for one in there]
    else:
        mine = [one[slice(*part_of(parts.m, rank, num_ranks))] for one in there]
    # Without rows there is no address to describe, and nothing is sent.
    rows = [descriptors_sm90.descriptor(one if one.numel() else other, chunk)
            for one, other in zip(mine, there)]  # fmt: skip
    return [*rows, *rows[-1:] * (scatter.MOST_PEERS - len(rows))]
