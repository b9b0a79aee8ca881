"""Generated source as a module: what runs is the text that was asked for, whatever lies on disk."""

from __future__ import annotations

import inspect
import os
import py_compile
from pathlib import Path

import pytest

from weft.base.errors import UsageError
from weft.megakernel import loading


def test_a_file_that_somebody_edited_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    text = '"""A module."""\n\nanswer = 42\n'
    path = loading.write("some", text)
    path.write_text("answer = 41\n")
    assert loading.write("some", text) == path and path.read_text() == text
    assert loading.import_text("some", text).answer == 42
    assert [one.name for one in path.parent.iterdir() if one.suffix == ".part"] == []


def test_bytecode_beside_a_generated_file_is_not_run(tmp_path, monkeypatch):
    """As Python would take it: of another text, with this one's size and time of change."""
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    text = '"""A module whose bytecode is another one\'s."""\n\nanswer = 42\n'
    path = loading.write("forged", text)
    path.write_text(text.replace("42", "41"))
    py_compile.compile(str(path))
    written = path.stat()
    path.write_text(text)
    os.utime(path, ns=(written.st_atime_ns, written.st_mtime_ns))
    assert loading.import_text("forged", text).answer == 42


def test_a_generated_module_leaves_no_bytecode_and_has_its_text(tmp_path, monkeypatch):
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path))
    text = "def answer():\n    return 42\n"
    module = loading.import_text("plain", text)
    path = Path(module.__file__)
    path.write_text("def answer():\n    return 41\n")
    assert inspect.getsource(module.answer) == text
    assert list(path.parent.iterdir()) == [path]


def test_a_cache_that_cannot_be_written_is_told_with_the_remedy(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("WEFT_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="cannot be kept in .*: Not a directory; set WEFT_CACHE"):
        loading.write("some", "x = 1\n")
