"""A reader of LLVM IR, for one thing: the atomics with their orders, scopes and places.

On AMD the assembly spreads one atomic's order over cache controls and waits; LLVM IR still says
it in two words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from weft.verify.places import NOWHERE, Key, Loc, coarse, key_of

_ATOMIC = re.compile(
    r"(?:= |^)(?:tail call )?(atomicrmw|cmpxchg|load atomic|store atomic)\b(.*?)"
    r"(?:syncscope\(\"([^\"]*)\"\) )?\b(monotonic|acquire|release|acq_rel|seq_cst)\b"
    r".*?(?:!dbg !(\d+))?$"
)
_LOCATION = re.compile(r"^!(\d+) = (?:distinct )?!DILocation\((.*)\)$")
_SCOPE = re.compile(r"^!(\d+) = (?:distinct )?!DI(?:Subprogram|LexicalBlock\w*)\((.*)")
_FILE = re.compile(r'^!(\d+) = (?:distinct )?!DIFile\(filename: "([^"]*)"')
_FIELD = re.compile(r"(\w+): !?(\d+)")

ORDERS = {"monotonic": "relaxed", "seq_cst": "acq_rel"}
SCOPES = {None: "sys", "": "sys", "one-as": "sys", "agent": "gpu", "agent-one-as": "gpu",
          "workgroup": "cta", "workgroup-one-as": "cta"}  # fmt: skip


@dataclass(frozen=True)
class Atomic:
    """One atomic of the IR, in Triton's words."""

    name: str
    order: str
    scope: str
    loc: Loc
    text: str

    @property
    def may_be_a_look(self) -> bool:
        """Does it change nothing, or only what it expects?"""
        return self.name == "cmpxchg" or bool(
            re.search(r"\b(?:or|add|xor) ptr.*? i\d+ 0\b", self.text)
        )

    @property
    def instructions(self) -> set[str]:
        """What AMD's instruction for it may be called: `global_atomic_` and one of these."""
        if self.name == "cmpxchg":
            return {"cmpswap"}
        word = self.text.partition("atomicrmw ")[2].removeprefix("volatile ").partition(" ")[0]
        return {"xchg": {"swap"}, "or": {"or", "add"}}.get(word, {word})

    @property
    def key(self) -> Key:
        return coarse(key_of(self.loc))

    @property
    def keys(self) -> frozenset[Key]:
        return frozenset({self.key})


def atomics(text: str, files: Mapping[str, str]) -> list[Atomic]:
    """Every atomic access of the module."""
    places = _Places(text, files)
    found = []
    for line in text.splitlines():
        stripped = line.strip()
        if "atomic" not in stripped and "cmpxchg" not in stripped:
            continue
        if match := _ATOMIC.search(stripped):
            scope = SCOPES.get(match[3], match[3] or "sys")
            order = ORDERS.get(match[4], match[4])
            tag = re.search(r"!dbg !(\d+)", stripped)
            loc = places.resolve(tag[1]) if tag else NOWHERE
            found.append(Atomic(match[1], order, scope, loc, stripped))
    return found


def has_buffer_atomic(text: str) -> bool:
    return "buffer.atomic" in text


class _Places:
    """The debug metadata of a module, as chains of places."""

    def __init__(self, text: str, files: Mapping[str, str]) -> None:
        self.files = files
        self.locations: dict[str, dict[str, str]] = {}
        self.scopes: dict[str, dict[str, str]] = {}
        self.names: dict[str, str] = {}
        for line in text.splitlines():
            if not line.startswith("!"):
                continue
            if match := _LOCATION.match(line):
                self.locations[match[1]] = dict(_FIELD.findall(match[2]))
            elif match := _SCOPE.match(line):
                self.scopes[match[1]] = dict(_FIELD.findall(match[2]))
            elif match := _FILE.match(line):
                self.names[match[1]] = match[2]

    def resolve(self, number: str) -> Loc:
        chain = []
        fields = self.locations.get(number)
        while fields is not None and len(chain) < 64:
            file = self._file(fields.get("scope", ""))
            chain.append((file, int(fields.get("line", 0)), int(fields.get("column", 0))))
            fields = self.locations.get(fields.get("inlinedAt", ""))
        return tuple(chain)

    def _file(self, scope: str) -> str:
        for _ in range(64):
            fields = self.scopes.get(scope)
            if fields is None:
                return ""
            if "file" in fields:
                name = self.names.get(fields["file"], "").rsplit("/", 1)[-1]
                return self.files.get(name, name)
            scope = fields.get("scope", "")
        return ""
