"""Every way of calling an operator that multiplies tokens with their experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

import weft
from weft.base.card import Op
from weft.base.dtypes import tolerance
from weft.base.target import TARGETS
from weft.language import triton_api
from weft.tools.check import rel_err
from weft.verify import compiled


def problem_for(op: Op, num_ranks: int, m: int, dtype: str = "float32", nodes=(), **fields: Any):
    sizes = {"k": 24, "experts": 5, "top_k": 2, "tile_m": 16, **fields}
    return op.problem(m, 40, num_ranks, dtype, nodes, **sizes)


def small(op: Op, problem: Any, **changes: Any) -> Any:
    """Several columns of tiles, the last of them ragged."""
    first = next(iter(op.candidates(problem, TARGETS["emu"])))
    return replace(first, **{"tile_n": 16, "tile_k": 16, **changes})


def check(op: Op, out: torch.Tensor, problem: Any, rank: int, seed: int = 0) -> None:
    inputs = [op.make_inputs(problem, other, seed) for other in range(problem.num_ranks)]
    expected = op.reference(problem, inputs)[rank]
    terms = problem.k * problem.num_ranks * problem.top_k
    assert rel_err(out, expected) <= tolerance(problem.dtype, terms)


def call_once(op: Op, problem: Any, config: Any = None) -> Callable[[], torch.Tensor]:
    """On one rank: one call, held to the reference."""

    def main() -> torch.Tensor:
        world = weft.init()
        out = op.run(world, problem, op.make_inputs(problem, world.rank), config)
        check(op, out, problem, world.rank)
        return out

    return main


def call_in_turns(op: Op, problem: Any, config: Any) -> Callable[[], torch.Tensor]:
    """On one rank: eager; then a recording replayed with other tokens and tables each time, with
    calls of another shape in between. Gives the first result."""
    other = replace(problem, m=problem.m + 9, n=17)

    def main() -> torch.Tensor:
        world = weft.init()
        inputs = [op.make_inputs(problem, world.rank, seed) for seed in range(2)]
        kept = {name: value.clone() for name, value in inputs[0].items()}
        first = op.run(world, problem, kept, config).clone()
        check(op, first, problem, world.rank)
        with world.record() as recording:
            out = op.run(world, problem, kept, config)
        for seed, one in enumerate(inputs):
            for name, value in one.items():
                kept[name].copy_(value)
            out.fill_(torch.nan)
            recording.replay()
            check(op, out.clone(), problem, world.rank, seed)
            mine = op.make_inputs(other, world.rank)
            check(op, op.run(world, other, mine), other, world.rank)
        world.close()
        return first

    return main


def check_kernel(op: Op, problem: Any, target_name: str, only: Sequence[str] = ()) -> None:
    """The kernels, or those of these names, which compile for a target, keep their waits, and fetch
    operands ahead."""
    target = TARGETS[target_name]
    kernels = op.kernels(problem, None, target)
    found = [one for one in kernels if not only or one[1].name in only]
    assert len(found) >= len(only)
    for fn, record in found:
        binary = triton_api.compile_kernel(fn, record, target)
        report = compiled(binary, target)
        assert report.ok, "\n".join(map(str, report.findings))
        if target.backend == "cuda" and record.name.endswith("multiply"):
            assert "cp.async" in binary.asm["ptx"] and "st.local" not in binary.asm["ptx"]
