"""Checks of programs that talk to other ranks: schedules, races, and what the compiler emitted."""

from weft.verify.compiled import compiled
from weft.verify.findings import CompiledReport

__all__ = ["CompiledReport", "compiled"]
