"""Messages between two ranks, weft's in variants beside NCCL's: what stages of a pipeline pass on.

    PYTHONPATH=src python benchmarks/pipeline_p2p.py [--mb 1,16,256] [--cuts 4/16,16/8]

Ranks 0 and 1 of two GPUs. `one way`: 0 sends and 1 receives; `both ways`: each does both at once.
NCCL is torch.distributed's batch_isend_irecv; cuts are programs and their warps. Answers are
checked before and behind, bit by bit. Some messages one behind the other, queued before the device
begins; variants in turns; the slower rank's median over rounds. GB/s are one way's bytes.
`programs` are those of the largest kernel that each of the two ranks launches (a program has an SM,
while it runs), seen by torch's profiler. `beside` is how much longer products take while messages
of this variant come and go. Writes results/send_recv_<gpus>.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from collectives import timed

import weft
from weft.ops.send import Problem, candidates
from weft.tune import processes
from weft.tune.compiling import compile_together
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
MB = 1 << 20
ROW = 4096
NUM_SETS = 2
# Of the product that messages run beside.
PRODUCT = 8192
CHOSEN = "chosen"


class Variant(NamedTuple):
    """A way of passing set i on; `call(i)` queues it on the current stream."""

    name: str
    call: Callable[[int], None]


class Subject:
    """Messages of one size on one rank, one way or both."""

    def __init__(self, world: Any, nbytes: int, both: bool) -> None:
        self.world, self.nbytes, self.both = world, nbytes, both
        self.peer = 1 - world.rank
        self.sends, self.receives = both or world.rank == 0, both or world.rank == 1
        self.x = [self._draw(world.rank, i) for i in range(NUM_SETS)]
        self.expected = [self._draw(self.peer, i) for i in range(NUM_SETS)]
        self.out = [torch.empty_like(x) for x in self.x]
        self.side = world.stream("receives")

    def _draw(self, rank: int, i: int) -> torch.Tensor:
        generator = torch.Generator(self.world.device).manual_seed(10 * i + rank)
        shape = (max(1, self.nbytes // 2 // ROW), ROW)
        return torch.randn(shape, generator=generator, device=self.world.device).bfloat16()

    def weft(self, name: str, config: Any) -> Variant:
        world, options = self.world, {"world": self.world, "config": config}

        def call(i: int) -> None:
            main = world.current_stream()
            if self.both:
                self.side.wait(main)
            if self.sends:
                weft.ops.send(self.x[i], self.peer, **options)
            if self.both:
                with self.side:
                    weft.ops.recv(self.out[i], self.peer, out=self.out[i], **options)
                main.wait(self.side)
            elif self.receives:
                weft.ops.recv(self.out[i], self.peer, out=self.out[i], **options)

        return Variant(f"weft {name}", call)

    def nccl(self) -> Variant:
        def call(i: int) -> None:
            both = [dist.P2POp(dist.isend, self.x[i], self.peer)] * self.sends
            both += [dist.P2POp(dist.irecv, self.out[i], self.peer)] * self.receives
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return Variant("nccl", call)

    def variants(self, cuts: list[list[int]]) -> Iterator[Variant]:
        yield self.nccl()
        yield self.weft(CHOSEN, None)
        problem = Problem(2 * self.x[0].shape[0], ROW, 2, "bfloat16")
        for one in candidates(problem, self.world.target):
            for channels, warps in cuts:
                block = one.block * warps // one.num_warps
                config = replace(one, channels=channels, num_warps=warps, block=block)
                yield self.weft(f"{one.transport} {channels}/{warps}", config)

    def check(self, variant: Variant) -> None:
        """Raises  AssertionError: a wrong answer of any rank"""
        for out in self.out:
            out.fill_(torch.nan)
        for i in range(NUM_SETS):
            variant.call(i)
        wrong = 0
        if self.receives:
            pairs = zip(self.out, self.expected, strict=True)
            wrong = sum(int(out.ne(want).sum()) for out, want in pairs)
        everyone = exchanged(self.world, wrong)
        assert not any(everyone), f"{variant.name}, {self.nbytes} bytes: wrong {everyone}"


def exchanged(world: Any, mine: Any) -> list[Any]:
    """What all ranks have."""
    everyone: list[Any] = [None] * world.num_ranks
    dist.all_gather_object(everyone, mine)
    return everyone


def measure(subject: Subject, variants: list[Variant], rounds: int) -> dict[str, list[float]]:
    """us of a message: the slower rank's median, least and most."""
    world, nbytes = subject.world, subject.nbytes
    ours = [one for one in variants if one.name.startswith("weft")]
    if subject.both:  # both ranks launch the same then
        compile_together(world, lambda: [one.call(0) for one in ours])
    count = 20 if nbytes <= MB else 10 if nbytes <= 16 * MB else 4
    times: dict[str, list[float]] = {one.name: [] for one in variants}
    for variant in variants:
        subject.check(variant)
    for turn in range(rounds + 1):
        for variant in variants:

            def several(variant: Variant = variant) -> None:
                for i in range(count):
                    variant.call(i % NUM_SETS)

            us = timed(several, ahead=True) / count
            if turn:
                times[variant.name].append(us)
    for variant in variants:
        subject.check(variant)
    everyone, found = exchanged(world, times), {}
    for name in times:
        slower = sorted(max(of) for of in zip(*(one[name] for one in everyone), strict=True))
        found[name] = [round(x, 2) for x in (statistics.median(slower), slower[0], slower[-1])]
    return found


