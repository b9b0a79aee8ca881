"""A place in the user's source, as carried by errors and reports."""

from __future__ import annotations

import linecache
from dataclasses import dataclass


@dataclass(frozen=True)
class Frame:
    """One level of a call chain."""

    file: str
    line: int
    function: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}"
        return f"{where} in {self.function}" if self.function else where

    def source(self) -> str:
        """The text of the line, stripped; empty where the file cannot be read."""
        return linecache.getline(self.file, self.line).strip()


@dataclass(frozen=True)
class Place:
    """A call chain, the user's outermost frame first, the innermost callee last."""

    frames: tuple[Frame, ...] = ()

    @property
    def outermost(self) -> Frame | None:
        return self.frames[0] if self.frames else None

    @property
    def innermost(self) -> Frame | None:
        return self.frames[-1] if self.frames else None

    def __str__(self) -> str:
        if not self.frames:
            return "an unknown place"
        first, *rest = self.frames
        text = str(first)
        if source := first.source():
            text += f"\n      {source}"
        for frame in rest:
            source = frame.source()
            text += f"\n    via {frame}" + (f":  {source}" if source else "")
        return text


UNKNOWN = Place()
