"""Slots on GPUs: eager, captured, replayed and mixed, with changing M and a random straggler.

    PYTHONPATH=src python benchmarks/slots.py [--ranks 4] [--replays 10000] [--part toy,ag_gemm]

Every call checks its own answer on the device, also inside a recording: inputs change from call
to call, so that a row of an earlier call, or one not there yet, is counted.
Writes results/slots_<gpus>.json.
"""

from __future__ import annotations

import argparse
import importlib
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft
import weft.language as wl
from weft.tune import processes
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
# About 2 ms at most: longer than several calls take.
STRAGGLE_CYCLES = 4_000_000


# ---------------------------------------------------------------------------------------------
# A toy of two kernels: rows to the next rank, announced by a counting signal


@triton.jit
def send(world, slot, rows, arrived, m, COLS: tl.constexpr):
    """Each program writes row after row of value e to the next rank, and counts itself there."""
    e = wl.slot_epoch(slot)
    wl.slot_wait_free(world, slot, e)
    to = (wl.rank(world) + 1) % world.num_ranks
    for row in range(tl.program_id(0), m, tl.num_programs(0)):
        at = rows + row * COLS + tl.arange(0, COLS)
        wl.put(world, at, tl.full((COLS,), 0, tl.int64) + e * 1024 + row, to=to)
    wl.notify(world, arrived, to=to)


@triton.jit
def receive(world, slot, rows, arrived, base, errors, m, senders, COLS: tl.constexpr):
    """Wait for all senders of this call, check every row, and let the last program close it."""
    e = wl.slot_epoch(slot)
    before = tl.load(base)
    wl.wait(arrived, before + senders, world=world)
    bad = tl.zeros((COLS,), tl.int32)
    for row in range(tl.program_id(0), m, tl.num_programs(0)):
        got = tl.load(rows + row * COLS + tl.arange(0, COLS))
        bad += (got != e * 1024 + row).to(tl.int32)
    tl.atomic_add(errors, tl.sum(bad), sem="relaxed")


@triton.jit
def close(world, slot, base, senders):
    """The counting signal's base moves by this call's count; the slot is free for its writers."""
    e = wl.slot_epoch(slot)
    tl.store(base, tl.load(base) + senders)
    wl.slot_finish(world, slot, e, 1)


@triton.jit
def finish_only(world, slot, programs):
    """What a call's end costs: the ticket, and credits to every rank."""
    wl.slot_finish(world, slot, wl.slot_epoch(slot), programs)


@triton.jit
def credit_only(world, slot):
    """What a call's start costs: waiting for credits that are there."""
    wl.slot_wait_free(world, slot, wl.slot_epoch(slot))


@triton.jit
def neither(world, slot):
    tl.store(slot.ticket, tl.load(slot.ticket))


COLS = 1024


class Toy:
    """Checks itself: `errors` counts words that did not belong to their call."""

    sizes = (1, 37, 256, 640)

    def __init__(self, world: weft.World) -> None:
        self.world = world
        self.errors = torch.zeros(1, dtype=torch.int32, device=world.device)

    def call(self, m: int) -> None:
        slot = self.world.workspace(
            "toy",
            {"rows": ((m, COLS), torch.int64)},
            {"arrived": (1, torch.int64), "base": (1, torch.int64)},
        )
        senders = 1 + m % 24
        arg = self.world.arg
        send[(senders,)](arg, slot.arg, slot.rows, slot.arrived, m, COLS=COLS)
        receive[(8,)](
            arg, slot.arg, slot.rows, slot.arrived, slot.base, self.errors, m, senders, COLS=COLS
        )
        close[(1,)](arg, slot.arg, slot.base, senders, num_warps=1)


class AgGemm:
    """`ag_gemm` whose input changes its sign from call to call."""

    def __init__(self, world: weft.World, transport: str, sizes: tuple[int, ...]) -> None:
        ag_gemm = importlib.import_module("weft.ops.ag_gemm")
        self.world, self.sizes = world, sizes
        self.errors = torch.zeros(1, dtype=torch.int32, device=world.device)
        self.n, self.k = 1024, 1024
        generator = torch.Generator().manual_seed(7 + world.rank)
        self.b = torch.randn(self.k, self.n, generator=generator).bfloat16().to(world.device)
        self.parts: dict[int, tuple] = {}
        for m in sizes:
            problem = ag_gemm.Problem(m, self.n, self.k, world.num_ranks)
            wanted = (c for c in ag_gemm.candidates(problem, world.target))
            config = next(c for c in wanted if c.transport == transport)
            first, end = problem.shard(world.rank)
            whole = torch.randn(m, self.k, generator=torch.Generator().manual_seed(m)).bfloat16()
            a = whole[first:end].to(world.device).contiguous()
            reference = whole.to(world.device).float() @ self.b.float()
            out = torch.empty(m, self.n, dtype=torch.bfloat16, device=world.device)
            sign = torch.ones(1, device=world.device)
            self.parts[m] = (a, out, reference, sign, config)
        self.operator = ag_gemm.ag_gemm

    def call(self, m: int) -> None:
        a, out, reference, sign, config = self.parts[m]
        a.neg_()
        sign.neg_()
        self.operator(a, self.b, world=self.world, m=m, config=config, out=out)
        # A stale row has the other sign; rounding to bf16 stays far below this.
        bad = (out.float() - reference * sign).abs() > 1.0 + 0.02 * reference.abs()
        self.errors += bad.sum(dtype=torch.int32)


