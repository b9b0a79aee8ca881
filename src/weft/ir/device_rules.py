"""What is legal at the Device level: a rule for each way in which a plan could hang, race or break.

The table, with the reasons, is at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import combinations

from weft.base.dtypes import DTYPES
from weft.base.place import Place
from weft.ir import text
from weft.ir.choice import Choice
from weft.ir.device import (
    ON_HEAP,
    PROGRAMS,
    ROLES,
    STAGES,
    TEMPLATES,
    Access,
    After,
    Buffer,
    Channel,
    Copy,
    Launch,
    Plan,
    Step,
    Take,
    accesses,
    announced,
    are_apart,
    awaited,
    is_relay,
)
from weft.ir.legality import Rule, Violation, legal, run
from weft.ir.order import Moment
from weft.ir.tensor import TABLE


def _names(plan: Plan) -> Iterator[tuple[str, Place]]:
    buffers: set[str] = set()
    channels: set[str] = set()
    for one in plan.statements:
        if isinstance(one, Buffer | Channel):
            if one.name in buffers | channels:
                yield f"{one.name} is declared twice", one.place
            (buffers if isinstance(one, Buffer) else channels).add(one.name)
            for name in _named_buffers(one) - buffers:
                yield (
                    f"{text.word(type(one))} {one.name} names {name}, which is no buffer",
                    one.place,
                )
            continue
        if isinstance(one, Choice):
            continue
        for name in sorted({access.buffer for access in accesses(one)} - buffers):
            yield f"{text.word(type(one))} uses {name}, which is no buffer", one.place
        for name in sorted({*announced(one), *awaited(one)} - channels):
            yield f"{text.word(type(one))} names {name}, which is no channel", one.place
    if missing := [name for name in plan.results if name not in buffers]:
        yield f"{plan.name} returns {', '.join(missing)}, which are no buffers", plan.place


def _named_buffers(one: Buffer | Channel) -> set[str]:
    """What a declaration says of buffers before it."""
    named = (one.shares,) if isinstance(one, Buffer) else (
        one.buffer, one.own, one.table, *one.along)  # fmt: skip
    return {name for name in named if name}


def _fields(plan: Plan) -> Iterator[tuple[str, Place]]:
    for buffer in plan.of(Buffer):
        may = {"tables": (TABLE,), "input": (*DTYPES, TABLE)}
        dtypes = may.get(buffer.role, DTYPES)
        if buffer.role not in ROLES or buffer.dtype not in dtypes:
            message = f"role={buffer.role}, dtype={buffer.dtype}; roles are {', '.join(ROLES)}"
            yield f"buffer {buffer.name} has {message}", buffer.place
    for channel in plan.of(Channel):
        for name, word in (("chunks", "tiles"), ("push_rows", None), ("tile_rows", None)):
            number = getattr(channel, name)
            if number < 1 if isinstance(number, int) else number != word:
                message = f"{name}={number}; it is 1 or more"
                yield f"channel {channel.name} has {message}", channel.place
        yield from _spelled(channel, f"channel {channel.name}", _CHANNEL_WORDS)
    for copy in plan.of(Copy):
        yield from _spelled(copy, f"copy of {copy.source}", {"side": ("push", "owner", "parts")})
    for launch in plan.of(Launch):
        yield from _spelled(launch, f"launch of {launch.kernel}", _LAUNCH_WORDS)
        if min((*launch.tile, launch.split_k)) < 1 or launch.spare < 0:
            message = f"tile={launch.tile}, split_k={launch.split_k}, spare={launch.spare}"
            yield (
                f"launch of {launch.kernel} has {message}; they are 1 or more, 0 or more",
                launch.place,
            )


_CHANNEL_WORDS = {
    "cuts": ("whole", "part", "each", "experts"),
    "to": ("all", "owner", "partner", "engine"),
    "by": ("word", "packet"),
}
_LAUNCH_WORDS = {"template": ("", *TEMPLATES), "programs": PROGRAMS}


def _spelled(one: Channel | Copy | Launch, what: str, words: Mapping[str, tuple[str, ...]]):
    """Fields that hold another word than they may."""
    for name, known in words.items():
        if (given := getattr(one, name)) not in known:
            may = " or ".join(word for word in known if word)
            yield f"{what} has {name}={given}; it is {may}", one.place


def _bodies(plan: Plan) -> Iterator[tuple[str, Place]]:
    for launch in plan.of(Launch):
        known, made = set(launch.reads), set()
        for do in launch.body:
            for name in do.operands:
                if name not in known:
                    message = f"{do.result} = {do.kind} of {name}"
                    yield (
                        f"{launch.kernel} does {message}, which it neither reads nor makes",
                        launch.place,
                    )
            known.add(do.result)
            made.add(do.result)
        for name in launch.writes if launch.body else ():
            if name not in made:
                yield (
                    f"{launch.kernel} writes {name}, which nothing in its body makes",
                    launch.place,
                )


def _reach(plan: Plan) -> Iterator[tuple[str, Place]]:
    roles = {buffer.name: buffer.role for buffer in plan.of(Buffer)}
    for step in plan.steps:
        for access in accesses(step):
            name = access.buffer
            if access.far and roles[name] not in ON_HEAP:
                message = f"other ranks' parts of {name} are reached, but its role is {roles[name]}"
                yield f"{message}: it must be {' or '.join(ON_HEAP)}", step.place


def _paired(plan: Plan) -> Iterator[tuple[str, Place]]:
    gives = {name for step in plan.steps for name in announced(step)}
    takes = {name for step in plan.steps for name in awaited(step)}
    for channel in plan.of(Channel):
        if channel.name in takes - gives:
            yield f"{channel.name} is waited for and nobody announces it", channel.place
        if channel.name in gives - takes:
            yield f"{channel.name} is announced and nobody waits for it", channel.place


def _cycles(plan: Plan) -> Iterator[tuple[str, Place]]:
    moments = plan.moments
    for i, step in enumerate(plan.steps, 1):
        for name in awaited(step):
            if moments.order.is_cyclic(Moment(i, "arrived", name)):
                message = (
                    f"{text.word(type(step))} waits for {name}, whose announcement waits for it"
                )
                yield f"{message}: queue the announcement first", step.place


def _ordered(plan: Plan) -> Iterator[tuple[str, Place]]:
    moments, steps = plan.moments, plan.steps
    given = [Access(one.name, True) for one in plan.of(Buffer) if one.role == "input"]
    touches = [(0, one) for one in given]
    touches += [(i, one) for i, step in enumerate(steps, 1) for one in accesses(step)]
    for (i, a), (j, b) in combinations(touches, 2):
        if not a.meets(b) or i == j or not (a.writes or b.writes):
            continue
        if i == 0 and b.writes:  # nothing of the caller's is lost: the plan writes anew
            continue
        if not (moments.before(i, a, j, b) or moments.before(j, b, i, a)):
            by = "a channel" if a.far or b.far else "a stream, `after` or a channel"
            both = f"{_access_text(steps, i, a)} and {_access_text(steps, j, b)}"
            message = f"{both} of {a.buffer} are not ordered"
            yield f"{message}: {by} must", steps[j - 1].place


def _access_text(steps: list[Step], i: int, access: Access) -> str:
    verb = "the writing" if access.writes else "the reading"
    return f"{verb} by {text.word(type(steps[i - 1])) if i else 'the caller'}"


def _written(plan: Plan) -> Iterator[tuple[str, Place]]:
    moments = plan.moments
    writers: dict[str, list[tuple[int, Access]]] = {}
    for buffer in plan.of(Buffer):
        if buffer.role == "input":
            writers.setdefault(buffer.name, []).append((0, Access(buffer.name, True)))
    for i, step in enumerate(plan.steps, 1):
        for access in accesses(step):
            if access.writes:
                writers.setdefault(access.buffer, []).append((i, access))
    for j, step in enumerate(plan.steps, 1):
        for access in accesses(step):
            is_written = any(
                i == j or moments.order.before(moments.done(i, one), moments.begun(j, access))
                for i, one in writers.get(access.buffer, ())
            )
            if not access.writes and not is_written:
                message = f"{text.word(type(step))} reads {access.buffer}"
                yield f"{message}, which nothing before it writes", step.place
    for name in plan.results:
        if name not in writers:
            yield f"{plan.name} returns {name}, which nothing writes", plan.place


def _inside(plan: Plan) -> Iterator[tuple[str, Place]]:
    """Of one launch: a kernel that reads what its own launch pushes."""
    announced_by = {one.name: {one.buffer, *one.along} for one in plan.of(Channel)}
    for launch in plan.of(Launch):
        both = {*launch.announces} & {*launch.awaits}
        for name in sorted(
            {*launch.pushes} & {*launch.reads} - set().union(*(announced_by[one] for one in both))
        ):
            message = f"{launch.kernel} reads {name}, which its launch on other ranks pushes"
            yield f"{message}: it must announce and await a channel of {name}", launch.place
        if both and launch.programs != "resident":
            message = f"{launch.kernel} waits for what its own launch announces"
            yield f"{message}: programs={launch.programs} must be resident", launch.place


def _tokens(plan: Plan) -> Iterator[tuple[str, Place]]:
    """One kernel sets a token, which one copy takes that is queued behind it; no SM waits for it.

    Whoever else sets, takes or lacks one is told first.
    """
    tokens = {one.name: one.buffer for one in plan.of(Channel) if one.to == "engine"}
    set_by: dict[str, list[int]] = {name: [] for name in tokens}
    taken_by: dict[str, list[int]] = {name: [] for name in tokens}
    for i, step in enumerate(plan.steps):
        word = text.word(type(step))
        for name in {*announced(step)} & {*tokens}:
            set_by[name].append(i)
            if not isinstance(step, Launch):
                message = f"{name} is set by {word}"
                yield f"{message}: tokens are set by the kernel that makes the tiles", step.place
        for name in awaited(step):
            if isinstance(step, Copy) != (name in tokens):
                message = f"{word} waits for {name}"
                yield f"{message}: copies take tokens, to=engine, and nothing else does", step.place
        if not isinstance(step, Copy):
            continue
        if step.awaits in tokens:
            taken_by[step.awaits].append(i)
        if (step.side == "owner") != bool(step.awaits or step.piece):
            message = (
                f"copy of {step.source} has side={step.side}, awaits={step.awaits or 'nothing'}"
            )
            yield (
                f"{message}, piece={step.piece}: what tiles leave for owners, and that alone, has "
                "tokens or is a piece", step.place,
            )  # fmt: skip
        if tokens.get(step.awaits, step.source) != step.source:
            message = f"copy of {step.source} takes {step.awaits}, a token of {tokens[step.awaits]}"
            yield f"{message}: it must be of what is copied", step.place
    yield from _turns(plan, set_by, taken_by)


def _pieces(plan: Plan) -> Iterator[tuple[str, Place]]:
    """Of a buffer that is made and copied chunk by chunk each is made once and copied once."""
    steps = [one for one in plan.steps if isinstance(one, Copy | Launch) and one.piece]
    names = {name: one for one in steps if isinstance(one, Launch) for name in one.writes}
    names |= {one.source: one for one in steps if isinstance(one, Copy)}
    for name, first in names.items():
        wanted = [(chunk, first.piece[-1]) for chunk in range(first.piece[-1])]
        made = sorted(one.piece for one in steps if isinstance(one, Launch) and name in one.writes)
        copied = sorted(one.piece for one in steps if isinstance(one, Copy) and name == one.source)
        for verb, found in (("made", made), ("copied", copied)):
            if found != wanted:
                message = f"{name} is {verb} in pieces {text.value(tuple(found))}"
                yield f"{message}; it has {text.value(tuple(wanted))}, each once", first.place


def _turns(
    plan: Plan, set_by: Mapping[str, list[int]], taken_by: Mapping[str, list[int]]
) -> Iterator[tuple[str, Place]]:
    """Which steps set and take a token: one each, in this order."""
    for name in set_by:
        for what, steps in (("set", set_by[name]), ("taken", taken_by[name])):
            if len(steps) > 1:
                message = f"{name} is {what} by {len(steps)} steps"
                yield f"{message}: a token is {what} once", plan.steps[steps[-1]].place
        if any(i < j for i in taken_by[name] for j in set_by[name]):
            message = f"a copy takes {name}, which a later launch sets"
            place = plan.steps[taken_by[name][0]].place
            yield f"{message}: what waits on a stream is queued behind it", place


def _resident(plan: Plan) -> Iterator[tuple[str, Place]]:
    """Of one launch, over other steps: programs that wait for what follows from their own tiles.

    And a relay, whose programs hold their SMs until a later launch has given it all.
    """
    for i, launch in enumerate(plan.steps, 1):
        if not isinstance(launch, Launch) or launch.programs == "resident":
            continue
        for name in sorted({*launch.awaits} - {*launch.announces}):
            sent = [Moment(i, "announced", one) for one in launch.announces]
            if plan.moments.order.before(sent, [Moment(i, "arrived", name)]):
                said = f"{launch.kernel} waits for {name}, which follows from what it announces"
                yield f"{said}: programs={launch.programs} must be resident", launch.place

    for i, relay in enumerate(plan.steps, 1):
        before = [(j, one) for j, one in enumerate(plan.steps[: i - 1], 1)
                  if isinstance(one, Launch) and one.stream != relay.stream]  # fmt: skip
        if not is_relay(relay):
            continue
        behind = [one for one in plan.steps[i:]
                  if isinstance(one, Launch) and one.stream != relay.stream]  # fmt: skip
        if behind and behind[0].programs == "resident" and not behind[0].spare:
            message = (
                f"{behind[0].kernel} leaves no SM to {_kernel(relay)}, which goes on beside it"
            )
            yield message, behind[0].place
        if not before:
            continue
        j, last = before[-1]
        if not plan.moments.order.before([Moment(j, "end")], [Moment(i, "begin")]):
            message = f"launch of {_kernel(relay)} may hold SMs while {last.kernel} asks for all"
            yield f"{message}: it must come after stream {last.stream}", relay.place


def _entered(plan: Plan) -> Iterator[tuple[str, Place]]:
    """Whoever looks for credits before copies has begun when all SMs wait for these copies."""
    for i, take in enumerate(plan.steps, 1):
        if not isinstance(take, Take):
            continue
        brings = {name for one in plan.steps[i:] if one.stream == take.stream
                  if isinstance(one, Copy) for name in announced(one)}  # fmt: skip
        for j, launch in enumerate(plan.steps[i:], i + 1):
            if not isinstance(launch, Launch) or launch.stream == take.stream or launch.spare:
                continue
            ahead = plan.moments.order.before([Moment(i, "end")], [Moment(j, "begin")])
            for name in sorted(brings & {*launch.awaits}):
                if not ahead:
                    message = f"{launch.kernel} may hold all SMs and wait for {name}, which is sent"
                    message += " when credits were looked for on an SM: leave one, or come after"
                    yield f"{message} stream {take.stream}", launch.place


def _kernel(step: Step) -> str:
    return step.kernel if isinstance(step, Launch) else text.word(type(step))


def _joined(plan: Plan) -> Iterator[tuple[str, Place]]:
    """By streams alone: whoever records the plan ends on the stream on which it began."""
    last = {step.stream: i for i, step in enumerate(plan.steps)}
    joins = {one.other: i for i, one in enumerate(plan.steps)
             if isinstance(one, After) and one.stream == "main"}  # fmt: skip
    for stream, i in last.items():
        if stream != "main" and joins.get(stream, -1) < i:
            message = f"{text.word(type(plan.steps[i]))} on stream {stream} may run when the caller"
            yield f"{message} goes on: the main stream must come after it", plan.steps[i].place


def _credits(plan: Plan) -> Iterator[tuple[str, Place]]:
    heap = {buffer.name for buffer in plan.of(Buffer) if buffer.role == "symmetric"}
    boxes = {buffer.name for buffer in plan.of(Buffer) if buffer.role == "packets"}
    by_word = {one.name for one in plan.of(Channel) if one.by == "word"}
    steps, moments = plan.steps, plan.moments
    users = [i for i, step in enumerate(steps, 1) if _uses_slot(step, heap, by_word)]
    if not users and not boxes:
        return
    takers = [i for i, step in enumerate(steps, 1) if getattr(step, "takes", False)]
    taken = [one for i in takers for one in moments.credited(i)]
    for i in users:
        behind = i in takers or moments.order.before(taken, moments.started(i))
        if not behind:
            message = f"{text.word(type(steps[i - 1]))} writes the slot before credits are taken"
            yield f"{message}: other ranks may still read what it held", steps[i - 1].place
    for i in {*users, *takers}:
        if isinstance(steps[i - 1], Launch | Take) and not moments.order.before(
            [Moment(0, "end")], [Moment(i, "begin")]
        ):
            word, stream = text.word(type(steps[i - 1])), steps[i - 1].stream
            message = f"a {word} on stream {stream} may be ahead of the caller's work, and takes "
            message += "the last call's number for this one's"
            yield f"{message}: it must come after the stream main", steps[i - 1].place
    givers = [i for i, step in enumerate(steps, 1) if getattr(step, "gives", False)]
    if len(givers) != 1:
        yield f"{plan.name} gives its slot back {len(givers)} times; once is right", plan.place
    for i, step in enumerate(steps, 1):
        for access in accesses(step):
            given = [Moment(giver, "end") for giver in givers]
            if not givers or access.buffer not in heap | boxes:
                continue
            if not moments.order.before(moments.read(i, access), given):
                message = (
                    f"{text.word(type(step))} uses {access.buffer} and is not before what gives"
                )
                yield f"{message} it back", step.place


def _uses_slot(step: Step, heap: set[str], by_word: set[str]) -> bool:
    """Does it write the slot, or words of it that peers read?"""
    return bool({access.buffer for access in accesses(step) if access.writes} & heap
                or {*announced(step)} & by_word)  # fmt: skip


# Shares to all; or to who owns the rows, and sums of all shares back to all.
_BY_PACKET = (("each", "all"), ("part", "owner"), ("part", "all"))


def _packets(plan: Plan) -> Iterator[tuple[str, Place]]:
    announced_by = {one.buffer: (one.by, one.cuts, one.to) for one in plan.of(Channel)}
    gathered = {do.result for launch in plan.of(Launch) for do in launch.body
                if do.kind == "all_gather"}  # fmt: skip
    for buffer in plan.of(Buffer):
        name, is_box = buffer.name, buffer.role == "packets"
        by = announced_by.get(name, ("", "", ""))
        known = (*_BY_PACKET, ("whole", "all")) if name in gathered else _BY_PACKET
        if is_box != (by[0] == "packet") or (is_box and by[1:] not in known):
            message = f"{name} has role={buffer.role} and is announced by={by[0] or 'nobody'}"
            yield (
                f"{message}: packets need both, of rows that each rank has a share of",
                buffer.place,
            )


def _shared(plan: Plan) -> Iterator[tuple[str, Place]]:
    buffers = {buffer.name: buffer for buffer in plan.of(Buffer)}
    for buffer in buffers.values():
        if not buffer.shares:
            continue
        other = buffers[buffer.shares]
        if buffer.role != other.role or buffer.role == "input":
            message = f"{buffer.name} is {buffer.role} and shares the memory of {other.name}"
            yield f"{message}, which is {other.role}; both must be local or symmetric", buffer.place
        alike = [one for one in buffers.values() if other.name in (one.name, one.shares)]
        for one in alike:
            if one.name < buffer.name and not are_apart(plan, one.name, buffer.name):
                message = f"{one.name} and {buffer.name} share memory and are in use at once"
                yield f"{message}: their accesses are not ordered", buffer.place


RULES = (
    Rule("names", "a name means one thing, before it is used", _names, "drawn"),
    Rule("fields", "words and numbers that the runtime takes", _fields, "drawn"),
    Rule("bodies", "what a kernel computes follows from what it reads", _bodies, "body"),
    Rule("reach", "peers find only what lies at one place on the heap", _reach, "body"),
    Rule("packets", "whoever ends a call knows that every rank has ended the one before",
         _packets, "body"),
    Rule("paired", "a lone half of a signal is a hang or a waste", _paired, "signalled"),
    Rule("inside", "programs of one launch know of each other by signals alone", _inside,
         "signalled"),
    Rule("tokens", "a stream waits where only the host's order says what comes first", _tokens,
         "signalled"),
    Rule("pieces", "who waits for all chunks waits for ever for one that nobody sends", _pieces,
         "signalled"),
    Rule("cycles", "all ranks run this plan: what waits for itself hangs", _cycles, "order"),
    Rule("resident", "a program that is not there yet announces nothing", _resident, "order"),
    Rule("entered", "a program that finds no SM sends nothing", _entered, "order"),
    Rule("written", "fresh memory holds nothing", _written, "order"),
    Rule("ordered", "two accesses, one a write, that nothing orders are a race", _ordered, "order"),
    Rule("joined", "a recording ends on the stream on which it began", _joined, "order"),
    Rule("credits", "the slot is used again by the next call", _credits, "allocated"),
    Rule("shared", "what lies in one place is not needed at once", _shared, "allocated"),
)  # fmt: skip


# Rules are run stage by stage: those that ask for an order once names and signals make sense.
_CHECKED = {"drawn": ("drawn", "body"), "signalled": ("drawn", "body", "signalled", "order"),
            "allocated": ("drawn", "body", "signalled", "order", "allocated")}  # fmt: skip


def check(plan: Plan) -> list[Violation]:
    """Every breach of the rules that hold at the plan's stage."""
    stage = plan.stage or STAGES[-1]
    if stage not in STAGES:
        message = f"{plan.name} is at stage {stage}; there are {', '.join(STAGES)}"
        return [Violation("stage", message, plan.place)]
    return run(RULES, plan, _CHECKED[stage])


def require(plan: Plan) -> Plan:
    """The plan itself. Raises  IllegalError: with all breaches, and the user's lines"""
    return legal(f"Device IR of {plan.name}", plan, check(plan))
