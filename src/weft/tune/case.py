"""One point of a benchmark on one rank: the problem, inputs in several sets, and right answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from weft.base.card import Op
from weft.base.dtypes import DTYPES, tolerance
from weft.tune.answers import poison, rel_err

MAX_SETS = 3


class Case:
    """Inputs drawn on the device, more of them than L2 holds, and each set's right answer.

    `sets[i]` are this rank's inputs; `is_swept`: even all sets would stay in L2, so that it must
    be swept between calls.
    """

    def __init__(self, world: Any, card: Op, problem: Any, l2_bytes: int) -> None:
        self.world, self.card, self.problem = world, card, problem
        self.sets: list[Mapping[str, Any]] = []
        self.expected: list[Any] = []
        count = MAX_SETS
        while len(self.sets) < count:
            self._draw_set()
            set_bytes = sum(x.nbytes for x in self.sets[0].values() if hasattr(x, "nbytes"))
            count = 2 if set_bytes > l2_bytes else MAX_SETS
        self.is_swept = set_bytes * count < 2 * l2_bytes

    @property
    def group(self) -> Any:
        """The process group that baselines talk over; None is the default one."""
        return getattr(self.world.backend, "group", None)

    @property
    def tolerance(self) -> float:
        return tolerance(self._out_dtype, getattr(self.problem, "k", 1))

    @property
    def _out_dtype(self) -> str:
        """What results are rounded to: of fp8 operands something else."""
        return getattr(self.problem, "out_dtype", self.problem.dtype)

    def _draw_set(self) -> None:
        world, seed = self.world, len(self.sets)
        everyone = [
            drawn_on(world.device, self.card.make_inputs, self.problem, rank, seed)
            for rank in range(world.num_ranks)
        ]
        with _exact_products(self.problem.dtype):
            expected = drawn_on(world.device, self.card.reference, self.problem, everyone)
            self.expected.append(expected[world.rank])
        self.sets.append(everyone[world.rank])

    def error(self, index: int, out: Any) -> float:
        """How far an answer for set `index` is off."""
        return rel_err(out, self.expected[index])

    def poison_free_memory(self) -> None:
        """What the allocator hands out next must not hold the last variant's right answer."""
        poison(_like(self.expected[0], getattr(torch, self._out_dtype)))


def _like(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, (tuple, list)):
        return [_like(one, dtype) for one in value]
    return torch.empty_like(value, dtype=dtype if value.is_floating_point() else value.dtype)


@contextmanager
def _exact_products(dtype: str):
    """Fast fp32 products of 16-bit operands: TF32 holds their every bit, and sums in fp32."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, DTYPES[dtype].itemsize == 2
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def drawn_on(device: torch.device, function: Any, *args: Any) -> Any:
    """`function(*args)` with what it makes, and draws from CPU generators, on `device` instead.

    Cards draw inputs on the CPU, the same on every machine; at a benchmark's sizes that takes
    minutes. Generators keep their seeds, so ranks on alike devices agree.
    """
    with torch.device(device), _DrawnOn(device):
        return function(*args)


class _DrawnOn(TorchFunctionMode):
    """Gives every factory call that names a generator one of the same seed on `device`."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.made: list[tuple[torch.Generator, torch.Generator]] = []

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if isinstance(kwargs.get("generator"), torch.Generator):
            kwargs["generator"] = self._alike(kwargs["generator"])
            kwargs["device"] = self.device
        return func(*args, **kwargs)

    def _alike(self, generator: torch.Generator) -> torch.Generator:
        for known, made in self.made:
            if known is generator:
                return made
        made = torch.Generator(self.device).manual_seed(generator.initial_seed())
        self.made.append((generator, made))
        return made