def programs_of(subject: Subject, variant: Variant) -> list[int]:
    """By rank, of the largest kernel that a message launches there; 0 where none was seen."""
    variant.call(0)
    subject.world.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        variant.call(0)
        subject.world.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(path := f"{folder}/trace.json")
        events = json.loads(Path(path).read_text())["traceEvents"]
    grids = [one["args"]["grid"][0] for one in events if one.get("cat") == "kernel"]
    return exchanged(subject.world, max(grids, default=0))


def beside(subject: Subject, variants: list[Variant], rounds: int) -> dict[str, float]:
    """By variant, the time of some products while messages come and go on another stream, over
    that of the products alone; the slower rank's."""
    world = subject.world
    shape = (PRODUCT, PRODUCT)
    a, b = (torch.randn(shape, device=world.device).bfloat16() for _ in range(2))
    c, products = torch.empty(shape, dtype=a.dtype, device=a.device), 8
    messages, stream = world.stream("messages"), world.current_stream()

    def multiply() -> None:
        for _ in range(products):
            torch.mm(a, b, out=c)

    multiply()
    world.synchronize()
    # So many that they last about as long as the products; as many on both ranks.
    alone_us = max(exchanged(world, timed(multiply, ahead=True)))
    counts = {}
    for variant in variants:
        us = timed(lambda variant=variant: variant.call(0), ahead=True)
        counts[variant.name] = max(1, int(alone_us / max(exchanged(world, us))))
    times: dict[str, list[float]] = {one.name: [] for one in variants}
    plain: list[float] = []
    for _ in range(rounds):
        plain.append(timed(multiply, ahead=True))
        for variant in variants:

            def both(variant: Variant = variant) -> None:
                messages.wait(stream)
                with messages:
                    for i in range(counts[variant.name]):
                        variant.call(i % NUM_SETS)
                multiply()

            times[variant.name].append(timed(both, ahead=True))
            stream.wait(messages)
            world.synchronize()
    everyone = exchanged(world, (plain, times))
    base = max(statistics.median(one[0]) for one in everyone)
    return {
        name: round(max(statistics.median(one[1][name]) for one in everyone) / base, 3)
        for name in times
    }


def main(rank: int, options: argparse.Namespace) -> None:
    sizes = [int(float(size) * MB) for size in options.mb.split(",")]
    world = weft.init(heap_bytes=4 * max(sizes) + (64 << 20))
    assert world.num_ranks == 2, "messages are between two ranks"
    weft.mailbox(max(sizes), world=world)
    cuts = [list(map(int, cut.split("/"))) for cut in options.cuts.split(",")]
    results: dict[str, Any] = provenance() if rank == 0 else {}
    results |= {"what": __doc__.splitlines()[0], "num_ranks": 2, "rows": []}
    for nbytes in sizes:
        for both in (True, False):
            begin = time.perf_counter()
            subject = Subject(world, nbytes, both)
            variants = list(subject.variants(cuts))
            found = measure(subject, variants, options.rounds)
            programs = {one.name: programs_of(subject, one) for one in variants}
            slower = {}
            if both and nbytes > MB:
                slower = beside(subject, variants, options.rounds)
            for name, (us, least, most) in found.items():
                row = {
                    "mb": nbytes / MB, "way": "both" if both else "one", "variant": name,
                    "median_us": us, "least_us": least, "most_us": most,
                    "gbps": round(nbytes / us / 1e3, 1), "ratio_to_nccl":
                    round(found["nccl"][0] / us, 3), "programs": programs[name],
                    "beside": slower.get(name), "checked": True,
                }  # fmt: skip
                results["rows"].append(row)
            if rank == 0:
                save("send_recv", results, 2, RESULTS)
                what = f"{nbytes / MB:g} MB, {'both ways' if both else 'one way'}"
                print(f"{what}, {time.perf_counter() - begin:.1f} s", flush=True)
                for name, us in sorted(found.items(), key=lambda one: one[1]):
                    gbps = nbytes / us[0] / 1e3
                    print(f"   {us[0]:9.2f} [{us[1]:.2f}, {us[2]:.2f}] us {gbps:6.1f} GB/s"
                          f"  programs {programs[name]}  beside {slower.get(name, '-')}"
                          f"  {name}", flush=True)  # fmt: skip
            del subject, variants
            torch.cuda.empty_cache()
    world.synchronize()
    world.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", default="1,16,256")
    parser.add_argument("--cuts", default="4/16,8/16,16/16,32/16,16/8,32/8")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--timeout", type=float, default=420.0)
    options = parser.parse_args()
    processes.run_on_gpus(main, 2, options, timeout_s=options.timeout)
