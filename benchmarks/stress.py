"""Collectives under stress: stragglers, changing shapes and seeds, two worlds, eager and replayed.

    PYTHONPATH=src python benchmarks/stress.py [--ranks 4] [--calls 10000] [--replays 10000]

Every call of every operator and transport checks its own answer on the device, bit by bit, also
inside a recording: inputs are small integers that change from call to call, so sums are exact and
an element of an earlier call, or one that is not there yet, is counted. A straggler is one rank,
another each time, that sleeps up to 0.5 ms before a call. Writes results/stress_<gpus>.json.
"""

from __future__ import annotations

import argparse
import importlib
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.tune import processes
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
STRAGGLE_CYCLES = 1_000_000
NUM_SEEDS = 40

# Rows and columns: whole vectors, several tiles for a lane, nothing that divides, one element.
SHAPES = ((256, 512), (2048, 1024), (97, 33), (1, 1))
FEW_LANES_AT = (97, 33)


def configs(op: Any, world: Any, m: int, n: int) -> Iterator[Any]:
    """Every transport; at one shape also with few lanes and small tiles: many steps."""
    problem = op.make_problem(world.num_ranks, {"m": m, "n": n}, "bfloat16")
    for config in op.candidates(problem, world.target):
        if config.transport != "nccl":
            yield config
            if (m, n) == FEW_LANES_AT:
                yield replace(config, lanes=min(5, config.lanes), block=max(16, config.block // 8))


class Subject:
    """One operator with one configuration and one shape; `errors` counts wrong elements."""

    def __init__(self, world: Any, op: Any, m: int, n: int, config: Any) -> None:
        self.name = f"{op.name} {config.transport} {m}x{n}"
        self.world, self.op, self.config = world, op, config
        self.problem = op.make_problem(world.num_ranks, {"m": m, "n": n}, "bfloat16")
        parts = [self._numbers(rank) for rank in range(world.num_ranks)]
        expected = op.reference(self.problem, [{"x": part} for part in parts])[world.rank]
        device = world.device
        self.base = parts[world.rank].to(device)
        self.x = torch.empty_like(self.base)
        self.expected, self.want = expected.to(device), torch.empty_like(expected, device=device)
        self.seed = torch.zeros((), dtype=torch.bfloat16, device=device)
        self.errors = torch.zeros((), dtype=torch.int64, device=device)
        self.step = world.num_ranks if op.name in ("all_reduce", "reduce_scatter") else 1
        self.calls = 0

    def _numbers(self, rank: int) -> torch.Tensor:
        """Small enough that sums are exact in bfloat16."""
        generator = torch.Generator().manual_seed(rank)
        shape = self.op.make_inputs(self.problem, rank)["x"].shape
        return torch.randint(0, 8, tuple(shape), generator=generator).bfloat16()

    def call(self) -> None:
        self.calls += 1
        self.seed.add_(1).remainder_(NUM_SEEDS)
        torch.add(self.base, self.seed, out=self.x)
        out = self.op.run(self.world, self.problem, {"x": self.x}, self.config)
        torch.add(self.expected, self.seed, alpha=self.step, out=self.want)
        self.errors.add_(out.ne(self.want).sum())


def subjects_of(world: Any, ops: list[str], shapes: Any = SHAPES) -> list[Subject]:
    found = []
    for name in ops:
        op = importlib.import_module(f"weft.ops.{name}").op
        for m, n in shapes:
            found += [Subject(world, op, m, n, config) for config in configs(op, world, m, n)]
    return found


class Stragglers:
    """Makes another rank late now and then."""

    def __init__(self, world: Any, seed: int) -> None:
        self.world, self.together = world, random.Random(seed)

    def maybe(self, chance: float = 0.05) -> None:
        together = self.together
        is_now, late = together.random() < chance, together.randrange(self.world.num_ranks)
        cycles = together.randrange(STRAGGLE_CYCLES)
        if is_now and late == self.world.rank and self.world.device.type == "cuda":
            torch.cuda._sleep(cycles)


def recorded(world: Any, some: list[Subject]) -> Callable[[], None]:
    with world.record() as recording:
        for one in some:
            one.call()
    return recording.replay


def eager(world: Any, subjects: list[Subject], calls: int) -> None:
    """Any subject, of either world, in any order; all ranks draw alike."""
    draw, stragglers = random.Random(1), Stragglers(world, 2)
    for _ in range(calls):
        stragglers.maybe()
        draw.choice(subjects).call()


def replayed(world: Any, subjects: list[Subject], replays: int) -> None:
    """One recording of several operators and shapes, again and again."""
    draw, stragglers = random.Random(3), Stragglers(world, 4)
    replay = recorded(world, draw.sample(subjects, min(8, len(subjects))))
    for _ in range(replays):
        stragglers.maybe(0.01)
        replay()


def mixed(world: Any, subjects: list[Subject], calls: int) -> None:
    """Eager calls and three recordings, in any order."""
    draw, stragglers = random.Random(5), Stragglers(world, 6)
    some = [draw.sample(subjects, min(3, len(subjects))) for _ in range(3)]
    replays = [recorded(world, few) for few in some]
    for _ in range(calls):
        stragglers.maybe()
        draw.choice([*replays, draw.choice(subjects).call, draw.choice(subjects).call])()


def at_once(world: Any, first: list[Subject], second: list[Subject], calls: int) -> None:
    """Two worlds on two streams that wait for nothing of each other."""
    draw, stragglers = random.Random(7), Stragglers(world, 8)
    side = world.stream("second world")
    side.wait(world.current_stream())
    for _ in range(calls):
        stragglers.maybe()
        draw.choice(first).call()
        with side:
            stragglers.maybe()
            draw.choice(second).call()
    world.current_stream().wait(side)


def say(world: Any, text: str) -> None:
    if world.rank == 0:
        print(text, flush=True)


def stress(world: Any, other: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Errors and calls of every way of using the operators, of all ranks together."""
    ops = options.ops.split(",")
    subjects, others = subjects_of(world, ops), subjects_of(other, ops, SHAPES[2:])
    # Programs of both worlds are resident at once: few of each.
    small = [[one for one in some if one.config.lanes <= 16] for some in (subjects, others)]
    begin = time.perf_counter()
    for one in (*subjects, *others):
        one.call()  # compiled, and its memory taken, before anything is recorded
    world.synchronize()
    results: dict[str, Any] = {"subjects": len(subjects) + len(others)}
    say(world, f"{results['subjects']} subjects, compiled in {time.perf_counter() - begin:.1f} s")
    ways = {
        "eager": lambda: eager(world, [*subjects, *others], options.calls),
        "replayed": lambda: replayed(world, subjects, options.replays),
        "mixed": lambda: mixed(world, [*subjects, *others], options.calls // 4),
        "two worlds at once": lambda: at_once(world, *small, options.calls // 4),
    }
    for name, run in ways.items():
        begin = time.perf_counter()
        before = sum(one.calls for one in (*subjects, *others))
        run()
        world.synchronize()
        other.check()
        wrong = {one.name: int(one.errors) for one in (*subjects, *others) if int(one.errors)}
        results[name] = {
            "calls": sum(one.calls for one in (*subjects, *others)) - before,
            "wrong_elements": sum(wrong.values()),
            "wrong": wrong,
            "seconds": round(time.perf_counter() - begin, 2),
        }
        if name == "replayed":
            results[name]["calls"] = min(8, len(subjects)) * options.replays
        say(
            world,
            f"{name}: {results[name]['calls']} calls, {results[name]['wrong_elements']} wrong",
        )
    return results


def main(rank: int, options: argparse.Namespace) -> None:
    world = weft.init(heap_bytes=2 << 30)
    other = weft.init(heap_bytes=1 << 30)
    results = provenance() if rank == 0 else {}
    results["num_ranks"] = world.num_ranks
    results["stress"] = stress(world, other, options)
    everyone: list[Any] = [None] * world.num_ranks
    dist.all_gather_object(everyone, results["stress"])
    if rank == 0:
        results["by_rank"] = everyone[1:]
        save("stress", results, world.num_ranks, RESULTS)
        ways = [way for way in results["stress"] if way != "subjects"]
        for way in ways:
            wrong = sum(one[way]["wrong_elements"] for one in everyone)
            mine = results["stress"][way]
            print(f"{way:20} {mine['calls']:6} calls  {mine['seconds']:6.1f} s  wrong: {wrong}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--calls", type=int, default=10000)
    parser.add_argument("--replays", type=int, default=10000)
    parser.add_argument("--ops", default="all_reduce,all_gather,reduce_scatter,all_to_all")
    parser.add_argument("--timeout", type=float, default=240.0)
    options = parser.parse_args()
    processes.run_on_gpus(main, options.ranks, options, timeout_s=options.timeout)
