"""Every way to reach a far peer, and every collective that does; torchrun on GPUs, or emulated.

All turns are compared bit by bit: eager, replayed, eager again. On GPUs two nodes are declared, and
a far peer has no address: whatever reached it went through NVSHMEM. Prints one line for each rank.
"""

import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft import ops

N = 512
FORMS = 10
TURNS = 3


@triton.jit
def letters(world, x, inbox, own, arrived, out, turn, size, n: tl.constexpr):
    """x of every rank to every rank in ten ways, each with an inbox and signals of its own."""
    me, ranks, i, e = wl.rank(world), world.num_ranks, tl.arange(0, n), tl.load(turn) + 1
    row, column = tl.arange(0, 8)[:, None], tl.arange(0, n // 8)[None, :]
    tile = row * (n // 8) + column
    mixed = (i * 7) % n
    tl.store(own + i, tl.load(x + i))
    wl.barrier(world)
    for hop in range(ranks):
        to = (me + hop) % ranks
        box, word = inbox + me * n, arrived + me
        # 0: a part of a tile of pointers. 1: values, SET. 2: a fence and a relaxed signal
        wl.put(world, box + i, x + i, to=to, mask=(i > 2) & (i < size))
        wl.notify(world, word, to=to)
        box, word = box + ranks * n, word + ranks
        wl.put_signal(world, box + i, tl.load(x + i), word, e, to=to)
        box, word = box + ranks * n, word + ranks
        wl.put(world, box + i, x + i, to=to)
        wl.fence(world)
        wl.notify(world, word, e, to=to, op=wl.SignalOp.SET, order=wl.Order.RELAXED)
        # 3: pointers, added. 4: one element. 5: rows of which a part is meant
        box, word = box + ranks * n, word + ranks
        wl.put_signal(world, box + i, x + i, word, to=to, op=wl.SignalOp.ADD)
        box, word = box + ranks * n, word + ranks
        wl.put_signal(world, box + 5, tl.load(x + 5), word, to=to, op=wl.SignalOp.ADD)
        box, word = box + ranks * n, word + ranks
        wl.put(world, box + tile, x + tile, to=to, mask=column < n // 8 - 3)
        wl.notify(world, word, e, to=to, op=wl.SignalOp.SET)
        # 6: addresses in no order. 7: told to all at the end
        box, word = box + ranks * n, word + ranks
        wl.put(world, box + mixed, x + mixed, to=to, mask=mixed > 2)
        wl.notify(world, word, to=to)
        box = box + ranks * n
        wl.put(world, box + i, tl.load(x + i), to=to)
    wl.notify_all(world, arrived + 7 * ranks + me)
    wl.wait(arrived, at_least=e, count=8 * ranks, world=world)
    for part in range(8 * ranks):
        tl.store(out + part * n + i, tl.load(inbox + part * n + i))
    for source in range(ranks):
        # 8: a part of a tile fetched. 9: addresses in no order
        to = out + (8 * ranks + source) * n
        wl.get(world, to + i, own + i, source=source, mask=(i > 2) & (i < size))
        wl.get(world, to + ranks * n + mixed, own + mixed, source=source, mask=mixed > 2)
    wl.barrier(world)
    tl.store(turn, e)


def expected(x, ranks, size):
    """What `letters` leaves in out, all ranks' x being known: zeros where nothing was meant."""
    parts = torch.zeros(FORMS, ranks, N, dtype=x[0].dtype)
    middle, late = slice(3, size), slice(3, None)
    for source, row in enumerate(x):
        for form in (1, 2, 3, 7):
            parts[form, source] = row
        parts[4, source, 5] = row[5]
        for form, part in ((0, middle), (6, late), (8, middle), (9, late)):
            parts[form, source, part] = row[part]
        parts[5, source].view(8, -1)[:, :-3] = row.view(8, -1)[:, :-3]
    return parts


class Letters:
    """One launch of `letters`, with what it needs; collective."""

    def __init__(self, world, dtype, signal_dtype, size):
        ranks, device = world.num_ranks, world.device
        self.world, self.dtype, self.size = world, dtype, size
        self.x = torch.zeros(N, dtype=dtype, device=device)
        self.out = torch.zeros(FORMS, ranks, N, dtype=dtype, device=device)
        self.arguments = (
            world.arg, self.x, world.zeros((8, ranks, N), dtype), world.zeros(N, dtype),
            world.signals(8 * ranks, signal_dtype), self.out,
            torch.zeros(1, dtype=signal_dtype, device=device), size, N,
        )  # fmt: skip

    def rows(self, seed):
        """x of every rank."""
        of = [torch.arange(N) * 3 + 50 * rank + seed for rank in range(self.world.num_ranks)]
        return [row.remainder(101).to(self.dtype) for row in of]

    def check(self):
        recording = None
        for seed in range(2 + TURNS):
            self.x.copy_(self.rows(seed)[self.world.rank])
            if 0 < seed <= TURNS:
                if recording is None:
                    with self.world.record() as recording:
                        letters[(1,)](*self.arguments)
                recording.replay()
            else:
                letters[(1,)](*self.arguments)
            self.world.synchronize()
            same = self.out.cpu() == expected(self.rows(seed), self.world.num_ranks, self.size)
            wrong = sorted({form for form, *_ in (~same).nonzero().tolist()})
            assert not wrong, (str(self.dtype), seed, wrong)


def check_letters(world):
    """Ranks compile dtypes for each other, where they share a cache."""
    cases = [
        Letters(world, *case)
        for case in (
            (torch.float32, torch.int32, N),
            (torch.bfloat16, torch.int64, N - 9),
            (torch.int8, torch.int32, 100),
            (torch.int64, torch.int64, 3),
        )
    ]
    for case in cases[world.rank :: world.num_ranks]:
        world.load(letters, *case.arguments)
    dist.barrier()
    for case in cases:
        case.check()
    return [str(case.dtype).removeprefix("torch.") for case in cases]


def check_collective(world, op, config, problem):
    """One transport, eager and replayed; small integers, so that sums are exact in any order."""
    every = [dict(op.make_inputs(problem, rank)) for rank in range(world.num_ranks)]
    for inputs in every:
        inputs["x"] = (inputs["x"] * 8).round().clamp(-31, 31)
    x = every[world.rank]["x"].clone().to(world.device)
    recording = None
    for seed in range(2 + TURNS):
        sign = (-1) ** seed
        x.copy_(sign * every[world.rank]["x"])
        if 0 < seed <= TURNS:
            if recording is None:
                out = op.run(world, problem, {"x": x}, config)  # what it needs is there now
                with world.record() as recording:
                    out = op.run(world, problem, {"x": x}, config)
            recording.replay()
        else:
            out = op.run(world, problem, {"x": x}, config)
        world.synchronize()
        right = op.reference(problem, [{"x": sign * one["x"]} for one in every])[world.rank]
        assert torch.equal(out.cpu(), right), (problem, config, seed)


def main():
    names = sys.argv[1:] or ["letters", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    dist.init_process_group()
    world = weft.init(heap_bytes=64 << 20, nodes=2)
    nodes = world.backend.seats.nodes
    assert len(set(nodes)) == 2
    x = world.zeros(4, torch.float32)
    far = [peer for peer in range(world.num_ranks) if nodes[peer] != world.node]
    assert far and all(world.pointers(x)[peer].item() == 0 for peer in far)
    for peer in far:
        try:
            world.peer(x, peer)
            raise AssertionError(f"rank {peer} is far and has an address")
        except weft.FarPointerError:
            pass
    done = []
    if "letters" in names:
        names.remove("letters")
        done += check_letters(world)
    sizes = tuple(nodes.count(node) for node in sorted(set(nodes)))
    for name in names:
        op = ops.card(name)
        problem = op.make_problem(world.num_ranks, {"m": 388, "n": 96}, "float32", sizes)
        for config in op.candidates(problem, world.target):
            if not config.by_library:
                check_collective(world, op, replace(config, channels=2), problem)
                done.append(f"{name} {config.transport}")
    world.close()
    print(f"rank {world.rank} on node {world.node}: {', '.join(done)}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
