"""What is legal at the Core level: a rule for each way in which a kernel could hang, race or break.

The table, with the reasons, is at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from weft.base.place import Place
from weft.ir import text
from weft.ir.core import (
    ARRIVALS,
    BESIDE,
    CUTS,
    DEPARTURES,
    ENGINE,
    FLAGS,
    FUNCTIONS,
    HOOKS,
    KERNEL,
    MAPPINGS,
    OF_CHUNKS,
    ORDERS,
    OWN_ROWS,
    RELAY,
    SCOPES,
    SIGNALS,
    SORTS,
    TEMPLATES,
    TO,
    Advance,
    Credit,
    Finish,
    Fused,
    Hook,
    Kernel,
    Mapping,
    Notify,
    Param,
    Template,
    Wait,
    homes,
    uses,
    wrong_tile,
)
from weft.ir.kinds import ELEMENTWISE
from weft.ir.legality import Rule, Violation, legal, run


def _names(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    known: dict[str, str] = {}
    for one in kernel.statements:
        if isinstance(one, Template):
            continue
        if not isinstance(one, Param):
            for name, sort in uses(one):
                if name not in known:
                    yield f"{name} is used and is no parameter before it", one.place
                elif sort and sort != known[name]:
                    message = f"{name} is of sort {known[name]}; here it must be of sort {sort}"
                    yield f"{text.word(type(one))}: {message}", one.place
        if isinstance(one, Param | Mapping):
            if one.name in known:
                yield f"{one.name} is declared twice", one.place
            known[one.name] = one.sort if isinstance(one, Param) else "mapping"


def _known(what: str, word: str, words: Iterable[str], place: Place) -> Iterator[tuple[str, Place]]:
    words = list(words)
    if word not in words:
        yield f"{what} {word or repr(word)}: there are {', '.join(filter(None, words))}", place


def _words(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    for one in kernel.statements:
        if isinstance(one, Param):
            yield from _known(f"{one.name} is of sort", one.sort, SORTS, one.place)
        elif isinstance(one, Mapping):
            yield from _known(f"{one.name} is of sort", one.sort, MAPPINGS, one.place)
            yield from _known(f"{one.name} cuts", one.cuts, CUTS, one.place)
            if one.sort in MAPPINGS and CUTS.get(one.cuts, one.sort) != one.sort:
                message = f"{one.name} is of sort {one.sort} and cuts {one.cuts}"
                yield f"{message}, which is of sort {CUTS[one.cuts]}", one.place
        elif not isinstance(one, Template):
            yield from _known("hook", one.slot, HOOKS, one.place)
        if isinstance(one, Hook):
            yield from _known(f"hook {one.slot} has", one.function, FUNCTIONS, one.place)
            count = len(FUNCTIONS.get(one.function, ("", one.args))[1])
            if len(one.args) != count:
                message = f"{one.function} takes {count} arguments; it has {len(one.args)}"
                yield f"hook {one.slot}: {message}", one.place
        if isinstance(one, Wait | Notify):
            word = text.word(type(one))
            yield from _known(f"{word} has order", one.order, ORDERS[word], one.place)
            yield from _known(f"{word} has scope", one.scope, SCOPES, one.place)
        if isinstance(one, Wait):
            yield from _known("wait for flags", one.flags, FLAGS, one.place)
            yield from _known("wait unless", one.unless, ("", "own"), one.place)
            yield from _known("wait by", one.by, ("", "last"), one.place)
        if isinstance(one, Notify):
            yield from _known("notify to", one.to, TO, one.place)


def _template(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    templates = kernel.of(Template)
    if len(templates) != 1:
        yield f"{kernel.name} has {len(templates)} templates; it must have one", kernel.place
        return
    (template,) = templates
    if template.function not in TEMPLATES:
        message = f"there are {', '.join(TEMPLATES)}"
        yield f"{kernel.name} is of template {template.function}; {message}", template.place
        return
    _, needed = TEMPLATES[template.function]
    if any(one.function.startswith("spread") for one in kernel.of(Hook)):
        needed = (*needed, "collect")  # what owners hand to all
    cuts = {one.cuts for one in kernel.of(Mapping)}
    if message := wrong_tile(template.function, template.tile, is_static="experts" not in cuts):
        yield f"template {template.function} has tile={template.tile}; {message}", template.place
    given = Counter(hook.slot for hook in kernel.of(Hook))
    if missing := [slot for slot in needed if not given[slot]]:
        yield f"{template.function} needs the hooks {', '.join(missing)}", template.place
    for hook in kernel.of(Hook):
        if hook.slot in ("order", "ready") and given[hook.slot] > 1:
            yield f"hook {hook.slot} is given {given[hook.slot]} times; once is right", hook.place


def _places(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    for one in kernel.of(Hook):
        if one.slot not in (right := homes(one.function)):
            message = " or ".join(right)
            yield f"{one.function} is given as {one.slot}; it is for hook {message}", one.place
    (template,) = kernel.of(Template)
    for one in kernel.of(Hook):
        is_alone = one.slot == "result" and one.function in ELEMENTWISE
        if is_alone and template.function != OWN_ROWS:
            message = f"{one.function} is given as result of {template.function}"
            yield f"{message}; there it is {one.function}_rows", one.place
    for one in kernel.of(SIGNALS):
        word = text.word(type(one))
        if word not in HOOKS[one.slot]:
            may = ", ".join(HOOKS[one.slot]) or "none"
            yield f"{word} at hook {one.slot}; what orders ranks there: {may}", one.place


def _chunks(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    counted = False
    for one in kernel.at("announce"):
        counted |= isinstance(one, Hook) and one.function == "count"
        of_chunk = isinstance(one, Credit) or getattr(one, "to", "") in OF_CHUNKS
        if of_chunk and not counted:
            message = text.word(type(one))
            yield (
                f"{message} is for a whole chunk, but no count of its tiles is before it",
                one.place,
            )


_PAIRS = (
    ("add_packets", "send_packets"), ("add_packets", "push_packets"),
    ("spread_packets", "take_packets"),
)  # fmt: skip


def _packets(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    hooks = kernel.of(Hook)
    for one in kernel.of(Param):
        if one.sort == "packets":
            used = [hook.function for hook in hooks if one.name in hook.args]
            if tuple(sorted(used)) not in _PAIRS:
                message = f"packets {one.name} are for {', '.join(used) or 'nothing'}"
                yield f"{message}; who sends them once takes them once", one.place
    loaded: set[str] = set()
    for hook in kernel.at("combine"):
        if not isinstance(hook, Hook):
            continue
        if hook.function == "ahead":
            loaded.add(hook.args[0])
        if hook.function.endswith("_ahead") and hook.args[0] not in loaded:
            yield f"{hook.function} of {hook.args[0]}, which nothing loads ahead of it", hook.place
    for template in kernel.of(Template):
        cuts = {one.cuts for one in kernel.of(Mapping)}
        if (template.function == "every_row") != ("each" in cuts):
            message = f"{template.function} has a mapping that cuts {', '.join(sorted(cuts))}"
            yield f"{message}; each is for every_row", template.place


# ---------------------------------------------------------------------------------------------
# What orders ranks: each wait, notify, credit and finish is asked for by something else


def _arriving(kernel: Kernel) -> dict[str, Param]:
    """By array that others write while the kernel runs: the signals for which it waits."""
    awaited = [one for one in kernel.of(Param) if one.sort == "signals" and one.to == KERNEL]
    return {name: one for one in awaited for name in one.announces}


def _named(party: str, kernel: Kernel) -> str:
    """Who is at the other end, for a message."""
    if party == KERNEL:
        return f"{kernel.name} on the other ranks"
    return {ENGINE: "a copy engine", RELAY: "a relay", "": "nobody"}.get(party, party)


def _contents(signals: Param) -> str:
    """What signals announce, for a message."""
    return ", ".join(signals.announces) or "what it announces"


def _counters(kernel: Kernel) -> set[str]:
    at = {"count": 0, "push_own": 2}
    return {one.args[at[one.function]] for one in kernel.of(Hook) if one.function in at}


def _parties(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    arrays = {one.name for one in kernel.of(Param) if one.sort in ("operand", "pointer")}
    for one in kernel.of(Param):
        if one.sort not in ("signals", "slot") and (one.to or one.announces):
            message = f"{one.name} is of sort {one.sort} and has to or announces"
            yield f"{message}: signals have these, and the slot has to", one.place
        for name in one.announces:
            if name not in arrays:
                yield f"{one.name} announces {name}, which is no array of the kernel", one.place
        if one.sort == "signals" and one.name not in _counters(kernel):
            if not (one.by and one.to):
                message = f"{one.name} is notified by {_named(one.by, kernel)} and waited for by "
                message += f"{_named(one.to, kernel)}: a lone half is a hang or a waste"
                yield f"{message}; name both ends, by and to", one.place
    if (count := len(_slots(kernel))) != 1:
        yield f"{kernel.name} has {count} slots; it must have one", kernel.place


def _slots(kernel: Kernel) -> list[Param]:
    return [one for one in kernel.of(Param) if one.sort == "slot"]


def _paired(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    for one in kernel.of(Param):
        if one.sort != "signals":
            continue
        notifies = [each for each in kernel.of(Notify) if each.signals == one.name]
        waits = [each for each in kernel.of(Wait) if each.signals == one.name]
        if notifies and one.by != KERNEL:
            message = f"{kernel.name} notifies {one.name}, which {_named(one.by, kernel)} notifies"
            yield f"{message}: say by=kernel, or leave the notify out", notifies[0].place
        if one.by == KERNEL and not notifies:
            message = f"{_named(one.to, kernel)} waits for {one.name} for ever, which nothing in "
            yield (
                f"{message}{kernel.name} notifies: put a notify behind what is announced",
                one.place,
            )
        if waits and one.to != KERNEL:
            message = (
                f"{kernel.name} waits for {one.name}, for which {_named(one.to, kernel)} waits"
            )
            yield f"{message}: say to=kernel, or leave the wait out", waits[0].place
        if one.to == KERNEL and not waits:
            message = f"{_named(one.by, kernel)} notifies {one.name}, and nothing in {kernel.name}"
            message += f" waits for it: {_contents(one)} may be read before it has come"
            yield f"{message}; put a wait before the reading", one.place
        for each in notifies:
            if (each.to in OF_CHUNKS) != (one.to == ENGINE):
                message = f"{one.name} is notified to={each.to} and waited for by "
                yield f"{message}{_named(one.to, kernel)}: only engines take tokens", each.place


def _orders(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    signals = {one.name: one for one in kernel.of(Param)}
    for one in kernel.of((Wait, Notify)):
        other = signals[one.signals]
        message = f"{text.word(type(one))} of {one.signals} at hook {one.slot}"
        if one.scope != "system":
            end = _named(other.by if isinstance(one, Wait) else other.to, kernel)
            said = f"{message} has scope={one.scope}, which does not reach {end}"
            yield f"{said}: take scope=system", one.place
        # The word that an engine copies: it takes a token behind it, which orders both.
        if one.order == "relaxed" and getattr(one, "to", "") != "here":
            said = (
                f"{message} is relaxed, so {_contents(other)} may be read as the last call left it"
            )
            yield f"{said}: take order={ORDERS[text.word(type(one))][0]}", one.place


def _reads(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    arriving = _arriving(kernel)
    params = {one.name: one for one in kernel.of(Param)}
    for hook in kernel.of(Hook):
        at, flags = ARRIVALS.get(hook.function, (None, ""))
        written, _ = DEPARTURES.get(hook.function, (None, ""))
        for i, name in enumerate(hook.args):
            message = f"{hook.function} at hook {hook.slot} reads {name}"
            if i == at and name not in arriving:
                by = params[name].by
                if not by.isidentifier() or by in (KERNEL, *BESIDE):
                    message += ", which others write, and no signals with to=kernel announce it"
                    yield f"{message}: wait for it, or say by= which step before has", hook.place
            elif i == at:
                if not _is_awaited(kernel, hook, arriving[name], flags):
                    yield f"{message}{_unguarded(kernel, hook, arriving[name], flags)}", hook.place
            elif name in arriving and i != written and hook.function != "rounded":
                message += f", which {_named(arriving[name].by, kernel)} writes meanwhile"
                yield f"{message}: only {', '.join(ARRIVALS)} stand behind a wait", hook.place


# What reads own rows where they lie from the start.
READ_IN_PLACE = ("rows_or_own", "left_channel", "right_channel", "slice_or_own")


def _is_awaited(kernel: Kernel, hook: Hook, signals: Param, flags: str) -> bool:
    """Does every program wait for these flags, or for all, before the hook at its place?"""
    # What reads own rows elsewhere need not wait for them.
    may = ("", "own") if hook.function in READ_IN_PLACE else ("",)
    slot = hook.slot
    if slot == "scales":  # own ones are there before the kernel
        slot, may = "ready", ("", "own")
    return any(
        one.slot == slot and _is_before(kernel, one, hook) and one.signals == signals.name
        and one.flags in (flags, "all") and one.unless in may and not one.by
        for one in kernel.of(Wait)
    )  # fmt: skip


def _unguarded(kernel: Kernel, hook: Hook, signals: Param, flags: str) -> str:
    slot = "ready" if hook.slot == "scales" else hook.slot
    remedy = f"wait({slot}, {signals.name}, {flags}, {_mapping(kernel)})"
    message = f", which {_named(signals.by, kernel)} writes, and does not wait for {signals.name}"
    return f"{message}: put {remedy} before it"


def _mapping(kernel: Kernel) -> str:
    """The mapping's name, for a remedy."""
    return next((one.name for one in kernel.of(Mapping)), "its mapping")


