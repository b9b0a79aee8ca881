"""A server's life: each m is new. ag_gemm, then gemm_rs, beside NCCL and cuBLAS, after `prepare`.

    PYTHONPATH=src torchrun --nproc-per-node 2 benchmarks/changing_sizes.py [--count 200]

Of each m: the first call, the worst of calls 2 to 12 and the median of the last ten, in ms of this
host's clock, with torch's beside them; the relative error; what was compiled so far behind
`prepare` (0 is wanted; a fresh TRITON_CACHE_DIR shows what `prepare` takes). Writes
results/changing_sizes_<gpus>.json. With `--emulated N` calls run on emulated ranks, without times.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import weft
import weft.ops
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
# Of a decode step, a prompt, a batch of prompts: where the logarithm of m lies, and how far around.
MODES = ((2.5, 1.2), (6.5, 0.8), (8.3, 0.6))
CALLS, WARM, LAST = 24, 12, 10


def sizes_of(count: int, most: int, num_ranks: int) -> list[int]:
    """Rows of all ranks, as many on each."""
    rng = random.Random(5)
    drawn = [math.exp(rng.gauss(*rng.choice(MODES))) for _ in range(count)]
    return [max(1, min(most // num_ranks, round(m / num_ranks))) * num_ranks for m in drawn]


def timed(world: Any, call: Any) -> dict[str, float]:
    """First call, worst of the next, median of the last, in ms."""
    found = []
    for _ in range(CALLS):
        world.synchronize()
        begin = time.perf_counter()
        call()
        world.synchronize()
        found.append((time.perf_counter() - begin) * 1e3)
    return {"first": found[0], "worst": max(found[1:WARM]),
            "steady": statistics.median(found[-LAST:])}  # fmt: skip


def measure(world: Any, options: argparse.Namespace) -> dict[str, Any]:
    hidden, wide, ranks = options.hidden, options.wide, world.num_ranks
    dtype = torch.float32 if options.emulated else torch.bfloat16
    named = {"world": world, "dtype": str(dtype).removeprefix("torch.")}
    rows = range(1, options.most + 1)
    done = [weft.prepare("ag_gemm", {"m": rows, "n": wide, "k": hidden}, **named),
            weft.prepare("gemm_rs", {"m": rows, "n": hidden, "k": wide}, **named)]  # fmt: skip
    gc.collect()
    gc.freeze()  # as a server does: what is there is no garbage, and looking takes 0.2 s
    up = torch.randn(wide, hidden, device=world.device).to(dtype)
    down = torch.randn(hidden, wide, device=world.device).to(dtype)
    readings = []
    for m in sizes_of(options.count, options.most, ranks):
        x = torch.randn(m // ranks, hidden, device=world.device).to(dtype)

        def ours(x: torch.Tensor = x) -> torch.Tensor:
            rows = weft.ops.ag_gemm(x, up.t(), world=world)
            return weft.ops.gemm_rs(rows, down.t(), world=world)

        def torchs(x: torch.Tensor = x, m: int = m) -> torch.Tensor:
            whole = torch.empty(m, hidden, device=x.device, dtype=dtype)
            dist.all_gather_into_tensor(whole, x)
            out = torch.empty_like(x)
            dist.reduce_scatter_tensor(out, F.linear(F.linear(whole, up), down))
            return out

        reading: dict[str, Any] = {"m": m}
        if options.emulated:
            ours()
        else:
            reading |= {"torch": timed(world, torchs), "weft": timed(world, ours)}
            want, got = torchs().float(), ours().float()
            reading["error"] = ((want - got).norm() / want.norm()).item()
        readings.append({**reading, "compiled": world.compiled})
        if world.rank == 0:
            print(json.dumps(readings[-1]), flush=True)
    return {"ranks": ranks, "prepared": [vars(one) for one in done], "readings": readings}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--most", type=int, default=16384)
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--wide", type=int, default=7168)
    parser.add_argument("--emulated", type=int, default=0)
    options = parser.parse_args()
    if options.emulated:
        with weft.emulated(ranks=options.emulated) as ranks:
            ranks.run(lambda: measure(weft.init(), options))
        return
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with weft.init() as world:
        found = measure(world, options)
        if world.rank == 0:
            about = {**provenance(), "what": __doc__.splitlines()[0]}
            save("changing_sizes", about | found, world.num_ranks, RESULTS)


if __name__ == "__main__":
    main()
