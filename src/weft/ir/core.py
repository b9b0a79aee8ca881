"""Core IR: a kernel is a template, its hooks, and the mappings that the hooks ask.

    program(ag_gemm_multiply)
    a = param(pointer)
    rows = mapping(static, (m, rank_rows, chunk_rows))
    template(gemm, (128, 256, 64))
    hook(order, rotated, (group_m, start))
    hook(ready, wait_rows, (a, rows), effects=(waits,))

The hooks are those of docs/decisions/009-hooks.md. Each names a `@triton.jit` function and the one
tuple of arguments that it gets; what the function does beside computing is said as effects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from weft.base.place import UNKNOWN, Place
from weft.ir import text
from weft.ir.legality import Rule, Violation, illegal, run

SORTS = ("pointer", "descriptor", "size", "signals", "world")
# Static: affine, of sizes. Tables: of pointers, filled on the device.
MAPPINGS = ("static", "tables")
EFFECTS = ("reads", "waits", "writes", "signals")

# What each hook may do beside computing, and why no more.
HOOKS = {
    "order": ("reads",),  # every role of a template asks it: it must be the same each time
    "segments": ("reads",),
    "ready": ("reads", "waits"),
    "emit": ("reads", "writes"),  # data alone: its stores may still be under way when it returns
    "announce": ("reads", "signals"),
    "done": ("reads", "waits", "signals"),
}

# Template -> how many extents a tile has, and the hooks that it cannot do without.
TEMPLATES = {
    "gemm": (3, ("order", "ready", "emit")),
    "reduce": (1, ("ready", "emit")),
}


@dataclass(frozen=True)
class Param:
    """An argument of the kernel, of one of SORTS."""

    name: str
    sort: str
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Mapping:
    """Which range, on which rank, on which channel: of these params."""

    name: str
    sort: str
    of: tuple[str, ...]
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Template:
    """What is computed, and the extents of a tile."""

    function: str
    tile: tuple[int, ...]
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Hook:
    """What is woven in at one place of the template."""

    slot: str
    function: str
    args: tuple[str | int, ...]
    effects: tuple[str, ...] = ()
    place: Place = UNKNOWN


@dataclass(frozen=True)
class Kernel:
    """A kernel of one template."""

    name: str
    statements: tuple[Param | Mapping | Template | Hook, ...]
    place: Place = UNKNOWN

    def of(self, kind: type) -> list:
        """The statements of one kind, in order."""
        return [one for one in self.statements if isinstance(one, kind)]


RECORDS = text.words(Param, Mapping, Template, Hook)


def show(kernel: Kernel, *, places: bool = True) -> str:
    """The kernel as text; `parse` takes it back."""
    header = text.Header(kernel.name, place=kernel.place)
    return text.show([header, *kernel.statements], places=places)


def parse(source: str) -> Kernel:
    """Raises  UsageError: with the line"""
    header, statements = text.read(source, RECORDS)
    return Kernel(header.title, statements, header.place)


# ---------------------------------------------------------------------------------------------
# What is legal


def _names(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    known: set[str] = set()
    for one in kernel.statements:
        if isinstance(one, Param | Mapping):
            if one.name in known:
                yield f"{one.name} is declared twice", one.place
            known.add(one.name)
        used = one.of if isinstance(one, Mapping) else getattr(one, "args", ())
        for name in used:
            if isinstance(name, str) and name not in known:
                yield f"{name} is used and is no parameter before it", one.place


def _words(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    for one in kernel.statements:
        if isinstance(one, Param | Mapping):
            words = SORTS if isinstance(one, Param) else MAPPINGS
            if one.sort not in words:
                yield f"{one.name} is of sort {one.sort}; there are {', '.join(words)}", one.place
    for hook in kernel.of(Hook):
        if hook.slot not in HOOKS:
            yield f"hook {hook.slot}: there are {', '.join(HOOKS)}", hook.place
        if unknown := [effect for effect in hook.effects if effect not in EFFECTS]:
            told = f"{', '.join(unknown)}: effects are {', '.join(EFFECTS)}"
            yield f"hook {hook.slot} has effects {told}", hook.place


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
    extents, needed = TEMPLATES[template.function]
    is_wrong = [extent for extent in template.tile if extent < 16 or extent & (extent - 1)]
    if len(template.tile) != extents or is_wrong:
        told = f"it takes {extents} extents, each a power of two from 16 on"
        yield f"template {template.function} has tile={template.tile}; {told}", template.place
    given = Counter(hook.slot for hook in kernel.of(Hook))
    if missing := [slot for slot in needed if not given[slot]]:
        yield f"{template.function} needs the hooks {', '.join(missing)}", template.place
    for hook in kernel.of(Hook):
        if given[hook.slot] > 1:
            yield f"hook {hook.slot} is given {given[hook.slot]} times; once is right", hook.place


def _effects(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    for hook in kernel.of(Hook):
        if extra := [effect for effect in hook.effects if effect not in HOOKS[hook.slot]]:
            may = ", ".join(HOOKS[hook.slot])
            told = f"{hook.function} {', '.join(extra)}; hook {hook.slot} may only: {may}"
            yield told, hook.place


def _constants(kernel: Kernel) -> Iterator[tuple[str, Place]]:
    for hook in kernel.of(Hook):
        if constants := [one for one in hook.args if not isinstance(one, str)]:
            told = f"{', '.join(map(str, constants))}, which Triton 3.6 forgets in tuples"
            yield f"hook {hook.slot} takes constants {told}: make them parameters", hook.place


RULES = (
    Rule("names", "a name means one thing, before it is used", _names),
    Rule("words", "what the generator of source can spell", _words),
    Rule("template", "a template runs with its hooks, each once", _template, "template"),
    Rule("effects", "a template relies on what its hooks do not do", _effects, "template"),
    Rule("constants", "docs/decisions/009-hooks.md", _constants, "template"),
)


def check(kernel: Kernel) -> list[Violation]:
    """Every breach of the rules."""
    return run(RULES, kernel, ("", "template"))


def require(kernel: Kernel) -> Kernel:
    """The kernel itself. Raises  IllegalError: with all breaches, and the user's lines"""
    if violations := check(kernel):
        raise illegal(f"Core IR of {kernel.name}", violations)
    return kernel
