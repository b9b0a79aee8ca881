"""What is legal at the Core level: a rule for each way in which a kernel could hang, race or break.

The table, with the reasons, is at the end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from weft.base.place import Place
from weft.ir import text
from weft.ir.core_statements import (
    CUTS,
    FUNCTIONS,
    HOOKS,
    MAPPINGS,
    OF_CHUNKS,
    ORDERS,
    SCOPES,
    SIGNALS,
    SORTS,
    TEMPLATES,
    TO,
    WORDS,
    Credit,
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
from weft.ir.legality import Rule


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
                    told = f"{name} is of sort {known[name]}; here it must be of sort {sort}"
                    yield f"{text.word(type(one))}: {told}", one.place
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
                told = f"{one.name} is of sort {one.sort} and cuts {one.cuts}"
                yield f"{told}, which is of sort {CUTS[one.cuts]}", one.place
        elif not isinstance(one, Template):
            yield from _known("hook", one.slot, HOOKS, one.place)
        if isinstance(one, Hook):
            yield from _known(f"hook {one.slot} has", one.function, FUNCTIONS, one.place)
            count = len(FUNCTIONS.get(one.function, ("", one.args))[1])
            if len(one.args) != count:
                told = f"{one.function} takes {count} arguments; it has {len(one.args)}"
                yield f"hook {one.slot}: {told}", one.place
        if isinstance(one, Wait | Notify):
            word = text.word(type(one))
            yield from _known(f"{word} has order", one.order, ORDERS[word], one.place)
            yield from _known(f"{word} has scope", one.scope, SCOPES, one.place)
        if isinstance(one, Wait):
            yield from _known("wait for words", one.words, WORDS, one.place)
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
        told = f"there are {', '.join(TEMPLATES)}"
        yield f"{kernel.name} is of template {template.function}; {told}", template.place
        return
    _, needed = TEMPLATES[template.function]
    cuts = {one.cuts for one in kernel.of(Mapping)}
    if told := wrong_tile(template.function, template.tile, is_whole=cuts == {"whole"}):
        yield f"template {template.function} has tile={template.tile}; {told}", template.place
    given = Counter(hook.slot for hook in kernel.of(Hook))
    if missing := [slot for slot in needed if not given[slot]]:
        yield f"{template.function} needs the hooks {', '.join(missing)}", template.place
    for hook in kernel.of(Hook):
        if hook.slot in ("order", "ready") and given[hook.slot] > 1:
            yield f"hook {hook.slot} is given {given[hook.slot]} times; once is right", hook.place


def _places(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    for one in kernel.of(Hook):
        if one.slot not in (right := homes(one.function)):
            told = " or ".join(right)
            yield f"{one.function} is given as {one.slot}; it is for hook {told}", one.place
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
            told = text.word(type(one))
            yield f"{told} is for a whole chunk, but no count of its tiles is before it", one.place


def _guards(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    for slot in ("ready", "combine", "collect"):
        seen: Hook | None = None
        for one in kernel.at(slot):
            if isinstance(one, Wait) and seen:
                told = f"wait for {one.signals} comes behind {seen.function}"
                yield f"{told}, which it guards: put it before", one.place
            seen = one if isinstance(one, Hook) else seen


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
                told = f"packets {one.name} are for {', '.join(used) or 'nothing'}"
                yield f"{told}; who sends them once takes them once", one.place
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
            told = f"{template.function} has a mapping that cuts {', '.join(sorted(cuts))}"
            yield f"{told}; each is for every_row", template.place


RULES = (
    Rule("names", "a name means one thing of one sort, before it is used", _names),
    Rule("words", "what the generator of source can spell", _words),
    Rule("template", "a template runs with its hooks", _template, "template"),
    Rule("places", "a template relies on what its hooks do not do", _places, "template"),
    Rule("chunks", "a chunk is complete when its last tile is stored", _chunks, "template"),
    Rule("guards", "what is read before its wait is last call's", _guards, "template"),
    Rule("packets", "what is sent as packets is taken as packets", _packets, "template"),
)
