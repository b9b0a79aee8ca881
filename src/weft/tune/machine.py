"""What a machine can do: a probe of some seconds, to which the cost model's record is fitted.

    weft machine                     on all GPUs here; worlds that begin later reckon with it

A probe does one thing in several amounts. What that took lies on a line: a start, and the amount
over a rate, each for a field of base.hardware.Hardware. Those fields say what is attained within
sequences of calls and beside products, which one call by itself does not show. So the record is
the one that was fitted to readings of 4 x H200, each field at the pace of its probe: as many times
as fast as the same probe was there. On those GPUs it stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton
import triton.language as tl

import weft.language as wl
from weft.base.errors import WeftError
from weft.base.hardware import H200X4, Curve, Hardware, hardware_of
from weft.base.providers import provider
from weft.runtime import choices
from weft.runtime.start import init
from weft.tune.device import LOST, EmulatedDevice, GpuDevice
from weft.tune.provenance import write_json

FACTORS = (1, 4, 16, 64)
REPEATS = 7
# In a microsecond at a rate of 1: so many bytes, so many operations.
GBPS, TFLOPS = 1e3, 1e6
BLOCK = tl.constexpr(4096)
WARPS = {"num_warps": 8}
# Columns of the products that are read, and what they sum over.
WIDTH, SMALL_WIDTH = 4096, 64
# What the probes read on 4 x H200 (benchmarks/results/machine_h200x4.json), and the L2 there.
READ = {
    "copy_gbps": 396.7, "copy_us": 12.27, "push_gbps": 405.1, "push_us": 9.93,
    "pusher_gbps": 42.6, "signal_us": 1.205, "packet_gbps": 173.1, "packet_us": 8.08,
    "memory_gbps": 4956.0, "program_tflops": 7.075, "library_tflops": 900.2, "library_us": 9.71,
}  # fmt: skip
READ_L2 = 62914560
# A start is what is left of a call where nothing is done: noise may make it nothing, or much.
LEAST_PACE, MOST_PACE = 0.25, 4.0

# By what a probe reads, fields that are as much faster or slower.
ALONG = {
    "copy_us": ("gate_us", "put_gate_us", "word_us", "token_us"),
    "push_gbps": ("combine_gbps", "sums_gbps", "wide_sums_gbps"),
    "memory_gbps": ("reread_gbps", "small_gbps", "few_gbps", "library_gbps"),
    "signal_us": ("end_us", "share_us"),
}
# Of collectives, whose starts go along with signals and whose rates with copies.
CURVES = ("gather", "scatter", "reduce")

# Of a probe: amounts, and what each took.
Readings = Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True)
class Step:
    """One call of a probe that does so much."""

    probe: str
    amount: float
    call: Callable[[], Any]

    def __call__(self) -> Any:
        return self.call()


@dataclass(frozen=True)
class Probe:
    """What reads a `start`, in us, and a `rate`, for the fields of these names: `unit` are done in
    a microsecond at a rate of 1; a rate in us is what one takes. `make(lab, factor)` gives an
    amount and a call that does so much."""

    make: Callable[[Any, int], tuple[float, Callable[[], Any]]]
    rate: str = ""
    start: str = ""
    unit: float = GBPS
    has_peers: bool = True


@triton.jit(do_not_specialize=["to"])
def _store(world, dst, src, n, to, TILE: tl.constexpr):
    """Store n elements on rank `to`, by all programs of the grid."""
    for first in range(tl.program_id(0) * TILE, n, tl.num_programs(0) * TILE):
        at = first + tl.arange(0, TILE)
        wl.put(world, dst + at, tl.load(src + at, mask=at < n), to=to, mask=at < n)


@triton.jit(do_not_specialize=["is_first", "peer", "start", "rounds"])
def _volley(world, words, is_first, peer, start, rounds):
    """Two ranks answer each other so many times."""
    for i in range(start + 1, start + rounds + 1):
        if is_first == 1:
            wl.notify(world, words, i, to=peer, op=wl.SignalOp.SET)
        wl.wait(words, i, world=world)
        if is_first == 0:
            wl.notify(world, words, i, to=peer, op=wl.SignalOp.SET)


class Lab:
    """What probes need of a rank: memory here and on all ranks, and a world of this rank alone."""

    def __init__(self, world: Any) -> None:
        self.world, self.is_small = world, world.target.backend == "emu"
        self.bytes = (1 << 10) if self.is_small else (1 << 20)
        elements = max(FACTORS) * self.bytes // 4
        self.here = torch.ones(elements, dtype=torch.int32, device=world.device)
        self.there = world.empty(elements, torch.int32, name="probe")
        self.words = world.signals(1, torch.int32, name="probe_words")
        self.peer, self.volleys = (world.rank + 1) % world.num_ranks, 0
        self.alone = world
        if world.num_ranks > 1:
            groups = [dist.new_group([rank]) for rank in range(world.num_ranks)]
            self.alone = init(groups[world.rank], name="probe-alone")

    def copy(self, factor: int) -> tuple[float, Callable[[], Any]]:
        """By a copy engine."""
        amount = self.bytes // 4 * factor
        dst = self.world.peer(self.there, self.peer)[:amount]
        return 4.0 * amount, lambda: self.world.copy(dst, self.here[:amount])

    def push(self, factor: int, programs: int = 0) -> tuple[float, Callable[[], Any]]:
        """By all SMs, or by so many programs."""
        amount = self.bytes // 4 * factor // (8 if programs else 1)
        grid = programs or (2 if self.is_small else self.world.target.num_sms)
        arguments = (self.world.arg, self.there, self.here, amount, self.peer, BLOCK)
        return 4.0 * amount, partial(_store[(grid,)], *arguments, **WARPS)

    def signal(self, factor: int) -> tuple[float, Callable[[], Any]]:
        """One way of a signal, of which two are a round trip."""
        world, rounds = self.world, factor * (1 if self.is_small else 16)
        peer = world.rank ^ 1

        def call() -> None:
            start, self.volleys = self.volleys, self.volleys + rounds
            if peer < world.num_ranks:
                is_first = int(world.rank < peer)
                _volley[(1,)](world.arg, self.words, is_first, peer, start, rounds)

        return 2.0 * rounds, call

    def packets(self, factor: int) -> tuple[float, Callable[[], Any]]:
        """What a rank gets of all others by weft's all-gather of packets."""
        collectives, world = provider("collectives"), self.world
        amount = self.bytes // 1024 * factor
        x = self.here[:amount]
        shape = {"m": amount * world.num_ranks, "n": 1}
        card = collectives.card("all_gather")
        problem = card.make_problem(world.num_ranks, shape, "int32")
        found = (one for one in card.candidates(problem, world.target) if one.transport == "ll")
        call = partial(collectives.all_gather, x, world=world, config=next(found))
        return 4.0 * amount * (world.num_ranks - 1), call

    def memory(self, factor: int) -> tuple[float, Callable[[], Any]]:
        """Read and written here."""
        amount = self.bytes // 4 * factor
        return 8.0 * amount, lambda: self.there[:amount].copy_(self.here[:amount])

    def product(self, factor: int, by_library: bool = False) -> tuple[float, Callable[[], Any]]:
        """Of this rank alone, by weft's template or by the library."""
        width, rows = (SMALL_WIDTH, 4) if self.is_small else (WIDTH, 256)
        made = partial(torch.ones, dtype=torch.bfloat16, device=self.world.device)
        a, b = made(rows * factor, width), made(width, width).t()
        out = made(rows * factor, width)
        amount = 2.0 * rows * factor * width * width
        if by_library:
            return amount, lambda: torch.mm(a, b, out=out)
        ag_gemm = provider("collectives").ag_gemm
        return amount, lambda: ag_gemm(a, b, world=self.alone, out=out)


