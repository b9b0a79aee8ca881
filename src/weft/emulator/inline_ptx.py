"""Inline assembly of a kernel, read: the PTX that synchronisation helpers of the field are made of.

Instructions become closures on a lane (assembly.py), which has registers and may access memory.
A register holds its bits as a Python integer; each instruction cuts operands to its own type.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from weft.base.errors import UnsupportedError
from weft.emulator import vector_ptx
from weft.emulator.memory import ORDERS, SCOPES

SCOPE_WORDS = {**SCOPES, "gl": SCOPES["gpu"]}  # membar's word for the device
SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid)\.([xyz])$|%(laneid|warpid|nwarpid|smid|nsmid|clock64|clock|"
    r"globaltimer|globaltimer_lo)$"
)
PER_THREAD = re.compile(r"%(tid\.x|laneid|warpid)\b")
IGNORED = {"bar", "barrier", "nanosleep", "griddepcontrol", "prefetch", "prefetchu"}
# What may stand in an access's opcode and changes nothing here.
HINTS = {"global", "nc", "ca", "cg", "cs", "lu", "wb", "wt", "weak"}
PART = re.compile(r"[{}]|[\w$%]+\s*:(?!:)|[^;]*;")  # a brace, a label, a statement
TYPE = re.compile(r"([busf])(8|16|32|64)$|(pred)$")
THREADS_OF_A_WARP = 32
ALL_BITS = (1 << 64) - 1

Read = Callable[[Any], int]
Step = Callable[[Any], None]


class Kind(NamedTuple):
    """A type: "u32" is ("u", 32); a predicate is one bit."""

    letter: str
    bits: int

    @property
    def mask(self) -> int:
        return (1 << self.bits) - 1

    @property
    def dtype(self) -> np.dtype:
        """Of words in memory: signed, as all others access them."""
        return np.dtype(f"i{self.bits // 8}")

    def value(self, bits: int) -> int:
        """The number that these bits are."""
        bits &= self.mask
        if self.letter == "s" and bits >> (self.bits - 1):
            return bits - (1 << self.bits)
        return bits


class Instruction(NamedTuple):
    """`guard` is the predicate with the value it must have; a branch has a `target`."""

    text: str
    guard: tuple[Read, bool] | None
    step: Step | None
    target: int | None = None


class Assembly(NamedTuple):
    """One inline assembly. `per_thread`: threads see different values in it; `counts`: it matters
    how many threads run it; `written`: which of its results it writes; `accesses`: its instructions
    that access memory, of ld, st, atom and red."""

    instructions: tuple[Instruction, ...]
    num_results: int
    written: frozenset[int]
    per_thread: bool
    counts: bool
    accesses: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """May threads get different results of it from equal operands?"""
        return self.per_thread or self.counts


@lru_cache(maxsize=256)
def read_assembly(text: str, constraints: str) -> Assembly:
    """The assembly in Triton's spelling: $0, $1 are results, then operands.

    Raises  UnsupportedError: PTX that the emulator does not run, with its line
    """
    letters = [word.strip() for word in constraints.split(",")]
    for word in letters:
        if not re.fullmatch(r"=?[rlhfd]|~\{.*\}", word):
            raise UnsupportedError(f"inline assembly with the constraint {word!r} is not emulated")
    reader = _Reader(text, sum(word.startswith("=") for word in letters))
    instructions = tuple(reader.instructions())
    opcodes = {one.text.split()[0].split(".")[0] for one in reader.statements}
    return Assembly(
        instructions, reader.num_results, frozenset(reader.written),
        bool(PER_THREAD.search(text)), bool(opcodes & {"atom", "red"}),
        tuple(sorted(opcodes & {"ld", "st", "atom", "red"})),
    )  # fmt: skip


class _Statement(NamedTuple):
    text: str  # without its predicate
    guard: tuple[str, bool] | None
    names: tuple[dict[str, str], ...]  # registers of the braces around it, the inner ones last


class _Reader:
    """Reads one text: first its statements, registers and labels, then what they do."""

    def __init__(self, text: str, num_results: int) -> None:
        self.num_results = num_results
        self.written: set[int] = set()
        self.labels: dict[str, int] = {}
        self.statements: list[_Statement] = []
        text = re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
        text = text.replace("${:uid}", "_uid").replace("$$", "$").strip()
        scopes: list[dict[str, str]] = [{}]
        while text:
            match = PART.match(text)
            if match is None:
                raise _refusal(text, "it does not end with a semicolon")
            self._part(match[0].strip(), scopes)
            text = text[match.end() :].lstrip()

    def _part(self, part: str, scopes: list[dict[str, str]]) -> None:
        if part == "{":
            scopes.append({})
        elif part == "}":
            scopes.pop()
        elif part.endswith(":"):
            label = part[:-1].strip()
            if label in self.labels:
                raise _refusal(part, "the label stands twice; let ${:uid} tell them apart")
            self.labels[label] = len(self.statements)
        elif part.startswith(".reg"):
            declared = re.fullmatch(r"\.reg((?:\s*\.\w+)+)\s+(.*);", part, re.DOTALL)
            if declared is None:
                raise _refusal(part, "it declares no registers")
            count = vector_ptx.count_of(re.findall(r"\w+", declared[1]))
            for name in declared[2].split(","):
                for whole in _declared(name.strip()):
                    for register in vector_ptx.parts_of_register(whole, count):
                        scopes[-1][register] = f"{register} {len(scopes)} {len(self.statements)}"
        elif part != ";":
            guard = re.match(r"@(!?)\s*([\w%$]+)\s+", part)
            self.statements.append(
                _Statement(
                    part[guard.end() if guard else 0 : -1].strip(),
                    (guard[2], guard[1] != "!") if guard else None,
                    tuple(scopes),
                )
            )

    def instructions(self) -> Iterator[Instruction]:
        for one in self.statements:
            guard = (self._read(one, one.guard[0]), one.guard[1]) if one.guard else None
            opcode, *rest = one.text.split(None, 1)
            words, operands = opcode.split("."), _operands("".join(rest))
            if words[0] == "bra":
                if operands[-1] not in self.labels:
                    raise _refusal(one.text, "it has no such label")
                yield Instruction(one.text, guard, None, self.labels[operands[-1]])
            elif words[0] in IGNORED or opcode.startswith("fence.proxy"):
                yield Instruction(one.text, guard, _nothing)
            else:
                yield Instruction(one.text, guard, self._step(one, words, operands))

    def _step(self, one: _Statement, words: list[str], operands: list[str]) -> Step:
        if words[0] in ("membar", "fence"):
            scope = next((SCOPE_WORDS[word] for word in words if word in SCOPE_WORDS), None)
            if scope is None:
                raise _refusal(one.text, "its scope is not cta, gpu or sys")
            return lambda lane: lane.fence(scope)
        if words[0] in ("ld", "st", "atom", "red"):
            return self._access(one, words, operands)
        if (vector := self._vector(one, words, operands)) is not None:
            return vector
        modifiers = {word for word in words[1:] if not TYPE.match(word)}
        reads = [self._read(one, operand) for operand in operands[1:]]
        count, change = vector_ptx.ON_NUMBERS.get(words[0], (0, None))
        if change and words[-1] == "f32" and count == len(reads):
            if modifiers <= vector_ptx.ROUNDINGS:
                write, f32 = self._write(one, operands[0]), np.dtype(np.float32)
                return vector_ptx.on_numbers(change, f32, np.float64, reads, write)
        kinds = [_kind(word) for word in words[1:] if TYPE.match(word)]
        if not kinds or any(kind.letter == "f" for kind in kinds) and words[0] != "mov":
            raise _refusal(one.text, "integers and some of f32 are computed with")
        compute = _computation(one.text, words[0], modifiers, kinds, len(operands) - 1)
        write = self._write(one, operands[0])
        return lambda lane: write(lane, compute(*(read(lane) for read in reads)))

    def _vector(self, one: _Statement, words: list[str], operands: list[str]) -> Step | None:
        """What it does to a vector; None where it is about none."""
        name, count = words[0], vector_ptx.count_of(words)
        if name in vector_ptx.ON_PAIRS and words[-1] in vector_ptx.PAIRS and len(operands) == 3:
            reads = [self._read(one, operand) for operand in operands[1:]]
            pair = vector_ptx.PAIRS[words[-1]]
            change, write = vector_ptx.ON_PAIRS[name], self._write(one, operands[0])
            return vector_ptx.on_numbers(change, pair, np.float32, reads, write)
        if name != "mov" or len(operands) != 2 or not TYPE.match(words[-1]):
            return None
        to, given = operands
        if count > 1:
            whole = vector_ptx.parts_of_register(to, count)
            writes = [self._write(one, register) for register in whole]
            read = self._read(one, given)
            return lambda lane: [write(lane, read(lane)) for write in writes] and None
        bits = _kind(words[-1]).bits
        if to.startswith("{"):
            writes = [self._write(one, register) for register in vector_ptx.parts_of(to)]
            return vector_ptx.split(self._read(one, given), writes, bits)
        if given.startswith("{"):
            reads = [self._read(one, register) for register in vector_ptx.parts_of(given)]
            return vector_ptx.joined(reads, self._write(one, to), bits)
        return None

    def _vector_access(
        self, one: _Statement, words: list[str], operands: list[str], count: int
    ) -> Step:
        """A load or store of several elements, one behind the other."""
        where, given = (1, 0) if words[0] == "ld" else (0, 1)
        registers = vector_ptx.parts_of(operands[given])
        match = re.fullmatch(r"\[\s*([\w%$]+)\s*(?:\+\s*(\d+)\s*)?\]", operands[where])
        if len(registers) != count or match is None or not TYPE.match(words[-1]):
            raise _refusal(one.text, f"it has not {count} registers and an address")
        scalar, size = [word for word in words if word != f"v{count}"], _kind(words[-1]).bits // 8
        steps = []
        for number, register in enumerate(registers):
            address = f"[{match[1]} + {int(match[2] or 0) + number * size}]"
            pair = [address, register] if where == 0 else [register, address]
            steps.append(self._access(one, scalar, pair))
        return lambda lane: [step(lane) for step in steps] and None

    def _access(self, one: _Statement, words: list[str], operands: list[str]) -> Step:
        count = vector_ptx.count_of(words)
        if count > 1 and words[0] in ("ld", "st"):
            return self._vector_access(one, words, operands, count)
        name, modifiers = words[0], words[1:-1]
        kind = _kind(words[-1]) if TYPE.match(words[-1]) else None
        order = next((ORDERS[word] for word in modifiers if word in ORDERS), None)
        scope = next((SCOPES[word] for word in modifiers if word in SCOPES), None)
        volatile = any(word in ("volatile", "cv") for word in modifiers)
        rest = {
            word for word in modifiers
            if word not in {*ORDERS, *SCOPES, *HINTS, "volatile", "cv"}
            and not word.startswith("L")
        }  # fmt: skip
        what = rest.pop() if name in ("atom", "red") and len(rest) == 1 else ""
        if kind is None or rest or (what and what not in UPDATES):
            wrong = ", ".join(sorted(rest)) or what or words[-1]
            raise _refusal(one.text, f"the emulator knows no .{wrong} of {name}")
        if (order or Any) not in (Any, *(ORDERS[word] for word in _ORDERS_OF[name])):
            raise _refusal(one.text, f"{name} has no order .{order.value}")
        if order is not None and scope is None and name in ("ld", "st"):
            raise _refusal(one.text, f"an ordered {name} says its scope: .gpu or .sys")
        if volatile:
            order, scope = ORDERS["relaxed"], SCOPES["sys"]
        if name in ("atom", "red"):
            order, scope = order or ORDERS["relaxed"], scope or SCOPES["gpu"]
        result = self._write(one, operands[0]) if name in ("ld", "atom") else None
        address, *values = operands[1:] if result else operands
        at = self._address(one, address)
        reads = [self._read(one, value) for value in values]
        if name == "ld":
            return lambda lane: result(lane, lane.load(at(lane), kind, order, scope))
        if name == "st":
            return lambda lane: lane.store(at(lane), reads[0](lane), kind, order, scope)
        if len(reads) != 1 + (what == "cas") or not what:
            raise _refusal(one.text, f"{name}.{what or '?'} does not take {len(reads)} values")
        if kind.letter == "f" and what not in ("exch", "cas"):
            raise _refusal(one.text, "only integers are computed with")
        update = partial(UPDATES[what], kind)

        def change(lane: Any) -> None:
            old = lane.update(at(lane), update, [read(lane) for read in reads], kind, order, scope)
            if result is not None:
                result(lane, old)

        return change

    def _address(self, one: _Statement, operand: str) -> Read:
        match = re.fullmatch(r"\[\s*([\w%$]+)\s*(?:\+\s*(-?\w+)\s*)?\]", operand)
        if match is None:
            raise _refusal(one.text, f"{operand} is no address of a register and an offset")
        base, offset = self._read(one, match[1]), int(match[2] or "0", 0)
        return lambda lane: (base(lane) + offset) & ALL_BITS

    def _read(self, one: _Statement, operand: str) -> Read:
        if operand.startswith("!"):
            inner = self._read(one, operand[1:])
            return lambda lane: inner(lane) ^ 1
        if match := re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", operand):
            number = int(match[0].rstrip("U"), 0) & ALL_BITS
            return lambda lane: number
        if match := SPECIAL.match(operand):
            name, axis = match[1] or match[3], "xyz".find(match[2] or "x")
            return lambda lane: lane.special(name, axis)
        name = self._register(one, operand)
        return lambda lane: lane.registers.get(name, 0)

    def _write(self, one: _Statement, operand: str) -> Callable[[Any, int], None]:
        name = self._register(one, operand)
        if name.startswith("$"):
            self.written.add(int(name[1:]))

        def write(lane: Any, bits: int) -> None:
            lane.registers[name] = bits

        return write

    def _register(self, one: _Statement, operand: str) -> str:
        if re.fullmatch(r"\$\d+", operand):
            return operand
        for names in reversed(one.names):
            if operand in names:
                return names[operand]
        raise _refusal(one.text, f"{operand} is no register that .reg declares")


def _declared(name: str) -> Iterator[str]:
    match = re.fullmatch(r"([\w%$]+)<(\d+)>", name)
    if match is None:
        yield name
    else:
        yield from (f"{match[1]}{number}" for number in range(int(match[2])))


def _operands(text: str) -> list[str]:
    return [part.strip() for part in re.split(r",(?![^\[{]*[\]}])", text) if part.strip()]


def _kind(word: str) -> Kind:
    match = TYPE.match(word)
    assert match is not None
    return Kind("u", 1) if match[3] else Kind(match[1], int(match[2]))


def _refusal(line: str, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the emulator does not run the line {line!r} of this inline assembly: {why}; write it in"
        " Triton or with weft.language, or branch on the target (docs/emulator.md lists the PTX"
        " that runs)"
    )


def _nothing(lane: Any) -> None:
    """A program is one thread here, and time does not pass."""


# ---------------------------------------------------------------------------------------------
# What instructions compute, and what atomics make of a word

_ORDERS_OF = {
    "ld": ("relaxed", "acquire"), "st": ("relaxed", "release"),
    "atom": tuple(ORDERS), "red": ("relaxed", "release", "acq_rel"),
}  # fmt: skip

COMPARISONS = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le,
    "gt": operator.gt, "ge": operator.ge, "lo": operator.lt, "ls": operator.le,
    "hi": operator.gt, "hs": operator.ge,
}  # fmt: skip
COMBINATIONS = {"and": operator.and_, "or": operator.or_, "xor": operator.xor}


def _quotient(a: int, b: int) -> int:
    return 0 if b == 0 else abs(a) // abs(b) * (-1 if (a < 0) != (b < 0) else 1)


ARITHMETIC: dict[str, tuple[int, Callable[..., int]]] = {
    "mov": (1, lambda a: a), "cvta": (1, lambda a: a),
    "add": (2, operator.add), "sub": (2, operator.sub),
    "and": (2, operator.and_), "or": (2, operator.or_), "xor": (2, operator.xor),
    "min": (2, min), "max": (2, max), "not": (1, operator.invert), "neg": (1, operator.neg),
    "abs": (1, abs), "div": (2, _quotient), "rem": (2, lambda a, b: a - b * _quotient(a, b)),
}  # fmt: skip


def _computation(
    text: str, name: str, modifiers: set[str], kinds: list[Kind], count: int
) -> Callable[..., int]:
    """A function of operands' bits, which gives the result's."""
    kind = kinds[0]
    value, mask = kind.value, kind.mask
    if name == "setp":
        compare = next((COMPARISONS[word] for word in modifiers if word in COMPARISONS), None)
        combine = next((COMBINATIONS[word] for word in modifiers if word in COMBINATIONS), None)
        if compare and combine and count == 3:
            return lambda a, b, c: combine(int(compare(value(a), value(b))), c)
        if compare and not combine and count == 2:
            return lambda a, b: int(compare(value(a), value(b)))
    elif name == "selp" and count == 3:
        return lambda a, b, chosen: (a if chosen else b) & mask
    elif name == "cvt" and len(kinds) == 2 and count == 1 and not modifiers:
        return lambda a: kinds[1].value(a) & mask
    elif name == "shl" and count == 2:
        return lambda a, by: (a << min(by, kind.bits)) & mask
    elif name == "shr" and count == 2:
        return lambda a, by: (value(a) >> min(by & 0xFFFFFFFF, kind.bits)) & mask
    elif name in ("mul", "mad") and count == 2 + (name == "mad"):
        wide = (1 << 2 * kind.bits) - 1 if "wide" in modifiers else mask
        high = kind.bits if "hi" in modifiers else 0
        if modifiers & {"lo", "hi", "wide"}:
            return lambda a, b, c=0: ((value(a) * value(b) >> high) + c) & wide
    elif name in ARITHMETIC and count == ARITHMETIC[name][0] and modifiers <= {"to", "global"}:
        function = ARITHMETIC[name][1]
        return lambda *operands: function(*map(value, operands)) & mask
    raise _refusal(text, f"{text.split()[0]} is not among the instructions that it knows")


def _count_up(kind: Kind, old: int, limit: int) -> int:
    return 0 if kind.value(old) >= kind.value(limit) else old + 1


def _count_down(kind: Kind, old: int, limit: int) -> int:
    return limit if kind.value(old) == 0 or kind.value(old) > kind.value(limit) else old - 1


# The new value of a word, by its old one and the operands; None writes none.
UPDATES: dict[str, Callable[..., int | None]] = {
    "add": lambda kind, old, value: old + value,
    "exch": lambda kind, old, value: value,
    "cas": lambda kind, old, expected, value: value if old == expected & kind.mask else None,
    "and": lambda kind, old, value: old & value,
    "or": lambda kind, old, value: old | value,
    "xor": lambda kind, old, value: old ^ value,
    "min": lambda kind, old, value: min(old, value, key=kind.value),
    "max": lambda kind, old, value: max(old, value, key=kind.value),
    "inc": _count_up,
    "dec": _count_down,
}
