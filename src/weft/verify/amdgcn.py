"""A reader of AMDGCN assembly: instructions with place and branch targets, as a flow graph."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from weft.verify.places import NOWHERE, AssemblyLines, Key, Loc, coarse, key_of

_LABEL = re.compile(r"^([A-Za-z_.$][\w.$]*):")
_DWORDS = {"dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16, "short": 2, "byte": 1}
_SIZES = {**_DWORDS, "b8": 1, "b16": 2, "b32": 4, "b64": 8, "b96": 12, "b128": 16}


@dataclass(eq=False)
class Instruction:
    """One instruction; `asm_block` numbers the inline assembly it stands in, 0 outside;
    `after_write_back` says that a cache write-back stands before it, with no access between."""

    opcode: str
    operands: str
    locs: tuple[Loc, ...]
    line: int
    asm_block: int
    target: str = ""
    after_write_back: bool = False

    def __post_init__(self) -> None:
        self.loc = self.locs[0]
        self.keys = frozenset(coarse(key_of(loc)) for loc in self.locs)
        self.key = min(self.keys)

    @property
    def is_vector_memory(self) -> bool:
        return self.opcode.startswith(("global_", "flat_", "buffer_")) and not self.is_cache_control

    @property
    def is_cache_control(self) -> bool:
        return self.opcode.startswith(("buffer_wbl2", "buffer_inv", "buffer_wbinv", "global_wb",
                                       "global_inv"))  # fmt: skip

    @property
    def is_load(self) -> bool:
        return self.is_vector_memory and "_load" in self.opcode or self.opcode.startswith("s_load")

    @property
    def is_coherent(self) -> bool:
        """Does it go past caches that another device cannot see through?"""
        return bool(re.search(r"\bsc[01]\b|scope:SCOPE_(?:DEV|SYS)", self.operands))

    @property
    def is_store(self) -> bool:
        return self.is_vector_memory and "_store" in self.opcode

    @property
    def is_atomic(self) -> bool:
        return self.is_vector_memory and "_atomic" in self.opcode

    @property
    def is_barrier(self) -> bool:
        return self.opcode.startswith("s_barrier") and self.opcode != "s_barrier_signal"

    @property
    def waits_for_memory(self) -> bool:
        """Do this wave's vector memory accesses, stores among them, end before the next one?"""
        if self.opcode == "s_waitcnt":
            return "vmcnt(0)" in self.operands or self.operands.strip() == "0"
        return self.opcode in ("s_wait_storecnt", "s_waitcnt_vscnt") and (
            self.operands.strip().rsplit(" ", 1)[-1] in ("0", "0x0")
        )

    @property
    def writes_back(self) -> str:
        """The scope as far as which this instruction writes caches back."""
        if self.opcode.startswith("buffer_wbl2"):
            return "sys" if "sc0" in self.operands else "gpu"
        if self.opcode.startswith("global_wb"):
            return "sys" if "SCOPE_SYS" in self.operands else "gpu"
        return ""

    @property
    def bytes(self) -> int:
        word = self.opcode.rsplit("_", 1)[-1]
        if self.opcode.endswith("_d16_hi"):
            word = self.opcode.split("_")[-3]
        return _SIZES.get(word, 0)


@dataclass(eq=False)
class Program:
    """The kernel's instructions and, for each, where control may go next.

    A skip over instructions because no lane is active (`s_cbranch_execz`) is not followed: such
    instructions are predicated, not left out.
    """

    instructions: list[Instruction]
    successors: list[list[int]]
    has_lines: bool


def parse(text: str, files: Mapping[str, str], known: Collection[Key] = frozenset()) -> Program:
    """The first function of an AMDGCN module; `known` are the places of the stages before it."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    locs: tuple[Loc, ...] = (NOWHERE,)
    lines = AssemblyLines(text, files, known)
    written_back = False
    num_asm = asm_block = 0
    has_lines = inside = False
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not inside:
            inside = bool(_LABEL.match(stripped)) and "@" in stripped
            continue
        if stripped.startswith((".section", ".size", ".amdhsa", ".Lfunc_end")):
            break
        if stripped.startswith(";;#ASMSTART"):
            num_asm += 1
            asm_block = num_asm
            continue
        if stripped.startswith(";;#ASMEND"):
            asm_block = 0
            continue
        if stripped.startswith(".loc"):
            has_lines = True
            if not asm_block:
                locs = lines.read(stripped)
            continue
        code = stripped.partition(";")[0].partition("//")[0].strip()
        if match := _LABEL.match(code):
            labels[match[1]] = len(instructions)
            written_back = False
            code = code[match.end() :].strip()
        if not code or code.startswith("."):
            continue
        opcode, _, operands = code.partition(" ")
        one = Instruction(opcode, operands.strip(), locs, number, asm_block)
        if opcode == "s_branch" or opcode.startswith("s_cbranch"):
            one.target = operands.strip()
        one.after_write_back = written_back
        written_back = bool(one.writes_back) or (written_back and not one.is_vector_memory)
        instructions.append(one)
    return Program(instructions, _successors(instructions, labels), has_lines)


def _successors(instructions: list[Instruction], labels: dict[str, int]) -> list[list[int]]:
    end = len(instructions)
    following: list[list[int]] = []
    for index, one in enumerate(instructions):
        targets = [index + 1] if index + 1 < end else []
        if one.opcode in ("s_endpgm", "s_setpc_b64", "s_trap"):
            targets = []
        elif one.target and one.opcode != "s_cbranch_execz":
            target = labels.get(one.target, end)
            taken = [target] if target < end else []
            targets = taken if one.opcode == "s_branch" else targets + taken
        following.append(targets)
    return following
