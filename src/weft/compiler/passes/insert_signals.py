"""Say who waits for whom: streams, channels, credits; then leave out what nobody needs.

    copy(a, gathered, pull, rows_ready)    ->    after(copy, main)
                                                 notify(a_shards, stream=copy, takes=True)
                                                 wait(a_shards, stream=copy)
                                                 copy(a, gathered, pull, rows_ready)

A copy of what tiles leave takes a token of the kernel that stores them instead, and nothing before:
only the host's order says that it is behind that kernel.

All that could be needed is put in, by rule; then each wait, join and credit is taken out again for
as long as the table of legality finds no breach without it: what stream order or another channel
already gives is gone. All words are events that a call's epoch is stored to, each by one writer:
so a mapping's counts are all 1, and nothing has a base to keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from weft.ir import device
from weft.ir.device import (
    After,
    Buffer,
    Call,
    Channel,
    Copy,
    Launch,
    Notify,
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
    buffers = {one.name: one for one in plan.of(Buffer)}
    by_buffer = {name: one.name for one in plan.of(Channel) for name in (one.buffer, *one.along)}
    tokens = {one.buffer for one in plan.of(Channel) if one.to == "engine"}
    along = {name for one in plan.of(Channel) for name in one.along}
    channels: list[Channel] = []
    behind: list[Channel] = []
    steps: list[Step] = []
    for step in plan.steps:
        if isinstance(step, Copy) and step.source in tokens:
            steps.append(replace(step, awaits=by_buffer[step.source]))
        elif isinstance(step, Copy):
            made, around = _around(step, buffers[step.source], plan)
            channels += made[:1]
            behind += made[1:]
            steps += around
        elif isinstance(step, Launch):
            awaits = tuple(dict.fromkeys(by_buffer[n] for n in step.reads if n in by_buffer))
            kept = [name for name in step.writes if name in tokens]
            # What goes along with other rows is announced with these.
            sent = [name for name in step.pushes if name not in along]
            announces = tuple(dict.fromkeys(by_buffer[n] for n in (*sent, *kept)))
            steps.append(replace(step, awaits=awaits, announces=announces))
        else:
            reads = step.reads if isinstance(step, Call) else ()
            waits = dict.fromkeys(by_buffer[name] for name in reads if name in by_buffer)
            steps += [*(Wait(name, place=step.place) for name in waits), step]
    streams = dict.fromkeys(step.stream for step in steps)
    steps += [After(MAIN, other) for other in streams if other != MAIN]
    statements = [one for one in plan.statements if not isinstance(one, Channel | Step)]
    channels += [*plan.of(Channel), *behind]
    return replace(plan, statements=(*statements, *channels, *_credited(plan, steps)))


def _around(copy: Copy, source: Buffer, plan: Plan) -> tuple[list[Channel], list[Step]]:
    """A pull waits until all ranks' rows are there; of a caller's rows all say when they have them.

    Its channels are of `source`, one word for each rank. A push asks for free slots alone.
    """
    rows = next(one.rows for one in plan.of(Channel) if one.name == copy.announces)
    shards = Channel(f"{copy.target}_shards", copy.source, rows, place=copy.place)
    stream = copy.stream
    if copy.side == "push":
        # What stages own rows beside the copied ones has taken credits.
        is_staged = any(copy.target in one.writes for one in plan.of(Launch)
                        if [do.kind for do in one.body] == ["stage"])  # fmt: skip
        take = [] if is_staged else [Take(stream, copy.place)]
        return [], [After(stream, MAIN), *take, copy]
    around: list[Step] = [
        After(stream, MAIN), Notify(shards.name, stream, place=copy.place),
        Wait(shards.name, stream, copy.place), copy,
    ]  # fmt: skip
    if source.role not in device.GIVEN:
        return [shards], around
    taken = Channel(f"{copy.target}_taken", copy.source, rows, place=copy.place)
    around += [Notify(taken.name, stream, place=copy.place), Wait(taken.name, stream, copy.place)]
    return [shards, taken], around


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
        is_carried = isinstance(step, Launch) and tokens & {*step.announces}
        if isinstance(step, Notify) or is_carried or (isinstance(step, Launch) and writes):
            found[i] = replace(step, takes=True)
    if uses:
        last = found[uses[-1]]
        assert isinstance(last, Launch)
        found[uses[-1]] = replace(last, gives=True)
    return found


def _without_needless(plan: Plan) -> Plan:
    """Leave out, one by one and the last first, what the rules do not ask for."""
    if device.check(_complete(plan)):
        return plan  # the breach is told by whoever checks the plan
    at = len(plan.statements)
    while at > 0:
        at -= 1
        for fewer in _lighter(plan, at):
            if not device.check(_complete(fewer)):
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
    if isinstance(one, Notify | Launch) and one.takes:
        yield instead(replace(one, takes=False))
    if isinstance(one, Launch):
        for name in one.awaits:
            yield instead(replace(one, awaits=tuple(n for n in one.awaits if n != name)))
    if isinstance(one, Channel):
        # A pair that says what is known: the channel, its announcement, its waits.
        named = [s for s in plan.statements if one.name in _of_pair(s)]
        if any(isinstance(s, Notify) for s in named):
            left = (s for s in plan.statements if s is not one and s not in named)
            yield replace(plan, statements=tuple(left))


def _of_pair(one: Statement) -> tuple[str, ...]:
    return (one.channel,) if isinstance(one, Notify | Wait) else ()
