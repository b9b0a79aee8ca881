"""How many there are of something, as messages say it."""

from __future__ import annotations


def counted(number: int, word: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {word}{'' if number == 1 else 's'}"
