"""Operators under stress: stragglers, changing shapes and seeds, two worlds, eager and replayed.

    PYTHONPATH=src python benchmarks/stress.py [--ranks 4] [--calls 10000] [--replays 10000]

Every call of every operator and transport checks its own answer on the device, bit by bit, also
inside a recording: inputs are small integers that change from call to call, so sums are exact and
an element of an earlier call, or one that is not there yet, is counted. Operators whose sums are
not of small integers take sets of inputs by turns; their bits must be those of a call that nothing
ran beside, which was held against the reference. A straggler is one rank,
another each time, that sleeps up to 0.5 ms before a call. Writes results/stress_<gpus>.json.
"""

from __future__ import annotations

import argparse
import faulthandler
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import weft
from weft.base.dtypes import tolerance
from weft.compiler import Replicate, Shard, Tensor, all_reduce, silu
from weft.ops import card
from weft.tools.check import Work, rel_err
from weft.tune import processes
from weft.tune.compiling import compile_together
from weft.tune.provenance import provenance, save

RESULTS = Path(__file__).parent / "results"
STRAGGLE_CYCLES = 1_000_000
NUM_SEEDS = 40
# Calls in the recording that is replayed most.
REPLAYED = 8

# Rows and columns: whole vectors, several tiles for a channel; nothing that divides; one element.
WHOLE, LARGE, ODD, ONE = (256, 512), (1024, 1024), (97, 33), (1, 1)
ALL = (WHOLE, LARGE, ODD, ONE)
PRODUCTS = ("ag_gemm", "gemm_rs", "gemm_ar")
INNER = 64
# Moved by channels, and summed: a second world's too.
MOVED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send", "recv")
# What takes sets of inputs by turns, and how many.
TURNED = (
    "ag_moe", "moe_rs", "moe_ar", "moe_route", "ep_dispatch", "ep_combine", "ag_attention",
    "flash_decode", "ag_wgrad", "ag_rms_gemm", "all_reduce_rms_norm", "persistent",
)  # fmt: skip
SETS = 3
OPS = (*MOVED, *PRODUCTS, *TURNED)
CE_PUSH = "ce_push"


