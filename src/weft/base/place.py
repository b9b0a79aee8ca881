"""A place in the user's source, as carried by errors and reports."""

from __future__ import annotations

import linecache
import os
from dataclasses import dataclass

_PACKAGE = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
# What a user's line means is said by its own words: how weft does it tells no more.
_INNER = tuple(os.path.join(_PACKAGE, room, "") for room in ("language", "runtime", "emulator"))


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
    """A call chain, the user's outermost frame first, the innermost callee last.

    As text it leaves out how weft's language and runtime do what a line before them asks for.
    """

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
            if frame.file.startswith(_INNER):
                continue
            source = frame.source()
            text += f"\n    via {_short(frame)}" + (f":  {source}" if source else "")
        return text


def _short(frame: Frame) -> Frame:
    """weft's own files by their path inside of it."""
    if not frame.file.startswith(_PACKAGE):
        return frame
    inside = os.path.join("weft", frame.file[len(_PACKAGE) :])
    return Frame(inside, frame.line, frame.function)


UNKNOWN = Place()
