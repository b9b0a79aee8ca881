"""Checks of programs that talk to other ranks: schedules, races, and what the compiler emitted."""

from weft.verify.compiled import CompiledReport, compiled, store_widths

__all__ = ["CompiledReport", "compiled", "store_widths"]