def kinds(op: Any, world: Any, shapes: Any) -> Iterator[tuple[tuple[int, int], Any, bool]]:
    """(shape, configuration, is in place): every transport by whole vectors and by odd elements,
    with few channels and small tiles, so in many steps; in place where it can be; and what is
    chosen, at every shape."""
    for shape in shapes:
        yield shape, None, False
        if shape == WHOLE:
            yield shape, None, True
    if op.name in PRODUCTS:
        for shape in [one for one in shapes if is_by_engines(op) and one in (WHOLE, LARGE)]:
            found = op.candidates(problem_of(op, world, shape), world.target)
            config = next(one for one in found if one.is_fused)
            yield shape, replace(config, transport=CE_PUSH, by_tma=False), False
        return
    for shape in [one for one in shapes if one in (WHOLE, ODD)]:
        problem = problem_of(op, world, shape)
        for config in op.candidates(problem, world.target):
            if config.transport != "nccl":
                few = replace(
                    config, channels=min(5, config.channels), block=max(16, config.block // 8)
                )
                yield shape, few, False
                if config.reads_in_place and shape == WHOLE:
                    yield shape, config, True


def is_by_engines(op: Any) -> bool:
    """Whether copy engines carry its tiles in eager calls; these are not to be recorded."""
    return CE_PUSH in getattr(op.problem, "transports", ())


def problem_of(op: Any, world: Any, shape: tuple[int, int]) -> Any:
    m, n = shape
    # TMA asks for whole vectors; odd products go without.
    inner = {"k": INNER} if op.name in PRODUCTS else {}
    return op.make_problem(world.num_ranks, {"m": m, "n": n, **inner}, "bfloat16")


class Subject:
    """One operator with one configuration and one shape; `errors` counts wrong elements.

    Inputs are small integers that grow by the same number from call to call; so the right answer
    grows by that number times `step`. Sums are exact in fp32, and rounded once.
    """

    def __init__(self, world: Any, op: Any, shape: tuple[int, int], config: Any, in_place: bool):
        how = "as chosen" if config is None else config.transport
        self.name = f"{op.name} {how} {shape[0]}x{shape[1]}{' in place' if in_place else ''}"
        self.world, self.op, self.config = world, op, config
        self.is_recordable = config is None or not (
            is_by_engines(op) and config.transport == CE_PUSH
        )
        self.problem = problem_of(op, world, shape)
        device, (mine, expected, step) = world.device, _drawn(op.name, self.problem, world.rank)
        self.moving = next(iter(mine))
        self.base = mine[self.moving].to(device)
        x = torch.empty_like(self.base)
        if in_place:
            x = world.empty(tuple(self.base.shape), self.base.dtype)
        self.inputs = {name: value.to(device) for name, value in mine.items()} | {self.moving: x}
        self.expected, self.step = expected.to(device), step.to(device)
        self.seed = torch.zeros((), dtype=torch.float32, device=device)
        self.errors = torch.zeros((), dtype=torch.int64, device=device)
        self.calls = 0

    def prepare(self) -> None:
        """Nothing: the answers are known."""

    def run(self) -> torch.Tensor:
        return self.op.run(self.world, self.problem, self.inputs, self.config)

    def call(self) -> None:
        self.calls += 1
        self.seed.add_(1).remainder_(NUM_SEEDS)
        x = self.inputs[self.moving]
        torch.add(self.base, self.seed, out=x)
        out = self.run()
        want = torch.addcmul(self.expected, self.step, self.seed).to(out.dtype)
        self.errors.add_(out.ne(want).sum())
        x.fill_(-1)  # a rank that reads late reads this


@cache
def _drawn(
    name: str, problem: Any, rank: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    """A rank's numbers, its answer, and what that grows by: alike for all transports."""
    op = card(name)
    parts = [_numbers(op, problem, peer) for peer in range(problem.num_ranks)]
    expected, more = (_answer(op, problem, parts, more)[rank] for more in (0, 1))
    return parts[rank], expected, more - expected


def _numbers(op: Any, problem: Any, rank: int) -> dict[str, torch.Tensor]:
    """Small enough that one rank's sums are exact in bfloat16, all ranks' in fp32."""
    generator, found = torch.Generator().manual_seed(rank), {}
    for name, tensor in op.make_inputs(problem, rank).items():
        if not found:
            found[name] = torch.randint(0, 8, tensor.shape, generator=generator).bfloat16()
        else:  # a right side of two ones in each column
            rows, columns = tensor.shape
            ones = torch.randint(0, rows, (2, columns), generator=generator)
            found[name] = torch.zeros(rows, columns).scatter_(0, ones, 1.0).bfloat16()
    return found


def _answer(
    op: Any, problem: Any, parts: list[dict[str, torch.Tensor]], more: int
) -> list[torch.Tensor]:
    """In fp32, of every rank, where what moves is so much larger."""
    results = {"out_dtype": "float32"} if hasattr(problem, "out_dtype") else {}
    problem = replace(problem, dtype="float32", **results)
    raised = []
    for one in parts:
        moving = next(iter(one))
        raised.append({name: x.float() + more * (name == moving) for name, x in one.items()})
    return op.reference(problem, raised)


class Turns:
    """`run(inputs)` with one set of inputs after the other; `errors` counts wrong elements.

    `right(turn)` is the reference's answer. What comes of a call must be the same bits each time:
    no operator's sums depend on who is late.
    """

    config = None
    is_recordable = True

    def __init__(
        self, world: Any, name: str, run: Callable[[Any], Any], sets: list[dict[str, Any]],
        right: Callable[[int], Any], tolerance: float,
    ) -> None:  # fmt: skip
        self.world, self.name = world, name
        self._run, self._right, self._tolerance = run, right, tolerance
        tensors = {key for key, one in sets[0].items() if isinstance(one, torch.Tensor)}
        self.inputs = {
            key: one.to(world.device, copy=True) if key in tensors else one
            for key, one in sets[0].items()
        }
        self.sets = {key: torch.stack([one[key] for one in sets]) for key in sorted(tensors)}
        self.sets = {key: one.to(world.device) for key, one in self.sets.items()}
        self.answers: list[torch.Tensor] = []
        self.turn = torch.zeros(1, dtype=torch.int64, device=world.device)
        self.errors = torch.zeros((), dtype=torch.int64, device=world.device)
        self.calls = 0

    def run(self) -> list[torch.Tensor]:
        out = self._run(self.inputs)
        return [*out] if isinstance(out, (tuple, list)) else [out]

    def _set(self) -> None:
        for key, every in self.sets.items():
            self.inputs[key].copy_(every.index_select(0, self.turn)[0])

    def prepare(self) -> None:
        """Find each set's answer while nothing else runs; one that is wrong is counted."""
        found = []
        for turn in range(SETS):
            self.turn.fill_(turn)
            self._set()
            self.world.barrier()
            found.append([one.clone() for one in self.run()])
            self.world.synchronize()
            right = self._right(turn)
            right = [*right] if isinstance(right, (tuple, list)) else [right]
            if not rel_err(found[-1], right) <= self._tolerance:
                self.errors.add_(1)
        self.answers = [torch.stack(every) for every in zip(*found, strict=True)]

    def call(self) -> None:
        self.calls += 1
        self.turn.add_(1).remainder_(SETS)
        self._set()
        for out, every in zip(self.run(), self.answers, strict=True):
            want = every.index_select(0, self.turn)[0]
            self.errors.add_((out.ne(want) & (out.eq(out) | want.eq(want))).sum())
        for one in self.inputs.values():
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                one.fill_(-1)  # a rank that reads late reads this


def turns_of(world: Any, op: Any) -> Iterator[Turns]:
    """An operator at its usual size, and where nothing divides."""
    usual, num_ranks = dict(op.default_shape), world.num_ranks
    for shape in (usual, {**usual, **op.awkward_shapes[0][1]}):
        work = Work(op, num_ranks, shape, "bfloat16")
        yield Turns(
            world, f"{op.name} {' '.join(f'{key}={size}' for key, size in shape.items())}",
            lambda inputs, work=work: op.run(world, work.problem(), inputs, None),
            [dict(work.inputs(world.rank, turn)) for turn in range(SETS)],
            lambda turn, work=work: work.reference(turn)[world.rank], work.tolerance(),
        )  # fmt: skip


def one_kernel(world: Any, m: int = 33, k: int = 128, f: int = 256) -> Turns:
    """Two products and a sum over ranks, as one persistent kernel."""

    @weft.program(
        mesh="tp", x=Tensor("bfloat16", ("m", k), Replicate()),
        v=Tensor("bfloat16", (k, f), Shard(1)), w=Tensor("bfloat16", (f, k), Shard(0)),
    )  # fmt: skip
    def layer(x, v, w):
        return all_reduce(silu(x @ v) @ w)

    def drawn(turn: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(turn)
        sizes = ((m, k), (k, f), (f, k))
        return [torch.randn(*one, generator=generator).bfloat16() / 4 for one in sizes]

    def mine(turn: int) -> dict[str, torch.Tensor]:
        (x, v, w), rank, num_ranks = drawn(turn), world.rank, world.num_ranks
        return {"x": x, "v": v.chunk(num_ranks, 1)[rank], "w": w.chunk(num_ranks, 0)[rank]}

    def right(turn: int) -> torch.Tensor:
        x, v, w = (one.float() for one in drawn(turn))
        return torch.nn.functional.silu(x @ v) @ w

    def run(inputs: dict[str, torch.Tensor]) -> Any:
        return layer.options(lowering="persistent")(*inputs.values(), world=world, m=m)

    sets = [{key: one.contiguous() for key, one in mine(turn).items()} for turn in range(SETS)]
    return Turns(world, f"persistent m={m}", run, sets, right, tolerance("bfloat16", f))


def subjects_of(world: Any, ops: list[str], shapes: Any = ALL) -> list[Any]:
    found: list[Any] = []
    for name in ops:
        if name == "persistent":
            found.append(one_kernel(world))
            continue
        op = card(name)
        if name in TURNED:
            found += turns_of(world, op)
        else:
            found += [Subject(world, op, *kind) for kind in kinds(op, world, shapes)]
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


def recorded(world: Any, some: list[Any]) -> Callable[[], None]:
    with world.record() as recording:
        for one in some:
            one.call()
    return recording.replay


def told(world: Any, name: str, count: int) -> Iterator[int]:
    """0 .. count - 1; says now and then how far the device has come."""
    begin, tenth = time.perf_counter(), max(1, count // 10)
    for i in range(count):
        yield i
        if i % tenth == tenth - 1:
            world.synchronize()
            say(world, f"{name}: {i + 1} of {count}, {time.perf_counter() - begin:.1f} s")


def eager(world: Any, subjects: list[Any], calls: int) -> None:
    """Any subject, of either world, in any order; all ranks draw alike."""
    draw, stragglers = random.Random(1), Stragglers(world, 2)
    for _ in told(world, "eager", calls):
        stragglers.maybe()
        draw.choice(subjects).call()


def replayed(world: Any, subjects: list[Any], replays: int) -> None:
    """One recording of several operators and shapes, again and again."""
    draw, stragglers = random.Random(3), Stragglers(world, 4)
    subjects = [one for one in subjects if one.is_recordable]
    replay = recorded(world, draw.sample(subjects, min(REPLAYED, len(subjects))))
    for _ in told(world, "replayed", replays):
        stragglers.maybe(0.01)
        replay()


def mixed(world: Any, subjects: list[Any], calls: int) -> None:
    """Eager calls and three recordings, in any order."""
    draw, stragglers = random.Random(5), Stragglers(world, 6)
    recordable = [one for one in subjects if one.is_recordable]
    some = [draw.sample(recordable, min(3, len(recordable))) for _ in range(3)]
    replays = [recorded(world, few) for few in some]
    for _ in told(world, "mixed", calls):
        stragglers.maybe()
        draw.choice([*replays, draw.choice(subjects).call, draw.choice(subjects).call])()


def at_once(world: Any, first: list[Any], second: list[Any], calls: int) -> None:
    """Two worlds on two streams that wait for nothing of each other."""
    draw, stragglers = random.Random(7), Stragglers(world, 8)
    side = world.stream("second world")
    side.wait(world.current_stream())
    for _ in told(world, "two worlds", calls):
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
    begin = time.perf_counter()
    subjects = subjects_of(world, ops)
    others = subjects_of(other, [name for name in ops if name in MOVED], (ODD, ONE))
    # Programs of both worlds are resident at once: few of each.
    small = [
        [one for one in some if getattr(one.config, "channels", 1 << 10) <= 16]
        for some in (subjects, others)
    ]
    everyone = [*subjects, *others]
    say(world, f"{len(everyone)} subjects, drawn in {time.perf_counter() - begin:.1f} s")
    num_kernels, seconds = compile_together(world, lambda: [one.run() for one in everyone])
    other.calls.clear()
    say(world, f"{num_kernels} kernels, compiled in {seconds:.1f} s")
    begin = time.perf_counter()
    for one in everyone:
        one.prepare()
        one.call()  # loaded, and its memory taken, before anything is recorded
    world.synchronize()
    wrong = {one.name: int(one.errors) for one in everyone if int(one.errors)}
    say(world, f"each called once in {time.perf_counter() - begin:.1f} s; wrong: {wrong}")
    results: dict[str, Any] = {"subjects": [one.name for one in everyone], "first": wrong}
    ways = {
        "eager": lambda: eager(world, [*subjects, *others], options.calls),
        "replayed": lambda: replayed(world, subjects, options.replays),
        "mixed": lambda: mixed(world, [*subjects, *others], options.calls // 4),
    }
    if all(small):
        ways["two worlds at once"] = lambda: at_once(world, *small, options.calls // 4)
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
            results[name]["calls"] = min(REPLAYED, len(subjects)) * options.replays
        say(
            world,
            f"{name}: {results[name]['calls']} calls, {results[name]['wrong_elements']} wrong",
        )
    return results


def main(rank: int, options: argparse.Namespace) -> None:
    # Where all ranks are, should it hang: before the parent ends them.
    faulthandler.dump_traceback_later(options.timeout - 2, file=sys.stderr)
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
        ways = [way for way, row in results["stress"].items() if "calls" in row]
        for way in ways:
            wrong = sum(one[way]["wrong_elements"] for one in everyone)
            mine = results["stress"][way]
            print(f"{way:20} {mine['calls']:6} calls  {mine['seconds']:6.1f} s  wrong: {wrong}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--calls", type=int, default=10000)
    parser.add_argument("--replays", type=int, default=10000)
    parser.add_argument("--ops", default=",".join(OPS))
    parser.add_argument("--timeout", type=float, default=540.0)
    options = parser.parse_args()
    processes.run_on_gpus(main, options.ranks, options, timeout_s=options.timeout)