# Flags of a wait that leave none out which an engine or a relay writes: those of a tile leave out
# chunks that have no rows. Ranks without rows have no engine write a flag of `sources`; a relay
# sets those of all.
_COMPLETE = ("all", "others", "chunk")


def _engines(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    for signals in kernel.of(Param):
        if signals.sort != "signals" or signals.by not in BESIDE:
            continue
        complete = _COMPLETE if signals.by == RELAY else (*_COMPLETE, "sources")
        if not any(
            one.signals == signals.name and one.flags in complete
            and all(_is_before(kernel, one, end) for end in kernel.of((Finish, Advance)))
            for one in kernel.of(Wait)
        ):  # fmt: skip
            does = "an engine may write flags" if signals.by == ENGINE else "a relay may read rows"
            message = f"{does} of {signals.name} when the call is over: no wait before its end "
            message += "is for all flags, and tiles leave out chunks without rows"
            remedy = f"wait(done, {signals.name}, all, {_mapping(kernel)}, by=last)"
            yield f"{message}; put {remedy}", signals.place


def _is_before(kernel: Kernel, one: Fused, other: Fused) -> bool:
    """By their hooks, and at one hook by the order of the text."""
    moments = [(list(HOOKS).index(x.slot), kernel.statements.index(x)) for x in (one, other)]
    return moments[0] < moments[1]


def _sends(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    for hook in kernel.of(Hook):
        if hook.function not in DEPARTURES:
            continue
        at, to = DEPARTURES[hook.function]
        name, slot = hook.args[at], "begin" if hook.slot == "begin" else "announce"
        message = f"{hook.function} at hook {hook.slot} writes {name} for other ranks"
        by_name = [one for one in kernel.of(Param) if one.by == KERNEL and name in one.announces]
        if not by_name:
            yield f"{message}, and no signals by=kernel announce it", hook.place
        for signals in by_name:
            if not any(
                one.signals == signals.name and one.to == to and one.slot == slot
                and _is_before(kernel, hook, one)
                for one in kernel.of(Notify)
            ):  # fmt: skip
                remedy = f"notify({slot}, {signals.name}, {to}, {_mapping(kernel)})"
                message += f", and no notify behind it sets {signals.name} there: "
                message += f"{_named(signals.to, kernel)} waits for ever"
                yield f"{message}; put {remedy}", hook.place
    for token in kernel.of(Notify):
        if token.to == "engine" and not any(
            one.to == "here" and _is_before(kernel, one, token) for one in kernel.of(Notify)
        ):
            message = (
                f"an engine that takes {token.signals} copies rows, and nothing sets the word "
            )
            message += "that it copies behind them: their owner waits for ever"
            yield f"{message}; put notify(announce, .., here, ..) before the token", token.place


def _writes(kernel: Kernel) -> Iterator[tuple[str, Hook | Notify]]:
    """What makes somebody write arrays of the slot on other ranks, and how it is told."""
    for one in kernel.of((Hook, Notify)):
        if isinstance(one, Hook) and one.function in DEPARTURES and one.function != "stage":
            name = one.args[DEPARTURES[one.function][0]]
            yield f"{one.function} writes {name} on other ranks", one
        if isinstance(one, Notify) and one.to == "engine":
            yield f"an engine that takes {one.signals} writes on other ranks", one


def _credits(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    (slot,) = _slots(kernel)
    credits = kernel.of(Credit)
    unsafe = "may still read there what the call before left"
    if credits and slot.by != KERNEL:
        message = f"{kernel.name} waits for credits of {slot.name}, for which "
        yield f"{message}{_named(slot.by, kernel)} waits: say by=kernel", credits[0].place
    writes = list(_writes(kernel))
    if slot.by == KERNEL and not credits and not writes:
        message = (
            f"nothing in {kernel.name} waits for credits of {slot.name}, by=kernel: other ranks"
        )
        yield f"{message} {unsafe}; put credit(begin, {slot.name}) first", slot.place
    for message, one in writes:
        if slot.by == KERNEL and not any(_is_before(kernel, each, one) for each in credits):
            message += f" before a credit of {slot.name} has come: they {unsafe}"
            yield f"{message}; put credit(begin, {slot.name}) before it", one.place
        if not slot.by:
            message += f", and nobody waits for credits of {slot.name}: they {unsafe}"
            yield f"{message}; put credit(begin, {slot.name}), or name in by the step", one.place


def _finished(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    (slot,) = _slots(kernel)
    ends = kernel.of((Finish, Advance))
    if ends and slot.to != KERNEL:
        message = (
            f"{kernel.name} ends the call on {slot.name}, which {_named(slot.to, kernel)} ends"
        )
        yield f"{message}: say to=kernel, or leave it out", ends[0].place
    if slot.to == KERNEL and not ends:
        message = (
            f"nothing in {kernel.name} ends the call on {slot.name}, to=kernel: every rank waits"
        )
        yield f"{message} for ever in its next call; put finish(end, {slot.name}) last", slot.place
    if len(ends) > 1:
        message = (
            f"{kernel.name} ends the call on {slot.name} {len(ends)} times, so its programs are "
        )
        yield f"{message}counted twice; once is right", ends[1].place
    if not slot.to and any(one.sort in ("signals", "packets") for one in kernel.of(Param)):
        message = f"{kernel.name} uses {slot.name}, and nobody ends the call on it"
        yield f"{message}: put finish(end, {slot.name}), or name in to the step", slot.place
    for end in ends:
        if isinstance(end, Advance) and slot.by:
            message = f"advance tells no rank that the call on {slot.name} is over, and "
            yield f"{message}{_named(slot.by, kernel)} waits for their credits: finish", end.place
        for hook in kernel.of(Hook) if end.slot == "done" else ():
            late = hook.function in ARRIVALS and hook.slot != "ready"
            if late or (hook.function in DEPARTURES and hook.function != "push_own"):
                message = (
                    f"the call on {slot.name} ends at hook done, when operands have been read; "
                )
                yield f"{message}{hook.function} comes behind that: end it at hook end", end.place


RULES = (
    Rule("names", "a name means one thing of one sort, before it is used", _names),
    Rule("words", "what there are hooks for", _words),
    Rule("template", "a template runs with its hooks", _template, "template"),
    Rule("places", "a template relies on what its hooks do not do", _places, "template"),
    Rule("chunks", "a chunk is complete when its last tile is stored", _chunks, "template"),
    Rule("packets", "what is sent as packets is taken as packets", _packets, "template"),
    Rule("parties", "signals have two ends, a kernel has one slot", _parties, "template"),
    Rule("orders", "what is relaxed, or reaches one device, orders no ranks", _orders, "signals"),
    Rule("reads", "what is read before its wait is last call's", _reads, "signals"),
    Rule("sends", "whoever waits for what is written hears of it behind that", _sends, "signals"),
    Rule("credits", "other ranks may still read there what the call before left", _credits,
         "signals"),
    Rule("finished", "the next call waits until this one is over, on every rank", _finished,
         "signals"),
    Rule("paired", "a lone half of a signal is a hang or a waste", _paired, "ends"),
    Rule("engines", "what is written or read when a call is over, the next call reads or writes",
         _engines, "ends"),
)  # fmt: skip


def check(kernel: Kernel) -> list[Violation]:
    """Every breach of the rules."""
    return run(RULES, kernel, ("", "template", "signals", "ends"))


def require(kernel: Kernel) -> Kernel:
    """The kernel itself. Raises  IllegalError: with all breaches, and the user's lines"""
    return legal(f"Core IR of {kernel.name}", kernel, check(kernel))
