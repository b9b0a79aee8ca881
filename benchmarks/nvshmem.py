"""Far transfers on GPUs of one host that are declared two nodes, beside the same made directly.

    PYTHONPATH=src python benchmarks/nvshmem.py [--ranks 4] [--part latency,bandwidth,collectives]

Everything that crosses goes through NVSHMEM, which finds NVLink below: so this is what the way
through the library costs, and not what a network does. `far` is the world of two nodes, `near` one
of one node over the same GPUs. Writes results/nvshmem_<gpus>.json. Times are microseconds, medians
over rounds in turns; bandwidths GB/s (1e9) that each rank sends.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft import ops
from weft.tune import processes
from weft.tune.figures import percentile
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
ROUNDS = 15
VOLLEYS = 100
FLOOD_BYTES = 32 << 20
BLOCK = 4096
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
MEGABYTES = (0.0625, 1, 16)


@triton.jit
def volley(world, x, inbox, word, turn, peer, first, n, rounds: tl.constexpr, BLOCK: tl.constexpr):
    """Two ranks send each other n elements, with a signal behind them, in turns."""
    i, start = tl.arange(0, BLOCK), tl.load(turn)
    for step in range(rounds):
        e = start + step + 1
        if first == 0:
            wl.wait(word, e, world=world)
        wl.put_signal(world, inbox + i, x + i, word, e, to=peer, mask=i < n)
        if first == 1:
            wl.wait(word, e, world=world)
    tl.store(turn, start + rounds)


@triton.jit
def flood(world, x, inbox, word, turn, peer, size, BLOCK: tl.constexpr):
    """Each program sends its tiles; all are there when the peer has every program's signal."""
    e = tl.load(turn + tl.program_id(0)) + 1
    for start in range(tl.program_id(0) * BLOCK, size, tl.num_programs(0) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        wl.put(world, inbox + i, x + i, to=peer, mask=i < size)
    wl.notify(world, word + tl.program_id(0), e, to=peer, op=wl.SignalOp.SET)
    wl.wait(word + tl.program_id(0), e, world=world)
    tl.store(turn + tl.program_id(0), e)


def medians(runs: dict[str, Callable[[], None]]) -> dict[str, float]:
    """us of each, run in turns; the slowest rank counts."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for turn in range(ROUNDS + 2):
        for name, run in runs.items():
            dist.barrier()
            begin.record()
            run()
            end.record()
            end.synchronize()
            if turn > 1:
                times[name].append(begin.elapsed_time(end) * 1e3)
    found = torch.tensor([percentile(row, 0.5) for row in times.values()], device="cuda")
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return {name: round(us, 3) for name, us in zip(times, found.tolist(), strict=True)}


class Pair:
    """What a rank and its peer on the other node send each other, in one world."""

    def __init__(self, world: Any, peer: int) -> None:
        self.world, self.peer = world, peer
        elements = FLOOD_BYTES // 4
        self.x = torch.arange(elements, device=world.device, dtype=torch.float32) + world.rank
        self.inbox = world.zeros(elements, torch.float32)
        self.word = world.signals(256, torch.int64)
        self.turn = torch.zeros(256, dtype=torch.int64, device=world.device)

    def volley(self, n: int) -> Callable[[], None]:
        block, first = (16 if n <= 16 else 8192), self.world.rank == 0
        shared = (self.world.arg, self.x, self.inbox, self.word, self.turn, self.peer, int(first))

        def run() -> None:
            if 0 in (self.world.rank, self.peer):
                volley[(1,)](*shared, n, VOLLEYS, block)

        return run

    def flood(self, programs: int) -> Callable[[], None]:
        shared = (self.world.arg, self.x, self.inbox, self.word[128:], self.turn[128:], self.peer)
        return lambda: flood[(programs,)](*shared, FLOOD_BYTES // 4, BLOCK, num_warps=8) and None

    def check(self) -> None:
        """All of the peer's x lies in the inbox."""
        self.world.synchronize()
        wanted = self.x - self.world.rank + self.peer
        assert torch.equal(self.inbox, wanted), f"rank {self.world.rank}: wrong elements came"


def latency(pairs: dict[str, Pair]) -> Iterator[dict[str, Any]]:
    for n in (0, 16, 1024, 8192):
        us = medians({name: pair.volley(n) for name, pair in pairs.items()})
        yield {"bytes": 4 * n, **{f"{k}_us": round(v / 2 / VOLLEYS, 3) for k, v in us.items()}}


def bandwidth(pairs: dict[str, Pair]) -> Iterator[dict[str, Any]]:
    for programs in (1, 4, 16, 64):
        us = medians({name: pair.flood(programs) for name, pair in pairs.items()})
        for pair in pairs.values():
            pair.check()
            pair.inbox.zero_()
        yield {"programs": programs,
               **{f"{k}_gbps": round(FLOOD_BYTES / v / 1e3, 1) for k, v in us.items()}}  # fmt: skip


def collectives(worlds: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What each world chooses: over two nodes, the form that sends a row across once."""
    for op in map(ops.card, COLLECTIVES):
        for megabytes in MEGABYTES:
            m = int(megabytes * (1 << 20)) // 2048 // 4 * 4
            runs, chosen, answers = {}, {}, {}
            for name, world in worlds.items():
                seats = world.backend.seats.nodes
                nodes = tuple(seats.count(node) for node in sorted(set(seats)))
                problem = op.make_problem(len(seats), {"m": m, "n": 1024}, "bfloat16", nodes)
                config = next(iter(op.candidates(problem, world.target)))
                if config.by_library:
                    config = next(c for c in op.candidates(problem, world.target)
                                  if not c.by_library)  # fmt: skip
                x = op.make_inputs(problem, world.rank)["x"].round().to(world.device)
                chosen[name] = config.transport
                answers[name] = op.run(world, problem, {"x": x}, config)
                with world.record() as recording:
                    op.run(world, problem, {"x": x}, config)
                runs[name] = recording.replay
            same = torch.equal(answers["far"], answers["near"])
            us = medians(runs)
            yield {"op": op.name, "bytes": m * 2048, "checked": same,
                   **{f"{k}_us": v for k, v in us.items()}, "transports": chosen}  # fmt: skip


def measure(rank: int, parts: str, folder: str) -> None:
    far = weft.init(name="two nodes", nodes=2, heap_bytes=256 << 20)
    near = weft.init(name="one node", nodes=1, heap_bytes=256 << 20)
    assert far.backend.far is not None and near.backend.far is None
    worlds = {"far": far, "near": near}
    pairs = {
        name: Pair(world, (rank + far.num_ranks // 2) % far.num_ranks)
        for name, world in worlds.items()
    }
    for part in parts.split(","):
        rows = []
        for row in {"latency": lambda: latency(pairs), "bandwidth": lambda: bandwidth(pairs),
                    "collectives": lambda: collectives(worlds)}[part]():  # fmt: skip
            rows.append(row)
            if rank == 0:
                print(part, json.dumps(row), flush=True)
                Path(folder, f"{part}.json").write_text(json.dumps(rows))
    for world in worlds.values():
        world.synchronize()
        world.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--part", default="latency,bandwidth,collectives")
    options = parser.parse_args()
    document: dict[str, Any] = provenance() | {"nodes": 2, "flood_bytes": FLOOD_BYTES}
    with tempfile.TemporaryDirectory() as folder:
        processes.run_on_gpus(measure, options.ranks, options.part, folder, timeout_s=150)
        for part in options.part.split(","):
            document[part] = json.loads(Path(folder, f"{part}.json").read_text())
    print(save("nvshmem", document, options.ranks, RESULTS))
