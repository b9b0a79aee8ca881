"""Small programs whose signals are all needed, and one with a signal too many."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.emulator.rewriting import Rewrite, parsed
from weft.verify.mutants import Run, WrongAnswer

SIZE = 16


@triton.jit
def exchange(world, x, inbox, ready, out, e, size: tl.constexpr):
    """Everybody's x to the right neighbour, which doubles it."""
    right = (wl.rank(world) + 1) % wl.num_ranks(world)
    i = tl.arange(0, size)
    wl.put(world, inbox + i, tl.load(x + i), to=right)
    wl.notify(world, ready, e, to=right, op="set")
    wl.wait(ready, at_least=e, world=world)
    tl.store(out + i, 2 * tl.load(inbox + i))


@triton.jit
def tell_twice(world, ready, also_ready, e):
    right = (wl.rank(world) + 1) % wl.num_ranks(world)
    wl.notify(world, ready, e, to=right, op="set")
    wl.notify(world, also_ready, e, to=right, op="set")
    wl.wait(ready, at_least=e, world=world)
    wl.wait(also_ready, at_least=e, world=world)


@triton.jit
def spin(world, x, inbox, ready, out, size: tl.constexpr):
    """The same by Triton's own atomics."""
    right = (wl.rank(world) + 1) % wl.num_ranks(world)
    i = tl.arange(0, size)
    wl.put(world, inbox + i, tl.load(x + i), to=right)
    tl.atomic_add(wl.at(world, ready, right), 1, sem="release", scope="sys")
    while tl.atomic_add(ready, 0, sem="acquire", scope="sys") < 1:
        pass
    tl.store(out + i, 2 * tl.load(inbox + i))


def check(out: torch.Tensor, expected: torch.Tensor) -> None:
    if not torch.equal(out, expected):
        raise WrongAnswer("not twice what the left neighbour has")


def exchanging(calls: int = 3, launch=None):
    """`exchange`, called again and again with a barrier between: one buffer serves all."""

    def main() -> None:
        world = weft.init()
        inbox, ready = world.empty((SIZE,), torch.int64), world.signals(1, torch.int64)
        left = (world.rank - 1) % world.num_ranks
        for e in range(1, calls + 1):
            x = torch.arange(SIZE) + 100 * world.rank + 1000 * e
            out = torch.zeros(SIZE, dtype=torch.int64)
            exchange[(1,)](world.arg, x, inbox, ready, out, e, SIZE)
            world.barrier()
            check(out, 2 * (torch.arange(SIZE) + 100 * left + 1000 * e))

    return main


def copying() -> None:
    """The same by copy engines, on a stream of their own."""
    world = weft.init()
    inbox, ready = world.empty((SIZE,), torch.int64), world.signals(1, torch.int64)
    left, right = ((world.rank + step) % world.num_ranks for step in (-1, 1))
    main, copier = world.current_stream(), world.stream("copy")
    word = torch.zeros(1, dtype=torch.int64)
    for e in range(1, 3):
        x = torch.arange(SIZE) + 100 * world.rank + 1000 * e
        word.fill_(e)
        out = torch.zeros(SIZE, dtype=torch.int64)
        copier.wait(main)
        with copier:
            world.copy(world.peer(inbox, right), x)
            world.copy_word(world.peer(ready, right), word)
        take[(1,)](world.arg, inbox, ready, word, out, SIZE)
        main.wait(copier)
        world.barrier()
        check(out, 2 * (torch.arange(SIZE) + 100 * left + 1000 * e))


@triton.jit
def take(world, inbox, ready, word, out, size: tl.constexpr):
    i = tl.arange(0, size)
    wl.wait(ready, at_least=tl.load(word), world=world)
    tl.store(out + i, 2 * tl.load(inbox + i))


@triton.jit
def produce(world, x, rows, token, size: tl.constexpr):
    i = tl.arange(0, size)
    tl.store(rows + i, tl.load(x + i))
    wl.notify(world, token, 1, to=wl.rank(world), op="set")


def carrying() -> None:
    """The same by a kernel that says what it has stored, and copy engines that carry it."""
    world = weft.init()
    inbox, ready = world.empty((SIZE,), torch.int64), world.signals(1, torch.int64)
    token, sent = world.signals(1, torch.int64), world.signals(1, torch.int64)
    left, right = ((world.rank + step) % world.num_ranks for step in (-1, 1))
    main, copier = world.current_stream(), world.stream("copy")
    rows, turn = torch.empty(SIZE, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    for e in range(1, 3):
        x = torch.arange(SIZE) + 100 * world.rank + 1000 * e
        turn.fill_(e)
        sent.fill_(e)
        out = torch.zeros(SIZE, dtype=torch.int64)
        copier.wait(main)
        produce[(1,)](world.arg, x, rows, token, SIZE)
        with copier:
            world.take_token(token)
            world.copy(world.peer(inbox, right), rows)
            world.copy_word(world.peer(ready, right), sent)
        take[(1,)](world.arg, inbox, ready, turn, out, SIZE)
        main.wait(copier)
        world.barrier()
        check(out, 2 * (torch.arange(SIZE) + 100 * left + 1000 * e))


def telling_twice() -> None:
    world = weft.init()
    ready, also_ready = world.signals(1, torch.int64), world.signals(1, torch.int64)
    tell_twice[(1,)](world.arg, ready, also_ready, 1)
    world.barrier()


def spinning() -> None:
    world = weft.init()
    inbox, ready = world.empty((SIZE,), torch.int64), world.signals(1, torch.int32)
    x, out = torch.arange(SIZE) + 100 * world.rank, torch.zeros(SIZE, dtype=torch.int64)
    spin[(1,)](world.arg, x, inbox, ready, out, SIZE)
    check(out, 2 * (torch.arange(SIZE) + 100 * ((world.rank - 1) % world.num_ranks)))


def run_of(main, ranks: int = 2, name: str = "it") -> Run:
    def run(seed: int, rewrite: Rewrite):
        with weft.emulated(ranks, seed=seed, collect=True, rewrite=rewrite) as session:
            session.run(main)
        return session.report

    return Run(name, run)


def module_of(main, kernel: str, ranks: int = 2):
    """The TTIR of one of the kernels that `main` launches, as a tree."""
    texts: dict[str, str] = {}

    class Listener(Rewrite):
        def kernel(self, text):
            texts[parsed(text).kernel.name] = text
            return super().kernel(text)

    run_of(main, ranks).run(0, Listener())
    return parsed(texts[kernel])
