"""A reader of PTX: instructions with predicate, place and branch targets, as a flow graph.

Inline assembly is part of the same text and is read with the same eyes: its labels live in the
`{ }` in which they stand, its loops are loops.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from weft.verify.flow import reached
from weft.verify.places import NOWHERE, AssemblyLines, Key, Loc, key_of

_LABEL = re.compile(r"^([A-Za-z_$%][\w$%]*)\s*:(?!:)")
_INSTRUCTION = re.compile(r"^(?:@!?(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.DOTALL)
_REGISTER = re.compile(r"%[a-z]+\d+\b")
_PARAMETER = re.compile(r"_param_(\d+)")

SEMANTICS = {"relaxed", "acquire", "release", "acq_rel", "sc", "volatile"}
SCOPES = {"cta", "cluster", "gpu", "sys"}


@dataclass(eq=False)
class Instruction:
    """One instruction; `parts` is its opcode split at dots; `asm_block` numbers the inline
    assembly that it stands in, 0 outside; `locs` are the places it may stand for, `keys` theirs."""

    opcode: str
    operands: str
    predicate: str
    locs: tuple[Loc, ...]
    line: int
    asm_block: int
    parts: list[str] = field(default_factory=list)
    target: str = ""

    def __post_init__(self) -> None:
        self.loc = self.locs[0]
        self.keys = frozenset(key_of(loc) for loc in self.locs)
        self.key = min(self.keys)

    @property
    def base(self) -> str:
        return self.parts[0]

    @property
    def is_global(self) -> bool:
        """Does it access global memory, or generic addresses that may be global?"""
        if self.base in ("ld", "st", "atom", "red", "ldu"):
            other = ("shared", "local", "param", "const", "tensormap", "mbarrier")
            return not any(part.startswith(other) for part in self.parts[1:])
        return self.base == "multimem"

    @property
    def order(self) -> str:
        found = next((part for part in self.parts if part in SEMANTICS), "")
        if not found and self.base in ("atom", "red"):
            return "relaxed"
        return found or "weak"

    @property
    def scope(self) -> str:
        found = next((part for part in self.parts if part in SCOPES), "")
        if found:
            return found
        if self.base == "membar":
            return {"gl": "gpu", "cta": "cta", "sys": "sys"}.get(self.parts[1], "")
        if self.order == "volatile":
            return "sys"
        return "gpu" if self.base in ("atom", "red") else ""

    @property
    def is_barrier(self) -> bool:
        return (self.base == "bar" and self.parts[1] in ("sync", "red")) or (
            self.base == "barrier" and "arrive" not in self.parts
        )

    @property
    def is_warp_barrier(self) -> bool:
        return self.opcode.startswith("bar.warp.sync")

    @property
    def copies(self) -> str:
        """For an asynchronous copy: "in" for global to shared, "out" for shared to global."""
        if self.base not in ("cp", "multimem") or "async" not in self.parts:
            return ""
        if "prefetch" in self.parts or "wait_group" in self.parts or "commit_group" in self.parts:
            return ""
        sides = [part for part in self.parts if part.startswith(("shared", "global"))]
        if len(sides) < 2:
            return ""
        return "in" if sides[1].startswith("global") else "out"

    @property
    def completes_bulk(self) -> bool:
        """Waits until this thread's bulk stores are written, not only read from shared memory."""
        return (
            self.opcode.startswith("cp.async.bulk.wait_group")
            and "read" not in self.parts
            and self.operands.strip().rstrip(";") == "0"
        )


@dataclass(eq=False)
class Program:
    """The kernel's instructions and, for each, where control may go next."""

    instructions: list[Instruction]
    successors: list[list[int]]
    has_lines: bool
    definitions: dict[str, list[Instruction]]

    def parameters(self, instruction: Instruction) -> set[int]:
        """Which kernel parameters the instruction's address is computed from."""

        def made_of(register: str) -> str:
            return " ".join(one.operands for one in self.definitions.get(register, ()))

        address = instruction.operands
        if bracket := re.search(r"\[(.*)\]", address, re.DOTALL):
            address = bracket[1]
        registers = reached(_REGISTER.findall(address), lambda one: _REGISTER.findall(made_of(one)))
        return {int(number) for one in registers for number in _PARAMETER.findall(made_of(one))}


