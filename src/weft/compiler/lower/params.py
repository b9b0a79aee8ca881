"""What the plan says of any kernel: its signals, and its slot, from first credit to last finish."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir import core, core_in_plan
from weft.ir.device import Channel, Launch, Plan


def announced(plan: Plan, launch: Launch) -> list[Channel]:
    """The channels that a launch announces."""
    return [one for one in plan.of(Channel) if one.name in launch.announces]


def signals(plan: Plan, launch: Launch, channel: Channel, *arrays: str) -> core.Param:
    """The words of a channel: who notifies and awaits them, and which arrays they announce."""
    by, to = core_in_plan.of_signals(plan, launch, channel)
    return core.Param(channel.name, "signals", by, to, arrays or (channel.buffer,))


def around(plan: Plan, launch: Launch) -> Iterator[core.Param]:
    """What every kernel is given beside its arrays."""
    yield core.Param("slot", "slot", *core_in_plan.of_slot(plan, launch))
    yield core.Param("world", "world")


def begun(
    plan: Plan, launch: Launch, mapping: core.Mapping, formula: str, template: str = "gemm", *,
    is_credited: bool = True,
) -> Iterator[core.Statement]:  # fmt: skip
    """What stands between a kernel's own parameters and its first hook; `is_credited`: before it
    writes to other ranks, all of it waits until they are done with the call before."""
    yield from around(plan, launch)
    yield mapping
    yield core.Template(template, launch.tile, formula)
    if is_credited:
        yield from credited(launch)


def credited(launch: Launch, slot: str = "begin") -> Iterator[core.Credit]:
    if launch.takes:
        yield core.Credit(slot, "slot")


def ended(launch: Launch, slot: str) -> Iterator[core.Finish]:
    if launch.gives:
        yield core.Finish(slot, "slot")
