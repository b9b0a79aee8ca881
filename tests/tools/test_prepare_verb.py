"""`weft prepare`: its words, and what it prints."""

from __future__ import annotations

import json

import pytest

from weft.tools.main import main


@pytest.mark.slow
def test_it_compiles_for_a_range_of_sizes(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    words = ["prepare", "reduce_scatter", "--shape", "m=2000..2004,n=96", "--ranks", "2", "--json"]
    assert main(words) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["op"] == "reduce_scatter"
    assert said["cuda:90"]["kernels"] == said["cuda:90"]["compiled"] > 0
    assert list(tmp_path.glob("*/push_packets.cubin"))
    assert main([*words, "--gradients"]) == 0
    again = json.loads(capsys.readouterr().out)["cuda:90"]
    assert again["compiled"] == again["kernels"] - said["cuda:90"]["kernels"] > 0


def test_sizes_have_no_default_and_go_up(capsys):
    assert main(["prepare", "reduce_scatter", "--shape", "n=96"]) == 2
    assert "reduce_scatter needs m" in capsys.readouterr().err
    assert main(["prepare", "reduce_scatter", "--shape", "m=9..1,n=96"]) == 2
    assert "m goes from more to less" in capsys.readouterr().err
