"""The rules' questions once more, to TTIR: where Triton's front end can lower a kernel unlaunched.

There loops carry the options that they end up with, calls are inlined whatever file they came from,
and what a constexpr decides is decided. Findings have the line of the user's that Triton names.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from weft.base.target import TARGETS
from weft.emulator import ttir, ttir_parser
from weft.language.symbols import base_symbol, with_trait
from weft.verify.lint.arguments import record_of
from weft.verify.lint.problem import Span
from weft.verify.lint.registry import Hit, Kernel, Program
from weft.verify.lint.shadow import Unshadowed, shadow
from weft.verify.lint.signatures import LANGUAGE

ADDRESS_OPS = (
    "tt.addptr",
    "tt.splat",
    "tt.broadcast",
    "tt.expand_dims",
    "tt.bitcast",
    "tt.reshape",
)
# What must be in a kernel for it to be worth lowering.
WORTH_A_LOOK = ("atomic", "wait", "test", "notify", "barrier", "opaque", "assembly")
WAITS = with_trait("waits")


@dataclass
class Seen:
    """`kernels` were lowered; `notes` say why others were not."""

    kernels: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hits: list[tuple[str, Hit]] = field(default_factory=list)


def look(program: Program) -> Seen:
    """Lower every kernel that can be, and ask."""
    seen = Seen()
    kernels = [
        one for one in program.kernels if one.of(*WORTH_A_LOOK) or any(op.waits for op in one.ops)
    ]
    if not kernels:
        return seen
    try:
        module = shadow(program.source)
    except Unshadowed as reason:
        seen.notes.append(f"no kernel of this file was lowered: {reason}")
        return seen
    for kernel in kernels:
        fn = getattr(module, kernel.name, None)
        if fn is None:
            seen.notes.append(f"{kernel.name} was not lowered: it is defined within a function")
            continue
        try:
            with _quiet(), redirect_stdout(io.StringIO()):
                text = _lower(fn, program, kernel)
            questions = Questions(ttir_parser.parse(text), Path(str(module.__file__)).name)
        except Exception as reason:  # types were guessed: Triton may say no in any way it has
            seen.notes.append(f"{kernel.name} was not lowered: {_first_line(reason)}")
            continue
        seen.kernels.append(kernel.name)
        seen.hits += questions.hits(program.source.lines)
    return seen


def _lower(fn: Any, program: Program, kernel: Kernel) -> str:
    from weft.language import triton_api

    record = record_of(program, kernel)
    # Part of the key under which Triton keeps the result, whose places name this file.
    record.options["ignored"] = (("lint", Path(fn.fn.__code__.co_filename).name),)
    text = triton_api.compile_kernel(fn, record, TARGETS["emu"]).asm["emu"]
    return text.decode() if isinstance(text, bytes) else text


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what Triton's compiler prints, past Python, about kernels that it refuses."""
    sys.stderr.flush()
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


def _first_line(reason: BaseException) -> str:
    message = getattr(reason, "message", "") or str(reason)
    return message.strip().splitlines()[0] if message.strip() else type(reason).__name__


@dataclass(frozen=True)
class Step:
    """An operation and the loops around it, outermost first."""

    op: ttir.Op
    loops: tuple[ttir.Op, ...]


