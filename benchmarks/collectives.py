"""Collectives in variants: transports, channels, tiles, beside NCCL and torch's symmetric memory.

    PYTHONPATH=src python benchmarks/collectives.py [--ranks 4] [--ops all_reduce,..] [--mb 1,16]

`weft bench` measures what is chosen; this is where the choice comes from. Each row says where x
lies: `plain` tensors, or `symmetric` ones, which torch's operators ask for and weft uses in place.
Answers are checked before anything is timed, weft's bit by bit. Some calls in one CUDA graph, so
that a call's own time remains; variants in turns; the slowest rank's median over rounds. Writes
results/collective_variants_<gpus>.json.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft
from weft.tune import processes
from weft.tune.compiling import compile_together
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
MB = 1 << 20
ROW = 4096
NUM_SETS = 2
HOST_CALLS = 200
SUMS = ("all_reduce", "reduce_scatter")
# Channels, warps, bytes of a thread.
CUTS = ((128, 16, 64), (128, 16, 32), (256, 8, 64), (256, 8, 32))
# Of packets: channels, warps.
PACKET_CUTS = ((128, 4), (256, 4), (128, 8))


class Variant(NamedTuple):
    """A way of doing it: `calls[i]` works on set i; `is_exact`: to the last bit."""

    name: str
    calls: list[Callable[[], Any]]
    is_exact: bool
    in_graph: bool = True
    before: Callable[[], None] | None = None


class Subject:
    """One operator at one size on one rank."""

    def __init__(self, world: Any, op: str, nbytes: int, heap: torch.Tensor) -> None:
        self.world, self.op, self.nbytes = world, op, nbytes
        self.module = importlib.import_module(f"weft.ops.{op}")
        rows = nbytes // 2 // ROW * (world.num_ranks if op in ("all_gather", *SUMS[1:]) else 1)
        self.problem = self.module.op.make_problem(
            world.num_ranks, {"m": rows, "n": ROW}, "bfloat16"
        )
        everyone = [[self._draw(rank, i) for rank in range(world.num_ranks)] for i in (0, 1)]
        self.plain = [parts[world.rank] for parts in everyone]
        size = self.plain[0].numel()
        self.symmetric = [
            heap[i * size : (i + 1) * size].view(self.plain[0].shape) for i in range(NUM_SETS)
        ]
        self.restore()
        self.expected = self._expected(everyone[0])

    def restore(self) -> None:
        for there, x in zip(self.symmetric, self.plain, strict=True):
            there.copy_(x)

    def _draw(self, rank: int, i: int) -> torch.Tensor:
        problem = self.problem
        rows = problem.rows if self.op == "all_gather" else problem.m
        generator = torch.Generator(self.world.device).manual_seed(1000 * i + rank)
        return torch.randn(rows, ROW, generator=generator, device=self.world.device).bfloat16()

    def _expected(self, parts: list[torch.Tensor]) -> torch.Tensor:
        rank, n = self.world.rank, self.world.num_ranks
        if self.op == "all_gather":
            return torch.cat(parts)
        if self.op == "all_to_all":
            return torch.cat([part.chunk(n)[rank] for part in parts])
        total = parts[0].float()
        for part in parts[1:]:
            total += part.float()
        return total.bfloat16() if self.op == "all_reduce" else total.chunk(n)[rank].bfloat16()

    def weft(self, name: str, config: Any, place: str) -> Variant:
        run, xs = getattr(self.module, self.op), getattr(self, place.split()[0])
        is_same = place.endswith("out=x")
        outs = xs if is_same else [torch.full_like(self.expected, torch.nan) for _ in xs]
        calls = [
            lambda x=x, out=out: run(x, world=self.world, config=config, out=out)
            for x, out in zip(xs, outs, strict=True)
        ]
        return Variant(
            f"weft {name} | {place}", calls, True, before=self.restore if is_same else None
        )

    def ours(self, cuts: Any) -> Iterator[Variant]:
        module, target = self.module, self.world.target
        config, word = module.Config, 2 if self.op in SUMS else 8
        boxes = "two_shot" if self.op == "all_reduce" else "sm_push"
        yield self.weft("default", None, "plain")
        yield self.weft("default", None, "symmetric")

        def cut(transport: str, channels: int, warps: int, nbytes: int) -> Any:
            one = config(transport, channels, 32 * warps * nbytes // word, warps)
            return replace(one, channels=min(channels, one.most_channels(target)))

        def wanted(transport: str, place: str, these: Any) -> Iterator[Variant]:
            for channels, warps, nbytes in these:
                name = f"{transport} {channels}/{warps}/{nbytes}"
                yield self.weft(name, cut(transport, channels, warps, nbytes), place)

        def by_packets(transport: str) -> Iterator[Variant]:
            for channels, warps in PACKET_CUTS:
                packets = config(transport, channels, 128 * warps, warps)
                yield self.weft(f"{transport} {channels}/{warps}/16", packets, "plain")

        yield from wanted(boxes, "plain", cuts)
        yield from wanted("sm_pull", "plain", cuts[:1])
        yield from wanted("sm_pull", "symmetric", cuts)
        if self.op != "all_reduce" and self.nbytes <= 2 * MB:
            yield from by_packets("ll")
        if self.op == "all_gather":
            yield from wanted("ce_pull", "plain", cuts[:1])
            yield from wanted("ce_pull", "symmetric", cuts[:1])
        if self.op == "all_reduce":
            yield from wanted("sm_pull", "symmetric out=x", cuts)
            yield from wanted("one_shot", "plain", cuts)
            if self.nbytes <= 4 * MB:
                yield from by_packets("one_shot_ll")
                yield from by_packets("two_shot_ll")

    def others(self) -> Iterator[Variant]:
        group, xs = dist.group.WORLD, self.plain
        outs = [torch.empty_like(self.expected) for _ in xs]
        starts = {
            "all_gather": dist.all_gather_into_tensor,
            "reduce_scatter": dist.reduce_scatter_tensor,
            "all_to_all": dist.all_to_all_single,
        }
        if self.op == "all_reduce":
            # In place: the sums of sums stay finite for as many calls as are made here.
            outs = [x.clone() for x in xs]

            def restore() -> None:
                for out, x in zip(outs, xs, strict=True):
                    out.copy_(x)

            calls = [lambda out=out: (dist.all_reduce(out), out)[1] for out in outs]
            yield Variant("nccl | plain", calls, False, before=restore)
        else:
            start = starts[self.op]
            calls = [
                lambda x=x, out=out: (start(out, x), out)[1]
                for x, out in zip(xs, outs, strict=True)
            ]
            yield Variant("nccl | plain", calls, self.op not in SUMS)
        yield from self._of_torch(group.group_name)

    def _of_torch(self, group: str) -> Iterator[Variant]:
        import torch.distributed._symmetric_memory as symmetric

        if self.op == "all_to_all":
            return
        ops, xs = torch.ops.symm_mem, []
        for x in self.plain:
            there = symmetric.empty(x.shape, dtype=x.dtype, device=x.device)
            symmetric.rendezvous(there, group)
            xs.append(there.copy_(x))
        wait = torch.ops._c10d_functional.wait_tensor
        if self.op == "all_gather":
            calls = [lambda x=x: wait(ops._low_contention_all_gather(x, group)) for x in xs]
            yield Variant("torch low_contention | symmetric", calls, True, in_graph=False)
        if self.op == "reduce_scatter":
            outs = [torch.empty(x.numel() // self.world.num_ranks, dtype=x.dtype,
                                device=x.device) for x in xs]  # fmt: skip
            shape = self.expected.shape
            calls = [
                lambda x=x, out=out: (
                    ops.reduce_scatter_out(x.view(-1), group, False, out),
                    out.view(shape),
                )[1]
                for x, out in zip(xs, outs, strict=True)
            ]
            yield Variant("torch reduce_scatter_out | symmetric", calls, False)
        if self.op == "all_reduce":

            def restore() -> None:
                for there, x in zip(xs, self.plain, strict=True):
                    there.copy_(x)

            calls = [lambda x=x: ops.two_shot_all_reduce_(x, "sum", group) for x in xs]
            yield Variant("torch two_shot | symmetric out=x", calls, False, before=restore)


def check(subject: Subject, variant: Variant) -> None:
    """Raises  AssertionError: a wrong answer of any rank; nothing is timed then"""
    if variant.before:
        variant.before()
    got = variant.calls[0]().view(subject.expected.shape)
    if variant.is_exact:
        wrong = int(got.ne(subject.expected).sum())
    else:
        wrong = int((got.float() - subject.expected.float()).abs().gt(0.1).sum())
    everyone: list[Any] = [None] * subject.world.num_ranks
    dist.all_gather_object(everyone, wrong)
    assert not any(everyone), f"{subject.op} {subject.nbytes} {variant.name}: wrong {everyone}"


def timed(run: Callable[[], None], ahead: bool) -> float:
    """us, of one rank; with `ahead` the host queues all before the device begins."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    if ahead:
        torch.cuda._sleep(4_000_000)
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3


