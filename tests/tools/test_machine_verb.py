"""`weft machine`: what it prints of a probe, and what it needs."""

from __future__ import annotations

import json
from dataclasses import replace

from weft.base.hardware import H200X4
from weft.tools.main import main
from weft.tune import processes

FOUND = replace(H200X4, name="NVIDIA H100x2", copy_gbps=180.5)


def test_it_says_what_was_read_and_where_it_is_kept(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("WEFT_CHOICES", str(tmp_path))
    monkeypatch.setattr("weft.tools.machine.find_gpus", lambda ranks: ranks)
    heard = [(FOUND, "NVIDIA H100")]
    monkeypatch.setattr(processes, "messages_from_gpus", lambda *args, **named: iter(heard))
    assert main(["machine", "--ranks", "2"]) == 0
    printed = capsys.readouterr().out
    assert "copy_gbps" in printed and "NVIDIA H100x2" in printed
    assert main(["machine", "--ranks", "2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["record"]["copy_gbps"] == 180.5
    assert said["file"].startswith(f"{tmp_path}/machine-NVIDIA_H100x2-weft")


def test_it_needs_gpus(capsys):
    assert main(["machine", "--ranks", "2"]) != 0
    assert "weft:" in capsys.readouterr().err
