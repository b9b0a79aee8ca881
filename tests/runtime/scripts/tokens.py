"""Kernels set tokens, streams take them and carry what was stored to the next rank; torchrun or
emulated.

Each call has new numbers, and the same token words; eager, recorded and replayed. Answers are
compared on the device, exactly. Prints one line for each rank.
"""

import os

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.emulator.session import active

PARTS = 4
# Large enough that a copy which did not wait would find most of a part unwritten.
SIZE, BLOCK, REPLAYS = (256, 128, 3) if active() else (1 << 20, 4096, 50)


@triton.jit
def produce(world, x, rows, tokens, turn, size, block: tl.constexpr):
    part, e = tl.program_id(0), tl.load(turn)
    for start in range(0, size, block):
        i = part * size + start + tl.arange(0, block)
        tl.store(rows + i, tl.load(x + i) + e)
    wl.notify(world, tokens + part, 1, to=wl.rank(world), op=wl.SignalOp.SET)


@triton.jit
def consume(world, inbox, ready, turn, out, size, block: tl.constexpr):
    part = tl.program_id(0)
    wl.wait(ready + part, at_least=tl.load(turn), world=world)
    for start in range(0, size, block):
        i = part * size + start + tl.arange(0, block)
        tl.store(out + i, 2 * tl.load(inbox + i))


def main():
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group()
    world = weft.init(heap_bytes=64 << 20)
    rank, n = world.rank, world.num_ranks
    right, device = (rank + 1) % n, world.device
    copies = world.stream("copies")

    inbox = world.empty((PARTS, SIZE), torch.int32)
    tokens, ready = world.signals(PARTS, torch.int64), world.signals(PARTS, torch.int64)
    turn, sent = torch.zeros(1, dtype=torch.int64, device=device), world.signals(1, torch.int64)
    numbers = torch.arange(PARTS * SIZE, dtype=torch.int32, device=device).view(PARTS, SIZE)
    x, rows, out = numbers + 1000 * rank, torch.empty_like(numbers), torch.empty_like(numbers)
    expected = numbers + 1000 * ((rank - 1) % n)
    wrong = torch.zeros(1, dtype=torch.int64, device=device)

    def call():
        turn.add_(1)
        sent.add_(1)
        copies.wait(world.current_stream())
        produce[(PARTS,)](world.arg, x, rows, tokens, turn, SIZE, BLOCK)
        with copies:
            for part in range(PARTS):
                word = slice(part, part + 1)
                world.take_token(tokens[word])
                world.copy(world.peer(inbox, right)[part], rows[part])
                world.copy_word(world.peer(ready, right)[word], sent)
        consume[(PARTS,)](world.arg, inbox, ready, turn, out, SIZE, BLOCK)
        world.current_stream().wait(copies)
        world.barrier()

    def check():
        wrong.add_((out != 2 * (expected + turn)).sum())

    world.load(produce, world.arg, x, rows, tokens, turn, SIZE, BLOCK)
    world.load(consume, world.arg, inbox, ready, turn, out, SIZE, BLOCK)
    for _ in range(3):
        call()
        check()
    with world.record() as recording:
        call()
    for _ in range(REPLAYS):
        recording.replay()
        check()
    call()
    check()
    world.synchronize()
    calls = int(turn)
    assert calls == REPLAYS + 4 and not wrong.any(), f"{int(wrong)} wrong in {calls} calls"
    assert not tokens.any(), tokens
    world.close()
    print(f"rank {rank} of {n}: tokens carried {calls} calls", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
