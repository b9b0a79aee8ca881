"""Two streams of each rank call a world's operators in turn, and nothing of the script's orders the
calls; torchrun or emulated. The first stream is held up, so that calls would overlap.

Eager, recorded on both streams, replayed on one while the other calls. Every answer is exact.
Prints one line for each rank.
"""

import os

import torch

import weft
from weft.ops import ag_gemm, all_gather, all_reduce, all_to_all

SLEEP_CYCLES = 500_000


def held_up():
    """The current stream has something else to do first."""
    if torch.cuda.is_available():
        torch.cuda._sleep(SLEEP_CYCLES)


class Calls:
    """One operator with inputs of each turn, and what comes of them."""

    def __init__(self, world, turns):
        n, rank = world.num_ranks, world.rank
        rows = torch.arange(4.0 * n, device=world.device)[:, None] + torch.zeros(
            4, device=world.device
        )
        self.world = world
        self.inputs = [[rows + 100 * r + turn for r in range(n)] for turn in range(turns)]
        self.weight = torch.eye(4, device=world.device)
        self.own = slice(4 * rank, 4 * rank + 4)
        self.rank, self.n = rank, n

    def call(self, kind, turn, out=None):
        x = self.inputs[turn][self.rank]
        if kind == "all_reduce":
            return all_reduce(x, world=self.world, out=out)
        if kind == "all_gather":
            return all_gather(x[self.own], world=self.world, out=out)
        if kind == "all_to_all":
            return all_to_all(x, world=self.world, out=out)
        half = x[self.own].half()
        return ag_gemm(half, self.weight.half(), world=self.world, out=out)

    def expected(self, kind, turn):
        every = self.inputs[turn]
        if kind == "all_reduce":
            return sum(every)
        if kind == "all_to_all":
            return torch.cat([one[self.own] for one in every])
        whole = torch.cat([one[4 * r : 4 * r + 4] for r, one in enumerate(every)])
        return whole if kind == "all_gather" else whole.half()


KINDS = ("all_reduce", "all_gather", "all_to_all", "ag_gemm")


def main(turns=int(os.environ.get("TURNS", "40"))):
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    world = weft.init(heap_bytes=64 << 20)
    first, second = world.current_stream(), world.stream("second")
    calls = Calls(world, turns)
    for kind in KINDS:
        calls.call(kind, 0)  # compiles, and makes mailboxes
    world.synchronize()

    num_right = 0

    def check(found):
        nonlocal num_right
        world.synchronize()
        for kind, turn, out in found:
            assert torch.equal(out, calls.expected(kind, turn)), (kind, turn, out)
            num_right += 1

    # One operator in turn, then all of them.
    second.wait(first)
    for kinds in (*((kind,) for kind in KINDS), KINDS):
        found = []
        for turn in range(turns):
            kind = kinds[turn // 2 % len(kinds)]
            if turn % 2:
                with second:
                    found.append((kind, turn, calls.call(kind, turn)))
            else:
                held_up()
                found.append((kind, turn, calls.call(kind, turn)))
        check(found)

    # Recorded on both streams; only the first call of each is put in order by the script.
    outs = [torch.empty_like(calls.expected("all_reduce", 0)) for _ in range(3)]
    with world.record() as recording:
        root = world.current_stream()
        calls.call("all_reduce", 0, outs[0])
        second.wait(root)
        with second:
            calls.call("all_reduce", 1 % turns, outs[1])
        calls.call("all_reduce", 2 % turns, outs[2])
        root.wait(second)
    for turn in range(turns):
        for out in outs:
            out.zero_()
        second.wait(first)
        held_up()
        recording.replay()
        with second:
            eager = calls.call("all_reduce", turn)
        check([("all_reduce", i % turns, out) for i, out in enumerate(outs)])
        check([("all_reduce", turn, eager)])
    world.close()
    print(f"rank {world.rank} of {world.num_ranks}: {num_right} right", flush=True)


if __name__ == "__main__":
    main()
