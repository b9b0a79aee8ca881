"""A plan, compiled by the host's C compiler and run: ranks as processes over one mapping.

run = execute(plan, inputs)      inputs: of each rank, its parts by name
run.results[rank][name], run.counted[kernel], run.ns
"""

from __future__ import annotations

import mmap
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from weft.base.errors import ShapeError, TimeoutError, WeftError
from weft.manycore import emit
from weft.manycore.build import compile_c
from weft.manycore.lower import Plan
from weft.manycore.traffic import Traffic
from weft.manycore.values import View

# The runtime gives up a wait after a minute.
SECONDS = 300
POLL_S = 0.002


@dataclass(frozen=True)
class Counted:
    """What one kernel has moved on all ranks, and when it was through on the last of them."""

    name: str
    traffic: Traffic
    end_ns: float


@dataclass(frozen=True)
class Run:
    """Units   ns: of the simulated machine"""

    results: tuple[dict[str, torch.Tensor], ...]
    counted: tuple[Counted, ...]
    ns: float

    @property
    def traffic(self) -> Traffic:
        return sum((one.traffic for one in self.counted), Traffic())


def execute(
    plan: Plan, inputs: Sequence[Mapping[str, torch.Tensor]], *, sanitize: bool = False
) -> Run:  # fmt: skip
    """Run it. `sanitize`: under ThreadSanitizer, ranks as threads of one process.

    Raises  ShapeError: inputs that are not the plan's; WeftError: a rank that fails, with what it
            said; TimeoutError: one that does not end
    """
    binary = compile_c(plan.name, emit.source(plan), sanitize=sanitize)
    size = emit.rank_bytes(plan)
    shared = "/dev/shm" if Path("/dev/shm").is_dir() else None
    with tempfile.NamedTemporaryFile(dir=shared, prefix="weft_") as file:
        file.truncate(size * plan.num_ranks)
        with mmap.mmap(file.fileno(), size * plan.num_ranks) as mapping:
            memory = torch.frombuffer(mapping, dtype=torch.uint8)
            for rank, given in enumerate(inputs):
                for name, value in plan.inputs.items():
                    _fill(plan, memory, rank, name, value.name, given)
            _start(binary, file.name, plan, sanitize)
            results = tuple(
                {name: _part(plan, memory, rank, view).clone()
                 for name, view in plan.results.items()}
                for rank in range(plan.num_ranks)
            )  # fmt: skip
            counted = _counted(plan, memory)
            del memory
    return Run(results, counted, max((one.end_ns for one in counted), default=0.0))


def _start(binary: Path, file: str, plan: Plan, sanitize: bool) -> None:
    """Until all ranks have ended; of the first that fails what it said, and no others go on."""
    ranks = ["all"] if sanitize else [str(rank) for rank in range(plan.num_ranks)]
    with ExitStack() as files:
        said = {rank: files.enter_context(tempfile.TemporaryFile("w+")) for rank in ranks}
        started = {
            rank: subprocess.Popen([str(binary), file, rank], stderr=said[rank]) for rank in ranks
        }
        try:
            end = time.monotonic() + SECONDS
            while None in (codes := {rank: one.poll() for rank, one in started.items()}).values():
                if any(codes.values()):
                    break
                if time.monotonic() > end:
                    raise TimeoutError(f"{plan.name} has not ended after {SECONDS} s: {binary}")
                time.sleep(POLL_S)
        finally:
            for one in started.values():
                if one.poll() is None:
                    one.kill()
                one.wait()
        for rank, code in codes.items():
            if code:
                said[rank].seek(0)
                raise WeftError(f"{plan.name}, rank {rank}: exit code {code}\n{said[rank].read()}")


def _fill(
    plan: Plan, memory: torch.Tensor, rank: int, name: str, value: str,
    given: Mapping[str, torch.Tensor],
) -> None:  # fmt: skip
    view = next(one for one in plan.values if one.name == value)
    part = _part(plan, memory, rank, View(view, view.columns))
    if given[name].shape != part.shape or given[name].dtype != part.dtype:
        message = f"{tuple(given[name].shape)}, {given[name].dtype}"
        raise ShapeError(f"{plan.name}: {name} of rank {rank} is {message}; it takes "
                         f"{tuple(part.shape)}, {part.dtype}")  # fmt: skip
    part.copy_(given[name])


def _part(plan: Plan, memory: torch.Tensor, rank: int, view: View) -> torch.Tensor:
    """A view in a rank's memory, as a tensor."""
    dtype = getattr(torch, plan.dtype)
    value, size = view.value, view.value.itemsize
    start = rank * emit.rank_bytes(plan) + emit.header_bytes(plan) + value.offset
    start += view.first_row * value.pitch + view.first * size
    shape = view.num_rows.on(rank), view.columns.on(rank)
    elements = memory[: len(memory) // size * size].view(dtype)
    return elements.as_strided(shape, (value.pitch // size, 1), start // size)


def _counted(plan: Plan, memory: torch.Tensor) -> tuple[Counted, ...]:
    size, words = emit.rank_bytes(plan), emit.COUNTER_BYTES // 8
    found = []
    for i, kernel in enumerate(plan.kernels):
        traffic, end_ps = Traffic(), 0
        for rank in range(plan.num_ranks):
            first = rank * size + i * emit.COUNTER_BYTES
            numbers = memory[first : first + emit.COUNTER_BYTES].view(torch.int64).tolist()
            end_ps = max(end_ps, numbers[0])
            traffic += Traffic(*numbers[1:words])
        found.append(Counted(kernel.name, traffic, end_ps / 1000))
    return tuple(found)
