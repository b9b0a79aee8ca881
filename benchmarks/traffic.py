"""One day's traffic in small: many calls of changing sizes, in two worlds on two streams.

    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/traffic.py [--calls 20000]

Each call draws a world, an operator, m (log-normal modes, as changing_sizes.py) and whether it is
also recorded by the caller; all ranks draw alike, and the streams' calls come one after the other.
One call in fifty is held against torch's collectives in fp32. Of each operator p50, p99 and the
worst of call times, in ms of this host's clock; memory after some calls (WARM) and in the end:
both worlds' heaps and scratch memory, recordings, the device's memory. Memory that grew, a wrong
answer or a kernel that was compiled is an error. Writes results/traffic_<gpus>.json. With
`--emulated N` on emulated ranks, all of whose answers are checked.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from changing_sizes import sizes_of

import weft
import weft.ops
from weft.base.dtypes import tolerance
from weft.tools.check import rel_err
from weft.tune.provenance import provenance, save

# By how many elements operands lie apart at most.
SPARE = 1 << 20
# One in so many calls is checked, one is recorded by the caller.
CHECKED, RECORDED = 50, 10
# Calls until all ways of all operators were met: a tenth, or so many, but no more than half of all.
WARM = 200
# Between sizes of which every way has some.
STEP = 1.25
# By what memory may grow that the heap is not.
OTHERS_BYTES = {"device": 64 << 20, "recordings": 64 << 20}
PRODUCTS = ("ag_gemm", "gemm_rs", "gemm_ar")
OPS = (*PRODUCTS, "all_gather", "reduce_scatter", "all_reduce")
GATHERS, SCATTERS = ("ag_gemm", "all_gather"), ("gemm_rs", "reduce_scatter")


class Caller:
    """One world's operators with weights that stay, on a stream of its own."""

    def __init__(self, world: Any, stream: Any, options: argparse.Namespace, dtype: Any) -> None:
        self.world, self.stream, self.options, self.dtype = world, stream, options, dtype
        # (n, k) of a rank's part: what gathers goes from hidden to wide, what sums comes back.
        self.sizes = dict.fromkeys(PRODUCTS, (options.hidden, options.wide))
        self.sizes["ag_gemm"] = (options.wide, options.hidden)
        draw = torch.Generator().manual_seed(1)
        self.weights = {
            name: (torch.randn(n, k, generator=draw) * k**-0.5).to(world.device, dtype).t()
            for name, (n, k) in self.sizes.items()
        }
        # Of which operands are cut: to draw each would take longer than all calls.
        draw.manual_seed(2 + world.rank)
        most = options.most * max(options.hidden, options.wide) + SPARE
        self.numbers = torch.randn(most, generator=draw).to(world.device, dtype)

    def prepare(self) -> None:
        for name in OPS:
            sizes = dict(zip("nk", self.sizes.get(name, (self.options.hidden,))))
            rows = {"m": range(1, self.options.most + 1)}
            kind = str(self.dtype).removeprefix("torch.")
            weft.prepare(name, rows | sizes, world=self.world, dtype=kind)

    def operand(self, name: str, m: int, seed: int) -> torch.Tensor:
        """This rank's rows, or summand, of m rows: another on each rank, in fresh memory."""
        rows = m // self.world.num_ranks if name in GATHERS else m
        columns = self.sizes[name][1] if name in PRODUCTS else self.options.hidden
        first = random.Random(seed).randrange(len(self.numbers) - rows * columns + 1)
        return self.numbers[first : first + rows * columns].view(rows, columns).clone()

    def call(self, name: str, x: torch.Tensor) -> torch.Tensor:
        weight = (self.weights[name],) if name in PRODUCTS else ()
        return getattr(weft.ops, name)(x, *weight, world=self.world)

    def right(self, name: str, x: torch.Tensor) -> torch.Tensor:
        """The same by torch, in fp32."""
        ranks, value = self.world.num_ranks, x.float()
        if name in GATHERS:
            parts = [torch.empty_like(value) for _ in range(ranks)]
            dist.all_gather(parts, value)
            value = torch.cat(parts)
        if name in PRODUCTS:
            value = value @ self.weights[name].float()
        if name not in GATHERS:
            dist.all_reduce(value)
        return value.chunk(ranks)[self.world.rank] if name in SCATTERS else value


def memory_of(callers: list[Caller]) -> dict[str, int]:
    gc.collect()
    found, reports = defaultdict(int), [one.world.memory() for one in callers]
    for one in reports:
        found["heap_used"] += one.heap_bytes - one.free_bytes
        found["scratch"] += one.scratch_bytes
        found["recordings"] += one.recordings_bytes
    if callers[0].world.device.type == "cuda":
        found["device"] = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
    return dict(found)


