"""A compiled kernel and its launch as plain, JSON-serialisable records."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field

# Of the plan that `weft compile -o` writes: it changes when what a loader must know does.
PLAN_FORMAT = 2


@dataclass(frozen=True)
class KernelRecord:
    """One kernel specialised for one target.

    `signature` maps each argument name to Triton's type word ("*bf16", "i32", "constexpr",
    or a nested list for a tuple); `constants` maps argument names to values.
    `divisible_by_16` names arguments, or "argument.field" of a named tuple among the constants.
    """

    name: str
    signature: dict[str, object]
    constants: dict[str, object] = field(default_factory=dict)
    options: dict[str, object] = field(default_factory=dict)
    divisible_by_16: tuple[str, ...] = ()

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class LaunchRecord:
    """One launch of a plan: which kernel, over which grid, on which stream, in which role."""

    kernel: KernelRecord
    grid: tuple[int, ...]
    stream: str = "main"
    cooperative: bool = False

    def to_json(self) -> dict[str, object]:
        return asdict(self)
