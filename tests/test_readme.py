"""What README shows is executed: the kernel as it stands, and with the line removed."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest

from weft.emulator.observation import Recorder
from weft.emulator.script import run_script
from weft.verify.picture import draw, terminal

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "neighbour.py"
    path.write_text(source)
    return path


def test_the_kernel_runs(script: Path):
    report = run_script(str(script), [], ranks=4, nodes=1, seed=0)
    assert report.ok, str(report)


def test_without_the_barrier_the_race_is_found_with_both_lines(script: Path):
    lines = script.read_text().splitlines()
    barrier = next(i for i, line in enumerate(lines) if "world.barrier()" in line)
    lines[barrier] = ""
    script.write_text("\n".join(lines))
    report = run_script(str(script), [], ranks=4, nodes=1, seed=0)
    assert report.races, str(report)
    race = report.races[0]
    found = {lines[side.line - 1].split("#")[0].strip() for side in (race.first, race.second)}
    assert any("tl.load(wl.at(" in line for line in found), str(race)
    assert any("row.fill_" in line for line in found), str(race)
    assert "world.barrier()" in race.remedy


def test_the_example_is_short():
    (source,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(source.splitlines()) <= 20


PAGES = ["README.md", "CONTRIBUTING.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md")),
         *(f"docs/ops/{p.name}" for p in (ROOT / "docs" / "ops").glob("*.md"))]  # fmt: skip


@pytest.mark.parametrize("page", sorted(PAGES))
def test_the_commands_of_a_page_are_understood(page: str):
    """Verbs, options and the number of words; nothing is run."""
    from typer.main import get_command

    from weft.tools.main import app

    text = (ROOT / page).read_text()
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    fenced = "\n".join(block for language, block in blocks if language in ("", "sh"))
    commands = re.findall(r"^(?:\.venv/bin/)?weft (\w.*?)(?:  |;| #|$)", fenced, re.MULTILINE)
    if page == "README.md":
        commands += re.findall(r"`weft (\w+ [^`]+)`", text)
        assert len(commands) > 10
    for command in commands:
        verb, *words = shlex.split(command)
        get_command(app).commands[verb].make_context(verb, words)


CALLED = ["ag_gemm", "ep_dispatch", "flash_decode"]


@pytest.mark.parametrize("name", CALLED)
@pytest.mark.parametrize("ranks", [1, 3])
def test_what_an_operators_page_calls_runs(name: str, ranks: int, tmp_path: Path):
    text = (ROOT / "docs" / "ops" / f"{name}.md").read_text()
    path = tmp_path / "called.py"
    path.write_text(re.findall(r"```python\n(import .*?)```", text, re.DOTALL)[0])
    report = run_script(str(path), [], ranks=ranks, nodes=1, seed=0)
    assert report.ok, str(report)


def test_its_links_lead_somewhere():
    for link in re.findall(r"\]\(([\w./-]+)\)", README):
        assert (ROOT / link).exists(), link


@pytest.fixture
def render() -> ModuleType:
    spec = importlib.util.spec_from_file_location("render", ROOT / "benchmarks" / "render.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_say_what_was_measured(render: ModuleType):
    shown = set()
    for page in render.PAGES:
        text = (ROOT / page).read_text()
        shown |= {name for _, name, _ in render.MARKERS.findall(text)}
        assert text.count("<!-- end -->") == len(render.MARKERS.findall(text)), page
        assert render.rendered(text) == text, "run python benchmarks/render.py"
    assert shown == set(render.TABLES)


def test_every_ratio_is_between_checked_answers(render: ModuleType):
    for op in ("ag_gemm", *render.COLLECTIVES):
        for row in render.load(op).get("rows", []):
            assert row["checked"] or row["ratio_to_serial"] is None, row


def test_the_picture_is_what_is_printed(script: Path, monkeypatch: pytest.MonkeyPatch):
    kept = [line for line in script.read_text().splitlines() if "world.barrier()" not in line]
    script.write_text("\n".join(kept))
    recorder = Recorder()
    report = run_script(str(script), [], ranks=4, nodes=1, seed=0, observers=[recorder])
    monkeypatch.chdir(script.parent)
    printed = terminal.render(draw(recorder.events, report.races[0])).plain
    (shown,) = re.findall(r"```text\n(race at .*?)```", README, re.DOTALL)

    def without_counts(text: str) -> str:
        """How many steps a launch takes is not the README's business."""
        return re.sub(r"^ +\d+|step \d+|\d+ of \d+", "N", text, flags=re.M).strip()

    assert without_counts(printed).startswith(without_counts(shown)), printed
