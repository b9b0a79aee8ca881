"""Arguments that a mutant changes nothing, read from comments in the source.

    # weft: equivalent-mutant KIND, ... [of PRIMITIVE, ...] [in KERNEL, ...]: the reason
    # which may go on in the comments that follow
    the statement

A note stands above a statement, or behind it, and speaks of every mutant of these kinds (and these
primitives, in these kernels) whose chain of calls passes through the statement. A kind is a word of
`KINDS`, or its first part: `relax`, `value`.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from weft.base.errors import UsageError
from weft.base.place import Frame, Place
from weft.verify.mutants.records import KINDS, Mutant

_HEAD = re.compile(r"#\s*weft:\s*equivalent-mutant\b(?P<rest>.*)")
_BODY = re.compile(
    r"\s*(?P<kinds>[\w+, -]+?)(?:\s+of\s+(?P<names>[\w., ]+?))?(?:\s+in\s+(?P<kernels>[\w, ]+))?"
    r"\s*:\s*(?P<reason>.*)"
)


OF_STORES = (("complete_stores",), ("tma.store_wait",))


@dataclass(frozen=True)
class Note:
    """One argument: `lines` are those of the statement that it speaks of."""

    file: str
    line: int
    lines: range
    kinds: tuple[str, ...]
    primitives: tuple[str, ...]
    kernels: tuple[str, ...]
    reason: str

    def covers(self, mutant: Mutant) -> bool:
        kind, site = mutant.kind, mutant.site
        return (
            any(kind == word or re.split(r"[-+]", kind)[0] == word for word in self.kinds)
            and (not self.primitives or site.primitive in self.primitives)
            and self.is_passed_by(mutant)
        )

    def is_passed_by(self, mutant: Mutant) -> bool:
        """Does the mutant's chain of calls pass through the statement, in a kernel it speaks of?"""
        site = mutant.site
        return (not self.kernels or site.kernel in self.kernels) and any(
            one.file == self.file and one.number in self.lines for one in site.lines
        )

    @property
    def is_of_asynchronous_stores(self) -> bool:
        """Whether a program has such stores depends on its inputs, and on Triton's version."""
        return self.kinds == ("incomplete",) or self.primitives in OF_STORES

    def __str__(self) -> str:
        of = f" of {', '.join(self.primitives)}" if self.primitives else ""
        of += f" in {', '.join(self.kernels)}" if self.kernels else ""
        return f"{Path(self.file).name}:{self.line}: {', '.join(self.kinds)}{of}: {self.reason}"


def notes_for(mutants: Iterable[Mutant]) -> list[Note]:
    """The notes that the mutants' chains of calls pass by."""
    mutants = list(mutants)
    files = sorted({line.file for mutant in mutants for line in mutant.site.lines})
    return [
        note
        for file in files
        for note in notes_in(file)
        if any(note.is_passed_by(mutant) for mutant in mutants)
    ]


@lru_cache(maxsize=256)
def notes_in(file: str) -> tuple[Note, ...]:
    """The notes of a source file; none where it cannot be read.

    Raises  UsageError: a note without a kind that there is, or without a reason
    """
    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError):
        return ()
    return tuple(_notes(file, text)) if "equivalent-mutant" in text else ()


def _notes(file: str, text: str) -> Iterator[Note]:
    pending: list[tuple[int, str]] = []  # notes that wait for their statement
    first = 0  # the line on which the statement under way began
    goes_on = 0  # the line whose comment goes on with the last note
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        line = token.start[0]
        if token.type == tokenize.COMMENT:
            if (head := _HEAD.match(token.string)) is not None:
                pending.append((line, head["rest"].strip()))
                goes_on = line + 1 if not first else 0
            elif pending and line == goes_on and not token.line[: token.start[1]].strip():
                where, words = pending[-1]
                pending[-1] = (where, f"{words} {token.string.lstrip('#').strip()}")
                goes_on = line + 1
        elif token.type == tokenize.NEWLINE:
            yield from (_note(file, *one, range(first, line + 1)) for one in pending)
            pending, first = [], 0
        elif token.type not in _LAYOUT and not first:
            first = line


_LAYOUT = (tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def _note(file: str, line: int, words: str, lines: range) -> Note:
    body = _BODY.fullmatch(words)
    kinds = _list(body["kinds"]) if body else ()
    known = {*KINDS, *(re.split(r"[-+]", kind)[0] for kind in KINDS)}
    wrong = [kind for kind in kinds if kind not in known]
    if body is None or wrong or not body["reason"].strip():
        what = f"no kind of mutant is called {wrong[0]!r}" if wrong else "it cannot be read"
        raise UsageError(
            f"the note of equivalence {words!r}: {what}; write `# weft: equivalent-mutant KIND of "
            f"PRIMITIVE in KERNEL: reason` with the kinds {', '.join(KINDS)}",
            place=Place((Frame(file, line),)),
        )
    primitives, kernels = _list(body["names"] or ""), _list(body["kernels"] or "")
    return Note(file, line, lines, kinds, primitives, kernels, body["reason"].strip())


def _list(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
