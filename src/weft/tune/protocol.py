"""How variants are measured side by side: checked first, then in turns, A B C A B C.

A variant that raises, answers wrongly or cannot be measured is reported and left out; the others
go on. What hangs is ended by whoever watches this process (`supervision`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft.base.errors import PoisonedError, TimeoutError, WeftError
from weft.tune.answers import poison
from weft.tune.case import Case
from weft.tune.device import Device
from weft.tune.figures import Times
from weft.tune.variants import Variant

ROUNDS = 9
MIN_ROUNDS = 7
WARM_UP_ROUNDS = 2

Told = Callable[[str], None]


class FatalError(WeftError):
    """The device or the world is no longer usable: the process must be started again."""


@dataclass(frozen=True)
class Failure:
    """Why a variant has no time: in which mode (None: in all), and what it said."""

    variant: str
    mode: str | None
    error: str


def attempt(device: Device, what: Callable[[], Any]) -> tuple[Any, str | None]:
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


def check(device: Device, case: Case, variant: Variant) -> tuple[float | None, str | None]:
    """The worst relative error over all sets and ranks, and what is wrong if anything is."""

    def call_all() -> float:
        worst = 0.0
        for index, call in enumerate(variant.calls):
            case.poison_free_memory()
            if variant.before:
                variant.before(index)
            device.warm_us(call)
            if variant.before:
                variant.before(index)
            out = call()
            device.settle()
            if variant.answers:
                worst = max(worst, case.error(index, out))
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
    device: Device,
    case: Case,
    variants: Sequence[Variant],
    mode: str,
    *,
    rounds: int = ROUNDS,
    told: Told = lambda name: None,
) -> tuple[dict[str, Times], list[Failure]]:
    """Interleaved rounds in one mode; each time is the slowest rank's.

    `told` hears the name of each variant before it runs, for whoever watches.
    """
    failures: list[Failure] = []
    runs: dict[str, list[Callable[[], Any]]] = {}
    hosts: dict[str, float | None] = {}
    for variant in variants:
        if mode not in variant.modes:
            continue
        told(variant.name)
        made, error = attempt(device, lambda v=variant: _prepare(device, case, v, mode))
        if error is None:
            worst = max(device.agree(made[2]))
            error = _wrong(worst, case) if variant.answers else None
        if error is None:
            runs[variant.name], hosts[variant.name] = made[0], made[1]
        else:
            failures.append(Failure(variant.name, mode, error))
    if mode == "eager":
        hosts = dict.fromkeys(hosts, None)
    befores = {variant.name: variant.before for variant in variants}
    table = [[math.nan] * len(runs) for _ in range(rounds)]
    for number in range(-WARM_UP_ROUNDS, rounds):
        for column, (name, calls) in enumerate(runs.items()):
            told(name)
            index = number % len(calls)
            if before := befores[name]:
                before(index)
            if case.is_swept:
                device.sweep()
            took = device.time_us(calls[index], hosts[name])
            if number >= 0:
                table[number][column] = took
    slowest = device.slowest(table)
    times = {}
    for column, name in enumerate(runs):
        kept = tuple(row[column] for row in slowest if row[column] == row[column])
        if len(kept) >= min(MIN_ROUNDS, rounds):
            times[name] = Times(kept)
        else:
            lost = f"{rounds - len(kept)} of {rounds} rounds are lost: the host's time showed"
            failures.append(Failure(name, mode, lost))
    return times, failures


def _prepare(
    device: Device, case: Case, variant: Variant, mode: str
) -> tuple[list[Callable[[], Any]], float, float]:
    """What is timed for each set, how long the host takes, and how far recorded answers are off."""
    runs, host, worst = [], 0.0, 0.0
    for index, call in enumerate(variant.calls):
        if variant.before:
            variant.before(index)
        if mode == "graph":
            run, answer = device.record(call)
            poison(answer if variant.answers else None)
            if variant.before:
                variant.before(index)
            host = max(host, device.warm_us(run))
            if variant.answers:
                worst = max(worst, case.error(index, answer))
        else:
            run = call
            host = max(host, device.warm_us(run))
        runs.append(run)
    return runs, host, worst
