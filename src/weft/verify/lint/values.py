"""What lint knows of a value in a kernel, and of the operations that the kernel does.

The values are rough on purpose: where an address comes from, whose memory it is, and what has
gone into a number. What is not known is left empty, and no rule fires on what is not known.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, replace
from typing import Any

# What has gone into a value.
DATA = "data"  # something loaded
TICKET = "ticket"  # the result of an atomic
RANK = "rank"
NUM_RANKS = "num_ranks"
PROGRAM = "program"
TILE = "tile"  # one number for each element
OFFSET_RANK = "rank plus something"  # not brought back into 0 .. num_ranks - 1
UNCHECKED = "unchecked"  # from memory, and neither masked nor taken modulo since


@dataclass(frozen=True)
class Value:
    """`form` is set where the value is exactly that: one's rank, the number of ranks, ....

    `roots` name the memory that an address lies in: a parameter, `tasks.done`, or `flags[]` for
    what the entries of a table point to. `remote`: it may be another rank's. `offset` is the
    distance from the root. `params` are the parameters that have gone into a number. `entry`: what
    it is if this loaded number is turned into an address; `index`: where it was found.
    `items` are those of a tuple.
    """

    form: str = ""
    number: Any = None
    traits: frozenset[str] = frozenset()
    roots: frozenset[str] = frozenset()
    remote: bool = False
    offset: Value | None = None
    params: frozenset[str] = frozenset()
    items: tuple[Value, ...] = ()
    fields: tuple[str, ...] = ()
    entry: Value | None = None
    index: Value | None = None

    def has(self, trait: str) -> bool:
        return trait in self.traits or self.form == trait

    def without(self, *traits: str) -> Value:
        return replace(self, form="", traits=self.traits - set(traits))

    def at(self, index: Value) -> Value:
        """The address `index` further on."""
        offset = index
        if self.offset is not None:
            offset = plain(self.offset, index)
            if RANK in (self.offset.form, index.form):
                offset = replace(offset, traits=offset.traits | {OFFSET_RANK})
        traits = self.traits | ({TILE} if index.has(TILE) else set())
        return replace(self, offset=offset, traits=traits, form="", number=None)

    @property
    def is_tile(self) -> bool:
        return self.has(TILE)


NOTHING = Value()


def known(number: Any) -> Value:
    return Value(number=number)


def exactly(form: str) -> Value:
    return Value(form=form, traits=frozenset({form}))


def plain(*values: Value) -> Value:
    """A number computed from `values`."""
    traits = frozenset().union(*(value.traits for value in values))
    params = frozenset().union(*(value.params for value in values))
    return Value(traits=traits, params=params)


def join(one: Value, other: Value) -> Value:
    """What is known where it may be either."""
    if one == other:
        return one
    return Value(
        form=one.form if one.form == other.form else "",
        number=one.number if one.number == other.number else None,
        traits=one.traits | other.traits,
        roots=one.roots | other.roots,
        remote=one.remote or other.remote,
        offset=one.offset if one.offset == other.offset else _joined(one.offset, other.offset),
        params=one.params | other.params,
    )


def _joined(one: Value | None, other: Value | None) -> Value | None:
    return plain(*(value for value in (one, other) if value is not None))


# ---------------------------------------------------------------------------------------------
# Operations


@dataclass(frozen=True)
class Frame:
    """A statement around an operation: "if", "else", "for", "while" or "call".

    `test` is the condition or the loop's variable, `options` what a loop was given by keyword.
    """

    kind: str
    node: ast.AST
    test: Value = NOTHING
    options: dict[str, Value] = field(default_factory=dict, compare=False)
    call: str = ""
    own: int | None = None  # the own rank's number, where a branch has asked for it
    foreign: bool = False  # the function that is called stands in another file


@dataclass(eq=False)
class Op:
    """One thing that a kernel does, in the order of its text, calls of its own helpers inlined.

    kind: load, store, atomic, wait, test, notify, put, get, barrier, block barrier, fence,
    complete, descriptor store, descriptor load, dot, exit, assembly, opaque.
    """

    kind: str
    name: str
    node: ast.AST
    path: tuple[Frame, ...] = ()
    pointer: Value = NOTHING
    value: Value = NOTHING
    to: Value | None = None
    order: str = ""
    scope: str = ""
    options: dict[str, Value] = field(default_factory=dict)
    poll: ast.While | None = None
    used: bool = True

    @property
    def acquires(self) -> bool:
        return self.order in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        return self.order in ("release", "acq_rel")

    @property
    def is_raw(self) -> bool:
        """Made with Triton's own `tl`."""
        return self.name.startswith("tl.")

    @property
    def is_tile_access(self) -> bool:
        """Does it touch many words, one for each element?"""
        return self.pointer.is_tile

    @property
    def waits(self) -> bool:
        return self.kind == "wait" or self.poll is not None

    @property
    def can_poll(self) -> bool:
        """Does it look at a word and leave it as it is, or try to change it again?"""
        if self.is_tile_access:
            return False
        if self.kind in ("load", "test"):
            return True
        if self.kind != "atomic":
            return False
        how = self.name.split(".atomic_")[-1]
        if how in ("cas", "xchg", "exchange", "load") or self.name == "wl.load":
            return True
        return how in ("add", "or", "xor", "max") and self.value.number == 0

    def loops(self) -> list[Frame]:
        """The loops around it, outermost first."""
        return [frame for frame in self.path if frame.kind in ("for", "while")]

    def branches(self) -> list[Frame]:
        return [frame for frame in self.path if frame.kind in ("if", "else")]
