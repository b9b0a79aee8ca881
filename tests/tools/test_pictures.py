"""Pictures on the command line: below the report in the terminal, and as a page."""

from __future__ import annotations

import errno
import json
import re
import sys
from pathlib import Path

import pytest

from weft.base.report import Finding, Report, Side
from weft.emulator.observation import Recorder
from weft.tools import pictures
from weft.tools.main import main

RACY = '''"""Writes a peer's memory without telling it."""
import torch, triton, triton.language as tl, weft
import weft.language as wl

@triton.jit
def shout(world, x, value):
    for peer in range(wl.num_ranks(world)):
        tl.store(wl.at(world, x, peer), value)

world = weft.init()
x = world.zeros(1, torch.int32)
if RACES:
    shout[(1,)](world.arg, x, 7)
world.close()
'''


# A folder in which nobody can make a file, root neither.
on_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="it has /proc")


@pytest.fixture
def script(tmp_path: Path):
    def write(races: bool) -> str:
        path = tmp_path / "shouting.py"
        path.write_text(RACY.replace("RACES", str(races)))
        return str(path)

    return write


def test_emulate_prints_a_picture_of_what_it_found(script, capsys):
    assert main(["emulate", script(True), "--ranks", "2"]) == 1
    out = capsys.readouterr().out
    report, picture = out.split("\nrace at ")
    assert "nothing orders this write of" in report
    assert "writes x@rank0[0]" in picture and "missing (dashed): no signal tells" in picture
    assert "tl.store(wl.at(world, x, peer), value)" in report and "line 8" in picture
    assert max(map(len, ("race at " + picture).splitlines())) <= 100


def test_emulate_writes_a_page(script, tmp_path, capsys):
    page = tmp_path / "picture.html"
    assert main(["emulate", script(True), "--ranks", "2", "--html", str(page)]) == 1
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>") and "missing (dashed)" in text
    assert "nothing orders this write of" in text, "the report stands above its pictures"
    assert not re.search(r"https?:|//[a-z]+\.|@import|url\(", text), "it needs nothing else"
    capsys.readouterr()
    # Of a run in which nothing is found it shows the end.
    words = ["emulate", script(False), "--ranks", "2", "--html", str(page), "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] and str(page) in err
    assert "the last steps" in page.read_text()


@pytest.mark.parametrize("verb", ["emulate", "verify"])
def test_a_page_without_a_folder_is_misuse_before_anything_runs(verb, script, capsys):
    assert main([verb, script(True), "--html", "no/such/folder/x.html"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and "there is no folder no/such/folder" in err


def test_one_seed_prints_one_picture(script, capsys):
    path = script(True)
    said = set()
    for _ in range(2):
        main(["emulate", path, "--ranks", "2", "--seed", "3"])
        said.add(capsys.readouterr().out)
    assert len(said) == 1


def test_verify_draws_a_run_that_shows_it(script, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = tmp_path / "picture.html"
    words = ["verify", script(True), "--ranks", "2", "--html", str(page)]
    assert main([*words, "--schedules", "3"]) == 1
    drawn = capsys.readouterr().out
    assert "\nrace at shouting.py:8" in drawn and "missing (dashed)" in drawn
    assert "missing (dashed)" in page.read_text()
    page.unlink()
    assert main([*words, "--exhaustive", "--max-executions", "50"]) == 1
    out, err = capsys.readouterr()
    assert "\nrace at shouting.py:8" in out and page.exists()
    replay = err.split("--replay ")[1].split()[0].removesuffix("[/]")
    page.unlink()
    assert main(["verify", "--replay", replay, "--html", str(page)]) == 1
    assert "\nrace at shouting.py:8" in capsys.readouterr().out and page.exists()


def test_verify_draws_a_clean_run_on_request_only(script, tmp_path, capsys):
    page = tmp_path / "picture.html"
    words = ["verify", script(False), "--ranks", "2", "--schedules", "2"]
    assert main(words) == 0
    assert "step" not in capsys.readouterr().out
    assert main([*words, "--html", str(page)]) == 0
    assert "the last steps" in page.read_text()


def test_findings_of_different_kinds_are_drawn_from_runs_that_show_them():
    def finding(kind, line):
        return Finding(kind, "wrong", Side(file="a.py", line=line))

    report = Report("two", 2)
    for one in (finding("race", 1), finding("race", 2), finding("deadlock", 3)):
        report.add(one)
    asked = []

    def again(one):
        asked.append(one)
        return Recorder(), Report("two", 2, races=[finding("race", 1)])

    seen = pictures.seen_again(report, again)
    assert asked == [finding("race", 1), finding("deadlock", 3)]
    assert [list(one.findings) for one in seen] == [[asked[0]], [asked[1]]]


@pytest.mark.parametrize("path, said", [
    ("no/such/folder/x.html", "there is no folder no/such/folder"), (".", "that is a folder"),
    pytest.param("/proc/x.html", "cannot be written: No such file", marks=on_linux),
])  # fmt: skip
def test_a_file_that_cannot_be_is_refused_before_the_run(path, said, script, capsys):
    assert main(["emulate", script(True), "--ranks", "2", "--html", path]) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and "--html" in err


def test_a_file_that_is_asked_for_stays_as_it_is_until_it_is_written(tmp_path):
    there, link = tmp_path / "there.html", tmp_path / "link.html"
    there.write_text("before")
    link.symlink_to(tmp_path / "target.html")
    for path in (there, tmp_path / "new.html", link):
        pictures.check_path(str(path))
    assert there.read_text() == "before"
    assert {one.name for one in tmp_path.iterdir()} == {"there.html", "link.html"}


@pytest.mark.parametrize("folder, said", [
    ("file/replays", "is no folder"),
    pytest.param("/proc/x", "No such file", marks=on_linux),
    pytest.param("/proc", "No such file", marks=on_linux),
])  # fmt: skip
def test_a_folder_that_cannot_be_is_refused_too(
    folder, said, script, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("weft.tools.verify.run_exhaustive", None)
    (tmp_path / "file").write_text("")
    words = ["verify", script(True), "--exhaustive", "--save", str(tmp_path / folder)]
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_a_replay_that_cannot_be_written_is_a_note_beside_the_finding(script, capsys, monkeypatch):
    def full(self, path):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("weft.verify.exploration.replay.Replay.write", full)
    words = ["verify", script(True), "--exhaustive", "--max-executions", "20", "--save", "kept"]
    assert main(words) == 1
    out, err = capsys.readouterr()
    assert "nothing orders this write of" in out
    assert "note: cannot write the replay kept/" in err and "No space left" in err