def parse(text: str, files: Mapping[str, str], known: Collection[Key] = frozenset()) -> Program:
    """The entry function of a PTX module; `known` are the places of the stages before it."""
    instructions: list[Instruction] = []
    # Labels by the chain of braces around them: assembly blocks repeat names.
    scopes: list[int] = [0]
    labels: dict[tuple[tuple[int, ...], str], int] = {}
    branches: list[tuple[int, tuple[int, ...], str]] = []
    tables: dict[str, list[str]] = {}
    next_scope = 1
    locs: tuple[Loc, ...] = (NOWHERE,)
    lines = AssemblyLines(text, files, known)
    has_lines = inside = False
    asm_block = num_asm = 0
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not inside:
            # The kernel's body follows its header; other functions are left alone.
            inside = ".entry" in stripped
            header = inside
            continue
        if stripped.startswith("// begin inline asm"):
            num_asm += 1
            asm_block = num_asm
        elif stripped.startswith("// end inline asm"):
            asm_block = 0
        if stripped.startswith(".loc"):
            has_lines = True
            if not asm_block:  # inside, LLVM counts lines of the assembly, not of the source
                locs = lines.read(stripped)
            continue
        code = stripped.partition("//")[0].strip()
        if header:
            if code.startswith("{"):
                header = False
            continue
        while code:
            if code[0] == "{":
                scopes.append(next_scope)
                next_scope += 1
                code = code[1:].lstrip()
                continue
            if code[0] == "}":
                scopes.pop()
                code = code[1:].lstrip(" ;")
                if len(scopes) == 0:
                    break
                continue
            if match := _LABEL.match(code):
                labels[(tuple(scopes), match[1])] = len(instructions)
                code = code[match.end() :].lstrip()
                continue
            statement, rest = _statement(code)
            code = rest
            if statement.startswith(".branchtargets"):
                name = max((key[1] for key, at in labels.items() if at == len(instructions)))
                tables[name] = re.findall(r"\$[\w$]+", statement)
                continue
            if statement.startswith(".") or not statement:
                continue
            match = _INSTRUCTION.match(statement)
            if match is None:
                continue
            one = Instruction(match[2], match[3], match[1] or "", locs, number, asm_block)
            one.parts = one.opcode.split(".")
            if one.base in ("bra", "brx"):
                one.target = one.operands.split(",")[-1].strip()
                branches.append((len(instructions), tuple(scopes), one.target))
            instructions.append(one)
        if not scopes:
            break
    successors = _successors(instructions, labels, branches, tables)
    return Program(instructions, successors, has_lines, _definitions(instructions))


def _statement(code: str) -> tuple[str, str]:
    """The text up to the next `;`, braces of vector operands included."""
    statement, found, rest = code.partition(";")
    return statement.strip(), rest.lstrip() if found else ""


def _successors(instructions, labels, branches, tables) -> list[list[int]]:
    end = len(instructions)
    following = [[index + 1] if index + 1 < end else [] for index in range(end)]
    for index, one in enumerate(instructions):
        if one.base in ("ret", "exit", "trap") and not one.predicate:
            following[index] = []
    for index, scopes, name in branches:
        names = tables.get(name, [name])
        targets = [target for each in names if (target := _find(labels, scopes, each)) is not None]
        targets = [target for target in targets if target < end]
        is_conditional = bool(instructions[index].predicate)
        following[index] = (following[index] if is_conditional else []) + targets
    return following


def _find(labels, scopes: tuple[int, ...], name: str) -> int | None:
    """The label `name` as seen from within `scopes`."""
    for depth in range(len(scopes), 0, -1):
        if (scopes[:depth], name) in labels:
            return labels[(scopes[:depth], name)]
    return None


def _definitions(instructions: list[Instruction]) -> dict[str, list[Instruction]]:
    found: dict[str, list[Instruction]] = {}
    for one in instructions:
        if one.base in ("st", "red", "bra", "bar", "ret", "membar", "fence"):
            continue
        target = one.operands.partition(",")[0]
        if one.operands.startswith("{"):
            target = one.operands.partition("}")[0]
        for register in _REGISTER.findall(target):
            found.setdefault(register, []).append(one)
    return found