def measure(subject: Subject, variants: list[Variant], rounds: int) -> dict[str, list[float]]:
    nbytes, world = subject.nbytes, subject.world
    mine = [call for one in variants if one.name.startswith("weft") for call in one.calls[:1]]
    compile_together(world, lambda: [call() for call in mine])
    count = 20 if nbytes <= MB else 6 if nbytes <= 16 * MB else 2
    runs: dict[str, tuple[Callable, bool]] = {}
    for variant in variants:
        check(subject, variant)
        for call in variant.calls:
            call()
        world.synchronize()

        def several(variant: Variant = variant) -> None:
            for i in range(count):
                variant.calls[i % NUM_SETS]()

        if variant.in_graph:
            with world.record() as recording:
                several()
            runs[variant.name] = (recording.replay, False)
        else:
            runs[variant.name] = (several, True)
    times: dict[str, list[float]] = {variant.name: [] for variant in variants}
    for turn in range(rounds + 1):
        for variant in variants:
            if variant.before:
                variant.before()
            us = timed(*runs[variant.name]) / count
            if turn:
                times[variant.name].append(us)
    everyone: list[Any] = [None] * world.num_ranks
    dist.all_gather_object(everyone, times)
    found = {}
    for name in times:
        slowest = sorted(max(of) for of in zip(*(one[name] for one in everyone), strict=True))
        found[name] = [round(x, 2) for x in (statistics.median(slowest), slowest[0], slowest[-1])]
    return found


