"""ag_gemm against cuBLAS and NCCL, interleaved in one run, answers checked first.

    PYTHONPATH=src python benchmarks/ag_gemm.py [--ranks 4] [--m 512,2048,8192] [--shapes ...]

Modes  queued: the stream is held while the host enqueues, so that host time does not show;
       graph: both sides are CUDA graphs; eager: host time shows. Times are the maximum over ranks,
       medians over rounds. Writes results/ag_gemm_<gpus>.json.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import processes
import torch
import torch.distributed as dist

import weft
from weft.base.dtypes import tolerance

ag = importlib.import_module("weft.ops.ag_gemm")

# n and k per rank at TP4, from the project's list of shapes.
SHAPES = {
    "llama3-8b mlp": (7168, 4096),
    "llama3-70b attention": (2560, 8192),
    "llama3-70b mlp": (14336, 8192),
    "qwen3-32b mlp": (12800, 5120),
    "llama3-405b mlp": (26624, 16384),
}
SETS = 3
ROUNDS = 9
HOLD_CYCLES = 2_000_000


class Point:
    """One shape on one rank: inputs in several sets, so that none is found in L2."""

    def __init__(self, world: weft.World, m: int, n: int, k: int) -> None:
        self.world = world
        self.problem = ag.Problem(m, n, k, world.num_ranks, b_is_nk=True)
        first, end = self.problem.shard(world.rank)
        self.is_even = m % world.num_ranks == 0
        device = world.device
        generator = torch.Generator(device).manual_seed(1 + world.rank)
        self.a = [
            torch.randn(end - first, k, device=device, generator=generator).bfloat16()
            for _ in range(SETS)
        ]
        self.b = [
            torch.randn(n, k, device=device, generator=generator).bfloat16().t()
            for _ in range(SETS)
        ]
        self.out = torch.empty(m, n, device=device, dtype=torch.bfloat16)
        self.gathered = torch.empty(m, k, device=device, dtype=torch.bfloat16)

    def gather(self, i: int) -> None:
        if self.is_even:
            dist.all_gather_into_tensor(self.gathered, self.a[i])
        else:
            parts = list(self.gathered.split(self.problem.rows))
            dist.all_gather(parts, self.a[i])

    def multiply(self, i: int) -> None:
        torch.matmul(self.gathered, self.b[i], out=self.out)

    def serial(self, i: int) -> None:
        self.gather(i)
        self.multiply(i)

    def weft(self, config: Any) -> Callable[[int], None]:
        def call(i: int) -> None:
            ag.ag_gemm(
                self.a[i], self.b[i], world=self.world, m=self.problem.m, config=config,
                out=self.out,
            )  # fmt: skip

        return call

    def error(self, call: Callable[[int], None]) -> float:
        """Of the worst rank, against products summed in fp32, by norms."""
        worst = 0.0
        for i in range(SETS):
            self.gather(i)
            wanted = self.gathered.float() @ self.b[i].float()
            self.out.fill_(float("nan"))
            call(i)
            torch.cuda.synchronize()
            off = ((self.out.float() - wanted).norm() / wanted.norm()).nan_to_num(1e9).reshape(1)
            dist.all_reduce(off, op=dist.ReduceOp.MAX)
            worst = max(worst, off.item())
        return worst


def variants_of(point: Point, names: list[str]) -> dict[str, Any]:
    """Configurations by name: `weft` is what is chosen unmeasured; others say what they change."""
    target = point.world.target
    base = {}
    for config in ag.candidates(point.problem, target):
        base.setdefault(config.transport, config)
    found = {}
    for name in names:
        if name == "weft":
            found[name] = ag.choose(point.problem, target)
            continue
        transport, *chunks = name.split()[1].split("/")
        config = base[transport]
        found[name] = replace(config, chunks=int(chunks[0])) if chunks else config
    return found


def held_us(world: weft.World, call: Callable[[], None], held: bool) -> float:
    """Device time of one call on this rank; all ranks begin together."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if held:
        torch.cuda._sleep(HOLD_CYCLES)
    world.barrier()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def measure(
    world: weft.World, calls: dict[str, Callable[[int], None]], mode: str
) -> dict[str, list[float]]:
    """Interleaved rounds; per round the maximum over ranks."""
    runs: dict[str, list[Callable[[], None]]] = {}
    for name, call in calls.items():
        if mode == "graph":
            runs[name] = []
            for i in range(SETS):
                with world.record() as recording:
                    call(i)
                runs[name].append(recording.replay)
        else:
            runs[name] = [lambda c=call, i=i: c(i) for i in range(SETS)]
    times = torch.zeros(ROUNDS + 2, len(calls), device=world.device)
    for number in range(ROUNDS + 2):
        for column, name in enumerate(calls):
            times[number, column] = held_us(world, runs[name][number % SETS], mode != "eager")
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return {name: sorted(times[2:, i].tolist()) for i, name in enumerate(calls)}


