"""`weft simulate`: rows by numbers of ranks, what grows, words without a meaning."""

from __future__ import annotations

import json
import sys

import pytest

from weft.tools.main import main

LAYER = "examples/llama_mlp.py:mlp"


def rows(capsys, *words):
    assert main(["simulate", LAYER, "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)["rows"]


@pytest.mark.slow
def test_thousands_of_ranks(capsys):
    found = rows(capsys, "--ranks", "8,64,4096", "--shape", "m=65536")
    assert [(one["ranks"], one["nodes"]) for one in found] == [(8, 1), (64, 8), (4096, 512)]
    assert found[0]["efficiency"] == 1 and all(one["efficiency"] < 1 for one in found[1:])
    assert all(one["us"] >= one["computed_us"] > 0 for one in found)


def test_what_is_computed_goes_by_the_ranks(capsys):
    """Of one node: twice the ranks have half of the columns each; a size that grows is larger."""
    words = ("--ranks", "2,4,8", "--per-node", "8")
    two, four, eight = rows(capsys, *words, "--shape", "m=16384")
    assert two["computed_us"] > 1.7 * four["computed_us"] > 2.9 * eight["computed_us"]
    grown = rows(capsys, *words, "--shape", "m=16384", "--grow", "m")
    assert [one["shape"] for one in grown] == ["m=16384", "m=32768", "m=65536"]
    assert grown[2]["efficiency"] == pytest.approx(grown[0]["us"] / grown[2]["us"])


def test_a_faster_machine_is_faster(capsys):
    us = [rows(capsys, "--ranks", "8", "--hw", hw)[0]["us"] for hw in ("h200x8", "b200x8")]
    assert us[0] > 1.5 * us[1]


def test_switches_and_slow_ranks_cost_time(capsys):
    words = ("--ranks", "16", "--per-node", "4", "--shape", "m=4096")
    even, up, slow = (
        rows(capsys, *words, *more)[0]["us"]
        for more in ((), ("--leaf", "2", "--oversubscription", "4"), ("--slow", "1.5"))
    )
    assert up > 1.5 * even and 1.1 * even < slow < 1.5 * even


@pytest.mark.parametrize(
    "words, said",
    [
        (["--ranks", "8,12"], "--ranks 12: it is no multiple of the 8 of a node"),
        (["--ranks", "16,8"], "numbers that rise"),
        (["--ranks", "a"], "numbers with commas between them"),
        (["--grow", "m"], "say how large it is on the first number of ranks, --shape m=.."),
        (["--hw", "tpu"], "no machine is called 'tpu'; there are h100x8"),
        (["--slow", "0.9"], "slow=0.9 must be a number from 1 on"),
        (["--shape", "q=3"], "no size is called 'q'"),
    ],
)
def test_mistakes_say_what_to_write(capsys, words, said):
    assert main(["simulate", LAYER, *words]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_an_operator_is_no_program(capsys):
    assert main(["simulate", "ag_gemm"]) == 2
    assert "no file ag_gemm; an operator is no program" in " ".join(capsys.readouterr().err.split())


def test_a_picture_needs_its_library(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["simulate", LAYER, "--ranks", "8", "-o", str(tmp_path / "x.png")]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err


@pytest.mark.parametrize("path, said", [
    ("x.nosuch", "name a file that ends in .png"), ("x", "name a file that ends in .png"),
    ("no/x.png", "there is no folder no"),
    pytest.param("/proc/x.png", "No such file", marks=pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="it has /proc")),
])  # fmt: skip
def test_a_picture_that_cannot_be_is_refused_before_the_work(path, said, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("weft.tools.simulate.rows", None)
    assert main(["simulate", LAYER, "-o", path]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "x.png"
    assert main(["simulate", LAYER, "--ranks", "8,64", "-o", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
