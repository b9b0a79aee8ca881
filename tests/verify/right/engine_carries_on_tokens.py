"""A kernel says which rows it has stored; a copy engine carries them, with a word behind each.

Suspicious  no event orders the copies behind the stores, and the same token words serve each call
Right       the stream takes a token before each copy, and the next call's kernel comes behind it
"""

import torch
import triton
import triton.language as tl
from pieces import N, take

import weft.language as wl

PARTS = 2


@triton.jit
def produce(world, rows, tokens, turn, n: tl.constexpr):
    """A program for each part, which stores it and says so."""
    part, i = tl.program_id(0), tl.arange(0, n)
    tl.store(rows + part * n + i, (i + tl.load(turn)).to(tl.float32))
    wl.notify(world, tokens + part, 1, to=wl.rank(world), op=wl.SignalOp.SET)


@triton.jit
def consume(world, inbox, ready, turn, out, n: tl.constexpr):
    part = tl.program_id(0)
    wl.wait(ready + part, at_least=tl.load(turn), world=world)
    take(inbox + part * n, out + part * n)


def call(world, rows, inbox, tokens, ready, turn, sent, out):
    peer, main, copies = 1 - world.rank, world.current_stream(), world.stream("copies")
    turn.add_(1)
    sent.add_(1)
    copies.wait(main)
    produce[(PARTS,)](world.arg, rows, tokens, turn, N)
    with copies:
        for part in range(PARTS):
            word = slice(part, part + 1)
            world.take_token(tokens[word])
            world.copy(world.peer(inbox, peer)[part], rows[part])
            world.copy_word(world.peer(ready, peer)[word], sent)
    consume[(PARTS,)](world.arg, inbox, ready, turn, out, N)
    main.wait(copies)
    world.barrier()


def main(world):
    rows, inbox = torch.empty(PARTS, N), world.zeros((PARTS, N), torch.float32)
    tokens, ready = world.signals(PARTS, torch.int64), world.signals(PARTS, torch.int64)
    turn, sent = torch.zeros(1, dtype=torch.int64), world.signals(1, torch.int64)
    out = torch.empty(PARTS, N)
    everything = (world, rows, inbox, tokens, ready, turn, sent, out)
    call(*everything)
    with world.record() as recording:
        call(*everything)
    for _ in range(2):
        recording.replay()
        assert torch.equal(out, (torch.arange(N) + turn).float().expand(PARTS, N))
    assert not tokens.any()
