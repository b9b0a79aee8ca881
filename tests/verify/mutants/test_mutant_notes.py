"""Notes of equivalence: how they are read, and what they speak of."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.base.errors import UsageError
from weft.verify.mutants.notes import notes_for, notes_in
from weft.verify.mutants.records import Line, Mutant, Site
from weft.verify.mutants.results import CAUGHT, EQUIVALENT, Verdict, mistakes_of

TEXT = '''"""A file."""
def f():
    # weft: equivalent-mutant drop, relax of wait: it is known
    # already, and for good
    wait(
        ready,
    )
    # not a part of it
    tell()  # weft: equivalent-mutant value+1: told once
'''


def written(path: Path, text: str = TEXT) -> str:
    path.write_text(text)
    return str(path)


def mutant(file: str, line: int, kind: str, primitive: str = "wait") -> Mutant:
    return Mutant(Site("k", primitive, (Line("other.py", 1), Line(file, line))), kind)


def test_a_note_goes_on_and_speaks_of_the_whole_statement(tmp_path):
    file = written(tmp_path / "a.py")
    first, second = notes_in(file)
    assert (first.line, first.lines) == (3, range(5, 8))
    assert first.kinds == ("drop", "relax") and first.primitives == ("wait",)
    assert first.reason == "it is known already, and for good"
    assert (second.lines, second.primitives) == (range(9, 10), ())
    assert second.reason == "told once"


def test_kinds_primitives_and_lines_must_fit(tmp_path):
    file = written(tmp_path / "a.py")
    first, second = notes_in(file)
    assert first.covers(mutant(file, 6, "drop")) and first.covers(mutant(file, 5, "relax-acquire"))
    assert not first.covers(mutant(file, 5, "narrow"))
    assert not first.covers(mutant(file, 9, "drop"))
    assert not first.covers(mutant(file, 5, "drop", "notify"))
    assert second.covers(mutant(file, 9, "value+1", "notify"))
    assert not second.covers(mutant(file, 9, "value-1", "notify"))


def test_primitives_of_gluon_have_the_name_of_their_module(tmp_path):
    text = "# weft: equivalent-mutant drop of tma.store_wait, wait: free already\nstore(x)\n"
    (note,) = notes_in(written(tmp_path / "a.py", text))
    assert note.primitives == ("tma.store_wait", "wait") and note.reason == "free already"


def test_a_note_may_speak_of_some_kernels_alone(tmp_path):
    """Of what all share, for who needs less of it: in others it is neither asked for nor wrong."""
    text = "# weft: equivalent-mutant drop of wait in k, one_more: told before\nwait(x)\n"
    file = written(tmp_path / "a.py", text)
    (note,) = notes_in(file)
    assert (note.primitives, note.kernels) == (("wait",), ("k", "one_more"))
    assert note.reason == "told before" and "drop of wait in k, one_more: told" in str(note)
    mine = mutant(file, 2, "drop")
    others = mine._replace(site=mine.site._replace(kernel="another"))
    assert note.covers(mine) and not note.covers(others)
    assert notes_for([mine]) == [note] and not notes_for([others])


def test_only_notes_on_the_way_are_asked_for(tmp_path):
    file = written(tmp_path / "a.py")
    assert [note.line for note in notes_for([mutant(file, 9, "drop")])] == [9]


def test_notes_that_are_wrong_or_speak_of_nothing_are_mistakes(tmp_path):
    file = written(tmp_path / "a.py")
    notes = notes_in(file)
    caught = Verdict(mutant(file, 5, "drop"), CAUGHT, "race in it, seed 0")
    told_once = Verdict(mutant(file, 9, "value+1"), EQUIVALENT, "told once")
    (mistake,) = mistakes_of(notes, [caught, told_once])
    assert "a.py:3" in mistake and "was caught, race in it, seed 0" in mistake
    relaxed = Verdict(mutant(file, 5, "relax-acquire"), EQUIVALENT, "known")
    (mistake,) = mistakes_of(notes, [relaxed])
    assert "a.py:9" in mistake and "take the note away" in mistake


@pytest.mark.parametrize("what", ["incomplete of notify", "drop of tma.store_wait"])
def test_whether_stores_are_asynchronous_is_not_the_notes_business(tmp_path, what):
    text = f"# weft: equivalent-mutant {what}: none is before it\nnotify()\n"
    notes = notes_in(written(tmp_path / "a.py", text))
    assert not mistakes_of(notes, [])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("forget of wait: because", "no kind of mutant is called 'forget'"),
        ("drop of wait", "it cannot be read"),
        ("drop of wait:", "it cannot be read"),
    ],
)
def test_a_note_that_argues_nothing_is_refused(tmp_path, words, told):
    file = written(tmp_path / "a.py", f"# weft: equivalent-mutant {words}\nx = 1\n")
    with pytest.raises(UsageError, match=told):
        notes_in(file)
