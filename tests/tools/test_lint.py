"""`weft lint` from the outside: exit codes, what goes where, JSON, folders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.tools.main import main

BAD = """import triton
import triton.language as tl


@triton.jit
def take(x, ready, out):
    while tl.load(ready) < 1:
        pass
    tl.store(out, tl.load(x))
"""


@pytest.fixture
def bad(tmp_path: Path) -> Path:
    path = tmp_path / "bad.py"
    path.write_text(BAD)
    return path


def test_a_finding_is_printed_with_its_line(bad: Path, capsys):
    assert main(["lint", str(bad)]) == 1
    out, err = capsys.readouterr()
    assert f"{bad}:7:11: error: nothing in the loop changes ready" in out
    assert "    while tl.load(ready) < 1:\n          ^^^^^^^^^^^^^^\n" in out
    assert "[plain-load-wait]" in out and "remedy: wait with wl.wait" in out
    assert "1 file, 1 kernel: 1 finding" in out and not err
    assert "\x1b" not in out  # no colours into a pipe


def test_json(bad: Path, capsys):
    assert main(["lint", "--json", str(bad)]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["ok"] is False
    (file,) = values["files"]
    assert file["file"] == str(bad) and file["kernels"] == ["take"] and file["ok"] is False
    assert file["notes"] == []
    (finding,) = file["findings"]
    place = {key: finding[key] for key in ("rule", "severity", "line", "column", "source")}
    assert place == {
        "rule": "plain-load-wait",
        "severity": "error",
        "line": 7,
        "column": 11,
        "source": "while tl.load(ready) < 1:",
    }


def test_folders_and_several_files(bad: Path, capsys):
    (bad.parent / "deep").mkdir()
    (bad.parent / "deep" / "good.py").write_text("import triton\n")
    (bad.parent / ".venv").mkdir()
    (bad.parent / ".venv" / "other.py").write_text(BAD)
    assert main(["lint", str(bad.parent)]) == 1
    assert "2 files, 1 kernel: 1 finding" in capsys.readouterr().out
    assert main(["lint", str(bad), str(bad.parent / "deep")]) == 1
    assert main(["lint", str(bad.parent / "deep")]) == 0


@pytest.mark.parametrize("words", [[], ["nowhere.py"], ["README.md"], ["{empty}"]])
def test_misuse(words: list[str], tmp_path: Path, capsys):
    (tmp_path / "empty").mkdir()
    (tmp_path / "README.md").write_text("# none\n")
    words = [word.format(empty=tmp_path / "empty") for word in words]
    words = [str(tmp_path / w) if w == "README.md" else w for w in words]
    assert main(["lint", *words]) == 2
    assert "weft:" in capsys.readouterr().err


def test_rules_are_listed(capsys):
    assert main(["lint", "--rules", "--json"]) == 0
    rules = json.loads(capsys.readouterr().out)["rules"]
    assert len(rules) > 15 and all(one["remedy"] for one in rules)
    assert main(["lint", "--rules"]) == 0
    assert "device-scope" in capsys.readouterr().out


def test_notes_go_to_stderr(tmp_path: Path, capsys):
    path = tmp_path / "deep.py"
    path.write_text(BAD.replace("< 1", "< 1" + " + 1" * 500))
    main(["lint", str(path)])
    assert "nested too deeply" in capsys.readouterr().err
