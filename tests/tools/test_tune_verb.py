"""`weft tune`: its words, what it prints, and where it keeps what it found."""

from __future__ import annotations

import json

import pytest

from weft.tools.main import main

WORDS = ["tune", "reduce_scatter", "--shape", "m=7..8,n=16", "--emulated", "2", "--dtype", "fp32"]


@pytest.mark.slow
def test_it_counts_steps_on_emulated_ranks_and_keeps_choices(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    assert main([*WORDS, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["unit"], said["machine"], said["ranks"]) == ("steps", "emulated", 2)
    assert [one["shape"]["m"] for one in said["choices"]] == [7, 8]
    kept = json.loads((tmp_path / said["file"]).read_text())["choices"]
    assert [one["key"] for one in kept] == [one["key"] for one in said["choices"]]


@pytest.mark.slow
def test_without_a_folder_emulated_choices_are_kept_nowhere(monkeypatch, capsys):
    monkeypatch.delenv("WEFT_CHOICES", raising=False)
    assert main(WORDS) == 0
    printed = capsys.readouterr().out
    assert "kept nowhere: WEFT_CHOICES names no folder" in printed
    assert "reduce_scatter m=8,n=16 eager" in printed and " steps" in printed


def test_it_needs_gpus_or_emulated_ranks(capsys):
    assert main(["tune", "reduce_scatter", "--shape", "n=16", "--emulated", "2"]) == 2
    assert "reduce_scatter needs m" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, said",
    [(["--rounds", "2"], "--rounds 2: a median takes at least 7"),
     (["--ranks", "4"], "--ranks 4 and --emulated 2: give one")],
)  # fmt: skip
def test_what_it_would_leave_out_is_refused(more, said, capsys):
    assert main([*WORDS, *more]) == 2
    assert said in capsys.readouterr().err
