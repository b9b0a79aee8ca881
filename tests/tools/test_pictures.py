"""Pictures on the command line: below the report in the terminal, and as a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
    assert "writes x@rank0[0]" in picture and "missing (dashed): nothing that" in picture
    assert ">    8 │         tl.store(wl.at(world, x, peer), value)" in picture
    assert max(map(len, ("race at " + picture).splitlines())) <= 100


def test_emulate_writes_a_page(script, tmp_path, capsys):
    page = tmp_path / "picture.html"
    assert main(["emulate", script(True), "--ranks", "2", "--html", str(page)]) == 1
    assert page.read_text().startswith("<!doctype html>") and 'class="arrow missing"' in (
        page.read_text()
    )
    capsys.readouterr()
    # Of a run in which nothing is found it shows the end.
    words = ["emulate", script(False), "--ranks", "2", "--html", str(page), "--json"]
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"] and str(page) in err
    assert "the last steps" in page.read_text()


@pytest.mark.parametrize("verb", ["emulate"])
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
