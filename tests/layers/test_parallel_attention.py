"""Attention over own heads: as an ordinary module's, by prompt and token by token."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from effort import slow_but
from ordinary import HEAD, HIDDEN, Attention
from parallel import check, close, drawn, seeded
from torch import nn

import weft
from weft.layers import Activations, Cache, PagedCache, ParallelAttention, alone, rotary

GROUPED = partial(Attention, 12, 6, norms=True)


@pytest.mark.slow
@pytest.mark.parametrize("split", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("num_ranks", "make", "batch", "tokens"),
    slow_but(
        [(3, GROUPED, 1, 0), (4, partial(Attention, 12, 2, bias=True, norms=True), 1, 5),
         (3, partial(Attention, 6, 1), 2, 2)],
        [(2, GROUPED, 2, 3), (3, partial(Attention, bias=True), 1, 5), (2, Attention, 1, 1)],
    ),
)  # fmt: skip
def test_as_the_ordinary_module(ranks, num_ranks, make, batch, tokens, split):
    turns = rotary(torch.arange(tokens)[None] + 3, HEAD)
    check(
        ranks, num_ranks, make, ParallelAttention.from_module, (batch, tokens, HIDDEN), split,
        lambda layer, x: layer(x, turns),
    )  # fmt: skip


def test_one_sequence_needs_no_batch(ranks):
    def main():
        with weft.init() as world, torch.no_grad():
            layer = ParallelAttention.from_module(seeded(Attention), world)
            x = drawn(5, HIDDEN)
            close(layer(x), layer(x[None])[0])

    ranks(main, 2)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "split"),
    [("contiguous", True), ("by kernel", False), ("paged", False), ("paged", True)],
)
def test_prompt_then_tokens(ranks, kind, split):
    """A prompt, more of it behind that, then tokens; then the same with other sequences."""

    def main():
        with weft.init() as world, torch.no_grad():
            ordinary = seeded(GROUPED)
            lie = Activations(world, 4 if split else float("inf"))
            layer = ParallelAttention.from_module(copy.deepcopy(ordinary), world, lie)
            rest = {"device": world.device, "dtype": torch.float32}
            sizes = (1, 2, 12, layer.kv_heads, HEAD)
            if kind == "paged":
                cache = PagedCache(*sizes, page=4, pages=7, alone=alone(world), **rest)
                cache.table.copy_(torch.tensor([[3, 0, 6], [5, 1, 2]]))
            else:
                cache = Cache(*sizes, alone=alone(world) if kind == "by kernel" else None, **rest)
            for seed in (1, 5):
                cache.reset()
                past, x = [], drawn(2, 9, HIDDEN, seed=seed)
                for first, end in ((0, 3), (3, 6), (6, 7), (7, 8), (8, 9)):
                    turns = rotary(cache.positions(end - first), HEAD)
                    new = x[:, first:end].contiguous()
                    got = lie.leave(layer(lie.enter(new), turns, cache=cache))
                    cache.advance(end - first)
                    close(got, ordinary(new, turns, past), f"{first}..{end}")
            with pytest.raises(weft.CapacityError, match="4 more tokens behind 9 in a cache of 12"):
                cache.positions(4)

    ranks(main, 2)


def test_a_decode_step_is_recorded_once_for_all_tokens(ranks):
    def main():
        with weft.init() as world, torch.no_grad():
            ordinary = seeded(Attention)
            layer = ParallelAttention.from_module(copy.deepcopy(ordinary), world)
            cache = Cache(
                1, 2, 8, layer.kv_heads, HEAD, device=world.device, dtype=torch.float32,
                alone=alone(world),
            )  # fmt: skip
            past, x = [], drawn(2, 6, HIDDEN)
            token = x[:, :2].contiguous()

            def step(token):
                turns = rotary(cache.positions(token.shape[1]), HEAD)
                y = layer(token, turns, cache=cache)
                cache.advance(token.shape[1])
                return y

            def wanted(first, end):
                turns = rotary(torch.arange(first, end)[None].expand(2, -1), HEAD)
                return ordinary(x[:, first:end], turns, past)

            close(step(token), wanted(0, 2))
            token = x[:, 2:3].contiguous()
            close(step(token), wanted(2, 3))
            with world.record() as recording:
                y = step(token)
            for at in (3, 4, 5):
                token.copy_(x[:, at : at + 1])
                recording.replay()
                world.synchronize()
                close(y, wanted(at, at + 1), str(at))

    ranks(main, 2)


@pytest.mark.slow
def test_a_decode_step_is_one_graph(ranks):
    """With its cache, and flash_decode in it."""

    def main():
        with weft.init() as world, torch.no_grad():
            layer, x = ParallelAttention.from_module(seeded(GROUPED), world), drawn(2, 5, HIDDEN)
            own = alone(world)

            def steps(call):
                cache = Cache(1, 2, 8, layer.kv_heads, HEAD, device="cpu", dtype=x.dtype, alone=own)
                layer(x[:, :3], rotary(cache.positions(3), HEAD), cache=cache)
                cache.advance(3)
                return [call(cache, x[:, at : at + 1]) for at in (3, 4)]

            def step(cache, token):
                y = layer(token, rotary(cache.positions(1), HEAD), cache=cache)
                cache.advance(1)
                return y

            compiled = torch.compile(lambda *given: step(*given), fullgraph=True)
            for got, want in zip(steps(compiled), steps(step), strict=True):
                close(got, want)

    ranks(main, 2)


def test_mistakes_say_values_place_and_remedy(ranks):
    def main():
        with weft.init() as world:
            with pytest.raises(weft.ShapeError, match="kv_heads=4 over 3 ranks leaves 1 over"):
                ParallelAttention(8, 8, 4, 2, world)
            with pytest.raises(weft.ShapeError, match="heads=9 over kv_heads=6"):
                ParallelAttention(8, 9, 6, 2, world)
            with pytest.raises(weft.UsageError, match="Linear has none of q_proj"):
                ParallelAttention.from_module(nn.Linear(2, 2), world)
            with pytest.raises(weft.ShapeError, match=r"world of 3 ranks.*weft.layers.alone"):
                Cache(1, 1, 4, 1, 2, device="cpu", dtype=torch.float32, alone=world)
            with pytest.raises(weft.ShapeError, match="length=10 is no multiple of page=4"):
                PagedCache(1, 1, 10, 1, 2, page=4, device="cpu", dtype=torch.float32)

    ranks(main, 3)
