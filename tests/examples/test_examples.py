"""Every example runs on emulated ranks; the one with a bug is found out, with its lines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from mending import mended

from weft.tools.main import main

ROOT = Path(__file__).parent.parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))
BUG = "05_find_the_bug.py"
LONG = ("18_train_model.py",)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_it_is_complete_and_says_how_to_run_it(example: Path):
    text = example.read_text()
    assert f"weft emulate examples/{example.name} --ranks 4" in text
    assert "weft.init()" in text and "assert " in text


@pytest.mark.few(3)
@pytest.mark.parametrize("ranks", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "example",
    [pytest.param(e, marks=pytest.mark.slow if e.name in LONG else ()) for e in EXAMPLES
     if e.name != BUG],
    ids=lambda p: p.name,
)  # fmt: skip
def test_it_runs_and_nothing_is_found(example: Path, ranks: int, capsys):
    code = main(["emulate", str(example), "--ranks", str(ranks), "--seed", str(ranks)])
    out = capsys.readouterr().out
    assert code == 0, out
    assert len(re.findall(r"^rank \d", out, re.MULTILINE)) == ranks, out


@pytest.mark.slow
def test_the_bug_is_found_with_both_lines():
    """As a user meets it: in a process of its own, by the installed command."""
    words = [sys.executable, "-m", "weft", "emulate", f"examples/{BUG}", "--ranks", "4", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1, done.stdout + done.stderr
    report = json.loads(done.stdout)
    lines = (ROOT / "examples" / BUG).read_text().splitlines()
    race = report["races"][0]
    guilty = {lines[race[side]["line"] - 1].strip() for side in ("first", "second")}
    assert guilty == {
        "wl.put(world, inbox + at, travelling, to=right)",
        "travelling = tl.load(inbox + at)",
    }
    assert race["first"]["kernel"] == "ring_sum"
    assert race["first"]["tensor"] == race["second"]["tensor"]


def test_the_bug_has_a_remedy(capsys):
    assert main(["emulate", str(ROOT / "examples" / BUG), "--ranks", "4"]) == 1
    remedy = capsys.readouterr().out.partition("remedy: ")[2].splitlines()[0]
    assert remedy.startswith("before a buffer is used again, wait for a credit of each of its")


def swap(lines: list[str], first: str, second: str) -> None:
    i, j = (next(n for n, line in enumerate(lines) if word in line) for word in (first, second))
    lines[i], lines[j] = lines[j], lines[i]


def drop(lines: list[str], word: str, which: int = 0) -> None:
    """Blank the line, so that the others keep their numbers."""
    number = [n for n, line in enumerate(lines) if word in line][which]
    lines[number] = re.sub(r"\S.*", "pass", lines[number])


def replace(lines: list[str], before: str, after: str) -> None:
    (number,) = [n for n, line in enumerate(lines) if before in line]
    lines[number] = lines[number].replace(before, after)


def one_half(lines: list[str]) -> None:
    replace(lines, "inbox + (e % 2) * n * size", "inbox")


def one_flag(lines: list[str]) -> None:
    replace(lines, "total, e, to=peer", "total, 1, to=peer")
    replace(lines, "e, dtype=tl.float32", "1, dtype=tl.float32")


@pytest.mark.parametrize("ranks, nodes", [(4, 2), (6, 3), (4, 4)])
def test_two_nodes_or_more(ranks: int, nodes: int, capsys):
    words = ["emulate", str(ROOT / "examples/10_two_nodes.py"), "--ranks", str(ranks)]
    assert main([*words, "--nodes", str(nodes)]) == 0, capsys.readouterr().out


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "name, spoil, kind, guilty",
    [
        ("01_load.py", lambda text: drop(text, "world.barrier("), "race", "tl.load(wl.at("),
        ("02_put.py", lambda text: drop(text, "world.barrier("), "race", "wl.put("),
        ("03_signal.py", lambda text: swap(text, "wl.put(", "wl.notify("), "race", "wl.put("),
        ("03_signal.py", lambda text: drop(text, "wl.wait("), "race", "tl.load(row"),
        ("03_signal.py", lambda text: drop(text, "wl.notify("), "unsatisfiable wait", "wl.wait("),
        ("04_barrier.py", lambda text: drop(text, "wl.barrier("), "race", "wl.at(world, part"),
        ("04_barrier.py", lambda text: drop(text, "wl.barrier(", 1), "race", "wl.at(world, part"),
        ("06_all_gather.py", lambda text: drop(text, "wl.wait("), "race", "tl.load(gathered"),
        ("07_all_reduce.py", lambda text: drop(text, "wl.wait(part"), "race", "tl.load(parts"),
        ("07_all_reduce.py", lambda text: drop(text, "wl.wait(sum"), "race", "tl.load(sums"),
        ("08_low_latency_packet.py", one_half, "race", "wl.put_packets("),
        ("08_low_latency_packet.py", one_flag, "stale flag", "wl.put_packets("),
        ("09_ag_gemm.py", lambda text: drop(text, "wl.wait("), "race", "tl.load(gathered"),
        ("09_ag_gemm.py", lambda text: drop(text, "wl.notify("), "unsatisfiable wait", "wl.wait("),
        ("10_two_nodes.py", lambda text: drop(text, "wl.wait(", 1), "race", "tl.load(gathered"),
        (
            "10_two_nodes.py",
            lambda text: drop(text, "wl.notify("),
            "unsatisfiable wait",
            "wl.wait(",
        ),
        ("11_workers.py", lambda text: drop(text, "wl.wait(arrived"), "race", "tl.load(theirs"),
        ("11_workers.py", lambda text: drop(text, "wl.wait(computed +"), "race", "tl.load(own"),
        (
            "11_workers.py",
            lambda text: drop(text, "wl.notify(world, arrived"),
            "unsatisfiable wait",
            "wl.wait(arrived",
        ),
        ("12_dynamic_mapping.py", lambda text: drop(text, "wl.wait("), "race", "tl.load(counts"),
        (
            "12_dynamic_mapping.py",
            lambda text: drop(text, "wl.wait(rows_"),
            "race",
            "tl.load(inbox",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_what_the_tutorial_says_of_a_broken_example(
    name: str, spoil, kind: str, guilty: str, tmp_path: Path, capsys
):
    lines = (ROOT / "examples" / name).read_text().splitlines()
    spoil(lines)
    script = tmp_path / name
    script.write_text("\n".join(lines))
    assert main(["verify", str(script), "--ranks", "4", "--schedules", "3", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    found = [*report["races"], *report["deadlocks"], *report.get("others", [])]
    sides = [side for one in found for side in (one["first"], one["second"]) if side]
    assert kind in {one["kind"] for one in found}, report
    assert any(guilty in lines[side["line"] - 1] for side in sides), report


def test_the_tutorials_answer_mends_it(tmp_path: Path, capsys):
    """The credit that docs/tutorial.md adds, put into the example, under several schedules."""
    code = main(["verify", str(mended(tmp_path)), "--ranks", "4", "--schedules", "8"])
    assert code == 0, capsys.readouterr().out


def test_the_tutorial_speaks_of_every_example():
    tutorial = (ROOT / "docs" / "tutorial.md").read_text()
    for example in EXAMPLES:
        assert f"examples/{example.name}" in tutorial