def is_flat(before: dict[str, int], after: dict[str, int]) -> bool:
    """The largest sizes came first and all ways were met: heaps hold no more. Of the device's
    memory torch and CUDA keep some."""
    return all(after[one] <= before[one] + OTHERS_BYTES.get(one, 0) for one in after)


def ladder_of(most: int, num_ranks: int) -> list[int]:
    """Sizes from the largest down to one row of each rank, with STEP between."""
    found, m = [], float(most)
    while m >= num_ranks:
        found.append(int(m) // num_ranks * num_ranks)
        m /= STEP
    return list(dict.fromkeys((*found, num_ranks)))


def traffic(options: argparse.Namespace) -> dict[str, Any]:
    """What every rank does; the findings of this one."""
    heap = options.heap << 20
    worlds = [weft.init(name=name, heap_bytes=heap) for name in ("chat", "batch")]
    dtype = torch.float32 if options.emulated else torch.bfloat16
    streams = [worlds[0].current_stream(), worlds[1].stream("batch")]
    callers = [Caller(*one, options, dtype) for one in zip(worlds, streams)]
    begin = time.perf_counter()
    callers[0].prepare()  # both have the same kernels
    prepared_s = time.perf_counter() - begin
    ranks, draw = worlds[0].num_ranks, random.Random(2)
    sizes = sizes_of(options.calls, options.most, ranks)
    warm = min(max(WARM, options.calls // 10), options.calls // 2)
    times: dict[str, list[float]] = defaultdict(list)
    worst_error, before, wrong = 0.0, {}, []
    ladder = [m for m in ladder_of(options.most, ranks) for _ in range(2 * len(OPS))]
    for turn, m in enumerate(ladder + sizes):
        # Of each operator, in both worlds, eager and recorded, from the largest on sizes of every
        # way that it has: what follows needs no more.
        is_first = turn < len(ladder)
        name = OPS[turn % len(OPS)] if is_first else draw.choice(OPS)
        caller = callers[turn // len(OPS) % 2] if is_first else draw.choice(callers)
        is_recorded = is_first or draw.randrange(RECORDED) == 0
        x = caller.operand(name, m, turn)
        with caller.stream as stream:
            stream.synchronize()
            start = time.perf_counter()
            out = caller.call(name, x)
            stream.synchronize()
            if not is_first:
                times[name].append((time.perf_counter() - start) * 1e3)
            if is_recorded:
                with caller.world.record() as recording:
                    out = caller.call(name, x)
                recording.replay()
                stream.synchronize()
                del recording
            if turn % CHECKED == 0 or options.emulated:
                limit = tolerance(str(dtype).removeprefix("torch."), x.shape[1])
                error = rel_err(out, caller.right(name, x))
                worst_error = max(worst_error, error)
                if not error <= limit:
                    wrong.append({"turn": turn, "op": name, "m": m, "error": error})
        if turn == len(ladder) + warm - 1:
            before = memory_of(callers)
    after = memory_of(callers)
    found = {
        "ranks": ranks, "calls": options.calls, "prepared_s": prepared_s, "wrong": wrong,
        "worst_error": worst_error, "compiled": [one.compiled for one in worlds],
        "memory": {"early": before, "late": after, "is_flat": is_flat(before, after)},
        "ms": {name: quantiles(some) for name, some in sorted(times.items())},
    }  # fmt: skip
    for one in reversed(worlds):
        one.close()
    return found


def quantiles(some: list[float]) -> dict[str, float]:
    if not some:
        return {"calls": 0}
    some = sorted(some)
    at = {f"p{p}": some[min(len(some) - 1, len(some) * p // 100)] for p in (50, 99)}
    return {"calls": len(some), **at, "worst": some[-1]}


def is_fine(found: dict[str, Any]) -> bool:
    return found["memory"]["is_flat"] and not found["wrong"] and not any(found["compiled"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--calls", type=int, default=20000)
    parser.add_argument("--most", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--wide", type=int, default=3584)
    parser.add_argument("--heap", type=int, default=1024, help="MiB of each world")
    parser.add_argument("--emulated", type=int, default=0)
    options = parser.parse_args()
    if options.emulated:
        with weft.emulated(ranks=options.emulated) as ranks:
            found = ranks.run(traffic, options)
        print(json.dumps(found[0], indent=1))
        return not all(map(is_fine, found))
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    found = traffic(options)
    if dist.get_rank() == 0:
        about = {**provenance(), "what": __doc__.splitlines()[0]}
        save("traffic", about | found, found["ranks"], Path(__file__).parent / "results")
        print(json.dumps(found, indent=1))
    return not is_fine(found)


if __name__ == "__main__":
    raise SystemExit(main())
