"""What a session may change of the program that runs in it, before it runs.

A kernel is changed between Triton's front end and code generation, a host operation when it is
queued. `weft.verify.mutants` is what this is for.
"""

from __future__ import annotations

import math
from functools import lru_cache

from weft.base.report import Finding
from weft.emulator.codegen import EmulatedKernel, compile_ttir
from weft.emulator.device import Stream, Work
from weft.ir.ttir import Module
from weft.ir.ttir_parser import parse


class Rewrite:
    """A session's `rewrite`. This one changes nothing; others override what they change.

    One object may serve many sessions, one after the other.

    Units   steps: the scheduler's choices, and points at which there was none, of all sessions so
            far; most_steps: of one session, which raises NoEnd after so many; keeps_memory: is
            nothing freed before the session's end? No address comes twice then
    """

    keeps_memory: bool = False
    steps: int = 0
    most_steps: float = math.inf

    def kernel(self, text: str) -> EmulatedKernel:
        """The kernel to run for the TTIR `text`."""
        return compile_ttir(text)

    def position(self, work: Work, stream: Stream) -> int | None:
        """How many of the stream's queued works go before `work`; None leaves it out."""
        return len(stream.queue)

    def is_enough(self, finding: Finding) -> bool:
        """Does a session end with `finding`? What would run next is then left out."""
        return False

    def reached(self, mark: int) -> None:
        """A program has come by the operation `weft.reached:mark` that the kernel was given."""


@lru_cache(maxsize=256)
def parsed(text: str) -> Module:
    """The module printed as `text`, read once. Whoever changes it makes a new one of its parts."""
    return parse(text)