class Questions:
    """Asks one lowered kernel what the rules ask."""

    def __init__(self, module: ttir.Module, file: str) -> None:
        self.file = file
        self.made: dict[int, ttir.Op] = {}
        self.kernel = module.kernel
        self.steps = list(self._steps(module.kernel.body, ()))
        self.found: list[tuple[str, ttir.Op, str]] = []

    def hits(self, lines: Sequence[str]) -> list[tuple[str, Hit]]:
        """(rule, finding) for everything that has a line of the user's."""
        for step in self.steps:
            self._scope(step.op)
            self._loops(step)
            if step.op.name == "scf.while" and not self._is_weft(step.op):
                self._spin(step.op)
        return [
            (rule, Hit(Span(line, len(text) - len(text.lstrip()), len(text.rstrip())), message))
            for rule, op, message in self.found
            for line in [self._line(op)]
            if 0 < line <= len(lines)
            for text in [lines[line - 1]]
        ]

    def _steps(self, region: ttir.Region, loops: tuple[ttir.Op, ...]) -> Iterator[Step]:
        for block in region.blocks:
            for op in block.ops:
                for result in op.results:
                    self.made[id(result)] = op
                yield Step(op, loops)
                inner = (*loops, op) if op.name in ("scf.for", "scf.while") else loops
                for part in op.regions:
                    yield from self._steps(part, inner)

    def _is_weft(self, op: ttir.Op) -> bool:
        """Is it part of a primitive, which knows what it does?"""
        inner = op.place.innermost
        return inner is not None and inner.file.startswith(str(LANGUAGE))

    def _line(self, op: ttir.Op) -> int:
        """The innermost line in the user's file; 0 where there is none."""
        own = [frame.line for frame in op.place.frames if Path(frame.file).name == self.file]
        return own[-1] if own else 0

    # -- whose memory -------------------------------------------------------------------------

    def _is_remote(self, address: ttir.Value) -> bool:
        """Is it the address of something that is another rank's?"""
        op = self.made.get(id(address))
        if op is None:
            return False
        if op.name in ADDRESS_OPS:
            return self._is_remote(op.operands[0])
        if op.name == "tt.extern_elementwise" and _symbol(op) in ("weft.at", "weft.translate"):
            return not self._is_own_rank(op.operands[-1])
        return False

    def _is_own_rank(self, value: ttir.Value) -> bool:
        """wl.rank is the first word of the world's table; a constant may be the own rank too."""
        op = self.made.get(id(value))
        if op is not None and op.name == "arith.constant":
            return True
        while op is not None and op.name in ("arith.trunci", "arith.extsi"):
            value = op.operands[0]
            op = self.made.get(id(value))
        return op is not None and op.name == "tt.load" and op.operands[0].name == "world"

    def _scope(self, op: ttir.Op) -> None:
        scope = next((word for word in op.words if word in ("gpu", "cta", "sys")), "")
        if op.name in ("tt.atomic_rmw", "tt.atomic_cas") and not self._is_weft(op):
            remote = self._is_remote(op.operands[0])
            if remote and scope in ("gpu", "cta"):
                message = f"an atomic of scope {scope!r} on another rank's word"
                self.found.append(("device-scope", op, message))
            if op.name == "tt.atomic_cas" and (remote or scope == "sys"):
                message = (
                    f"tl.atomic_cas of scope {scope!r}: on AMD it has the agent's, and no order"
                )
                self.found.append(("cas-across-gpus", op, message))
        symbol = _symbol(op)
        if symbol.startswith("weft.notify") and symbol.endswith((".gpu", ".cta")):
            if self._is_remote(op.operands[0]):
                message = f"a notify of scope {symbol[-3:]!r} to another rank"
                self.found.append(("device-scope", op, message))

    # -- loops --------------------------------------------------------------------------------

    def _loops(self, step: Step) -> None:
        is_wait = base_symbol(_symbol(step.op)) in WAITS
        if step.op.name == "scf.while":
            is_wait = any(self._polls(step.op))
        if not is_wait:
            return
        counted = [loop for loop in step.loops if loop.name == "scf.for"]
        for loop in counted:
            if _is_set(loop, "tt.flatten"):
                message = f"the loop in line {self._line(loop)} is flattened around this wait"
                self.found.append(("flattened-wait", step.op, message))
            if _is_set(loop, "tt.warp_specialize"):
                message = (
                    f"the loop in line {self._line(loop)} is warp-specialised around this wait"
                )
                self.found.append(("specialised-wait", step.op, message))
        if counted and _stages(counted[-1]) > 1 and self._loads(counted[-1]):
            message = f"the loop in line {self._line(counted[-1])} is pipelined around this wait"
            self.found.append(("wait-in-pipelined-loop", step.op, message))

    def _loads(self, loop: ttir.Op) -> bool:
        """Does the loop itself, and not one within it, load what could be loaded ahead?"""
        for step in self.steps:
            counted = [one for one in step.loops if one.name == "scf.for"]
            if counted[-1:] == [loop] and step.op.name in ("tt.load", "tt.descriptor_load"):
                return True
        return False

    # -- spins --------------------------------------------------------------------------------

    def _polls(self, loop: ttir.Op) -> Iterator[ttir.Op]:
        """Reads of one word that the loop repeats and that it does not itself change."""
        inner = [op for region in loop.regions for op in _all(region)]
        if any(op.name in ("tt.store", "tt.call") for op in inner):
            return
        variant = {id(result) for op in inner for result in op.results}
        for region in loop.regions:
            variant |= {id(arg) for block in region.blocks for arg in block.args}
        for op in _all(loop.regions[0]):
            if op.name not in ("tt.load", "tt.atomic_rmw") or op.operands[0].type.is_tensor:
                continue
            if id(op.operands[0]) in variant:
                continue
            if op.name == "tt.load" or self._is_zero(op.operands[1]):
                yield op

    def _is_zero(self, value: ttir.Value) -> bool:
        op = self.made.get(id(value))
        return op is not None and op.name == "arith.constant" and op.words[:1] == ["0"]

    def _spin(self, loop: ttir.Op) -> None:
        after = [step.op for step in self.steps]
        after = after[after.index(loop) + 1 + sum(1 for r in loop.regions for _ in _all(r)) :]
        for op in self._polls(loop):
            if op.name == "tt.load":
                name = "volatile-wait" if op.flag("isVolatile") else "plain-load-wait"
                kind = "volatile" if op.flag("isVolatile") else "plain"
                self.found.append((name, op, f"a loop that waits by {kind} loads"))
            elif "relaxed" in op.words and _reads_unordered(after):
                message = "a loop that waits by relaxed atomics, and loads behind it"
                self.found.append(("spin-without-acquire", op, message))


def _reads_unordered(ops: Sequence[ttir.Op]) -> bool:
    """Does a load come before anything that acquires?"""
    for op in ops:
        if {"acquire", "acq_rel"} & set(op.words) or "acq" in _symbol(op):
            return False
        if op.name in ("tt.load", "tt.descriptor_load"):
            return True
    return False


def _all(region: ttir.Region) -> Iterator[ttir.Op]:
    for block in region.blocks:
        for op in block.ops:
            yield op
            for inner in op.regions:
                yield from _all(inner)


def _symbol(op: ttir.Op) -> str:
    if op.name != "tt.extern_elementwise":
        return ""
    return str(op.attributes.get("symbol", "")).strip('"')


def _is_set(op: ttir.Op, name: str) -> bool:
    """A unit attribute is printed as its bare name."""
    value = str(op.attributes.get(name, "true" if name in op.words else "false"))
    return value.split(":")[0].strip() == "true"


def _stages(loop: ttir.Op) -> int:
    return loop.integer("tt.num_stages", 1) if "tt.num_stages" in loop.attributes else 1