@triton.jit
def bare(x, out, block: tl.constexpr):
    i = tl.arange(0, block)
    tl.store(out + i, tl.load(x + i))


def host_us(call: Callable[[], Any]) -> float:
    """us of the host for a call, while the device keeps up."""
    found = []
    for _ in range(7):
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(HOST_CALLS):
            call()
        found.append((time.perf_counter() - begin) / HOST_CALLS * 1e6)
    torch.cuda.synchronize()
    return round(statistics.median(found), 2)


def on_the_host(world: Any, heap: torch.Tensor) -> dict[str, float]:
    """What a call of 8 KB costs the host, by who makes it; on this rank."""
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD.group_name
    x = torch.zeros(4, 1024, dtype=torch.bfloat16, device=world.device)
    there, out = heap[: x.numel()].view(x.shape).zero_(), torch.empty_like(x)
    of_torch = symmetric.empty(x.shape, dtype=x.dtype, device=x.device).zero_()
    symmetric.rendezvous(of_torch, group)
    reduce = importlib.import_module("weft.ops.all_reduce").all_reduce
    calls = {
        "bare Triton launch": lambda: bare[(1,)](x, out, 1024),
        "torch.empty_like": lambda: torch.empty_like(x),
        "world.operator_call": lambda: world.operator_call("nothing"),
        "weft all_reduce": lambda: reduce(x, world=world),
        "weft all_reduce, out given": lambda: reduce(x, world=world, out=out),
        "weft all_reduce, in place": lambda: reduce(there, world=world, out=there),
        "torch two_shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(of_torch, "sum", group),
        "nccl": lambda: dist.all_reduce(out),
    }
    found = {}
    for name, call in calls.items():
        for _ in range(20):
            call()
        found[name] = host_us(call)
    return found


def main(rank: int, options: argparse.Namespace) -> None:
    world = weft.init(heap_bytes=6 << 30)
    n = world.num_ranks
    sizes = [float(size) for size in options.mb.split(",")]
    heap = world.empty(int(NUM_SETS * n * max(sizes) * MB) // 2, torch.bfloat16)
    cuts = tuple(tuple(map(int, cut.split("/"))) for cut in options.cuts.split(","))
    results: dict[str, Any] = provenance() if rank == 0 else {}
    results |= {"what": __doc__.splitlines()[0], "num_ranks": n, "rows": []}
    results["host_us"] = on_the_host(world, heap)
    if rank == 0:
        print(results["host_us"], flush=True)
    for op in options.ops.split(","):
        for size in sizes:
            begin = time.perf_counter()
            subject = Subject(world, op, int(size * MB), heap)
            variants = [*subject.others(), *subject.ours(cuts)]
            row = {"op": op, "mb": size, "us": measure(subject, variants, options.rounds)}
            if rank == 0:
                results["rows"].append(row)
                save("collective_variants", results, n, RESULTS)
                print(f"{op} {size:g} MB, {time.perf_counter() - begin:.1f} s", flush=True)
                for name, us in sorted(row["us"].items(), key=lambda one: one[1]):
                    print(f"   {us[0]:9.2f} [{us[1]:.2f}, {us[2]:.2f}]  {name}", flush=True)
            del subject, variants
            torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--ops", default="all_reduce,all_gather,reduce_scatter,all_to_all")
    parser.add_argument("--mb", default="1,4,16,64")
    parser.add_argument("--cuts", default=",".join("/".join(map(str, cut)) for cut in CUTS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--timeout", type=float, default=240.0)
    options = parser.parse_args()
    processes.run_on_gpus(main, options.ranks, options, timeout_s=options.timeout)
