"""Run litmus programs on a world, on GPUs or emulated: how often was each outcome seen?"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from axiomatic import Litmus, Outcome, allowed_outcomes
from kernel_source import CELL_WORDS, kernel_of

# Registers are counted in a base larger than any value they take.
BASE = 8
NOISE_WORDS = 0x200000 + (1 << 16)


@dataclass(frozen=True)
class Effort:
    """`launches` times `lanes` times `iterations` instances; `stress` programs on each rank."""

    lanes: int = 32
    iterations: int = 1024
    launches: int = 32
    stress: int = 32
    max_delay: int = 512

    @property
    def instances(self) -> int:
        return self.lanes * self.iterations * self.launches


@dataclass(frozen=True)
class Verdict:
    """What was seen of one program, against what the model allows."""

    name: str
    instances: int
    seen: dict[Outcome, int]
    allowed: set[Outcome]
    weak_allowed: bool
    weak_seen: int

    @property
    def forbidden_seen(self) -> dict[Outcome, int]:
        return {outcome: n for outcome, n in self.seen.items() if outcome not in self.allowed}

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "instances": self.instances,
            "weak_allowed": self.weak_allowed,
            "weak_seen": self.weak_seen,
            "outcomes_seen": {str(k): n for k, n in sorted(self.seen.items())},
            "outcomes_allowed": len(self.allowed),
            "forbidden_seen": {str(k): n for k, n in self.forbidden_seen.items()},
        }


class Bench:
    """The symmetric memory that all litmus programs of one world share."""

    def __init__(self, world: Any, effort: Effort, max_locations: int = 3, max_registers: int = 4):
        self.world, self.effort = world, effort
        instances = effort.lanes * effort.iterations
        words = instances * max_locations * CELL_WORDS
        self.cells = world.zeros(words, torch.int32, name="cells")
        self.gates = world.zeros(effort.lanes * 32, torch.int32, name="gates")
        self.out = world.zeros(instances * max_registers, torch.int32, name="registers")
        self.noise = world.zeros(NOISE_WORDS, torch.int32, name="noise")

    def roles(self, test: Litmus) -> torch.Tensor | None:
        """Row 0: which thread each program of this rank runs, -1 for stress; row 1: its lane."""
        here = [i for i, thread in enumerate(test.threads) if thread.rank == self.world.rank]
        pairs = [(role, lane) for lane in range(self.effort.lanes) for role in here]
        pairs += [(-1, 0)] * self.effort.stress
        if not pairs:
            return None
        return torch.tensor(pairs, dtype=torch.int32, device=self.world.device).t().contiguous()

    def launch(self, kernel: Any, roles: torch.Tensor | None, seed: int) -> None:
        if roles is None:
            return
        kernel[(roles.shape[1],)](
            self.world.arg, self.cells, self.gates, self.out, roles, self.noise,
            self.effort.iterations, seed, self.effort.max_delay, 0, num_warps=1,
        )  # fmt: skip

    def run(self, test: Litmus, meet: Any) -> Verdict | None:
        """All instances of one program; `meet()` is a host barrier. Rank 0 has the verdict."""
        kernel, roles = kernel_of(test), self.roles(test)
        seen: Counter[Outcome] = Counter()
        size = max(1, len(test.registers))
        for number in range(self.effort.launches):
            self.cells.zero_()
            self.gates.zero_()
            self.out.fill_(BASE - 1)
            meet()
            self.launch(kernel, roles, 1 + number * 104729 + self.world.rank)
            meet()
            if self.world.rank == 0:
                seen.update(self._count(size))
        self.world.check()
        if self.world.rank != 0:
            return None
        allowed = allowed_outcomes(test)
        names = test.registers

        def is_weak(outcome: Outcome) -> bool:
            return all(outcome[names.index(name)] == value for name, value in test.weak.items())

        return Verdict(
            test.name,
            self.effort.instances,
            dict(seen),
            allowed,
            any(map(is_weak, allowed)),
            sum(n for outcome, n in seen.items() if is_weak(outcome)),
        )

    def _count(self, size: int) -> dict[Outcome, int]:
        instances = self.effort.lanes * self.effort.iterations
        rows = self.out[: instances * size].view(instances, size).long()
        codes = torch.zeros(instances, dtype=torch.int64, device=rows.device)
        for register in range(size):
            codes = codes * BASE + rows[:, register].clamp(0, BASE - 1)
        values, counts = codes.unique(return_counts=True)
        return {
            tuple((code // BASE ** (size - 1 - i)) % BASE for i in range(size)): n
            for code, n in zip(values.tolist(), counts.tolist())
        }
