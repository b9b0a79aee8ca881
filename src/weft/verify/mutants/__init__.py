"""Mutants: every signal of a program weakened in turn; each is caught, or argued equivalent."""

from __future__ import annotations

from weft.verify.mutants.records import Mutant, Site
from weft.verify.mutants.results import MutantReport, Verdict
from weft.verify.mutants.search import Bounds, ProgramFails, Run, WrongAnswer, search

__all__ = [
    "Bounds",
    "Mutant",
    "MutantReport",
    "ProgramFails",
    "Run",
    "Site",
    "Verdict",
    "WrongAnswer",
    "search",
]
