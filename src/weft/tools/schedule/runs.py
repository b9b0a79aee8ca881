"""A call of an operator on the emulator, with its clock on: the schedule of what happened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from weft.base.counts import counted
from weft.base.errors import UsageError
from weft.base.target import TARGETS, Target
from weft.tools.check import Work
from weft.tools.words import shape_text

if TYPE_CHECKING:
    from weft.compiler import Compiled
    from weft.compiler.facts import Facts
    from weft.emulator.timeline import Timeline


def timed_call(work: Work, config: Any, hardware: str, *, seed: int, num_sms: int) -> Timeline:
    """One eager call under the schedule of `seed`, in the times of `hardware`.

    Raises  FindingError: what the emulator found; UsageError: no such hardware
    """
    import weft

    inputs = [work.inputs(rank, seed) for rank in range(work.num_ranks)]

    def call(rank: int) -> None:
        world = weft.init()
        work.op.run(world, work.problem(), inputs[rank], config)
        world.synchronize()

    with weft.emulated(
        work.num_ranks, work.nodes or 1, seed, num_sms, hardware=hardware
    ) as session:
        session.run(call)
    return session.timeline


def timed_program(
    compiled: Compiled, facts: Facts, hardware: str, *, seed: int, num_sms: int
) -> Timeline:
    """The same of a call of a user's program with random operands, lowered to what overlaps."""
    import torch

    import weft
    from weft.compiler.lower.unfused import local_sizes
    from weft.compiler.passes.allocate import extent_of

    overlapped = compiled.options(lowering="overlapped")
    inputs = [one.type for one in compiled.stages.program.tasks if one.kind == "input" and one.type]

    def operands(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(seed * facts.num_ranks + rank)
        found = []
        for one in inputs:
            sizes = [extent_of(size, facts.sizes, rank, facts.num_ranks)
                     for size in local_sizes(one)]  # fmt: skip
            dtype = getattr(torch, one.dtype)
            found.append(torch.randn(sizes, generator=generator).to(dtype))
        return found

    def call(rank: int) -> None:
        world = weft.init()
        overlapped(*operands(rank), world=world, **facts.sizes)
        world.synchronize()

    nodes = facts.nodes or 1
    with weft.emulated(facts.num_ranks, nodes, seed, num_sms, hardware=hardware) as session:
        session.run(call)
    return session.timeline


def config_for(work: Work, transport: str, target: Target = TARGETS["emu"]) -> Any:
    """The configuration that is taken unmeasured; or the first by `transport`.

    Raises  UsageError: the operator knows no such transport here, with those it knows
    """
    configs = list(work.op.candidates(work.problem(), target))
    if not transport:
        return configs[0] if configs else None
    known = [getattr(config, "transport", "") for config in configs]
    if transport not in known:
        there = ", ".join(dict.fromkeys(filter(None, known))) or "one way only"
        raise UsageError(
            f"--transport {transport}: {work.op.name} knows {there} for "
            f"{shape_text(work.shape)} on {counted(work.num_ranks, 'rank')}, {target}"
        )
    return configs[known.index(transport)]


def notes_of(work: Work, config: Any) -> Sequence[str]:
    """What was called, in words: sizes and dtype, and the configuration's fields."""
    where = f" on {len(work.nodes)} nodes" if len(work.nodes) > 1 else ""
    lines = [f"{shape_text(work.shape)}, {work.dtype}, {counted(work.num_ranks, 'rank')}{where}"]
    if config is not None:
        fields = ", ".join(f"{name}={value}" for name, value in vars(config).items())
        lines.append(f"configuration: {fields}")
    return lines
