"""The parameters of a kernel that the plan has more to say of: its signals, and its slot."""

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