PROBES = {
    "copy": Probe(Lab.copy, "copy_gbps", "copy_us"),
    "push": Probe(Lab.push, "push_gbps", "push_us"),
    "pusher": Probe(partial(Lab.push, programs=1), "pusher_gbps"),
    "signal": Probe(Lab.signal, "signal_us", unit=1.0),
    "packets": Probe(Lab.packets, "packet_gbps", "packet_us"),
    "memory": Probe(Lab.memory, "memory_gbps", has_peers=False),
    "product": Probe(Lab.product, "program_tflops", unit=TFLOPS, has_peers=False),
    "library": Probe(
        partial(Lab.product, by_library=True), "library_tflops", "library_us", TFLOPS, False
    ),
}


def probe(world: Any, device: Any = None) -> Hardware:
    """Measure this machine, fit its record, and keep it for worlds that begin later. Collective.

    Sync    the host waits, some seconds
    Raises  WeftError: a probe that could not be timed
    """
    if device is None:
        device = (EmulatedDevice if world.target.backend == "emu" else GpuDevice)(world)
    lab = Lab(world)
    readings = {
        name: [(step.amount, _us(device, step)) for step in steps]
        for name, steps in _steps(lab)
    }  # fmt: skip
    machine = choices.machine_of(world.target)
    name = f"{machine}x{world.num_ranks}"
    base = hardware_of(replace(world.target, machine=None)) or H200X4
    record = fitted(readings, replace(base, name=name, num_sms=world.target.num_sms))
    if device.l2_bytes:
        record = replace(record, cached_bytes=base.cached_bytes * device.l2_bytes / READ_L2)
    if world.rank == 0:
        keep(record, machine, world)
    if lab.alone is not world:
        lab.alone.close()
    return record