def bench(
    world: weft.World, label: str, m: int, n: int, k: int, names: list[str], modes: list[str]
) -> list[dict[str, Any]]:
    point = Point(world, m, n, k)
    configs = variants_of(point, names)
    calls: dict[str, Callable[[int], None]] = {
        "gemm": point.multiply,
        "comm": point.gather,
        "serial": point.serial,
    }
    errors = {}
    for name, config in configs.items():
        call = point.weft(config)
        errors[name] = point.error(call)
        if errors[name] <= tolerance("bfloat16", k):
            calls[name] = call
        elif world.rank == 0:
            print(f"WRONG: {label} m={m} {name} rel_err={errors[name]:.2e} {config}", flush=True)
    rows = []
    for mode in modes:
        times = measure(world, calls, mode)
        median = {name: values[len(values) // 2] for name, values in times.items()}
        t_gemm, t_comm, t_serial = median["gemm"], median["comm"], median["serial"]
        for name in configs:
            if name not in times:
                continue
            values, mid = times[name], median[name]
            rows.append(
                {
                    "label": label,
                    "shape": {"m": m, "n": n, "k": k},
                    "ranks": world.num_ranks,
                    "dtype": "bfloat16",
                    "mode": mode,
                    "variant": name,
                    "config": str(configs[name]),
                    "median_us": round(mid, 1),
                    "p10_us": round(values[len(values) // 10], 1),
                    "p90_us": round(values[-1 - len(values) // 10], 1),
                    "t_gemm_us": round(t_gemm, 1),
                    "t_comm_us": round(t_comm, 1),
                    "t_serial_us": round(t_serial, 1),
                    "ratio_to_serial": round(t_serial / mid, 3),
                    "ceiling": round((t_gemm + t_comm) / max(t_gemm, t_comm), 3),
                    "overlap_efficiency": round((t_serial - mid) / min(t_gemm, t_comm), 3),
                    "rel_err": errors[name],
                    "checked": True,
                }
            )
            if world.rank == 0:
                row = rows[-1]
                print(
                    f"{label:22} m {m:6} {mode:7} {name:12} {row['median_us']:8.1f} us  gemm "
                    f"{row['t_gemm_us']:8.1f} comm {row['t_comm_us']:7.1f} serial "
                    f"{row['t_serial_us']:8.1f}  x{row['ratio_to_serial']:.2f} of "
                    f"{row['ceiling']:.2f}  E {row['overlap_efficiency']:5.2f}",
                    flush=True,
                )
    world.check()
    return rows


def main(rank: int, options: argparse.Namespace) -> None:
    world = weft.init(heap_bytes=6 << 30)
    torch.backends.cuda.matmul.allow_tf32 = False
    about = processes.provenance() if rank == 0 else {}
    results: dict[str, Any] = {
        "op": "ag_gemm",
        "hardware": f"{world.num_ranks} x {torch.cuda.get_device_name()}",
        **about,
        "rows": [],
    }
    for m in map(int, options.m.split(",")):
        for label, (n, k) in SHAPES.items():
            if any(part in label for part in options.shapes.split(",")):
                results["rows"] += bench(
                    world, label, m, n, k, options.variants.split(","), options.modes.split(",")
                )
                if rank == 0:
                    processes.save("ag_gemm", results, world.num_ranks)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--m", default="64,512,2048,4096,8192")
    parser.add_argument("--shapes", default="8b,70b,qwen")
    parser.add_argument("--variants", default="weft,weft pull/1,weft pull/4")
    parser.add_argument("--modes", default="queued")
    parser.add_argument("--timeout", type=float, default=240.0)
    options = parser.parse_args()
    processes.run_on_gpus(main, options.ranks, options, timeout_s=options.timeout)