def straggle(world: weft.World, number: int) -> None:
    """One rank, another each time, is late by up to 2 ms."""
    if random.Random(number).randrange(world.num_ranks) == world.rank:
        torch.cuda._sleep(random.Random(number * 31).randrange(STRAGGLE_CYCLES))


def exercise(world: weft.World, subject: Any, replays: int) -> dict[str, Any]:
    """All four uses, in one sequence on the same slots."""
    results: dict[str, Any] = {}
    order = random.Random(5)

    def counted(name: str, calls: int, run: Callable[[], None]) -> None:
        began = time.monotonic()
        run()
        world.synchronize()
        total = subject.errors.clone()
        dist.all_reduce(total)
        results[name] = {
            "calls": calls,
            "wrong": int(total.item()),
            "seconds": round(time.monotonic() - began, 2),
        }
        if world.rank == 0:
            print(f"  {type(subject).__name__} {name}: {results[name]}", flush=True)
        subject.errors.zero_()
        torch.cuda.synchronize()
        dist.barrier()

    def eager(calls: int, late: bool = False) -> None:
        for number in range(calls):
            if late:
                straggle(world, number)
            subject.call(order.choice(subject.sizes))

    for m in (max(subject.sizes), *subject.sizes):
        subject.call(m)
        subject.call(m)
    counted("warm_up", 2 + 2 * len(subject.sizes), lambda: None)
    counted("eager", 200, lambda: eager(200))
    counted("eager_straggler", 100, lambda: eager(100, late=True))
    recordings = []
    for sizes in ((subject.sizes[0], subject.sizes[-1], subject.sizes[1]), (subject.sizes[-1],)):
        with world.record() as recording:
            for m in sizes:
                subject.call(m)
        recordings.append((recording, len(sizes)))
    first, calls = recordings[0]

    def replay(count: int, late: bool = False) -> None:
        for number in range(count):
            if late and number % 10 == 0:
                straggle(world, number)
            first.replay()

    counted("captured_once", calls, first.replay)
    counted("replayed", calls * replays, lambda: replay(replays))
    counted("replayed_straggler", calls * 1000, lambda: replay(1000, late=True))

    def mixed() -> None:
        for number in range(500):
            pick = order.randrange(3)
            if number % 25 == 0:
                straggle(world, number)
            if pick == 2:
                subject.call(order.choice(subject.sizes))
            else:
                recordings[pick][0].replay()

    counted("mixed", 500, mixed)
    return results


def costs(world: weft.World) -> dict[str, float]:
    """Device time of a slot's parts, in a graph of 50, by differences."""
    slot = world.workspace("costs", {"x": ((16,), torch.int32)}, {"ready": (1, torch.int64)})
    variants: dict[str, Callable[[], Any]] = {
        "neither_us": lambda: neither[(1,)](world.arg, slot.arg, num_warps=1),
        "wait_free_us": lambda: credit_only[(1,)](world.arg, slot.arg, num_warps=1),
        "finish_1_program_us": lambda: finish_only[(1,)](world.arg, slot.arg, 1, num_warps=1),
        "finish_132_programs_us": lambda: finish_only[(132,)](
            world.arg, slot.arg, 132, num_warps=4
        ),
        "neither_132_programs_us": lambda: neither[(132,)](world.arg, slot.arg, num_warps=4),
    }
    recordings = {}
    for name, call in variants.items():
        call()
        world.synchronize()
        dist.barrier()
        with world.record() as recording:
            for _ in range(50):
                call()
        recordings[name] = recording
    samples: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(11):
        for name, recording in recordings.items():
            torch.cuda.synchronize()
            dist.barrier()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            recording.replay()
            end.record()
            end.synchronize()
            samples[name].append(begin.elapsed_time(end) * 1e3 / 50)
    return {name: round(sorted(times)[len(times) // 2], 2) for name, times in samples.items()}


def main(rank: int, options: argparse.Namespace) -> None:
    world = weft.init(heap_bytes=1 << 30)
    results: dict[str, Any] = provenance() if rank == 0 else {}
    results["num_ranks"] = world.num_ranks
    subjects: dict[str, Callable[[], Any]] = {
        "toy": lambda: Toy(world),
        "ag_gemm_push": lambda: AgGemm(world, "sm_push", (64, 1, 333, 1024)),
        "ag_gemm_put": lambda: AgGemm(world, "ce_push", (2048, 997, 256, 4096)),
    }
    if "costs" in options.part:
        results["costs"] = costs(world)
        if rank == 0:
            print(f"  costs {results['costs']}", flush=True)
    for name, make in subjects.items():
        if any(name.startswith(part) for part in options.part.split(",")):
            results[name] = exercise(world, make(), options.replays)
            if rank == 0:
                save("slots", results, world.num_ranks, RESULTS)
    if rank == 0:
        save("slots", results, world.num_ranks, RESULTS)
        wrong = [
            f"{name}.{use}"
            for name in subjects
            for use, row in results.get(name, {}).items()
            if row["wrong"]
        ]
        print(f"wrong: {wrong or 'none'}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--replays", type=int, default=10000)
    parser.add_argument("--part", default="costs,toy,ag_gemm")
    parser.add_argument("--timeout", type=float, default=240.0)
    options = parser.parse_args()
    processes.run_on_gpus(main, options.ranks, options, timeout_s=options.timeout)
