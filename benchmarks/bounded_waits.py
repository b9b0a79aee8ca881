"""Bounded waits on GPUs: what the bound costs; what a rank that dies, stalls or forgets does.

    PYTHONPATH=src python benchmarks/bounded_waits.py [--ranks 4] [--part cost,trouble]

Trouble runs with a deadline of TIMEOUT_S: every rank that is left must raise weft.TimeoutError
with the table of waits, close its world and tear its process group down.
Writes results/bounded_waits_<gpus>.json.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
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
TIMEOUT_S = 3.0
HEALTHY_CALLS = 20


@triton.jit
def wait_for_ever(word, at_least):
    """No world among the arguments: this wait has no end."""
    wl.wait(word, at_least)


@triton.jit
def volley(world, word, first, peer, start, rounds, BOUNDED: tl.constexpr):
    """Two programs answer each other through the language's own notify and wait."""
    for i in range(start + 1, start + rounds + 1):
        if first != 0:
            wl.notify(world, word, i, to=peer, op=wl.SignalOp.SET)
        if BOUNDED:
            wl.wait(word, i, world=world)
        else:
            wait_for_ever(word, i)
        if first == 0:
            wl.notify(world, word, i, to=peer, op=wl.SignalOp.SET)


@triton.jit
def satisfied(world, word, rounds, BOUNDED: tl.constexpr):
    """Waits whose signal is there."""
    for _ in range(rounds):
        if BOUNDED:
            wl.wait(word, 1, world=world)
        else:
            wait_for_ever(word, 1)


@triton.jit
def ring(world, token, i, skips, to):
    """Tell the next rank, wait for the one before."""
    if skips == 0:
        wl.notify(world, token, to=to)
    wl.wait(token, i, world=world)


def cost(rank: int, path: str) -> None:
    world = weft.init(heap_bytes=1 << 24)
    words = world.signals(64, torch.int32, name="volley")
    rounds, started = 2000, 0
    samples: dict[str, list[float]] = {}
    for warps in (1, 8):
        for attempt in range(9):
            for bounded in (True, False):
                torch.cuda.synchronize()
                dist.barrier()
                if world.rank < 2:
                    used = _events_us(
                        lambda b=bounded, w=warps, s=started: volley[(1,)](
                            world.arg,
                            words,
                            int(world.rank == 0),
                            1 - world.rank,
                            s,
                            rounds,
                            BOUNDED=b,
                            num_warps=w,
                        )  # fmt: skip
                    )
                    if attempt:
                        key = f"round_trip_{warps}_warps_{'bounded' if bounded else 'unbounded'}"
                        samples.setdefault(key, []).append(used / rounds)
                started += rounds
    words.fill_(1)
    world.synchronize()
    dist.barrier()
    for attempt in range(9):
        for bounded in (True, False):
            used = _events_us(
                lambda b=bounded: satisfied[(1,)](world.arg, words, rounds, BOUNDED=b, num_warps=8)
            )
            if attempt:
                key = f"satisfied_wait_{'bounded' if bounded else 'unbounded'}"
                samples.setdefault(key, []).append(used / rounds)
    world.synchronize()
    if rank == 0:
        medians = {k: round(sorted(v)[len(v) // 2], 4) for k, v in samples.items()}
        Path(path).write_text(json.dumps(medians))


def _events_us(call: Any) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def trouble(rank: int, kind: str, who: int, folder: str) -> None:
    """Twenty healthy rings; then rank `who` dies, stalls or forgets to notify."""
    os.environ["WEFT_TIMEOUT_S"] = str(TIMEOUT_S)
    world = weft.init(heap_bytes=1 << 24)
    token = world.signals(1, torch.int32, name="token")
    to = (world.rank + 1) % world.num_ranks
    answer: dict[str, Any] = {"rank": rank}
    began = time.monotonic()
    try:
        for i in range(1, HEALTHY_CALLS + 20):
            began = time.monotonic()
            if i > HEALTHY_CALLS and rank == who:
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "stall" and i == HEALTHY_CALLS + 1:
                    time.sleep(TIMEOUT_S * 2)
            drops = kind == "drop" and rank == who and i == HEALTHY_CALLS + 1
            ring[(1,)](world.arg, token, i, int(drops), to, num_warps=4)
            world.synchronize()
        # A signal that was dropped is missed at the latest when the ranks meet.
        began = time.monotonic()
        world.barrier()
        world.synchronize()
        answer["raised"] = "nothing"
    except weft.TimeoutError as error:
        answer |= {"raised": type(error).__name__, "table": str(error)}
    answer["raised_after_s"] = round(time.monotonic() - began, 2)
    try:
        world.empty(4, torch.int32)
    except weft.PoisonedError:
        answer["poisoned"] = True
    began = time.monotonic()
    world.close()
    answer["close_s"] = round(time.monotonic() - began, 2)
    Path(folder, f"{kind}_{who}_{rank}.json").write_text(json.dumps(answer))
    began = time.monotonic()
    over = threading.Timer(30, lambda: os._exit(3))
    over.start()
    dist.destroy_process_group()
    over.cancel()
    answer["teardown_s"] = round(time.monotonic() - began, 2)
    Path(folder, f"{kind}_{who}_{rank}.json").write_text(json.dumps(answer))


def run_trouble(num_ranks: int) -> dict[str, Any]:
    """All kinds of trouble at once: they mostly wait."""
    scenes = [("kill", 1), ("kill", 0), ("stall", 1), ("drop", 1)]
    with tempfile.TemporaryDirectory() as folder:
        threads = [
            threading.Thread(
                target=processes.run_on_gpus,
                args=(trouble, num_ranks, kind, who, folder),
                kwargs={"timeout_s": 120, "tolerate": True},
            )
            for kind, who in scenes
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        results = {}
        for kind, who in scenes:
            rows = []
            for rank in range(num_ranks):
                path = Path(folder, f"{kind}_{who}_{rank}.json")
                lost = {"rank": rank, "raised": "killed" if rank == who else "NO ANSWER"}
                rows.append(json.loads(path.read_text()) if path.exists() else lost)
            results[f"{kind}_rank_{who}"] = rows
    return results


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--part", default="cost,trouble")
    options = parser.parse_args()
    answers: dict[str, Any] = provenance() | {"timeout_s": TIMEOUT_S}
    if "cost" in options.part:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "cost.json")
            processes.run_on_gpus(cost, options.ranks, str(file), timeout_s=90)
            answers["cost_us"] = json.loads(file.read_text())
        print(answers["cost_us"], flush=True)
    if "trouble" in options.part:
        answers["trouble"] = run_trouble(options.ranks)
        print(json.dumps(answers["trouble"], indent=1), flush=True)
    save("bounded_waits", answers, options.ranks, RESULTS)
    sys.exit(0)