def _steps(lab: Lab) -> Iterator[tuple[str, list[Step]]]:
    for name, one in PROBES.items():
        if lab.world.num_ranks > 1 or not one.has_peers:
            yield name, [Step(name, *one.make(lab, factor)) for factor in FACTORS]


def _us(device: Any, step: Step) -> float:
    """The median of the slowest rank's times."""
    host_us = max(device.agree(device.warm_us(step)))
    (times,) = device.slowest([[device.held_us(step, host_us) for _ in range(REPEATS)]])
    good = sorted(one for one in times if one == one and one is not LOST)
    if not good:
        raise WeftError(
            f"{step.probe} of {step.amount:g}: the host was slower than the device in all "
            f"{REPEATS} repeats; run the probe where nothing else runs"
        )
    return good[len(good) // 2]


# ---------------------------------------------------------------------------------------------
# Of what was read


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Start and slope of the line whose errors, as shares of what was read, have the least sum of
    squares; it starts at no time below 0."""
    weights = [1 / us**2 for _, us in points]
    total = sum(weights)
    x = sum(w * amount for w, (amount, _) in zip(weights, points, strict=True)) / total
    y = sum(w * us for w, (_, us) in zip(weights, points, strict=True)) / total
    both = sum(w * (one - x) * (us - y) for w, (one, us) in zip(weights, points, strict=True))
    square = sum(w * (one - x) ** 2 for w, (one, _) in zip(weights, points, strict=True))
    slope = both / square
    if y - slope * x >= 0:
        return y - slope * x, slope
    return 0.0, sum(w * one * us for w, (one, us) in zip(weights, points, strict=True)) / sum(
        w * one**2 for w, (one, _) in zip(weights, points, strict=True)
    )


def fitted(readings: Readings, base: Hardware) -> Hardware:
    """`base` at the pace of the machine that was read, beside the one of READ."""
    paces: dict[str, float] = {}
    for name, points in readings.items():
        one = PROBES[name]
        start_us, slope = line(points)
        if slope <= 0:
            raise WeftError(
                f"{name}: more takes no longer, (amount, us): {points}; probe where nothing else "
                "runs"
            )
        if one.start:
            pace = start_us / READ[one.start]
            paces[one.start] = min(max(pace, LEAST_PACE), MOST_PACE)
        programs = base.num_sms if one.rate.startswith("program_") else 1
        read = slope if one.rate.endswith("_us") else 1 / (slope * one.unit * programs)
        paces[one.rate] = read / READ[one.rate]
    paces |= {name: paces[one] for one, names in ALONG.items() if one in paces for name in names}
    found: dict[str, Any] = {name: getattr(base, name) * pace for name, pace in paces.items()}
    if {"signal_us", "copy_gbps"} <= paces.keys():
        both = paces["signal_us"], 1 / paces["copy_gbps"]
        found |= {name: _at_paces(getattr(base, name), *both) for name in CURVES}
    return replace(base, **found)


def _at_paces(curve: Curve, of_start: float, of_rest: float) -> Curve:
    """What takes so many times as long as another."""
    start_us = curve[0][1]
    return tuple((n, start_us * of_start + (us - start_us) * of_rest) for n, us in curve)


def keep(record: Hardware, machine: str, world: Any) -> Path | None:
    """Put a record where worlds find it; where that is, if anywhere."""
    folder = choices.folder_of(world.settings, machine)
    if folder is None:
        return None
    path = folder / choices.file_name(choices.MACHINE, machine, world.num_ranks)
    values = {"key": choices.HARDWARE, "fields": vars(record)}
    write_json(path, {"op": choices.MACHINE, "machine": machine, "choices": [values]})
    return path
