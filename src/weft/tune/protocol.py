"""How variants are measured side by side: checked first, then in turns, A B C A B C.

A variant that raises, answers wrongly or cannot be measured is reported and left out; the others
go on. What hangs is ended from outside (`supervision`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from weft.base.errors import PoisonedError, TimeoutError, WeftError
from weft.tune.answers import poison
from weft.tune.case import Case
from weft.tune.device import GpuDevice
from weft.tune.figures import Times
from weft.tune.variants import Variant

ROUNDS = 9
MIN_ROUNDS = 7
WARM_UP_ROUNDS = 2
# Eager calls are timed in bursts of about so long, and of so many calls at most.
BURST_US, MAX_BURST = 3000.0, 10

OnVariant = Callable[[str], None]


class FatalError(WeftError):
    """The device or the world is no longer usable: the process must be started again."""


@dataclass(frozen=True)
class Failure:
    """Why a variant has no time: in which mode (None: in all), and what it said."""

    variant: str
    mode: str | None
    error: str


def attempt(device: GpuDevice, what: Callable[[], Any]) -> tuple[Any, str | None]:
    """`what()` on all ranks: its value, and what went wrong on the first rank where it did.

    Raises  FatalError: after what went wrong, nothing can be run here any more
    """
    value, error, is_fatal = None, None, False
    try:
        value = what()
        device.settle()
    except Exception as raised:  # a rival's code may raise anything; it must not end the others
        error, is_fatal = f"{type(raised).__name__}: {raised}", _is_fatal(raised)
        if not is_fatal:
            try:
                device.settle()
            except Exception:
                is_fatal = True
    outcomes = device.agree((error, is_fatal))
    for rank, (said, _) in enumerate(outcomes):
        if said is not None:
            message = f"rank {rank}: {' '.join(said.split())[:400]}"
            if any(fatal for _, fatal in outcomes):
                raise FatalError(message)
            return None, message
    return value, None


def _is_fatal(error: Exception) -> bool:
    """Does the error leave a device that answers nothing any more?"""
    if isinstance(error, (TimeoutError, PoisonedError)):
        return True
    return type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)


def check(device: GpuDevice, case: Case, variant: Variant) -> tuple[float | None, str | None]:
    """The worst relative error over all sets and ranks, and what is wrong if anything is."""
    if variant.prepare is not None:
        # Then one call by itself: if one rank fails in it, no other rank is in the next one.
        for step in (variant.prepare, variant.calls[0]):
            _, error = attempt(device, step)
            if error is not None:
                return None, error

    def call_all() -> float:
        worst = 0.0
        for index, call in enumerate(variant.calls):
            for _ in range(2):
                case.poison_free_memory()
                if variant.before:
                    variant.before(index)
                out = call()
                device.settle()
                if variant.answers:
                    worst = max(worst, case.error(index, out))
                    poison(out)
        return worst

    worst, error = attempt(device, call_all)
    if error is not None:
        return None, error
    worst = max(device.agree(worst))
    return worst, _wrong(worst, case)


def _wrong(error: float, case: Case) -> str | None:
    if error <= case.tolerance:
        return None
    return f"wrong answer: relative error {error:.2e}, allowed {case.tolerance:.2e}"


def measure(
    device: GpuDevice,
    case: Case,
    variants: Sequence[Variant],
    mode: str,
    *,
    rounds: int = ROUNDS,
    on_variant: OnVariant = lambda name: None,
) -> tuple[dict[str, Times], list[Failure]]:
    """Interleaved rounds in one mode; each time is the slowest rank's.

    `on_variant` is called with the name of each variant before it runs.
    """
    runs, failures = _prepare_all(device, case, variants, mode, on_variant)
    kept: dict[str, list[float]] = {name: [] for name in runs}
    for names in _rounds(kept, rounds):
        took = []
        for name in names:
            on_variant(name)
            if case.is_swept:
                device.sweep()
            took.append(runs[name].time(device, mode))
        for name, us in zip(names, device.slowest([took])[0], strict=True):
            if runs[name].turn > WARM_UP_ROUNDS and us == us:
                kept[name].append(us)
    for name in [name for name, times in kept.items() if len(times) < min(MIN_ROUNDS, rounds)]:
        lost = f"{len(kept.pop(name))} of {2 * rounds} rounds left: in the others host time showed"
        failures.append(Failure(name, mode, lost))
    return {name: Times(tuple(times)) for name, times in kept.items()}, failures


def _rounds(kept: dict[str, list[float]], rounds: int) -> Iterator[list[str]]:
    """Who takes a turn in each round: all in the first, then as many more for who lost some."""
    for _ in range(WARM_UP_ROUNDS + rounds):
        yield list(kept)
    for _ in range(rounds):
        if names := [name for name, times in kept.items() if len(times) < rounds]:
            yield names


@dataclass
class Run:
    """What of one variant is timed in one mode.

    calls: one for each set, recorded ones in graphs; host_us: how long the host takes for one;
    error: how far recorded answers were off; burst: how many eager calls are timed at once
    """

    calls: list[Callable[[], Any]]
    before: Callable[[int], None] | None
    host_us: float = 0.0
    error: float = 0.0
    burst: int = MAX_BURST
    turn: int = 0

    def time(self, device: GpuDevice, mode: str) -> float:
        index = self.turn % len(self.calls)
        self.turn += 1
        if self.before:
            self.before(index)
        if mode == "eager":
            return device.burst_us(self.calls[index:] + self.calls[:index], self.burst)
        return device.held_us(self.calls[index], self.host_us)


def _prepare_all(
    device: GpuDevice, case: Case, variants: Sequence[Variant], mode: str, on_variant: OnVariant
) -> tuple[dict[str, Run], list[Failure]]:
    """The runs of all variants that can be measured in this mode, by name."""
    runs: dict[str, Run] = {}
    failures: list[Failure] = []
    for variant in variants:
        if mode not in variant.modes:
            continue
        on_variant(variant.name)
        run, error = attempt(device, lambda v=variant: _prepare(device, case, v, mode))
        if run is not None:
            of_all = device.agree((run.error, run.burst))
            run.error = max(off for off, _ in of_all)
            run.burst = min(burst for _, burst in of_all)
            error = _wrong(run.error, case) if variant.answers else None
        if run is not None and error is None:
            runs[variant.name] = run
        else:
            failures.append(Failure(variant.name, mode, error or ""))
    return runs, failures


def _prepare(device: GpuDevice, case: Case, variant: Variant, mode: str) -> Run:
    """A variant's run, called once on every set; recorded answers are checked."""
    run = Run([], variant.before)
    for index, call in enumerate(variant.calls):
        if variant.before:
            variant.before(index)
        timed = call
        if mode == "graph":
            timed, answer = device.record(call)
            if variant.answers:
                poison(answer)
            if variant.before:
                variant.before(index)
        run.host_us = max(run.host_us, device.warm_us(timed))
        if mode == "graph" and variant.answers:
            run.error = max(run.error, case.error(index, answer))
        run.calls.append(timed)
    if mode == "eager":
        once_us = max(device.burst_us(run.calls, 1), 1.0)
        run.burst = max(1, min(MAX_BURST, int(BURST_US / once_us)))
    return run
