"""A plan as a picture: what is moved when, and what lies where in a core's scratchpad.

product   gathered @ w1 ...
          predicted 4.2 us; 18 transfers, 2560 bytes a rank
          scratchpad  |xx|xx|ww|ww|ssss|oo|oo|..........|  9216 of 32768 bytes
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from itertools import cycle

from weft.manycore.attention import TILE_KV, TILE_Q, Attention
from weft.manycore.exchanges import Exchange
from weft.manycore.lower import Kernel, Plan
from weft.manycore.nest import times
from weft.manycore.products import Product
from weft.manycore.rows import Rows
from weft.manycore.scratchpad import Map

WIDTH = 64


def picture(plan: Plan) -> str:
    """All kernels in order."""
    return "\n".join(line for one in plan.kernels for line in (*drawn(plan, one), ""))


def drawn(plan: Plan, kernel: Kernel) -> Iterator[str]:
    yield f"{kernel.name}  ({kernel.kind}, {kernel.active} of {plan.machine.cores} cores)"
    yield from (f"  {line}" for line in textwrap.wrap(kernel.text, 96))
    yield from (f"  {line}" for line in _transfers(kernel))
    moved = kernel.traffic(0)
    sent = f"; {moved.sends} sends, {moved.send_bytes} bytes to other ranks" if moved.sends else ""
    when = f"predicted {kernel.ns(0) / 1000:.2f} us"
    if isinstance(kernel, Exchange):
        when = f"all there after {kernel.ready.all_ns / 1000:.2f} us"
    moves = f"{moved.transfers} transfers of {moved.blocks} blocks, {moved.bytes} bytes"
    yield f"  rank 0: {moves}{sent}; {when}"
    if kernel.map is not None:
        yield from (f"  {line}" for line in scratchpad(kernel.map, plan.machine.scratchpad_bytes))


def _transfers(kernel: Kernel) -> Iterator[str]:
    """The loops with the transfers in them, as the C has them."""
    for ready in kernel.awaits:
        yield f"await {ready.name} of all ranks"
    if isinstance(kernel, Product):
        yield from _of_product(kernel)
    elif isinstance(kernel, Rows):
        for one in kernel.loaded:
            if one.is_row:
                yield f"get {one.name}: a row, once"
        yield f"for each block of {kernel.tile} rows:"
        for one in kernel.loaded:
            if not one.is_row:
                yield f"    get {one.name} {'x' * kernel.slots}"
        yield from (f"    put {one.name} {'x' * kernel.slots}" for one in kernel.outs)
    elif isinstance(kernel, Attention):
        yield f"for each head and block of {TILE_Q} queries:"
        yield f"    get {kernel.q.name}"
        yield f"    for each block of {TILE_KV} keys:"
        yield f"        get {kernel.k.name} {'x' * kernel.slots}, {kernel.v.name}"
        yield f"    put {kernel.out.name}"
    elif isinstance(kernel, Exchange):
        yield f"for each rank: send {kernel.source.name}, notify {kernel.ready.name}"


def _of_product(one: Product) -> Iterator[str]:
    """x and w stand in the loop where they are got; twice, what is got ahead."""
    m, n, k = one.counts(0)
    counts = {"m": -(-m // one.grid[0]), "n": -(-n // one.grid[1]), "k": k}
    tiles = dict(zip("mnk", one.tile))
    where: dict[str, list[str]] = {}
    for view, letters in ((one.x, "mk"), (one.w, "nk")):
        turning = [i for i in one.order if i in letters and counts[i] > 1]
        num = times(one.order, letters, counts, one.choices.choose_order)
        loop = (turning or [""])[-1] if one.choices.choose_order else "k"
        awaited = ", shards as they come" if one.gathered and view == one.x else ""
        text = f"get {view.name} {'x' * one.slots}  ({num} a core{awaited})"
        where.setdefault(loop, []).append(text)
    yield from where.get("", ())
    for depth, loop in enumerate(one.order):
        indent = "    " * depth
        grid = {"m": f", {one.grid[0]} cores abreast", "n": f", {one.grid[1]} cores abreast"}
        yield f"{indent}for i_{loop}: {counts[loop]} tiles of {tiles[loop]}{grid.get(loop, '')}"
        yield from (f"{indent}    {text}" for text in where.get(loop, ()))
    to = f"send to the ranks that own its rows: {one.sums.parts.name}" if one.sums else (
        f"put {one.out.name}" if one.out else "")  # fmt: skip
    yield f"        {to} {'x' * one.slots}"


def scratchpad(found: Map, num_bytes: int) -> Iterator[str]:
    """A bar to scale, and the first byte of each buffer."""
    letters = {one.name: letter for one, letter in zip(found.buffers, cycle("abcdefghijklmnop"))}
    bar = ["."] * WIDTH
    for one in found.buffers:
        for i, offset in enumerate(one.offsets):
            letter = letters[one.name].upper() if i else letters[one.name]
            first = offset * WIDTH // num_bytes
            end = max(first + 1, (offset + one.request.num_bytes) * WIDTH // num_bytes)
            bar[first : min(end, WIDTH)] = [letter] * (min(end, WIDTH) - first)
    yield f"scratchpad [{''.join(bar)}] {found.used_bytes} of {num_bytes} bytes"
    for one in found.buffers:
        at = " and ".join(map(str, one.offsets))
        yield f"    {letters[one.name]} {one.name}: {one.request.num_bytes} bytes at {at}"
