"""Say who waits for whom: streams, channels, credits; then leave out what nobody needs.

    copy(a, gathered, push, rows_ready)    ->    after(copy, main)
                                                 take(stream=copy)
                                                 copy(a, gathered, push, rows_ready)

A copy of what tiles leave takes a token of the kernel that stores them instead, and nothing before:
only the host's order says that it is behind that kernel. Where each of several launches leaves
some, a copy comes behind its launch.

All that could be needed is put in, by rule; then each wait, join and credit is taken out again for
as long as the table of legality finds no breach without it: what stream order or another channel
already gives is gone. All words are events that a call's epoch is stored to, each by one writer:
so a mapping's counts are all 1, and nothing has a base to keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.ir import device, device_rules
from weft.ir.device import (
    After,
    Buffer,
    Call,
    Channel,
    Copy,
    Launch,
    Plan,
    Statement,
    Step,
    Take,
    Wait,
)

MAIN = "main"


def insert_signals(plan: Plan) -> Plan:
    """From stage drawn to stage signalled."""
    inserted = _ordered(plan)
    return _without_needless(replace(inserted, stage="signalled"))


def _ordered(plan: Plan) -> Plan:
    """With all signals that could be needed."""
    by_buffer = {name: one.name for one in plan.of(Channel) for name in (one.buffer, *one.along)}
    tokens = {one.buffer for one in plan.of(Channel) if one.to == "engine"}
    along = {name for one in plan.of(Channel) for name in one.along}
    steps: list[Step] = []
    for step in plan.steps:
        if isinstance(step, Copy) and step.source in tokens:
            steps.append(replace(step, awaits=by_buffer[step.source]))
        elif isinstance(step, Copy) and step.piece:
            steps += [After(step.stream, MAIN), step]
        elif isinstance(step, Copy):
            # What stages own rows beside the copied ones has taken credits.
            is_staged = any(step.target in one.writes for one in plan.of(Launch)
                            if [do.kind for do in one.body] == ["stage"])  # fmt: skip
            take = [] if is_staged else [Take(step.stream, step.place)]
            steps += [After(step.stream, MAIN), *take, step]
        elif isinstance(step, Launch):
            awaits = tuple(dict.fromkeys(by_buffer[n] for n in step.reads if n in by_buffer))
            kept = [name for name in step.writes if name in tokens]
            # What goes along with other rows is announced with these.
            sent = [name for name in step.pushes if name not in along]
            announces = tuple(dict.fromkeys(by_buffer[n] for n in (*sent, *kept)))
            if step.stream != MAIN:
                steps.append(After(step.stream, MAIN))
            behind: list[Step] = []
            if step.piece and step.piece[0] == 0:
                # Ahead of the launch, which leaves no SM to what looks for credits.
                sends = next(one.stream for one in plan.of(Copy) if one.source in step.writes)
                steps += [After(sends, MAIN), Take(sends, step.place)]
                behind = [After(MAIN, sends)]
            steps += [replace(step, awaits=awaits, announces=announces), *behind]
        else:
            reads = step.reads if isinstance(step, Call) else ()
            waits = dict.fromkeys(by_buffer[name] for name in reads if name in by_buffer)
            steps += [*(Wait(name, place=step.place) for name in waits), step]
    streams = dict.fromkeys(step.stream for step in steps)
    steps += [After(MAIN, other) for other in streams if other != MAIN]
    statements = [one for one in plan.statements if not isinstance(one, Step)]
    return replace(plan, statements=(*statements, *_credited(plan, steps)))


def _credited(plan: Plan, steps: Sequence[Step]) -> list[Step]:
    """All that writes the slot, but for packets, takes credits; the last to use it gives them.

    What a copy takes tokens for, the kernel that sets them takes credits for.
    """
    slot = {one.name for one in plan.of(Buffer) if one.role == "symmetric"}
    heap = slot | {one.name for one in plan.of(Buffer) if one.role == "packets"}
    tokens = {one.awaits for one in steps if isinstance(one, Copy) and one.awaits}
    uses = [
        i for i, step in enumerate(steps)
        if isinstance(step, Launch) and heap & {one.buffer for one in device.accesses(step)}
    ]  # fmt: skip
    found = list(steps)
    for i, step in enumerate(found):
        writes = {one.buffer for one in device.accesses(step) if one.writes} & slot
        is_staged = isinstance(step, Launch) and tokens & {*step.announces}
        if is_staged or (isinstance(step, Launch) and writes):
            found[i] = replace(step, takes=True)
    if uses:
        last = found[uses[-1]]
        assert isinstance(last, Launch)
        found[uses[-1]] = replace(last, gives=True)
    return found


def _without_needless(plan: Plan) -> Plan:
    """Leave out, one by one and the last first, what the rules do not ask for."""
    if device_rules.check(_complete(plan)):
        return plan  # the breach is told by whoever checks the plan
    at = len(plan.statements)
    while at > 0:
        at -= 1
        for fewer in _lighter(plan, at):
            if not device_rules.check(_complete(fewer)):
                plan = fewer
                break
    return plan


def _complete(plan: Plan) -> Plan:
    """Checked by the rules of credits too."""
    return replace(plan, stage="allocated")


def _lighter(plan: Plan, at: int) -> Iterator[Plan]:
    """The plan with the statement at `at` left out, or a part of it."""
    one = plan.statements[at]

    def instead(*other: Statement) -> Plan:
        statements = (*plan.statements[:at], *other, *plan.statements[at + 1 :])
        return replace(plan, statements=statements)

    if isinstance(one, After | Wait):
        yield instead()
    if isinstance(one, Launch):
        if one.takes:
            yield instead(replace(one, takes=False))
        for name in one.awaits:
            yield instead(replace(one, awaits=tuple(n for n in one.awaits if n != name)))
