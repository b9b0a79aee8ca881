"""Every way of calling an operator that moves rows by channels, held against its reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from effort import slow_but

import weft
from weft.base.card import Op
from weft.base.dtypes import tolerance
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.verify import compiled

EMU = TARGETS["emu"]

# Targets, and whether kernels of every transport compile for them: for one of each family.
COMPILED = slow_but(
    [("emu", True), ("cuda:90", False)],
    [("cuda:90", True), ("hip:gfx942", True), *((name, False) for name in TARGETS)],
)

# Nodes by their sizes: every number of ranks that the operators promise, even and uneven nodes.
NODES = [(1,), (2,), (3,), (4,), (8,), (2, 2), (1, 3), (3, 2), (2, 1, 1), (4, 4)]
# Of these the largest and most uneven ones are tried in more time than a laptop has.
MORE_NODES = [(8,), (3, 2), (2, 1, 1), (4, 4)]
# What is chosen between nodes alone; within one it is tried for its own sake.
BETWEEN_NODES = ("relay",)


def configs(op: Op, problem: Any) -> Iterator[Any]:
    """A configuration for each transport that reaches all ranks; blocks are small: several."""
    for config in op.candidates(problem, EMU):
        yield replace(config, block=32)


def transports(op: Op, nodes: Sequence[int]) -> list[str]:
    problem = op.make_problem(sum(nodes), op.default_shape, op.dtypes[0], tuple(nodes))
    return [config.transport for config in op.candidates(problem, EMU)]


def cases(op: Op, shapes: Sequence[Mapping[str, int]]) -> list[Any]:
    """Nodes x transports; the shapes take turns, and every transport meets each of them."""
    found, turns = [], dict.fromkeys(op.problem.transports, 0)
    for nodes in NODES:
        for i, transport in enumerate(transports(op, nodes)):
            is_first = nodes == (8,) and i == 0
            is_elsewhere = transport in BETWEEN_NODES and len(nodes) == 1 and nodes != (3,)
            is_slow = is_elsewhere or (nodes in MORE_NODES and not is_first)
            shape = shapes[turns[transport] % len(shapes)]
            turns[transport] += 1
            name = f"{'+'.join(map(str, nodes))}-{transport}-{'x'.join(map(str, shape.values()))}"
            marks = [pytest.mark.slow] * is_slow
            found.append(pytest.param(nodes, transport, shape, id=name, marks=marks))
    return found


class Caller:
    """One operator on `nodes`, by one transport, in all the ways it is called.

    `exact` says whether results are bitwise those of the reference.
    """

    def __init__(self, op: Op, nodes: Sequence[int], transport: str, exact: bool = True) -> None:
        self.op, self.nodes, self.transport, self.exact = op, tuple(nodes), transport, exact

    @property
    def num_ranks(self) -> int:
        return sum(self.nodes)

    def problem(self, shape: Mapping[str, int], dtype: str) -> Any:
        return self.op.make_problem(self.num_ranks, shape, dtype, self.nodes)

    def call(self, world: Any, problem: Any) -> Any:
        config = next(c for c in configs(self.op, problem) if c.transport == self.transport)
        inputs = self.op.make_inputs(problem, world.rank)
        return self.op.run(world, problem, inputs, config)

    def check(self, world: Any, problem: Any, out: Any) -> None:
        inputs = [self.op.make_inputs(problem, rank) for rank in range(self.num_ranks)]
        expected = self.op.reference(problem, inputs)[world.rank]
        for got, want in zip(_parts(out), _parts(expected), strict=True):
            assert got.shape == want.shape and got.dtype == want.dtype
            if self.exact:
                assert _same_bits(got, want)
            elif want.numel():
                error = (got.double() - want.double()).norm() / want.double().norm()
                assert error <= tolerance(problem.dtype, self.num_ranks)

    def every_way(self, shape: Mapping[str, int], dtype: str) -> Callable[[], None]:
        """Eager, recorded and replayed, another shape in between, eager again; on one rank."""
        problem = self.problem(shape, dtype)
        other = self.problem({**shape, "m": shape["m"] + 5, "n": shape["n"] // 2 + 1}, dtype)

        def main() -> None:
            world = weft.init()
            self.check(world, problem, self.call(world, problem))
            with world.record() as recording:
                out = self.call(world, problem)
            for _ in range(3):
                _spoil(out)
                recording.replay()
                self.check(world, problem, out)
            self.check(world, other, self.call(world, other))
            _spoil(out)
            recording.replay()
            self.check(world, problem, out)
            for _ in range(2):
                self.check(world, problem, self.call(world, problem))
            world.close()

        return main

    def in_turns(self, shapes: Sequence[Mapping[str, int]], dtype: str) -> Callable[[], None]:
        """Eager calls with these shapes, one after the other, nothing between them."""
        problems = [self.problem(shape, dtype) for shape in shapes]

        def main() -> None:
            world = weft.init()
            outs = [self.call(world, problem) for problem in problems]
            for problem, out in zip(problems, outs, strict=True):
                self.check(world, problem, out)
            world.close()

        return main


def one_slot_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call uses the slot of the call before: only credits keep them apart."""
    monkeypatch.setenv("WEFT_SLOTS", "1")


def check_kernels(
    op: Op,
    target_name: str,
    every: bool,
    shape: Mapping[str, int],
    dtype: str,
    in_place: bool = False,
) -> None:
    """Kernels compile for a target, and pass the check after compilation: of the transport to take
    first, or of every one, and of rows of odd length, which are moved element by element.
    """
    target = TARGETS[target_name]
    problem = op.make_problem(4, {**op.default_shape, **shape}, dtype, (4,))
    if in_place:
        problem = replace(problem, in_place=True)
    odd = replace(problem, n=7)
    asked = [
        (problem, config)
        for config in op.candidates(problem, target)
        if config.reads_in_place or not in_place
    ]
    asked += [(odd, next(iter(op.candidates(odd, target))))]
    for one, config in asked if every else asked[:1]:
        for fn, record in op.kernels(one, config, target):
            binary = triton_api.compile_kernel(fn, record, target)
            if target.backend == "emu":
                continue
            report = compiled(binary, target)
            assert report.ok, "\n".join(map(str, report.findings))
            if target.backend == "cuda":
                assert "st.local" not in binary.asm["ptx"]


def _parts(value: Any) -> Sequence[torch.Tensor]:
    return value if isinstance(value, (tuple, list)) else (value,)


def _same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    return torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))


def _spoil(value: Any) -> None:
    for part in _parts(value):
        part.view(torch.uint8).fill_(0x77)
