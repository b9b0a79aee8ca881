"""A device whose clock is a script, and a case whose right answers are 1: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from weft.base.errors import WeftError
from weft.tune.answers import rel_err
from weft.tune.device import LOST


class FakeCase:
    """Right answers are 1, in two sets; `tolerance` as for bf16."""

    tolerance = 0.01
    is_swept = False

    def __init__(self) -> None:
        self.expected = [torch.ones(4), torch.ones(4)]

    def error(self, index: int, out: torch.Tensor) -> float:
        return rel_err(out, self.expected[index])

    def poison_free_memory(self) -> None:
        pass


class FakeDevice:
    """One of two ranks; the other is `slower` by so much and agrees with everything.

    `log` holds what was timed, in order. A timed call's duration is its `us`, or the next of them.
    """

    def __init__(self, slower: float = 0.0) -> None:
        self.slower = slower
        self.log: list[str] = []
        self.bursts: list[int] = []
        self.num_settled = 0
        self.poisoned = False

    def warm_us(self, call: Callable[[], Any]) -> float:
        call()
        return getattr(call, "host", 5.0)

    def held_us(self, call: Any, host_us: float) -> float:
        call()
        self.log.append(call.name)
        took = call.us.pop(0) if isinstance(call.us, list) else call.us
        return took if took is not None else LOST

    def burst_us(self, calls: Sequence[Any], count: int) -> float:
        self.bursts.append(count)
        return self.held_us(calls[0], 0.0)

    def host_us(self, calls: Sequence[Callable[[], Any]]) -> float:
        return 7.0

    def record(self, call: Any) -> tuple[Any, Any]:
        return call, call()

    def slowest(self, times: list[list[float]]) -> list[list[float]]:
        return [[cell + self.slower for cell in row] for row in times]

    def agree(self, value: Any) -> list[Any]:
        return [value, value]

    def sweep(self) -> None:
        self.log.append("sweep")

    def settle(self) -> None:
        self.num_settled += 1
        if self.poisoned:
            raise WeftError("CUDA error: an illegal memory access was encountered")


class Call:
    """A call that takes `us` and answers `answer`, or raises it."""

    def __init__(self, name: str, us: Any, answer: Any = 1.0, host: float = 5.0) -> None:
        self.name, self.us, self.answer, self.host = name, us, answer, host

    def __call__(self) -> torch.Tensor:
        if isinstance(self.answer, Exception):
            raise self.answer
        return torch.full((4,), float(self.answer))
