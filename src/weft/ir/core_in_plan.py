"""What a plan says of its kernels, and the rules by which a kernel of Core IR fits into its plan.

    launch(gemm_rs_multiply, .., awaits=(partials_ready,), announces=(partials_ready,), takes=True)
    ->  partials_ready = param(signals, by=kernel, to=kernel, announces=(partials,))
        slot = param(slot, by=kernel, to=gemm_rs_reduce)

`core_rules.py` holds a kernel to what its parameters say; here these are held to the plan. So a
signal that a kernel notifies is awaited by some step of the plan, and the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.base.place import Place
from weft.ir import text
from weft.ir.core import ARRIVALS, ENGINE, KERNEL, RELAY, Hook, Kernel, Param
from weft.ir.device import Channel, Copy, Launch, Plan, Step, announced, awaited, is_relay
from weft.ir.legality import Rule, Violation, legal, run


def of_signals(plan: Plan, launch: Launch, channel: Channel) -> tuple[str, str]:
    """(who notifies a channel, who waits for it), as a kernel's parameter names them."""
    gives = [step for step in plan.steps if channel.name in announced(step)]
    takes = [step for step in plan.steps if channel.name in awaited(step)]
    return _party(gives, launch), _party(takes, launch)


def of_slot(plan: Plan, launch: Launch) -> tuple[str, str]:
    """(who waits for the slot's credits, who ends the call on it), the same."""
    takes = [step for step in plan.steps if getattr(step, "takes", False)]
    gives = [step for step in plan.steps if getattr(step, "gives", False)]
    return _party(takes, launch), _party(gives, launch)


def _party(steps: list[Step], launch: Launch) -> str:
    if launch in steps:
        return KERNEL
    if any(isinstance(one, Copy) for one in steps):
        return ENGINE
    if steps and all(map(is_relay, steps)):
        return RELAY
    return _title(steps[0]) if steps else ""


def awaited_by(plan: Plan, launch: Launch, channel: Channel) -> str:
    """The step before a launch that has waited for all words of a channel; "" where none has."""
    before = [step for step in plan.steps[: plan.steps.index(launch)] if not is_relay(step)]
    return next((_title(step) for step in before if channel.name in awaited(step)), "")


def _title(step: Step) -> str:
    return step.kernel if isinstance(step, Launch) else text.word(type(step))


# ---------------------------------------------------------------------------------------------
# What is legal

_Fit = tuple[Plan, Launch, Kernel]


def _ends(fit: _Fit) -> Iterator[tuple[str, Place]]:
    plan, launch, kernel = fit
    channels = {one.name: one for one in plan.of(Channel)}
    for one in kernel.of(Param):
        by, to = one.by, one.to
        if one.sort == "slot":
            by, to = of_slot(plan, launch)
        elif one.sort == "signals" and one.name in channels:
            by, to = of_signals(plan, launch, channels[one.name])
        if (by, to) != (one.by, one.to):
            message = f"{one.name} of {kernel.name} has by={one.by or 'nobody'}, to="
            message += f"{one.to or 'nobody'}; in plan {plan.name} it is by={by or 'nobody'}"
            yield f"{message}, to={to or 'nobody'}", one.place


def _announced(fit: _Fit) -> Iterator[tuple[str, Place]]:
    plan, _, kernel = fit
    params = {one.name for one in kernel.of(Param)}
    channels = {one.name: one for one in plan.of(Channel)}
    for one in kernel.of(Param):
        if one.sort == "signals" and one.name in channels:
            channel = channels[one.name]
            named = (channel.buffer, *channel.along)
            holds = {*named, *(f"{name}_ptr" for name in named)} & params
            if {*one.announces} != holds:
                message = f"{one.name} of {kernel.name} announces {_listed(one.announces)}"
                yield (
                    f"{message}; in plan {plan.name} it announces {_listed(sorted(holds))}",
                    one.place,
                )


def _listed(names: tuple[str, ...] | list[str]) -> str:
    return ", ".join(names) or "nothing"


def _complete(fit: _Fit) -> Iterator[tuple[str, Place]]:
    plan, launch, kernel = fit
    params = {one.name for one in kernel.of(Param) if one.sort in ("signals", "packets")}
    for channel in plan.of(Channel):
        name = channel.buffer if channel.by == "packet" else channel.name
        verbs = [verb for verb, names in (("waits for", launch.awaits),
                 ("announces", launch.announces)) if channel.name in names]  # fmt: skip
        if verbs and name not in params:
            message = f"{launch.kernel} {' and '.join(verbs)} {channel.name} in plan {plan.name}"
            yield f"{message}, and its kernel has no parameter {name}", kernel.place
    channels = {one.name for one in plan.of(Channel)}
    for one in kernel.of(Param):
        # Words that an engine copies, which announce nothing themselves, are no channel.
        is_joined = one.to == KERNEL or (one.by == KERNEL and one.announces)
        if one.sort == "signals" and is_joined and one.name not in channels:
            message = f"{kernel.name} notifies or awaits {one.name}, which is no channel of plan "
            yield f"{message}{plan.name}", one.place


def _before(fit: _Fit) -> Iterator[tuple[str, Place]]:
    plan, launch, kernel = fit
    params = {one.name: one for one in kernel.of(Param)}
    announced_here = {name for one in params.values() for name in one.announces}
    for hook in kernel.of(Hook):
        at, _ = ARRIVALS.get(hook.function, (None, ""))
        if at is None or hook.args[at] in announced_here:
            continue
        one = params[hook.args[at]]
        found = [awaited_by(plan, launch, each) for each in plan.of(Channel)
                 if one.name in (each.buffer, *each.along)]  # fmt: skip
        if one.by not in found or not one.by:
            message = (
                f"{hook.function} reads {one.name}, which {one.by or 'nobody'} is to have waited"
            )
            message += f" for; in plan {plan.name} before {kernel.name} that was {_listed(found)}"
            yield message, hook.place


RULES = (
    Rule("ends", "whom a signal joins is the plan's to say", _ends),
    Rule("announced", "what a word announces is written behind another one's wait", _announced),
    Rule("complete", "what a launch waits for and announces its kernel does", _complete),
    Rule("before", "what a kernel does not wait for a step before it has waited for", _before),
)


def check(plan: Plan, launch: Launch, kernel: Kernel) -> list[Violation]:
    """Every breach of what the plan says of a kernel; the kernel itself is legal."""
    return run(RULES, (plan, launch, kernel), ("",))


def require(plan: Plan, launch: Launch, kernel: Kernel) -> Kernel:
    """The kernel. Raises  IllegalError: with all breaches, and the user's lines"""
    title = f"Core IR of {kernel.name} in plan {plan.name}"
    return legal(title, kernel, check(plan, launch, kernel))
